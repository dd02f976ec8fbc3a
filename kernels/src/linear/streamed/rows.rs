//! The rows of x that a cube multiplies, in shared memory, as f16 times a power of two (`powers.rs`).

use cubecl::prelude::*;

use super::form::{Form, TOKENS};
use super::{VECTOR, WARP};
use crate::linear::WeightFormat;
use crate::linear::grid::Tile;
use crate::linear::powers::{larger, power};
use crate::ptx::wgmma::Elem;
use crate::ptx::{math, matrix, warp};

/// Vectors of a row that a unit keeps in registers while it looks for the largest number; the others it reads twice.
const KEPT: usize = 8;

/// Where the numbers of a vector are, in the order in which codes are decoded: of FP4 each with the one four further.
fn order_of(format: WeightFormat) -> [usize; VECTOR] {
    match format {
        WeightFormat::Fp4 => [0, 4, 1, 5, 2, 6, 3, 7],
        WeightFormat::Fp8 | WeightFormat::Dense => [0, 1, 2, 3, 4, 5, 6, 7],
    }
}

/// Writes the rows of a tile to `rows_at`, and for each what its products are to be multiplied by. All units of a cube, of which none
/// reads any longer what is there. `own` is the number of the warp.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn write_rows<E: Float, V: Size>(
    x: &[Vector<E, V>],
    order: &[i32],
    tile: &Tile,
    rows_at: u32,
    own: u32,
    largest: &mut [u32],
    inverses: &mut [f32],
    #[comptime] form: Form,
) {
    // Of each token one warp has the vectors of each part.
    let parts = comptime!(form.warps() / TOKENS);
    let (token, part) = (own % comptime!(TOKENS as u32), own / comptime!(TOKENS as u32));
    let vectors = comptime!(form.inputs / VECTOR);
    let from = tile.input(order, token as usize) * vectors;
    let turns = comptime!(form.vectors().div_ceil(WARP * parts));
    let lane = UNIT_POS % comptime!(WARP as u32);
    let is_first = lane == 0;
    let first = part as usize * comptime!(turns * WARP) + lane as usize;

    let mut kept = Array::<Vector<E, V>>::new(comptime!(turns.min(KEPT)));
    let mut own_largest = 0u32.runtime();
    #[unroll]
    for turn in 0..turns {
        let value = read(x, from, first + comptime!(turn * WARP), vectors);
        if comptime!(turn < KEPT) {
            kept[turn] = value;
        }
        if comptime!(form.bf16) {
            own_largest = larger(own_largest, value);
        }
    }
    let mut factor = 1.0f32.runtime();
    let mut inverse = 1.0f32.runtime();
    if comptime!(form.bf16) {
        #[unroll]
        for step in 0..5u32 {
            own_largest = max(own_largest, warp::shuffle_xor::<u32>(own_largest, comptime!(1u32 << step)));
        }
        if is_first {
            largest[own as usize] = own_largest;
        }
        sync_cube();
        #[unroll]
        for part in 0..parts {
            own_largest = max(own_largest, largest[token as usize + comptime!(part * TOKENS)]);
        }
        (factor, inverse) = power(own_largest);
    }
    if is_first && part == 0 {
        inverses[token as usize] = inverse;
    }
    let order = comptime!(order_of(form.format));
    let row_at = rows_at + token * comptime!(form.row_bytes() as u32);
    #[unroll]
    for turn in 0..turns {
        let vector = first + comptime!(turn * WARP);
        let value = if comptime!(turn < KEPT) { kept[turn] } else { read(x, from, vector, vectors) };
        if vector < comptime!(form.vectors()) {
            let mut words = Vector::<u32, Const<4>>::new(0u32);
            #[unroll]
            for pair in 0..4usize {
                let low = f32::cast_from(value.extract(comptime!(order[2 * pair])));
                let high = f32::cast_from(value.extract(comptime!(order[2 * pair + 1])));
                words.insert(pair, math::pack(low * factor, high * factor, Elem::F16));
            }
            matrix::store_16(row_at + vector as u32 * 16, 0u32, words);
        }
    }
    sync_cube();
}

/// A vector of a row; zeros past its end.
#[cube]
fn read<E: Float, V: Size>(x: &[Vector<E, V>], from: usize, vector: usize, #[comptime] vectors: usize) -> Vector<E, V> {
    // Without a branch, at which lanes would part.
    let value = x[from + min(vector, vectors - 1)];
    let zero = Vector::<E, V>::new(E::from_int(0));
    if vector < vectors { value } else { zero }
}
