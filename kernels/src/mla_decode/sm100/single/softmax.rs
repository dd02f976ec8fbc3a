//! The four warps of the softmax: weights from scores, the output scaled where a maximum has grown, and written at the end.

use cubecl::prelude::*;

use super::items::Items;
use crate::ptx::{fence, warp};
use crate::tiles::form::{Form, KEYS, STAGES};
use crate::tiles::loader::{Item, Plan, Tile};
use crate::tiles::one_cube::{Cube, Rows};
use crate::tiles::output::{Results, Target};
use crate::tiles::softmax::{SoftmaxState, clear_keys, inverse, log_sum, quad_sum, weigh};

/// What a unit has of the tile, and how far it is.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Softmax {
    rows: Rows,
    /// The query rows, of which each may see other keys.
    tile: Tile,
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
        Softmax { rows: Rows::new(cube), tile, scale, empty_lse, form }
    }

    /// Weights, output and lse of all items.
    pub fn run<E: Float, P: Size>(
        &mut self,
        cube: &Cube,
        items: &Items,
        plan: &Plan,
        keys: &mut Shared<[u32]>,
        results: &mut Results<E, P>,
    ) {
        let mut index = items.first;
        while index < items.end {
            let mut item = Item::none();
            item.read(plan, index, &items.tile);
            let target = Target::of(plan, &item, index);
            let state = self.weigh_item(cube, plan, &item, keys);
            self.finish::<E, P>(cube, &state, item.blocks, &target, results);
            index = warp::next(index);
        }
    }

    /// The weights of the blocks of an item, one after the other.
    fn weigh_item(&mut self, cube: &Cube, plan: &Plan, item: &Item, keys: &mut Shared<[u32]>) -> SoftmaxState {
        // Rows past the end are computed, but not written.
        let end_a = self.tile.visible_end(plan, item.sequence, self.rows.own, item.end_key);
        let end_b = self.tile.visible_end(plan, item.sequence, self.rows.own + 8, item.end_key);
        let mut state = SoftmaxState::new();
        let mut base = item.first_key;
        let mut block = 0u32;
        while block < item.blocks {
            let scores = self.rows.scores(cube);
            let weighted = weigh(scores, &mut state, base, end_a, end_b, self.scale, cube.lane, self.form);
            self.rows.store_weights(cube, &weighted, block > 0);
            if base + comptime!(KEYS as u32) > item.tile_end {
                // All of the block has come: the scores were computed from it.
                clear_keys(keys, self.rows.turn % STAGES, item.tile_end - base, self.form);
                fence::async_shared();
            }
            self.rows.give_weights(cube);
            base += comptime!(KEYS as u32);
            block = warp::next(block);
        }
        state
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
            results.write_lses(target, self.rows.own, lse_a, lse_b);
        }
        let (factor_a, factor_b) = (inverse(sum_a), inverse(sum_b));
        self.rows.write::<E, P>(cube, blocks, factor_a, factor_b, target, self.rows.own, results);
    }
}
