//! The warp of the products in the first cube, of which one thread issues them for both: the scores of a block before the output of
//! the block before it.

use cubecl::prelude::*;

use super::places::{
    CHUNK_TILES, HELD, HELD_AT, HELD_COLUMNS, PARTS, Places, has_key_tile, of_block, parity, slot, slot_at,
};
use super::walk::{Range, Walk};
use crate::ptx::tcgen05::{self, Mma, Source, descriptor};
use crate::ptx::{mbarrier, warp};
use crate::tiles::form::{Form, TILE_BYTES};
use crate::tiles::loader::Plan;
use crate::tiles::pair::{CHUNK_BYTES, Cube, OUTPUT_AT, OUTPUT_COLUMNS, ROWS_OF_TERMS, SCORES_AT, output, scores};

/// How far it is.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Products {
    /// Items whose first scores and whose first output have been issued.
    queries: u32,
    outputs: u32,
    /// The turn of the first chunk of the block whose output was issued last.
    values_turn: u32,
    #[cube(comptime)]
    form: Form,
}

/// Scores with a chunk of the query from tensor memory.
fn held_scores(form: Form) -> Mma {
    Mma { a: Source::Tensor, ..scores(form, CHUNK_TILES) }
}

#[cube]
impl Products {
    pub fn new(#[comptime] form: Form) -> Products {
        Products { queries: 0u32, outputs: 0u32, values_turn: 0u32, form }
    }

    /// Issues the products of all items. One thread.
    pub fn multiply(&mut self, cube: &Cube, places: &Places, range: &Range, plan: &Plan) {
        let mut keys = Walk::new(range, plan);
        let mut values = Walk::new(range, plan);
        while values.has_block() {
            // An item's query comes while the last output of the one before is computed.
            let is_next = keys.has_block() && keys.block > 0;
            if is_next || keys.has_block() && keys.count == values.count {
                self.multiply_keys(cube, places, &keys);
                keys.advance(range, plan);
            }
            let is_next = keys.has_block() && keys.block > 0;
            if keys.count > values.count + 1 || !is_next {
                self.multiply_values(cube, places, &values, keys.count > values.count + 1);
                values.advance(range, plan);
            }
        }
    }

    /// The scores of a block, once those of the one before have been read; chunk by chunk, as they come.
    fn multiply_keys(&mut self, cube: &Cube, places: &Places, at: &Walk) {
        let to = cube.tensor + SCORES_AT;
        mbarrier::wait_cluster(places.scores_read, (at.count % 2) ^ 1);
        tcgen05::fence_after();
        #[unroll]
        for part in 0..PARTS {
            if comptime!(part < HELD) && at.block == 0 {
                let turn = at.turn - HELD + part;
                mbarrier::wait_cluster(cube.barriers.come + slot(turn) * 8, parity(turn));
                mbarrier::wait_cluster(cube.barriers.query_come + comptime!(8 * part), self.queries % 2);
                tcgen05::fence_after();
            }
            if comptime!(part < 2) && self.outputs > 0 {
                // Two chunks of the output before are still under way.
                self.wait_for_values(cube, comptime!(PARTS - 2 + part).runtime());
            }
            let turn = at.turn + part;
            mbarrier::wait_cluster(cube.barriers.come + slot(turn) * 8, parity(turn));
            let keys = descriptor(slot_at(cube.chunks_at, turn), ROWS_OF_TERMS);
            let more = comptime!((part > 0) as u32);
            if comptime!(part < HELD) {
                let query = cube.tensor + comptime!(HELD_AT + part * HELD_COLUMNS);
                tcgen05::mma_ts(to, query, keys, more, comptime!(held_scores(self.form)));
            } else {
                let query = descriptor(cube.query_at + comptime!((part - HELD) * CHUNK_BYTES), ROWS_OF_TERMS);
                tcgen05::mma_ss(to, query, keys, more, comptime!(scores(self.form, CHUNK_TILES)));
            }
            tcgen05::commit_pair(places.keys_read + of_block(at.count, part));
        }
        if comptime!(has_key_tile(self.form)) {
            mbarrier::wait_cluster(places.key_tile_come, at.count % 2);
            tcgen05::mma_ss(
                to,
                descriptor(cube.query_at + comptime!((PARTS - HELD) * CHUNK_BYTES), ROWS_OF_TERMS),
                descriptor(places.key_tile_at, ROWS_OF_TERMS),
                1u32,
                comptime!(scores(self.form, 1)),
            );
            tcgen05::commit_pair(places.key_tile_empty);
        }
        tcgen05::commit_pair(cube.barriers.scored + at.count % 2 * 8);
        if at.is_last() {
            tcgen05::commit_pair(cube.barriers.query_empty);
        }
        if at.block == 0 {
            self.queries = warp::next(self.queries);
        }
    }

    /// The output of a block, once its weights are there; `behind` says whether scores of another one have been issued before.
    fn multiply_values(&mut self, cube: &Cube, places: &Places, at: &Walk, behind: bool) {
        mbarrier::wait_cluster(cube.barriers.weighed, at.count % 2);
        if at.block == 0 {
            // This overwrites the output of the item before.
            mbarrier::wait_cluster(places.output_read, (self.outputs % 2) ^ 1);
            self.outputs = warp::next(self.outputs);
        }
        tcgen05::fence_after();
        if behind {
            // The last chunk of those scores is still under way.
            let other = at.count + 1;
            mbarrier::wait_cluster(places.keys_read + of_block(other, comptime!(PARTS - 1).runtime()), other / 2 % 2);
        }
        self.values_turn = at.turn;
        #[unroll]
        for part in 0..PARTS {
            let half = comptime!(part % 2).runtime();
            if comptime!(part > 1) {
                self.wait_for_values(cube, comptime!(part - 2).runtime());
            }
            let turn = at.turn + part;
            mbarrier::wait_cluster(places.values_come + of_block(at.count, part), at.count / 2 % 2);
            if at.block * 2 + half < at.item.blocks {
                tcgen05::mma_ss(
                    cube.tensor + comptime!(OUTPUT_AT + part / 2 * OUTPUT_COLUMNS),
                    descriptor(cube.weights_at + half * TILE_BYTES, ROWS_OF_TERMS),
                    descriptor(slot_at(cube.chunks_at, turn), comptime!(output(self.form).b)),
                    u32::cast_from(at.block > 0 || half > 0),
                    comptime!(output(self.form)),
                );
            }
            tcgen05::commit_pair(cube.barriers.empty + slot(turn) * 8);
        }
        tcgen05::commit_pair(cube.barriers.summed);
    }

    /// Waits until a chunk of the last output is done. Products of two chunks are under way then at most: the accesses of other warps and
    /// copies to shared memory come between them.
    fn wait_for_values(&self, cube: &Cube, part: u32) {
        let turn = self.values_turn + part;
        mbarrier::wait_cluster(cube.barriers.empty + slot(turn) * 8, parity(turn));
    }
}
