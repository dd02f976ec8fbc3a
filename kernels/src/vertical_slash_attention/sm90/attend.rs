//! What a computing warpgroup does: both products of its 64 query rows, and the softmax between them.

use cubecl::prelude::*;

use super::form::{Form, GROUP, KEY_ROWS, KEYS, PAIRS, PANEL_BYTES, SCORES, VALUES, output, query_words, scores};
use super::load::QueryRoom;
use super::stages::{END, GATHERED, Notes, Stages, mark_of};
use crate::ptx::wgmma::descriptor;
use crate::ptx::{fence, math, matrix, mbarrier, warp, wgmma};
use crate::tiles::output::scale_rows;
use crate::tiles::prefill::softmax::{Scores, Weights, pack, weigh};
use crate::tiles::prefill::wgmma::Attended;
use crate::vertical_slash_attention::seen::{Listed, Seen, Sight};

/// What a warpgroup works with.
#[derive(CubeType)]
pub(super) struct Attention {
    stages: Stages,
    room: QueryRoom,
    /// Where the lane's part of the queries begins.
    queries_at: u32,
    scores: Scores,
    /// The mark of its tiles, or of the end.
    own: u32,
    /// The first row of the warp.
    row: u32,
    /// Works so far.
    works: u32,
    #[cube(comptime)]
    form: Form,
}

/// A tile that has come, or the end.
#[derive(CubeTypeMut, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Found {
    stage: u32,
    is_tile: bool,
}

#[cube]
impl Attention {
    pub fn new(stages: Stages, room: QueryRoom, scores: Scores, group: u32, #[comptime] form: Form) -> Attention {
        let (own, row) = (mark_of(group) | END, warp::uniform(UNIT_POS % GROUP / 32) * 16);
        let lane = UNIT_POS % 32;
        // 16 rows of 8 channels, then the same of the next 8. A panel's rows have 128 bytes, with the swizzle of 128 bytes.
        let queries_at = room.at + (row + lane % 16) * 128 + ((lane / 16) ^ (lane % 8)) * 16;
        Attention { stages, room, queries_at, scores, own, row, works: 0u32, form }
    }

    /// The attention of a work's rows to all of their tiles. The scores of a tile are on the way when the values of the one before it are
    /// multiplied.
    pub fn attend<A: Size, Q: Size>(&mut self, sight: &Sight, notes: &Notes, attended: &mut Attended<A>) {
        let queries = self.read_queries::<Q>();
        let mut tile = self.find(notes);
        if tile.is_tile {
            let issued = self.issue_scores::<Q>(queries, tile.stage);
            let first = self.weigh::<A>(issued, 0u32, attended, sight, notes, tile.stage);
            let mut weights = pack::<Const<SCORES>, Const<PAIRS>>(first.weights, self.form);
            let mut stage = tile.stage;
            tile = self.find(notes);
            while tile.is_tile {
                weights = self.step::<A, Q>(queries, attended, weights, sight, notes, stage, tile.stage);
                stage = tile.stage;
                tile = self.find(notes);
            }
            let issued = self.issue_output::<A>(attended.out, weights, stage);
            attended.out = wgmma::wait::<A>(issued, 0u32);
            self.stages.release(stage);
        }
    }

    /// The queries of a work, as the left factor of a product. Gives their room back.
    fn read_queries<Q: Size>(&mut self) -> Vector<u32, Q> {
        mbarrier::wait(self.room.full, self.works % 2);
        self.works += 1;
        sync_plane();
        let mut words = Sequence::<u32>::new();
        #[unroll]
        for step in 0..comptime!(query_words(self.form) / 4) {
            let (flip, panel) = comptime!((step as u32 % 4 * 32, step as u32 / 4 * PANEL_BYTES));
            let four = matrix::load_x4(self.queries_at ^ flip, panel, false);
            #[unroll]
            for i in 0..4usize {
                words.push(four.extract(i));
            }
        }
        // Vectors have powers of two.
        #[unroll]
        for _ in comptime!(query_words(self.form))..Q::value().comptime() {
            words.push(0u32);
        }
        sync_plane();
        let lane = UNIT_POS % 32;
        mbarrier::arrive_if(self.room.empty, lane == 0);
        math::vector::<u32, Q>(&words)
    }

