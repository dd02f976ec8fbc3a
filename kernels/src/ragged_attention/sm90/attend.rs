//! What a computing warpgroup does: both products of its 64 query rows, and the softmax between them.

use cubecl::prelude::*;

use super::form::{Form, GROUP, GROUP_ROWS, KEYS, PAIRS, PANEL, QUERIES, SCORES, VALUES};
use super::work::{Slot, Work};
use crate::ptx::wgmma::{Layout, descriptor};
use crate::ptx::{barrier, mbarrier, warp, wgmma};
use crate::ragged_attention::seen::{Mask, Seen};
use crate::tiles::output::scale_rows;
use crate::tiles::prefill::softmax::{All, Scores, Visible, pack, weigh};
use crate::tiles::prefill::wgmma::Attended;
use crate::tiles::ring::Ring;

/// How keys lie, seen as rows of terms.
const KEY_ROWS: Layout = Layout::Terms { rows: KEYS };

/// What a warpgroup works with.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Attention {
    pub keys: Ring,
    pub values: Ring,
    /// The descriptor of its query rows.
    queries: u64,
    /// The barrier of blocks of values whose rows past the end of the sequence have been cleared, and how many so far.
    cleared: u32,
    tails: u32,
    scores: Scores,
    /// How many keys a row sees at most.
    most_seen: i32,
    group: u32,
    #[cube(comptime)]
    form: Form,
}

#[cube]
impl Attention {
    /// With the rings of keys and values.
    pub fn new(
        rings: (Ring, Ring),
        queries_at: u32,
        cleared: u32,
        scores: Scores,
        most_seen: i32,
        group: u32,
        #[comptime] form: Form,
    ) -> Attention {
        let queries = descriptor(queries_at + group * comptime!((GROUP_ROWS * PANEL * 2) as u32), QUERIES);
        // The first warpgroup has the first turn.
        if comptime!(form.takes_turns()) && group == 1 {
            barrier::arrive_at(1u32, comptime!(2 * GROUP));
        }
        let (keys, values) = rings;
        Attention { keys, values, queries, cleared, tails: 0u32, scores, most_seen, group, form }
    }

    /// The attention of a tile with at least one block, from the last block to the first. Gives the slot back.
    ///
    /// The scores of a block are on the way when the values of the one after it are multiplied, and both while the other warpgroup
    /// computes its softmax.
    pub fn attend<A: Size>(&mut self, work: &Work, slot: &mut Slot, attended: &mut Attended<A>) {
        let lane = UNIT_POS % 32;
        let first_row = self.group * comptime!(GROUP_ROWS as u32);
        let own_row = first_row + UNIT_POS % GROUP / 32 * 16 + lane / 4;
        // Blocks before this one are seen by all rows as a whole.
        let sees = min(max(work.tile.first_sees + first_row as i32, 0i32) as u32, work.tile.keys);
        let whole = sees / comptime!(KEYS as u32);
        let first_whole = self.first_whole(work, first_row);
        let mut block = work.tile.blocks - 1;

        self.keys.wait();
        let issued = wgmma::mma_ss_zero::<Const<SCORES>>(self.queries, self.key_rows(), comptime!(self.form.scores()));
        let scores = wgmma::wait::<Const<SCORES>>(issued, 0u32);
        self.keys.release(lane);
        let last = comptime!(Mask::last(self.form.windowed));
        let seen = self.seen(work, own_row, block, last);
        let first = weigh::<Const<SCORES>, Seen>(scores, &mut attended.state, self.scores, &seen, self.form);
        let mut weights = pack::<Const<SCORES>, Const<PAIRS>>(first.weights, self.form);
        if work.has_tail() {
            mbarrier::wait(self.cleared, self.tails % 2);
            self.tails += 1;
        }
        while block > max(whole, work.tile.hidden_blocks) {
            block -= 1;
            let seen = self.seen(work, own_row, block, last);
            weights = self.step::<A, Seen>(attended, weights, &seen, lane);
        }
        while block > first_whole {
            block -= 1;
            weights = self.step::<A, All>(attended, weights, &All {}, lane);
        }
        if comptime!(self.form.windowed) {
            while block > work.tile.hidden_blocks {
                block -= 1;
                let seen = self.seen(work, own_row, block, Mask::Start);
                weights = self.step::<A, Seen>(attended, weights, &seen, lane);
            }
        }
        slot.release(lane);
        self.values.wait();
        let issued =
            wgmma::mma_rs::<A, Const<PAIRS>>(attended.out, weights, self.value_rows(), comptime!(self.form.output()));
        attended.out = wgmma::wait::<A>(issued, 0u32);
        self.values.release(lane);
    }

