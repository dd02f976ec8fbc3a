//! From accumulators to rows of the output: the gated activation, the transposition, and stores of 16 bytes.

use cubecl::prelude::*;

use super::schedule::Place;
use super::{Form, GROUP, Rows, WEIGHT_ROWS};
use crate::linear::activation::{gated, gated_fast};
use crate::ptx::{barrier, fence, math, matrix, tma};

/// Elements of a store: 16 bytes.
pub(crate) const VECTOR: usize = 8;
/// Tokens that a warpgroup transposes at a time, at most.
const CHUNK: usize = 64;

impl Form {
    /// Tokens that a warpgroup transposes at a time.
    pub(super) fn chunk(self) -> usize {
        if self.tokens.is_multiple_of(CHUNK) { CHUNK } else { CHUNK / 2 }
    }

    /// Bytes of a chunk.
    fn chunk_bytes(self) -> u32 {
        (self.chunk() * WEIGHT_ROWS / 2 * 2) as u32
    }

    /// Shared memory of a warpgroup for that: of all chunks, where copies of them are under way.
    pub(super) fn staging_bytes(self) -> u32 {
        self.chunk_bytes() * if self.stores_tiles() { self.tokens / self.chunk() } else { 1 } as u32
    }

    /// Vectors of a token that a warpgroup has.
    fn vectors(self) -> usize {
        self.outputs() / 2 / VECTOR
    }

    /// Groups of 8 tokens that are stored by one instruction of a warp: 8 or 16 outputs of each.
    fn eights(self) -> usize {
        if self.linear.gated { 4 } else { 2 }
    }
}

/// Where a warpgroup's part of a tile goes.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Output {
    /// Its staging.
    pub staging_at: u32,
    /// Which of the two warpgroups.
    pub group: u32,
    /// Outputs of a row.
    pub outputs: u32,
    /// Channels of a row, or of a row's head.
    pub width: u32,
    pub heads: u32,
    pub limit: f32,
}

#[cube]
impl Output {
    /// Writes a tile. All units of the warpgroup.
    pub fn write<E: Float, V: Size, A: Size>(
        &self,
        acc: Vector<f32, A>,
        order: &[i32],
        out: &mut [Vector<E, V>],
        work: &Place,
        #[comptime] form: Form,
    ) {
        #[unroll]
        for chunk in 0..comptime!(form.tokens / form.chunk()) {
            // A tile that is not full has nothing to write past its tokens.
            if work.tokens > comptime!((chunk * form.chunk()) as u32) {
                self.stage::<A>(acc, self.staging_at, chunk, form);
                barrier::sync_at(self.group + 1, GROUP);
                self.store::<E, V>(order, out, work, chunk, form);
                // What has been read may be written anew.
                barrier::sync_at(self.group + 1, GROUP);
            }
        }
    }

    /// Starts to copy a tile to the output. All units of the warpgroup; the first one has the copies.
    pub fn copy<A: Size>(&self, acc: Vector<f32, A>, map: u64, work: &Place, #[comptime] form: Form) {
        let unit = UNIT_POS % GROUP;
        let copies = unit == 0;
        // The copies of the tile before.
        if copies {
            tma::wait_for_stores(0u32);
        }
        barrier::sync_at(self.group + 1, GROUP);
        #[unroll]
        for chunk in 0..comptime!(form.tokens / form.chunk()) {
            self.stage::<A>(acc, self.staging_at + comptime!(chunk as u32 * form.chunk_bytes()), chunk, form);
        }
        fence::async_shared();
        barrier::sync_at(self.group + 1, GROUP);
        if copies {
            let output = (work.output + self.group * comptime!(WEIGHT_ROWS as u32 / 2)) as i32;
            #[unroll]
            for chunk in 0..comptime!(form.tokens / form.chunk()) {
                let token = comptime!((chunk * form.chunk()) as u32);
                if work.tokens > token {
                    let from = self.staging_at + comptime!(chunk as u32 * form.chunk_bytes());
                    tma::store_2d(map, output, (work.first + token) as i32, from);
                }
            }
            tma::commit_stores();
        }
        // `wgmma` of the next tile is next, which all lanes execute together.
        sync_plane();
    }