    /// The scores and the softmax of the tile of stage `next`, and the values of the one before it, whose weights it takes. Gives its own.
    #[allow(clippy::too_many_arguments)]
    fn step<A: Size, Q: Size>(
        &self,
        queries: Vector<u32, Q>,
        attended: &mut Attended<A>,
        weights: Vector<u32, Const<PAIRS>>,
        sight: &Sight,
        notes: &Notes,
        stage: u32,
        next: u32,
    ) -> Vector<u32, Const<PAIRS>> {
        let scores = self.issue_scores::<Q>(queries, next);
        let output = self.issue_output::<A>(attended.out, weights, stage);
        let weighed = self.weigh::<A>(scores, 1u32, attended, sight, notes, next);
        let mut out = wgmma::wait::<A>(output, 0u32);
        self.stages.release(stage);
        if warp::any(weighed.factor_a != 1.0f32 || weighed.factor_b != 1.0f32) {
            out = scale_rows::<A>(out, weighed.factor_a, weighed.factor_b);
        }
        attended.out = out;
        pack::<Const<SCORES>, Const<PAIRS>>(weighed.weights, self.form)
    }

    fn issue_scores<Q: Size>(&self, queries: Vector<u32, Q>, stage: u32) -> Vector<f32, Const<SCORES>> {
        let keys = descriptor(self.stages.keys_at(stage), KEY_ROWS);
        wgmma::mma_rs_zero::<Const<SCORES>, Q>(queries, keys, comptime!(scores(self.form)))
    }

    fn issue_output<A: Size>(
        &self,
        out: Vector<f32, A>,
        weights: Vector<u32, Const<PAIRS>>,
        stage: u32,
    ) -> Vector<f32, A> {
        let values = descriptor(self.stages.values_at(stage), VALUES);
        wgmma::mma_rs::<A, Const<PAIRS>>(out, weights, values, comptime!(output(self.form)))
    }

    /// The softmax of a tile, when its products are there and so many others may be under way. Few tiles have keys that a row does not see.
    fn weigh<A: Size>(
        &self,
        issued: Vector<f32, Const<SCORES>>,
        #[comptime] pending: u32,
        attended: &mut Attended<A>,
        sight: &Sight,
        notes: &Notes,
        stage: u32,
    ) -> Weights<Const<SCORES>> {
        let list = Listed::new(&notes.positions, stage * comptime!(KEYS as u32));
        let hides_some = warp::any(sight.hides_some(&list, self.row));
        let mut bits = u32::MAX.runtime();
        if hides_some {
            bits = sight.bits(&list, self.row);
        }
        let products = wgmma::wait::<Const<SCORES>>(issued, pending);
        weigh::<Const<SCORES>, Seen>(products, &mut attended.state, self.scores, &Seen { bits }, self.form)
    }

    /// Waits for the next tile of this warpgroup, or the end. Gives back what is the other's.
    fn find(&mut self, notes: &Notes) -> Found {
        self.stages.wait();
        let mut stage = self.stages.stage();
        let mut mark = warp::uniform(notes.marks[stage as usize]);
        while mark & self.own == 0 {
            self.stages.release(stage);
            self.stages.advance();
            self.stages.wait();
            stage = self.stages.stage();
            mark = warp::uniform(notes.marks[stage as usize]);
        }
        self.stages.advance();
        let is_tile = mark & END == 0;
        if !is_tile {
            self.stages.release(stage);
        }
        // The products see what was copied, which tile loads have not.
        if mark & GATHERED != 0 {
            fence::async_shared();
        }
        Found { stage, is_tile }
    }
}