    /// The scores and the softmax of a block, and the values of the one after it, whose weights it takes. Gives its own.
    fn step<A: Size, S: Visible>(
        &mut self,
        attended: &mut Attended<A>,
        weights: Vector<u32, Const<PAIRS>>,
        seen: &S,
        lane: u32,
    ) -> Vector<u32, Const<PAIRS>> {
        self.keys.wait();
        self.begin_turn();
        let scores = wgmma::mma_ss_zero::<Const<SCORES>>(self.queries, self.key_rows(), comptime!(self.form.scores()));
        self.values.wait();
        let output =
            wgmma::mma_rs::<A, Const<PAIRS>>(attended.out, weights, self.value_rows(), comptime!(self.form.output()));
        self.end_turn();
        let scores = wgmma::wait::<Const<SCORES>>(scores, 1u32);
        self.keys.release(lane);
        let weighed = weigh::<Const<SCORES>, S>(scores, &mut attended.state, self.scores, seen, self.form);
        let mut out = wgmma::wait::<A>(output, 0u32);
        self.values.release(lane);
        if warp::any(weighed.factor_a != 1.0f32 || weighed.factor_b != 1.0f32) {
            out = scale_rows::<A>(out, weighed.factor_a, weighed.factor_b);
        }
        attended.out = out;
        pack::<Const<SCORES>, Const<PAIRS>>(weighed.weights, self.form)
    }

    /// Which columns of a block the unit's rows see.
    fn seen(&self, work: &Work, own_row: u32, block: u32, #[comptime] mask: Mask) -> Seen {
        let first = (block * comptime!(KEYS as u32) + UNIT_POS % 4 * 2) as i32;
        let (sees, keys) = (work.tile.first_sees + own_row as i32, work.tile.keys as i32);
        Seen { a: min(sees, keys) - first, b: min(sees + 8, keys) - first, most_seen: self.most_seen, mask }
    }

    /// The first block whose keys no row of the warpgroup is past: that of the first key that its last row sees.
    fn first_whole(&self, work: &Work, first_row: u32) -> u32 {
        let mut block = 0u32;
        if comptime!(self.form.windowed) {
            let last_row = (first_row + comptime!(GROUP_ROWS as u32 - 1)) as i32;
            let hidden = max(max(work.tile.first_sees + last_row, 0i32) - self.most_seen, 0i32) as u32;
            block = max(hidden.div_ceil(comptime!(KEYS as u32)), work.tile.hidden_blocks);
        }
        block
    }

    fn key_rows(&self) -> u64 {
        descriptor(self.keys.stage_at(), KEY_ROWS)
    }

    fn value_rows(&self) -> u64 {
        descriptor(self.values.stage_at(), VALUES)
    }

    /// Waits until the other warpgroup has issued its products: it computes its softmax under those of this one.
    fn begin_turn(&self) {
        if comptime!(self.form.takes_turns()) {
            barrier::sync_at(self.group + 1, comptime!(2 * GROUP));
        }
    }

    fn end_turn(&self) {
        if comptime!(self.form.takes_turns()) {
            barrier::arrive_at(2 - self.group, comptime!(2 * GROUP));
        }
    }
}
