//! What a computing warpgroup does: the products of keys with the heads of its query tokens, and their sums over the heads.

use cubecl::prelude::*;

use super::form::{BLOCK, COLUMNS, Form, GROUP, HALF, HEADS, KEYS, PANEL, PRODUCTS};
use super::load::Queries;
use super::work::{Part, Rows, Tile};
use crate::lightning_index::plain::rank;
use crate::ptx::wgmma::descriptor;
use crate::ptx::{barrier, math, matrix, warp, wgmma};
use crate::tiles::ring::Ring;

/// Where ranks go.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Output {
    /// The first query token that is scored.
    pub first_row: u32,
    /// From one query token to the next.
    pub stride: usize,
    /// The factor of the scores.
    pub scale: f32,
}

/// A warpgroup, and what it works with.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Group {
    number: u32,
    ring: Ring,
    queries: Queries,
    /// Where the weights of its columns are.
    weights_at: u32,
    #[cube(comptime)]
    form: Form,
}

#[cube]
impl Group {
    /// `words_at` is where the weights of both warpgroups are.
    pub fn new(number: u32, ring: Ring, queries: Queries, words_at: u32, #[comptime] form: Form) -> Group {
        // The first warpgroup has the first turn.
        if number == 1 {
            barrier::arrive_at(1u32, comptime!(2 * GROUP));
        }
        Group { number, ring, queries, weights_at: words_at + number * comptime!(COLUMNS as u32 * 4), form }
    }

    /// Puts the weights of a tile, and how many ranks each of its query tokens has, into shared memory.
    pub fn prepare<W: Float>(
        &self,
        rows: &Rows,
        visible: &[i32],
        head_weights: &[W],
        tile: &Tile,
        words: &mut Shared<[u32]>,
    ) {
        let form = self.form.comptime();
        let (unit, first) = (UNIT_POS % GROUP, tile.row_of(self.number, form));
        // All have read those of the tile before.
        barrier::sync_at(3 + self.number, GROUP);
        #[unroll]
        for i in 0..comptime!(COLUMNS as u32 / GROUP) {
            let column = unit + i * GROUP;
            let head = first * comptime!(form.heads as u32) + column;
            let mut weight = 0.0f32;
            if head < tile.end * comptime!(form.heads as u32) {
                weight = f32::cast_from(head_weights[head as usize]);
            }
            words[(self.number * comptime!(COLUMNS as u32) + place_of(column)) as usize] = weight.to_bits();
        }
        if unit < comptime!(form.group_tokens() as u32) {
            words[self.token(unit)] = rows.ranks(visible, tile, first + unit);
        }
        barrier::sync_at(3 + self.number, GROUP);
    }

    /// Where it says how many ranks a query token has: behind the weights.
    fn token(&self, token: u32) -> usize {
        (comptime!(2 * COLUMNS as u32) + self.number * comptime!(self.form.group_tokens() as u32) + token) as usize
    }

    /// Scores some blocks of a tile.
    pub fn score(&mut self, part: &Part, words: &Shared<[u32]>, output: &Output, scores: &mut [u32]) {
        let lane = UNIT_POS % 32;
        let own_key = UNIT_POS % GROUP / 32 * 16 + lane / 4;
        self.queries.wait(self.number);
        let heads = descriptor(self.queries.of(self.number), HEADS);
        let mut block = part.first;
        while block < part.end {
            self.ring.wait();
            #[unroll]
            for half in 0..2usize {
                let keys = descriptor(self.ring.stage_at() + comptime!((half * HALF * PANEL * 2) as u32), BLOCK);
                self.begin_turn();
                let issued = wgmma::mma_ss_zero::<Const<PRODUCTS>>(keys, heads, comptime!(self.form.products()));
                self.end_turn();
                let products = wgmma::wait::<Const<PRODUCTS>>(issued, 0u32);
                if comptime!(half == 1) {
                    self.ring.release(lane);
                    self.queries.release_if(self.number, (lane == 0) & (block + 1 == part.end));
                }
                let sums = sums(products, self.weights_at, self.form);
                let key = block * comptime!(KEYS as u32) + comptime!((half * HALF) as u32) + own_key;
                self.store(&part.tile, key, &sums, words, output, scores);
            }
            block = warp::next(block);
        }
        self.queries.advance();
    }

    /// Writes the ranks of this unit's sums, of `key` or the one 8 keys on.
    fn store(
        &self,
        tile: &Tile,
        key: u32,
        sums: &Sequence<f32>,
        words: &Shared<[u32]>,
        output: &Output,
        scores: &mut [u32],
    ) {
        let own = comptime!(self.form.group_tokens() / 2);
        #[unroll]
        for i in 0..own {
            let place = UNIT_POS % 4 * own as u32 + i as u32;
            let (token, key) = (place / 2, key + place % 2 * 8);
            if key < words[self.token(token)] {
                let row = tile.row_of(self.number, self.form) + token - output.first_row;
                scores[row as usize * output.stride + key as usize] = rank(*sums.index(i) * output.scale);
            }
        }
    }

    /// Waits until the other warpgroup has issued its products: it sums under those of this one.
    fn begin_turn(&self) {
        barrier::sync_at(self.number + 1, comptime!(2 * GROUP));
    }

    fn end_turn(&self) {
        barrier::arrive_at(2 - self.number, comptime!(2 * GROUP));
    }
}

/// Where the weight of a column is: four for each quarter of a warp's rows, of every 16 columns.
#[cube]
fn place_of(column: u32) -> u32 {
    column / 16 * 16 + column % 8 / 2 * 4 + column / 8 % 2 * 2 + column % 2
}

/// The weighted sums of products over the heads of each query token, of two keys 8 apart. Of the `2 * tokens` sums (keys of a token
/// side by side) each of four units side by side gets a quarter.
#[cube]
fn sums(products: Vector<f32, Const<PRODUCTS>>, weights_at: u32, #[comptime] form: Form) -> Sequence<f32> {
    let weights_at = weights_at + UNIT_POS % 4 * 16;
    let mut all = Sequence::<f32>::new();
    #[unroll]
    for token in 0..form.group_tokens() {
        let mut own = 0.0f32;
        let mut other = 0.0f32;
        #[unroll]
        for part in 0..comptime!(form.heads / 16) {
            let columns = comptime!(token * form.heads / 16 + part);
            let weights = matrix::load_16(weights_at, comptime!(columns as u32 * 64));
            let weights = Vector::<f32, Const<4>>::reinterpret(weights);
            #[unroll]
            for i in 0..4usize {
                let at = comptime!(8 * columns + i / 2 * 4 + i % 2);
                own = fma(math::relu(products.extract(at)), weights.extract(i), own);
                other = fma(math::relu(products.extract(comptime!(at + 2))), weights.extract(i), other);
            }
        }
        all.push(own);
        all.push(other);
    }
    let halves = halve(&all, comptime!(2 * form.group_tokens()), 2u32);
    halve(&halves, comptime!(form.group_tokens()), 1u32)
}

/// Adds the values of two units, which get half of the sums each: the one whose number has this bit the second half.
#[cube]
fn halve(values: &Sequence<f32>, #[comptime] count: usize, #[comptime] bit: u32) -> Sequence<f32> {
    let second = UNIT_POS & bit != 0;
    let mut sums = Sequence::<f32>::new();
    #[unroll]
    for i in 0..comptime!(count / 2) {
        let (low, high) = (*values.index(i), *values.index(comptime!(count / 2 + i)));
        let (kept, sent) = (select(second, high, low), select(second, low, high));
        sums.push(kept + warp::shuffle_xor::<f32>(sent, bit));
    }
    sums
}
