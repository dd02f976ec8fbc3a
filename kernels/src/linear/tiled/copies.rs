//! Which rows a unit copies into a stage, and where they lie there.

use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

use super::{Form, INTERLEAVED, STAGES, UNITS, VECTOR, VECTORS, WEIGHT_ROWS};
use crate::linear::grid::{Sizes, Tile};
use crate::linear::weight::{WeightRow, WeightRows};

/// Rows that the units of a cube copy at once: four of them have the vectors of a row.
const ROWS: usize = UNITS / VECTORS;

/// What a unit copies of each block: a vector of every so many rows.
#[derive(CubeType)]
pub(super) struct Copies {
    /// Where its rows of tokens start, with its own vector of the first block.
    tokens: Sequence<usize>,
    weights: Sequence<WeightRow>,
    /// Its own vector of a block.
    vector: usize,
    /// Vectors of a row.
    vectors: usize,
    /// Where its first one lies in a stage.
    to: usize,
}

#[cube]
impl Copies {
    /// Those for a tile and a group of outputs.
    pub fn new(order: &[i32], tile: &Tile, sizes: &Sizes, group: usize, #[comptime] form: Form) -> Copies {
        let (row, vector) = (UNIT_POS as usize / VECTORS, UNIT_POS as usize % VECTORS);
        let mut tokens = Sequence::<usize>::new();
        #[unroll]
        for pass in 0..comptime!(form.tokens / ROWS) {
            let input = tile.input(order, row + comptime!(pass * ROWS));
            tokens.push(input * tile.row(sizes.vectors, sizes.carried) + vector);
        }
        let mut weights = Sequence::<WeightRow>::new();
        #[unroll]
        for pass in 0..comptime!(WEIGHT_ROWS / ROWS) {
            let number = row + comptime!(pass * ROWS);
            let matrix = tile.expert * sizes.matrix_stride;
            let own = weight_row(number, group * form.outputs(), sizes.outputs, form);
            weights.push(WeightRow::new(tile.expert, matrix, own, sizes.vectors, vector));
        }
        let to = row * VECTORS + (vector ^ swizzle(row));
        Copies { tokens, weights, vector, vectors: sizes.vectors, to }
    }

    /// Starts to copy a block of channels into its stage. Past the last channel zeros are written: what is there may not be a
    /// number.
    pub fn start<E: Float, V: Size>(
        &self,
        x: &[Vector<E, V>],
        weight: &WeightRows<E, V>,
        ring: &mut Shared<[Vector<E, V>]>,
        block: usize,
        #[comptime] form: Form,
    ) {
        let column = block * VECTORS;
        let to = block % STAGES * form.stage() + self.to;
        let weights_to = to + comptime!(form.tokens * VECTORS);
        if comptime!(form.whole) || column + self.vector < self.vectors {
            #[unroll]
            for pass in 0..comptime!(form.tokens / ROWS) {
                let (from, to) = (self.tokens[pass] + column, to + comptime!(pass * ROWS * VECTORS));
                copy_async(&x[from..from + 1], &mut ring[to..to + 1], comptime!(VECTOR as u32));
            }
            #[unroll]
            for pass in 0..comptime!(WEIGHT_ROWS / ROWS) {
                let to = weights_to + comptime!(pass * ROWS * VECTORS);
                weight.copy(&self.weights[pass], column, ring, to);
            }
        } else {
            #[unroll]
            for pass in 0..comptime!((form.tokens + WEIGHT_ROWS) / ROWS) {
                ring[to + comptime!(pass * ROWS * VECTORS)] = Vector::new(E::from_int(0));
            }
        }
    }
}

/// The row of the matrix that is row `number` of a cube's weights; past the last output, that of the last one. Of a gated output,
/// eight rows of the gate lie before the same eight of up.
#[cube]
fn weight_row(number: usize, first_output: usize, outputs: usize, #[comptime] form: Form) -> usize {
    if comptime!(form.linear.gated) {
        let (pair, place) = (number / comptime!(2 * INTERLEAVED), number % comptime!(2 * INTERLEAVED));
        let output = min(first_output + pair * INTERLEAVED + place % INTERLEAVED, outputs - 1);
        place / INTERLEAVED * outputs + output
    } else {
        min(first_output + number, outputs - 1)
    }
}

/// By which a row's vectors are permuted. Two rows of 64 bytes are a line of all banks: the same vector of eight rows in turn lies in
/// different ones, which `ldmatrix` reads at once.
#[cube]
pub(super) fn swizzle(row: usize) -> usize {
    row / 2 % VECTORS
}
