//! The four warps of the softmax: weights from scores, the output scaled where a maximum has grown, and written at the end.

use cubecl::prelude::*;

use super::chunks::PAIR_KEYS;
use super::cube::Cube;
use super::rows::{RowState, partner, scale_output, store_weights, weigh_row};
use super::{OUTPUT_AT, OUTPUT_COLUMNS, SCORES_AT, SCORES_COLUMNS};
use crate::ptx::tcgen05::{self, LANE, Shape};
use crate::ptx::{fence, mbarrier, warp};
use crate::tiles::form::{Form, LOWEST, ROWS, VALUE_WIDTH};
use crate::tiles::loader::{Item, Plan};
use crate::tiles::output::{Results, Target, scale_rows};
use crate::tiles::softmax::{inverse, log_sum};

/// What a unit has of the tile, and how far it is. Two units have the same row, each half of the keys of a block and half of the
/// channels.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Softmax {
    half: u32,
    /// The first row of its warp, and its own.
    warp_row: u32,
    row: u32,
    /// Its warp's rows of tensor memory.
    own: u32,
    /// Blocks of all items so far, and how often units of a row have told each other something.
    turn: u32,
    times: u32,
    /// Of the scores, as powers of two.
    scale: f32,
    /// The bits of -inf.
    empty_lse: u32,
    #[cube(comptime)]
    form: Form,
}

#[cube]
impl Softmax {
    pub fn new(cube: &Cube, scale: f32, empty_lse: u32, #[comptime] form: Form) -> Softmax {
        let half = cube.warp / 2;
        let warp_row = cube.tile_row + cube.warp % 2 * 32;
        let own = cube.tensor + cube.warp * comptime!(32 * LANE);
        let row = warp_row + cube.lane;
        Softmax { half, warp_row, row, own, turn: 0u32, times: 0u32, scale, empty_lse, form }
    }

    /// Weights, output and lse of all items.
    pub fn run<E: Float, P: Size>(
        &mut self,
        cube: &Cube,
        plan: &Plan,
        weights: &mut Shared<[Vector<u32, Const<4>>]>,
        told: &mut Shared<[f32]>,
        results: &mut Results<E, P>,
    ) {
        let mut index = cube.first;
        while index < cube.end {
            let mut item = Item::none();
            item.read(plan, index, &cube.tile);
            let blocks = item.blocks.div_ceil(2u32);
            let target = Target::of(plan, &item, index);
            let state = self.weigh_item(cube, plan, &item, blocks, weights, told);
            let sum = state.sum + partner(told, self.times, state.sum);
            self.times += 1;
            if self.half == 0 && self.row < cube.rows {
                results.write_lse(&target, self.row, log_sum(sum, state.highest, self.empty_lse));
            }
            self.write::<E, P>(cube, sum, blocks, &target, results);
            index = warp::next(index);
        }
    }

    /// The weights of the blocks of an item, one after the other.
    fn weigh_item(
        &mut self,
        cube: &Cube,
        plan: &Plan,
        item: &Item,
        blocks: u32,
        weights: &mut Shared<[Vector<u32, Const<4>>]>,
        told: &mut Shared<[f32]>,
    ) -> RowState {
        let end = cube.tile.visible_end(plan, item.sequence, self.row, item.end_key);
        let mut state = RowState { highest: f32::new(LOWEST), sum: 0.0f32 };
        let mut first_key = item.first_key + self.half * comptime!(ROWS as u32);
        let mut block = 0u32;
        while block < blocks {
            mbarrier::wait_cluster(cube.barriers.scored + self.turn % 2 * 8, self.turn / 2 % 2);
            tcgen05::fence_after();
            let scores_at = self.own + SCORES_AT + self.turn % 2 * SCORES_COLUMNS;
            let scores = tcgen05::load::<Const<64>>(scores_at, comptime!(Shape::Lanes));
            let weighed = weigh_row(scores, &mut state, told, self.times, first_key, end, self.scale, self.form);
            self.times += 1;
            if block > 0 {
                self.correct(cube, weighed.factor);
            }
            store_weights(&weighed, weights, self.half);
            fence::async_shared();
            tcgen05::wait_for_stores();
            tcgen05::fence_before();
            sync_plane();
            mbarrier::arrive_at_if(cube.barriers.weighed, 0u32, cube.lane == 0);
            first_key += PAIR_KEYS;
            self.turn += 1;
            block = warp::next(block);
        }
        state
    }

    /// Waits for the output of the block before, and scales it. Its weights have been read then, too.
    fn correct(&self, cube: &Cube, factor: f32) {
        mbarrier::wait_cluster(cube.barriers.summed, (self.turn - 1) % 2);
        tcgen05::fence_after();
        if warp::any(factor != 1.0f32) {
            scale_output(self.own + OUTPUT_AT, factor);
        }
    }

    /// Writes the output of an item, divided by the sums of its rows, 16 rows at a time.
    fn write<E: Float, P: Size>(
        &self,
        cube: &Cube,
        sum: f32,
        blocks: u32,
        target: &Target,
        results: &mut Results<E, P>,
    ) {
        // Without blocks this waits for nothing: the phase of the last block, if there was one, is over.
        mbarrier::wait_cluster(cube.barriers.summed, (self.turn - 1) % 2);
        tcgen05::fence_after();
        let factor = inverse(sum);
        #[unroll]
        for group in 0..2u32 {
            let group_row = comptime!(group * 16) + cube.lane / 4;
            let factor_a = warp::shuffle::<f32>(factor, group_row);
            let factor_b = warp::shuffle::<f32>(factor, group_row + 8);
            #[unroll]
            for side in 0..2u32 {
                let mut acc = Vector::<f32, Const<64>>::zeroed();
                if blocks > 0 {
                    let at = self.own + comptime!(group * 16 * LANE + OUTPUT_AT + side * OUTPUT_COLUMNS);
                    acc = tcgen05::load::<Const<64>>(at, comptime!(Shape::Pairs));
                }
                acc = scale_rows::<Const<64>>(acc, factor_a, factor_b);
                let column = comptime!(side * VALUE_WIDTH as u32 / 2) + self.half * comptime!(VALUE_WIDTH as u32 / 4);
                results.write_rows::<Const<64>>(acc, target, self.warp_row + group_row, column, cube.lane);
                // Tensor memory is read by whole warps.
                sync_plane();
            }
        }
    }
}
