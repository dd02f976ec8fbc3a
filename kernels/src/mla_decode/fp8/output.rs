//! The output: a warp has all rows and keys, and some of the channels.

use cubecl::prelude::*;

use super::cube::Cube;
use super::form::{Form, ROW_BYTES, SCALED, TILE_ROWS, WEIGHT_STRIDE};
use crate::ptx::wgmma::Elem;
use crate::ptx::{math, matrix, warp};
use crate::tiles::form::KEYS;
use crate::tiles::output::{COLUMNS, Results, Target};

/// `[tile][product]`: column `n` of product `j` is channel `j` of the eighth `n` of the warp's channels.
#[cube]
pub(super) fn zeros(cube: &Cube) -> Array<Vector<f32, Const<4>>> {
    let count = comptime!(cube.form.tiles * cube.form.own_channels());
    let mut sums = Array::<Vector<f32, Const<4>>>::new(count);
    #[unroll]
    for i in 0..count {
        sums[i] = Vector::new(0.0f32);
    }
    sums
}

/// Adds the output of the block in a stage.
#[cube]
pub(super) fn add(sums: &mut Array<Vector<f32, Const<4>>>, cube: &Cube, stage_at: u32) {
    scale(sums, cube, cube.factors_at, false);
    let corner = cube.lane % 4;
    let channel =
        cube.warp * comptime!(cube.form.channels() as u32) + cube.lane / 4 * comptime!(cube.form.own_channels() as u32);
    let codes_at = stage_at + corner * 2 * ROW_BYTES + channel;
    let group = cube.warp * comptime!(cube.form.channels() as u32) / comptime!(SCALED as u32);
    let weights_at = cube.weights_at
        + ((group * comptime!(cube.form.rows() as u32) + cube.lane % 16) * comptime!(WEIGHT_STRIDE as u32)
            + cube.lane / 16 * 8)
            * 2;
    #[unroll]
    for step in 0..comptime!(KEYS / 16) {
        let mut weights = Sequence::<Vector<u32, Const<4>>>::new();
        #[unroll]
        for tile in 0..cube.form.tiles {
            let offset = comptime!((tile * TILE_ROWS * WEIGHT_STRIDE * 2 + step * 32) as u32);
            weights.push(matrix::load_x4(weights_at, offset, false));
        }
        let rows = comptime!((step * 16) as u32 * ROW_BYTES);
        let a = load_codes(codes_at, rows, cube.form);
        let b = load_codes(codes_at, comptime!(rows + ROW_BYTES), cube.form);
        let c = load_codes(codes_at, comptime!(rows + 8 * ROW_BYTES), cube.form);
        let d = load_codes(codes_at, comptime!(rows + 9 * ROW_BYTES), cube.form);
        #[unroll]
        for word in 0..comptime!(cube.form.own_channels() / 4) {
            #[unroll]
            for half in 0..2usize {
                // Both keys' codes of a channel side by side, of two channels.
                let order = comptime!(if half == 0 { 0x5140u32 } else { 0x7362u32 });
                let near = math::permute_two(a[word], b[word], order);
                let far = math::permute_two(c[word], d[word], order);
                #[unroll]
                for upper in 0..2usize {
                    let mut both = Sequence::<u32>::new();
                    both.push(math::e4m3_pair(near, comptime!(upper == 1)));
                    both.push(math::e4m3_pair(far, comptime!(upper == 1)));
                    let values = math::vector::<u32, Const<2>>(&both);
                    #[unroll]
                    for tile in 0..cube.form.tiles {
                        let at = comptime!(tile * cube.form.own_channels() + 4 * word + 2 * half + upper);
                        sums[at] = matrix::multiply_add(sums[at], weights[tile], values, comptime!(Elem::F16));
                    }
                }
            }
        }
    }
}

/// A thread's codes of a key.
#[cube]
fn load_codes(at: u32, #[comptime] offset: u32, #[comptime] form: Form) -> Sequence<u32> {
    let mut words = Sequence::<u32>::new();
    if comptime!(form.own_channels() == 8) {
        let both = matrix::load_8(at, offset);
        words.push(both.extract(0usize));
        words.push(both.extract(1usize));
    } else {
        words.push(matrix::load_4(at, offset));
    }
    words
}

/// Multiplies the output with factors `[scale][row]`, if one of the warp's is not 1.
#[cube]
pub(super) fn scale(sums: &mut Array<Vector<f32, Const<4>>>, cube: &Cube, factors_at: u32, #[comptime] always: bool) {
    let group = cube.warp * comptime!(cube.form.channels() as u32) / comptime!(SCALED as u32);
    let at = factors_at + (group * comptime!(cube.form.rows() as u32) + cube.lane / 4) * 4;
    #[unroll]
    for tile in 0..cube.form.tiles {
        let offset = comptime!((tile * TILE_ROWS * 4) as u32);
        let upper = f32::reinterpret(matrix::load_4(at, offset));
        let lower = f32::reinterpret(matrix::load_4(at, comptime!(offset + 32)));
        if comptime!(always) || warp::any(upper != 1.0f32 || lower != 1.0f32) {
            #[unroll]
            for product in 0..comptime!(cube.form.own_channels()) {
                let sum = sums[comptime!(tile * cube.form.own_channels() + product)];
                let mut scaled = Sequence::<f32>::new();
                scaled.push(sum.extract(0usize) * upper);
                scaled.push(sum.extract(1usize) * upper);
                scaled.push(sum.extract(2usize) * lower);
                scaled.push(sum.extract(3usize) * lower);
                sums[comptime!(tile * cube.form.own_channels() + product)] = math::vector::<f32, Const<4>>(&scaled);
            }
        }
    }
}

/// Writes the output. A thread has twice as many neighbouring channels of a row as it loads.
#[cube]
pub(super) fn write<E: Float, P: Size>(
    sums: &Array<Vector<f32, Const<4>>>,
    cube: &Cube,
    target: &Target,
    results: &mut Results<E, P>,
) {
    let channel = cube.warp * comptime!(cube.form.channels() as u32)
        + cube.lane % 4 * comptime!(2 * cube.form.own_channels() as u32);
    #[unroll]
    for tile in 0..cube.form.tiles {
        #[unroll]
        for half in 0..2usize {
            let row = cube.tile_row + comptime!((tile * TILE_ROWS + 8 * half) as u32) + cube.lane / 4;
            if row < cube.rows {
                #[unroll]
                for vector in 0..comptime!(2 * cube.form.own_channels() / COLUMNS) {
                    let mut columns = Vector::<f32, P>::empty();
                    #[unroll]
                    for i in 0..COLUMNS {
                        let own = comptime!(vector * COLUMNS + i);
                        let sum = sums[comptime!(tile * cube.form.own_channels() + own % cube.form.own_channels())];
                        columns.insert(i, sum.extract(comptime!(2 * half + own / cube.form.own_channels())));
                    }
                    results.write_columns(columns, target, row, channel + comptime!((vector * COLUMNS) as u32));
                }
            }
        }
    }
}
