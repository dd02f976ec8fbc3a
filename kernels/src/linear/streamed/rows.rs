//! The rows of x that a cube multiplies, in shared memory, as f16 times a power of two (`powers.rs`).

use cubecl::prelude::*;

use super::form::{Form, TOKENS};
use super::{VECTOR, WARP};
use crate::linear::grid::Tile;
use crate::linear::powers::{halves, larger, order as order_of_codes, power};
use crate::ptx::{matrix, warp};

/// Vectors of a row that a unit keeps in registers while it looks for the largest number; the others it reads twice.
const KEPT: usize = 8;

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
    let places = comptime!(order_of_codes(form.format, false));
    let row_at = rows_at + token * comptime!(form.row_bytes() as u32);
    #[unroll]
    for turn in 0..turns {
        let vector = first + comptime!(turn * WARP);
        let value = if comptime!(turn < KEPT) { kept[turn] } else { read(x, from, vector, vectors) };
        if vector < comptime!(form.vectors()) {
            let words = halves(value, factor, places);
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
