//! The four warps of the softmax: weights from scores, the output scaled where a maximum has grown, and the factors that it has at the end.

use cubecl::prelude::*;

use super::places::Places;
use super::walk::Range;
use crate::ptx::tcgen05::{self, Shape};
use crate::ptx::{mbarrier, warp};
use crate::tiles::form::{Form, ROWS};
use crate::tiles::loader::{Item, Plan};
use crate::tiles::output::{Results, Target};
use crate::tiles::pair::{Cube, PAIR_KEYS, RowState, Rows, SCORES_AT, weigh_row};
use crate::tiles::softmax::{inverse, log_sum};

/// The rows of a unit.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Softmax {
    rows: Rows,
    /// Of the scores, as powers of two.
    scale: f32,
    /// The bits of -inf.
    empty_lse: u32,
    #[cube(comptime)]
    form: Form,
}

#[cube]
impl Softmax {
    pub fn new(cube: &Cube, range: &Range, scale: f32, empty_lse: u32, #[comptime] form: Form) -> Softmax {
        Softmax { rows: Rows::new(cube, range.tile_row), scale, empty_lse, form }
    }

    /// Weights of all items, and lse and the factors of the output.
    #[allow(clippy::too_many_arguments)]
    pub fn run<E: Float, P: Size>(
        &mut self,
        cube: &Cube,
        places: &Places,
        range: &Range,
        plan: &Plan,
        weights: &mut Shared<[Vector<u32, Const<4>>]>,
        told: &mut Shared<[f32]>,
        factors: &mut Shared<[f32]>,
        results: &mut Results<E, P>,
    ) {
        let mut items = 0u32;
        let mut index = range.first;
        while index < range.end {
            let mut item = Item::none();
            item.read(plan, index, &range.tile);
            let blocks = item.blocks.div_ceil(2u32);
            let target = Target::of(plan, &item, index);
            let state = self.weigh_item(cube, places, range, plan, &item, blocks, weights, told);
            let sum = self.rows.sum(&state, told);
            if self.rows.half == 0 {
                if self.rows.row < range.rows {
                    results.write_lse(&target, self.rows.row, log_sum(sum, state.highest, self.empty_lse));
                }
                if blocks > 0 {
                    let place = items % 2;
                    let row = place * comptime!(ROWS as u32) + UNIT_POS % comptime!(ROWS as u32);
                    factors[row as usize] = inverse(sum);
                    sync_plane();
                    mbarrier::arrive_if(places.factored + place * 8, cube.lane == 0);
                    items = warp::next(items);
                }
            }
            index = warp::next(index);
        }
    }

    /// The weights of the blocks of an item, one after the other.
    #[allow(clippy::too_many_arguments)]
    fn weigh_item(
        &mut self,
        cube: &Cube,
        places: &Places,
        range: &Range,
        plan: &Plan,
        item: &Item,
        blocks: u32,
        weights: &mut Shared<[Vector<u32, Const<4>>]>,
        told: &mut Shared<[f32]>,
    ) -> RowState {
        let end = range.tile.visible_end(plan, item.sequence, self.rows.row, item.end_key);
        // The warp hides keys as one: it meets another one behind that. Its first row is of the earliest token, which sees least.
        let first_end = warp::shuffle::<u32>(end, 0u32);
        let mut state = RowState::new();
        let mut first_key = item.first_key + self.rows.half * comptime!(ROWS as u32);
        let mut block = 0u32;
        while block < blocks {
            let scores = self.scores(cube, places);
            let weighed =
                weigh_row(scores, &mut state, told, self.rows.times, first_key, end, first_end, self.scale, self.form);
            if block == 0 {
                // The weights of the item before have been read.
                self.rows.wait_for_output(cube);
            }
            self.rows.give_weights(cube, &weighed, weights, block > 0);
            first_key += PAIR_KEYS;
            self.rows.turn += 1;
            block = warp::next(block);
        }
        state
    }

    /// The scores of the block. The next ones may then be computed in their place.
    fn scores(&self, cube: &Cube, places: &Places) -> Vector<f32, Const<64>> {
        let turn = self.rows.turn;
        mbarrier::wait_cluster(cube.barriers.scored + turn % 2 * 8, turn / 2 % 2);
        tcgen05::fence_after();
        let scores = tcgen05::load::<Const<64>>(self.rows.at + SCORES_AT, comptime!(Shape::Lanes));
        tcgen05::fence_before();
        sync_plane();
        mbarrier::arrive_at_if(places.scores_read, 0u32, cube.lane == 0);
        scores
    }
}
