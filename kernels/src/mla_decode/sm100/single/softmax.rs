//! The four warps of the softmax: weights from scores, the output scaled where a maximum has grown, and written at the end.

use cubecl::prelude::*;

use super::cube::Cube;
use super::{OUTPUT_AT, RIGHT, SCORES_AT, SCORES_COLUMNS, WEIGHTS_AT};
use crate::ptx::tcgen05::{self, LANE, Shape};
use crate::ptx::{fence, mbarrier, warp};
use crate::tiles::form::{Form, KEYS, STAGES, VALUE_WIDTH};
use crate::tiles::loader::{Item, Plan, Tile};
use crate::tiles::output::{Results, Target, scale_rows};
use crate::tiles::softmax::{SoftmaxState, Weighted, clear_keys, inverse, log_sum, quad_sum, weigh};

/// What a unit has of the tile, and how far it is.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Softmax {
    /// The first of the two rows that it has a part of, in scores and output alike.
    own_row: u32,
    /// Its warp's rows of tensor memory.
    own: u32,
    /// The query rows, of which each may see other keys.
    tile: Tile,
    /// Blocks of all items so far.
    turn: u32,
    /// Of the scores, as powers of two.
    scale: f32,
    /// The bits of -inf.
    empty_lse: u32,
    #[cube(comptime)]
    form: Form,
}

#[cube]
impl Softmax {
    pub fn new(cube: &Cube, tile: Tile, scale: f32, empty_lse: u32, #[comptime] form: Form) -> Softmax {
        let own_row = cube.warp * 16 + cube.lane / 4;
        let own = cube.tensor + cube.warp * comptime!(32 * LANE);
        Softmax { own_row, own, tile, turn: 0u32, scale, empty_lse, form }
    }

    /// Weights, output and lse of all items.
    pub fn run<E: Float, P: Size>(
        &mut self,
        cube: &Cube,
        plan: &Plan,
        keys: &mut Shared<[u32]>,
        results: &mut Results<E, P>,
    ) {
        let mut index = cube.first;
        while index < cube.end {
            let mut item = Item::none();
            item.read(plan, index, &cube.tile);
            let target = Target::of(plan, &item, index);
            let state = self.weigh_item(cube, plan, &item, keys);
            self.finish::<E, P>(cube, &state, item.blocks, &target, results);
            index = warp::next(index);
        }
    }

    /// The weights of the blocks of an item, one after the other.
    fn weigh_item(&mut self, cube: &Cube, plan: &Plan, item: &Item, keys: &mut Shared<[u32]>) -> SoftmaxState {
        // Rows past the end are computed, but not written.
        let end_a = self.tile.visible_end(plan, item.sequence, self.own_row, item.end_key);
        let end_b = self.tile.visible_end(plan, item.sequence, self.own_row + 8, item.end_key);
        let mut state = SoftmaxState::new();
        let mut base = item.first_key;
        let mut block = 0u32;
        while block < item.blocks {
            mbarrier::wait(cube.barriers.scored + self.turn % 2 * 8, self.turn / 2 % 2);
            tcgen05::fence_after();
            let scores_at = self.own + SCORES_AT + self.turn % 2 * SCORES_COLUMNS;
            let scores = tcgen05::load::<Const<32>>(scores_at, comptime!(Shape::Pairs));
            let weighted = weigh(scores, &mut state, base, end_a, end_b, self.scale, cube.lane, self.form);
            if block > 0 {
                self.correct(cube, &weighted);
            }
            #[unroll]
            for side in 0..2u32 {
                let to = self.own + comptime!(side * RIGHT + WEIGHTS_AT);
                tcgen05::store::<u32, Const<16>>(to, weighted.weights, comptime!(Shape::Singles));
            }
            tcgen05::wait_for_stores();
            if base + comptime!(KEYS as u32) > item.tile_end {
                // All of the block has come: the scores were computed from it.
                clear_keys(keys, self.turn % STAGES, item.tile_end - base, self.form);
                fence::async_shared();
            }
            tcgen05::fence_before();
            mbarrier::arrive(cube.barriers.weighed);
            base += comptime!(KEYS as u32);
            self.turn += 1;
            block = warp::next(block);
        }
        state
    }

    /// Waits for the output of the block before, and scales it. Its weights have been read then, too.
    fn correct(&self, cube: &Cube, weighted: &Weighted) {
        mbarrier::wait(cube.barriers.summed, (self.turn - 1) % 2);
        tcgen05::fence_after();
        if warp::any(weighted.factor_a != 1.0f32 || weighted.factor_b != 1.0f32) {
            scale_output(self.own + OUTPUT_AT, weighted.factor_a, weighted.factor_b);
        }
    }

    /// Writes the lse and the output of an item.
    fn finish<E: Float, P: Size>(
        &self,
        cube: &Cube,
        state: &SoftmaxState,
        blocks: u32,
        target: &Target,
        results: &mut Results<E, P>,
    ) {
        let sum_a = quad_sum(state.sum_a);
        let sum_b = quad_sum(state.sum_b);
        let corner = cube.lane % 4;
        if corner == 0 {
            let lse_a = log_sum(sum_a, state.highest_a, self.empty_lse);
            let lse_b = log_sum(sum_b, state.highest_b, self.empty_lse);
            results.write_lses(target, self.own_row, lse_a, lse_b);
        }
        // Without blocks this waits for nothing: the phase of the last block, if there was one, is over.
        mbarrier::wait(cube.barriers.summed, (self.turn - 1) % 2);
        tcgen05::fence_after();
        let (factor_a, factor_b) = (inverse(sum_a), inverse(sum_b));
        // Tensor memory is read by whole warps.
        sync_plane();
        #[unroll]
        for side in 0..2u32 {
            let mut acc = Vector::<f32, Const<128>>::zeroed();
            if blocks > 0 {
                let at = self.own + comptime!(side * RIGHT + OUTPUT_AT);
                acc = tcgen05::load::<Const<128>>(at, comptime!(Shape::Pairs));
            }
            acc = scale_rows::<Const<128>>(acc, factor_a, factor_b);
            let column = comptime!(side * VALUE_WIDTH as u32 / 2);
            results.write_rows::<Const<128>>(acc, target, self.own_row, column, cube.lane);
            // The same of what is read next.
            sync_plane();
        }
    }
}

/// Multiplies a warp's rows of the output, in both halves; `output` is the address of the first. The next products are issued
/// after the stores have been waited for.
#[cube]
fn scale_output(output: u32, factor_a: f32, factor_b: f32) {
    let mut part = 0u32;
    while part < 8u32 {
        let at = output + part % 2 * RIGHT + part / 2 * 64;
        let acc = tcgen05::load::<Const<32>>(at, comptime!(Shape::Pairs));
        tcgen05::store::<f32, Const<32>>(at, scale_rows::<Const<32>>(acc, factor_a, factor_b), comptime!(Shape::Pairs));
        part = warp::next(part);
    }
}
