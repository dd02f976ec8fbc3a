//! The first warpgroup: scores, their softmax, the loads of the queries, and which rows are loaded.

use cubecl::prelude::*;

use super::cube::Cube;
use super::form::{ROWS_OF_TERMS, parts, scores};
use crate::ptx::wgmma::descriptor;
use crate::ptx::{fence, mbarrier, warp, wgmma};
use crate::sparse_mla::ends::Ends;
use crate::sparse_mla::work::{Ahead, Lists, RING, Work};
use crate::tiles::form::{KEYS, STAGES, load_query};
use crate::tiles::output::Results;
use crate::tiles::softmax::{SoftmaxState, store_weights, weigh_seen};

/// What the scores and the output exchange in shared memory.
#[derive(CubeType)]
pub(super) struct Exchange {
    pub weights: Shared<[u32]>,
    pub factors: Shared<[f32]>,
    /// Of the blocks of a ring.
    pub slots: Shared<[i32]>,
    /// Of which list they are; 0 where there is no block.
    pub kinds: Shared<[u32]>,
}

/// How far it is.
#[derive(CubeType)]
pub(super) struct Scores {
    /// Blocks, weights and queries so far.
    turn: u32,
    round: u32,
    queries: u32,
    /// Of the scores, as powers of two.
    scale: f32,
    /// The bits of -inf.
    empty_lse: u32,
}

#[cube]
impl Scores {
    pub fn new(scale: f32, empty_lse: u32) -> Scores {
        Scores { turn: 0u32, round: 0u32, queries: 0u32, scale, empty_lse }
    }

    /// Weights and factors of all work, and its lse.
    #[allow(clippy::too_many_arguments)]
    pub fn run<E: Float, P: Size>(
        &mut self,
        cube: &Cube,
        lists: &Lists,
        q_map: &TensorMap<E, Tiled>,
        sink: &[f32],
        ahead: &mut Ahead,
        exchange: &mut Exchange,
        results: &mut Results<E, P>,
    ) {
        let mut index = cube.first;
        // A plan may have nothing for a cube, and a cluster that merges may have fewer splits than cubes.
        let has_work = comptime!(!cube.form.planned() && !cube.form.merges()).runtime() || index < cube.end;
        if cube.warp == 0 && cube.lane == 0 && has_work {
            self.load_query::<E>(cube, lists, q_map, index);
        }
        // All lanes execute `wgmma` together.
        sync_plane();
        while index < cube.end {
            let mut work = Work::none();
            work.read(lists, index);
            let state = self.weigh_all(cube, lists, &work, ahead, exchange);
            mbarrier::arrive(cube.barriers.query_empty);
            index = cube.next(index);
            if cube.warp == 0 && index < cube.end {
                mbarrier::wait(cube.barriers.query_empty, self.queries % 2);
                if cube.lane == 0 {
                    self.load_query::<E>(cube, lists, q_map, index);
                }
            }
            self.queries += 1;
            self.finish::<E, P>(cube, &work, &state, sink, exchange, results);
        }
    }

    /// Starts to load the query of a tile. Past the heads of its token are those of the next, which nobody looks at.
    fn load_query<E: Float>(&self, cube: &Cube, lists: &Lists, q_map: &TensorMap<E, Tiled>, index: u32) {
        let row = lists.query_row(index, cube.heads);
        load_query::<E>(q_map, cube.query_at, cube.barriers.query_full, row, comptime!(cube.form.tile));
    }

    /// Weights and factors of the blocks of a tile, one after the other.
    fn weigh_all(
        &mut self,
        cube: &Cube,
        lists: &Lists,
        work: &Work,
        ahead: &mut Ahead,
        exchange: &mut Exchange,
    ) -> SoftmaxState {
        let mut state = SoftmaxState::new();
        mbarrier::wait(cube.barriers.query_full, self.queries % 2);
        let mut block = work.first;
        while block < work.end {
            let slots_at = self.turn % RING * comptime!(KEYS as u32) + cube.lane;
            let issued = self.multiply(cube);
            // All that needs no scores, while they are computed.
            let low = warp::ballot(exchange.slots[slots_at as usize] >= 0);
            let high = warp::ballot(exchange.slots[slots_at as usize + 32] >= 0);
            if comptime!(!cube.form.fp8()) {
                ahead.publish(lists, &mut exchange.slots, &mut exchange.kinds);
                ahead.advance(lists);
            }
            // All lanes execute the wait together, whichever slots there were for them to read.
            sync_plane();
            let scores = wgmma::wait::<Const<32>>(issued, 0u32);
            let weighted = weigh_seen(
                scores,
                &mut state,
                low,
                high,
                self.scale,
                cube.lane,
                comptime!(cube.form.slack()),
                comptime!(cube.form.tile),
            );
            mbarrier::wait(cube.barriers.used, (self.round % 2) ^ 1);
            store_weights(&weighted, cube.own_row, cube.lane, &mut exchange.weights, &mut exchange.factors);
            fence::async_shared();
            mbarrier::arrive(cube.barriers.weighed);
            self.turn += 1;
            self.round += 1;
            block = warp::next(block);
        }
        state
    }

    /// Begins the scores of the next block, once its rows have come. They came by generic copies and stores, which the products
    /// see after a fence.
    fn multiply(&self, cube: &Cube) -> Vector<f32, Const<32>> {
        let stage = self.turn % STAGES;
        let phase = self.turn / STAGES % 2;
        #[unroll]
        for part in 0..comptime!(parts(cube.form)) {
            mbarrier::wait(cube.barriers.full + stage * comptime!(8 * parts(cube.form)) + comptime!(8 * part), phase);
        }
        fence::async_shared();
        let keys = descriptor(cube.keys_at + stage * comptime!(cube.form.tile.stage_bytes()), ROWS_OF_TERMS);
        let query = descriptor(cube.query_at, ROWS_OF_TERMS);
        wgmma::mma_ss_zero::<Const<32>>(query, keys, comptime!(scores(cube.form)))
    }

    /// The last factors of a tile, which normalise its output if that is wanted, and its lse.
    #[allow(clippy::too_many_arguments)]
    fn finish<E: Float, P: Size>(
        &mut self,
        cube: &Cube,
        work: &Work,
        state: &SoftmaxState,
        sink: &[f32],
        exchange: &mut Exchange,
        results: &mut Results<E, P>,
    ) {
        let ends = Ends::of(state, work, cube.own_row, cube.heads, sink, self.empty_lse, cube.form);
        mbarrier::wait(cube.barriers.used, (self.round % 2) ^ 1);
        let corner = cube.lane % 4;
        if corner == 0 {
            exchange.factors[cube.own_row as usize] = ends.a.factor;
            exchange.factors[cube.own_row as usize + 8] = ends.b.factor;
            ends.write::<E, P>(work, results, cube.form);
        }
        sync_plane();
        mbarrier::arrive(cube.barriers.weighed);
        self.round += 1;
    }
}
