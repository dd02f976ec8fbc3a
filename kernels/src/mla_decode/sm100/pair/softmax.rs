//! The four warps of the softmax: weights from scores, the output scaled where a maximum has grown, and written at the end.

use cubecl::prelude::*;

use super::loads::Range;
use crate::ptx::warp;
use crate::tiles::form::{Form, ROWS};
use crate::tiles::loader::{Item, Plan};
use crate::tiles::output::{Results, Target};
use crate::tiles::pair::{Cube, PAIR_KEYS, RowState, Rows, weigh_row};
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

    /// Weights, output and lse of all items.
    #[allow(clippy::too_many_arguments)]
    pub fn run<E: Float, P: Size>(
        &mut self,
        cube: &Cube,
        range: &Range,
        plan: &Plan,
        weights: &mut Shared<[Vector<u32, Const<4>>]>,
        told: &mut Shared<[f32]>,
        results: &mut Results<E, P>,
    ) {
        let mut index = range.first;
        while index < range.end {
            let mut item = Item::none();
            item.read(plan, index, &range.tile);
            let blocks = item.blocks.div_ceil(2u32);
            let target = Target::of(plan, &item, index);
            let state = self.weigh_item(cube, range, plan, &item, blocks, weights, told);
            let sum = self.rows.sum(&state, told);
            if self.rows.half == 0 && self.rows.row < range.rows {
                results.write_lse(&target, self.rows.row, log_sum(sum, state.highest, self.empty_lse));
            }
            self.rows.wait_for_output(cube);
            self.rows.write::<E, P>(cube, blocks, inverse(sum), &target, self.rows.warp_row, results);
            index = warp::next(index);
        }
    }

    /// The weights of the blocks of an item, one after the other.
    #[allow(clippy::too_many_arguments)]
    fn weigh_item(
        &mut self,
        cube: &Cube,
        range: &Range,
        plan: &Plan,
        item: &Item,
        blocks: u32,
        weights: &mut Shared<[Vector<u32, Const<4>>]>,
        told: &mut Shared<[f32]>,
    ) -> RowState {
        let end = range.tile.visible_end(plan, item.sequence, self.rows.row, item.end_key);
        let mut state = RowState::new();
        let mut first_key = item.first_key + self.rows.half * comptime!(ROWS as u32);
        let mut block = 0u32;
        while block < blocks {
            let scores = self.rows.scores(cube);
            let weighed = weigh_row(scores, &mut state, told, self.rows.times, first_key, end, self.scale, self.form);
            self.rows.give_weights(cube, &weighed, weights, block > 0);
            first_key += PAIR_KEYS;
            self.rows.turn += 1;
            block = warp::next(block);
        }
        state
    }
}
