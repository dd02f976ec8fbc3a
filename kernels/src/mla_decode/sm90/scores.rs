//! The first warpgroup: scores, their softmax, and the loads of the queries.

use cubecl::prelude::*;

use super::ROWS_OF_TERMS;
use super::cube::Cube;
use crate::ptx::wgmma::descriptor;
use crate::ptx::{fence, mbarrier, warp, wgmma};
use crate::tiles::form::{Form, KEYS, STAGES, load_query};
use crate::tiles::loader::{Item, Plan};
use crate::tiles::output::{Results, Target};
use crate::tiles::softmax::{SoftmaxState, clear_keys, inverse, log_sum, quad_sum, store_weights, weigh};

/// How far it is.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Scores {
    /// Blocks, weights and queries of all items so far.
    turn: u32,
    round: u32,
    queries: u32,
    /// Of the scores, as powers of two.
    scale: f32,
    /// The bits of -inf.
    empty_lse: u32,
    #[cube(comptime)]
    form: Form,
}

#[cube]
impl Scores {
    pub fn new(scale: f32, empty_lse: u32, #[comptime] form: Form) -> Scores {
        Scores { turn: 0u32, round: 0u32, queries: 0u32, scale, empty_lse, form }
    }

    /// Weights and factors of all items, and their lse.
    #[allow(clippy::too_many_arguments)]
    pub fn run<E: Float, P: Size>(
        &mut self,
        cube: &Cube,
        plan: &Plan,
        q_map: &TensorMap<E, Tiled>,
        keys: &mut Shared<[u32]>,
        weights: &mut Shared<[u32]>,
        factors: &mut Shared<[f32]>,
        results: &mut Results<E, P>,
    ) {
        let mut index = cube.first;
        if index < cube.end && cube.warp == 0 && cube.lane == 0 {
            self.load_query::<E>(cube, q_map, plan.items[index as usize * 4]);
        }
        // All lanes execute `wgmma` together.
        sync_plane();
        while index < cube.end {
            let mut item = Item::none();
            item.read(plan, index, &cube.tile);
            let target = Target::of(plan, &item, index);
            let state = self.weigh_item(cube, plan, &item, keys, weights, factors);
            mbarrier::arrive(cube.barriers.query_empty);
            if cube.warp == 0 && index + 1 < cube.end {
                mbarrier::wait(cube.barriers.query_empty, self.queries % 2);
                if cube.lane == 0 {
                    self.load_query::<E>(cube, q_map, plan.items[index as usize * 4 + 4]);
                }
            }
            self.queries += 1;
            self.finish::<E, P>(cube, &state, factors, &target, results);
            index = warp::next(index);
        }
    }

    /// Starts to load the query of a sequence.
    fn load_query<E: Float>(&self, cube: &Cube, q_map: &TensorMap<E, Tiled>, sequence: i32) {
        let row = sequence as u32 * cube.rows + cube.tile_row;
        load_query::<E>(q_map, cube.query_at, cube.barriers.query_full, row, self.form);
    }

    /// Weights and factors of the blocks of an item, one after the other.
    fn weigh_item(
        &mut self,
        cube: &Cube,
        plan: &Plan,
        item: &Item,
        keys: &mut Shared<[u32]>,
        weights: &mut Shared<[u32]>,
        factors: &mut Shared<[f32]>,
    ) -> SoftmaxState {
        let end_a = cube.visible_end(plan, item, cube.own_row);
        let end_b = cube.visible_end(plan, item, cube.own_row + 8);
        let mut state = SoftmaxState::new();
        mbarrier::wait(cube.barriers.query_full, self.queries % 2);
        let mut base = item.first_key;
        let mut block = 0u32;
        while block < item.blocks {
            let scores = self.multiply(cube);
            let weighted = weigh(scores, &mut state, base, end_a, end_b, self.scale, cube.lane, self.form);
            mbarrier::wait(cube.barriers.used, (self.round % 2) ^ 1);
            store_weights(&weighted, cube.own_row, cube.lane, weights, factors);
            if base + comptime!(KEYS as u32) > item.tile_end {
                clear_keys(keys, self.turn % STAGES, item.tile_end - base, self.form);
            }
            fence::async_shared();
            mbarrier::arrive(cube.barriers.weighed);
            base += comptime!(KEYS as u32);
            self.turn += 1;
            self.round += 1;
            block = warp::next(block);
        }
        state
    }

    /// The scores of the next block, once its keys have come.
    fn multiply(&self, cube: &Cube) -> Vector<f32, Const<32>> {
        let stage = self.turn % STAGES;
        let phase = self.turn / STAGES % 2;
        mbarrier::wait(cube.barriers.full + stage * 16, phase);
        mbarrier::wait(cube.barriers.full + stage * 16 + 8, phase);
        let keys = descriptor(cube.keys_at + stage * comptime!(self.form.stage_bytes()), ROWS_OF_TERMS);
        let query = descriptor(cube.query_at, ROWS_OF_TERMS);
        let issued = wgmma::mma_ss_zero::<Const<32>>(query, keys, comptime!(self.form.scores()));
        wgmma::wait::<Const<32>>(issued, 0u32)
    }

    /// The last factors of an item, which normalise its output, and its lse.
    fn finish<E: Float, P: Size>(
        &mut self,
        cube: &Cube,
        state: &SoftmaxState,
        factors: &mut Shared<[f32]>,
        target: &Target,
        results: &mut Results<E, P>,
    ) {
        let sum_a = quad_sum(state.sum_a);
        let sum_b = quad_sum(state.sum_b);
        mbarrier::wait(cube.barriers.used, (self.round % 2) ^ 1);
        let corner = cube.lane % 4;
        if corner == 0 {
            factors[cube.own_row as usize] = inverse(sum_a);
            factors[cube.own_row as usize + 8] = inverse(sum_b);
            let lse_a = log_sum(sum_a, state.highest_a, self.empty_lse);
            let lse_b = log_sum(sum_b, state.highest_b, self.empty_lse);
            results.write_lses(target, cube.tile_row + cube.own_row, lse_a, lse_b);
        }
        sync_plane();
        mbarrier::arrive(cube.barriers.weighed);
        self.round += 1;
    }
}
