//! What a computing warpgroup does: both products of its 64 query rows, and the softmax between them.

use cubecl::prelude::*;

use super::form::{Form, GROUP, KEY_ROWS, KEYS, PAIRS, QUERIES, SCORES, VALUES, output, scores};
use super::load::QueryRoom;
use super::stages::{END, GATHERED, Notes, Stages, mark_of};
use crate::ptx::wgmma::descriptor;
use crate::ptx::{fence, mbarrier, warp, wgmma};
use crate::tiles::output::scale_rows;
use crate::tiles::prefill::softmax::{All, Scores, Visible, pack, weigh};
use crate::tiles::prefill::wgmma::Attended;
use crate::vertical_slash_attention::seen::{Listed, Seen, Sight};

/// What a warpgroup works with.
#[derive(CubeType)]
pub(super) struct Attention {
    stages: Stages,
    room: QueryRoom,
    /// The descriptor of its query rows.
    queries: u64,
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
        let queries = descriptor(room.at, QUERIES);
        let (own, row) = (mark_of(group) | END, warp::uniform(UNIT_POS % GROUP / 32) * 16);
        Attention { stages, room, queries, scores, own, row, works: 0u32, form }
    }

    /// The attention of a work's rows to all of their tiles.
    pub fn attend<A: Size>(&mut self, sight: &Sight, notes: &Notes, attended: &mut Attended<A>) {
        let mut tile = self.find(notes);
        mbarrier::wait(self.room.full, self.works % 2);
        self.works += 1;
        while tile.is_tile {
            let list = listed(notes, tile.stage);
            // The same for all of the warpgroup, which multiplies together.
            if warp::any(sight.hides_some(&list, 0u32)) {
                let seen = Seen { bits: sight.bits(&list, self.row) };
                self.add::<A, Seen>(attended, &seen, tile.stage);
            } else {
                self.add::<A, All>(attended, &All {}, tile.stage);
            }
            self.stages.release(tile.stage);
            tile = self.find(notes);
        }
        // All products with the queries are done.
        let lane = UNIT_POS % 32;
        mbarrier::arrive_if(self.room.empty, lane == 0);
    }

    /// Adds a tile. The other warpgroup multiplies while this one computes its softmax.
    fn add<A: Size, S: Visible>(&self, attended: &mut Attended<A>, seen: &S, stage: u32) {
        let keys = descriptor(self.stages.keys_at(stage), KEY_ROWS);
        let issued = wgmma::mma_ss_zero::<Const<SCORES>>(self.queries, keys, comptime!(scores(self.form)));
        let products = wgmma::wait::<Const<SCORES>>(issued, 0u32);
        let weighed = weigh::<Const<SCORES>, S>(products, &mut attended.state, self.scores, seen, self.form);
        let mut out = attended.out;
        if warp::any(weighed.factor_a != 1.0f32 || weighed.factor_b != 1.0f32) {
            out = scale_rows::<A>(out, weighed.factor_a, weighed.factor_b);
        }
        let weights = pack::<Const<SCORES>, Const<PAIRS>>(weighed.weights, self.form);
        let values = descriptor(self.stages.values_at(stage), VALUES);
        let issued = wgmma::mma_rs::<A, Const<PAIRS>>(out, weights, values, comptime!(output(self.form)));
        attended.out = wgmma::wait::<A>(issued, 0u32);
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

/// The positions of a stage's keys.
#[cube]
fn listed<'a>(notes: &'a Notes, stage: u32) -> Listed<'a> {
    Listed::new(&notes.positions, stage * comptime!(KEYS as u32))
}
