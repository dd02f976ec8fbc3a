//! The scores of a block, by what the codes of each scale contribute: a warp has the codes of one scale, a quarter of the rotary channels,
//! and a part of the keys.

use cubecl::prelude::*;

use super::cube::Cube;
use super::form::{ROPE, ROPE_AT, ROW_BYTES, SCALED, SCALES, SCALES_AT, SCORE_STRIDE, TILE_ROWS};
use super::query::STEPS;
use crate::ptx::wgmma::Elem;
use crate::ptx::{math, matrix};

/// Keys of a product.
const N: usize = 8;

/// Writes this warp's scores of the block in a stage, times the power of the query.
///
/// Column `n` of a product is row `n / 2`, or four rows on if `n` is odd: rows lie 16 bytes further along the banks each, and the
/// eight lanes that load 16 bytes together, of two columns, have all banks then.
#[cube]
pub(super) fn write(query: &Array<Vector<u32, Const<4>>>, cube: &Cube, stage_at: u32) {
    let scale = cube.warp % comptime!(SCALES as u32);
    let first = cube.warp / comptime!(SCALES as u32) * comptime!(cube.form.own_keys() as u32);
    let (column, corner) = (cube.lane / 4, cube.lane % 4);
    let row_at = stage_at + (first + column / 2 + column % 2 * 4) * ROW_BYTES;
    let codes_at = row_at + scale * comptime!(SCALED as u32) + corner * 16;
    let rope_at = row_at + scale * comptime!(2 * (ROPE / SCALES) as u32) + corner * 8;
    // Of the sums, whose columns are rows `corner` and four rows on.
    let scales_at = stage_at + (first + corner) * ROW_BYTES + scale * 4;
    let scores_at = cube.scores_at
        + ((scale * comptime!(cube.form.rows() as u32) + column) * comptime!(SCORE_STRIDE as u32) + first + corner) * 4;
    #[unroll]
    for product in 0..comptime!(cube.form.own_keys() / N) {
        let rows = comptime!((product * N) as u32 * ROW_BYTES);
        let codes = Codes::of(matrix::load_16(codes_at, rows), matrix::load_16(codes_at, comptime!(rows + 64)));
        let rope = matrix::load_8(rope_at, comptime!(rows + ROPE_AT));
        let scale_a = f32::reinterpret(matrix::load_4(scales_at, comptime!(rows + SCALES_AT)));
        let scale_b = f32::reinterpret(matrix::load_4(scales_at, comptime!(rows + SCALES_AT + 4 * ROW_BYTES)));
        #[unroll]
        for tile in 0..cube.form.tiles {
            let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
            #[unroll]
            for step in 0..STEPS {
                let a = query[comptime!(tile * (STEPS + 1) + step)];
                sum = matrix::multiply_add(sum, a, codes.pairs[step], comptime!(Elem::F16));
            }
            let a = query[comptime!(tile * (STEPS + 1) + STEPS)];
            let rotary = matrix::multiply_add(Vector::<f32, Const<4>>::new(0.0f32), a, rope, comptime!(Elem::Bf16));
            #[unroll]
            for i in 0..4u32 {
                let scale = if comptime!(i.is_multiple_of(2)) { scale_a } else { scale_b };
                let score = sum.extract(comptime!(i as usize)) * scale + rotary.extract(comptime!(i as usize));
                let row = comptime!((tile * TILE_ROWS) as u32 + i / 2 * 8);
                let offset = comptime!((row * SCORE_STRIDE as u32 + (product * N) as u32 + i % 2 * 4) * 4);
                matrix::store_4(scores_at, offset, u32::reinterpret(score));
            }
        }
    }
}

/// The second factor: the numbers of 32 codes, of two times 16 neighbours.
#[derive(CubeType)]
struct Codes {
    pairs: Sequence<Vector<u32, Const<2>>>,
}

#[cube]
impl Codes {
    fn of(first: Vector<u32, Const<4>>, second: Vector<u32, Const<4>>) -> Codes {
        let mut pairs = Sequence::<Vector<u32, Const<2>>>::new();
        #[unroll]
        for step in 0..STEPS {
            let words = if comptime!(step < 4) { first } else { second };
            let word = words.extract(comptime!(step % 4));
            let mut both = Sequence::<u32>::new();
            both.push(math::e4m3_pair(word, false));
            both.push(math::e4m3_pair(word, true));
            pairs.push(math::vector::<u32, Const<2>>(&both));
        }
        Codes { pairs }
    }
}
