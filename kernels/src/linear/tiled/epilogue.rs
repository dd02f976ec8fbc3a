//! From sums to rows of the output: the gated activation, the way through shared memory, and stores of 16 bytes.

use cubecl::prelude::*;

use super::products::Operands;
use super::{Form, INTERLEAVED, LANES, M, N, UNITS, VECTOR};
use crate::linear::activation::gated_fast;
use crate::linear::grid::{Sizes, Tile};
use crate::ptx::{math, matrix};

impl Form {
    /// Vectors of a token that a cube has.
    fn output_vectors(self) -> usize {
        self.outputs() / VECTOR
    }

    /// Bytes of a token in the staging.
    fn staged_row(self) -> u32 {
        (self.outputs() * 2) as u32
    }
}

/// Where a cube's part of the output goes.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Output {
    /// Its staging: the ring, which no plane needs any longer.
    pub staging_at: u32,
    /// Which group of outputs.
    pub group: usize,
    pub limit: f32,
}

#[cube]
impl Output {
    /// Writes the sums of a plane to the staging, a token a row, as numbers of the output.
    pub fn stage<NC: Size>(
        &self,
        sums: &Sequence<Array<Vector<f32, NC>>>,
        operands: &Operands,
        #[comptime] form: Form,
    ) {
        let lane = UNIT_POS % LANES as u32;
        let (row, quad) = (lane / 4, lane % 4);
        let halves = comptime!(if form.linear.gated { 2u32 } else { 1u32 });
        // A token's vectors are permuted by its number: those of 8 tokens lie in different banks.
        let in_row = (operands.weight_row / halves * 2) ^ (row * 16);
        let first = self.staging_at + (operands.token + row) * comptime!(form.staged_row()) + in_row + quad * 4;
        #[unroll]
        for m in 0..comptime!(2 * form.token_steps()) {
            let offset = comptime!((m * M / 2) as u32 * form.staged_row());
            #[unroll]
            for vector in 0..comptime!(form.weight_steps() / halves as usize) {
                let at = comptime!(m / 2 * form.weight_steps() + vector * halves as usize);
                let mut low = sums[at][comptime!(m % 2)].extract(0usize);
                let mut high = sums[at][comptime!(m % 2)].extract(1usize);
                if comptime!(form.linear.gated) {
                    let up = comptime!(at + INTERLEAVED / N);
                    low = gated_fast(low, sums[up][comptime!(m % 2)].extract(0usize), self.limit, form.linear.limited);
                    high =
                        gated_fast(high, sums[up][comptime!(m % 2)].extract(1usize), self.limit, form.linear.limited);
                }
                let word = math::pack(low, high, comptime!(form.elem()));
                matrix::store_4(first ^ comptime!(vector as u32 * 16), offset, word);
            }
        }
    }

    /// Writes the staging to the output, as far as there are such tokens and outputs. All units, which have synchronised.
    pub fn store<E: Float, V: Size>(
        &self,
        order: &[i32],
        out: &mut [Vector<E, V>],
        tile: &Tile,
        sizes: &Sizes,
        #[comptime] form: Form,
    ) {
        let vectors = comptime!(form.output_vectors());
        let row_vectors = tile.row(sizes.outputs / VECTOR, sizes.carried);
        // A unit has the same vector of every so many tokens.
        let vector = UNIT_POS as usize % vectors;
        let own = self.group * vectors + vector;
        if own < sizes.outputs / VECTOR {
            #[unroll]
            for pass in 0..comptime!(form.tokens * vectors / UNITS) {
                let token = UNIT_POS as usize / vectors + comptime!(pass * UNITS / vectors);
                if token < tile.count {
                    let at = (vector ^ (token % 8)) as u32 * 16;
                    let words =
                        matrix::load_16(self.staging_at + token as u32 * comptime!(form.staged_row()) + at, 0u32);
                    out[tile.output(order, token) * row_vectors + own] = Vector::<E, V>::reinterpret(words);
                }
            }
        }
    }

    /// Copies the channels of x past those of the product behind the outputs of each token. The first group's cubes do.
    pub fn carry<E: Float, V: Size>(&self, x: &[Vector<E, V>], out: &mut [Vector<E, V>], tile: &Tile, sizes: &Sizes) {
        if self.group == 0 {
            let (inputs, outputs, carried) = (sizes.vectors, sizes.outputs / VECTOR, sizes.carried);
            let mut at = UNIT_POS as usize;
            while at < tile.count * carried {
                let (row, vector) = (tile.head_row(at / carried), at % carried);
                out[row * (outputs + carried) + outputs + vector] = x[row * (inputs + carried) + inputs + vector];
                at += UNITS;
            }
        }
    }
}