    /// Writes the sums of a tile over a part of the channels, `[splits, rows, outputs]`, as they lie in the registers: eight units have
    /// neighbouring outputs of a token.
    pub fn write_partial<A: Size>(
        &self,
        acc: Vector<f32, A>,
        partial: &mut [f32],
        work: &Place,
        rows: u32,
        #[comptime] form: Form,
    ) {
        let (warp, lane) = (UNIT_POS % GROUP / 32, UNIT_POS % 32);
        let first_output = work.output + self.group * comptime!(WEIGHT_ROWS as u32 / 2) + warp * 16 + lane / 4;
        let first_row = (work.split * rows + work.first) as usize;
        #[unroll]
        for i in 0..comptime!(form.tokens / 2) {
            let token = comptime!((i / 4 * 8 + i % 2) as u32) + lane % 4 * 2;
            let output = first_output + comptime!((i / 2 % 2 * 8) as u32);
            if token < work.tokens && output < self.outputs {
                partial[(first_row + token as usize) * self.outputs as usize + output as usize] = acc.extract(i);
            }
        }
        // `wgmma` of the next tile is next, which all lanes execute together.
        sync_plane();
    }

    /// Writes a chunk of tokens to the staging, a token a row.
    fn stage<A: Size>(&self, acc: Vector<f32, A>, at: u32, #[comptime] chunk: usize, #[comptime] form: Form) {
        let eights = comptime!(form.eights());
        let warp = UNIT_POS % GROUP / 32;
        let (eight, row) = (UNIT_POS % 32 / 8, UNIT_POS % 8);
        // The lane's row of its matrix: which token, and which vector of it.
        let (token, vector) = if comptime!(form.linear.gated) {
            (eight * 8 + row, warp)
        } else {
            (eight / 2 * 8 + row, warp * 2 + eight % 2)
        };
        let to = at + address(token, vector, form);
        #[unroll]
        for i in 0..comptime!(form.chunk() / 8 / eights) {
            let first = comptime!(chunk * form.chunk() / 8 + i * eights);
            let mut words = Sequence::<u32>::new();
            #[unroll]
            for m in 0..4usize {
                let at = comptime!(if form.linear.gated { 4 * (first + m) } else { 4 * first + 2 * m });
                let (mut low, mut high) = (acc.extract(at), acc.extract(comptime!(at + 1)));
                if comptime!(form.linear.gated) {
                    low = self.activated(low, acc.extract(comptime!(at + 2)), form);
                    high = self.activated(high, acc.extract(comptime!(at + 3)), form);
                }
                words.push(math::pack(low, high, comptime!(form.out_elem())));
            }
            let offset = comptime!((i * eights * 8 * form.vectors() * 16) as u32);
            matrix::store_x4(to, offset, true, math::vector::<u32, Const<4>>(&words));
        }
    }

    /// The gated activation. Batch-invariant products have the bits of the small-batch kernel.
    fn activated(&self, gate: f32, up: f32, #[comptime] form: Form) -> f32 {
        if comptime!(form.in_parts) {
            gated(gate, up, self.limit, form.linear.limited)
        } else {
            gated_fast(gate, up, self.limit, form.linear.limited)
        }
    }

    /// Writes a chunk from the staging to the output, as far as there are such tokens and outputs.
    fn store<E: Float, V: Size>(
        &self,
        order: &[i32],
        out: &mut [Vector<E, V>],
        work: &Place,
        #[comptime] chunk: usize,
        #[comptime] form: Form,
    ) {
        let vectors = comptime!(form.vectors() as u32);
        let row_vectors = self.width / comptime!(VECTOR as u32);
        let first_vector = work.output / comptime!(VECTOR as u32) + self.group * vectors;
        #[unroll]
        for i in 0..comptime!(form.chunk() * form.vectors() / GROUP as usize) {
            let at = UNIT_POS % GROUP + comptime!(i as u32 * GROUP);
            let (token, vector) = (at / vectors, at % vectors);
            let place = token + comptime!((chunk * form.chunk()) as u32);
            if place < work.tokens && first_vector + vector < self.outputs / comptime!(VECTOR as u32) {
                let mut row = (work.first + place) as usize;
                if comptime!(form.rows == Rows::Scatter) {
                    row = order[row] as usize;
                } else if comptime!(form.rows == Rows::Heads) {
                    row = row * self.heads as usize + work.head as usize;
                }
                let words = matrix::load_16(self.staging_at + address(token, vector, form), 0u32);
                out[row * row_vectors as usize + (first_vector + vector) as usize] = Vector::<E, V>::reinterpret(words);
            }
        }
    }
}

/// Bytes to a vector of a token's row. Rows of 128 bytes, or halves of them, whose vectors are permuted: eight tokens' vectors
/// are in different banks, and so are a row's.
#[cube]
fn address(token: u32, vector: u32, #[comptime] form: Form) -> u32 {
    let per_line = comptime!((8 / form.vectors()) as u32);
    let line = token / per_line;
    let unit = token % per_line * comptime!(form.vectors() as u32) + vector;
    line * 128 + ((unit ^ (line % 8)) * 16)
}
