//! The loading warpgroup: one thread loads queries, keys and values; one warp clears the values past the end of a sequence.

use cubecl::prelude::*;

use super::form::{Form, KEYS, PANEL, ROWS};
use super::work::{Schedule, Slot, Work};
use crate::ptx::{fence, mbarrier, tma};
use crate::tiles::ring::Ring;

/// Bytes of a panel, of queries, keys or values.
const PANEL_BYTES: u32 = (KEYS * PANEL * 2) as u32;
const _: () = assert!(ROWS == KEYS, "panels of queries and keys have the same size");

/// Where queries, keys and values come from.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Maps {
    pub q: u64,
    pub k: u64,
    /// Of the last panels of all heads' keys.
    pub k_pe: u64,
    pub v: u64,
    /// Query heads for each head of the keys.
    pub group_size: u32,
}

#[cube]
impl Maps {
    /// Loads a block of keys into the ring's next stage.
    fn load_keys(&self, keys: &mut Ring, work: &Work, block: u32, #[comptime] form: Form) {
        let own = comptime!(form.key_panels - form.shared_panels);
        let row = (work.tile.first_key + block * comptime!(KEYS as u32)) as i32;
        let head = (work.head / self.group_size) as i32;
        keys.open();
        let (to, bar) = (keys.stage_at(), keys.full_at());
        #[unroll]
        for panel in 0..own {
            tma::load_3d(to + comptime!(panel as u32 * PANEL_BYTES), self.k, bar, channel(panel), head, row);
        }
        #[unroll]
        for panel in 0..form.shared_panels {
            let to = to + comptime!((own + panel) as u32 * PANEL_BYTES);
            tma::load_3d(to, self.k_pe, bar, channel(panel), 0i32, row);
        }
        keys.skip(1u32);
    }

    /// The same of values.
    fn load_values(&self, values: &mut Ring, work: &Work, block: u32, #[comptime] form: Form) {
        let row = (work.tile.first_key + block * comptime!(KEYS as u32)) as i32;
        let head = (work.head / self.group_size) as i32;
        values.open();
        let (to, bar) = (values.stage_at(), values.full_at());
        #[unroll]
        for panel in 0..form.value_panels {
            tma::load_3d(to + comptime!(panel as u32 * PANEL_BYTES), self.v, bar, channel(panel), head, row);
        }
        values.skip(1u32);
    }

    /// Loads a tile of queries.
    fn load_queries(&self, to: u32, bar: u32, work: &Work, #[comptime] form: Form) {
        #[unroll]
        for panel in 0..form.key_panels {
            let (to, row) = (to + comptime!(panel as u32 * PANEL_BYTES), work.tile.query as i32);
            tma::load_3d(to, self.q, bar, channel(panel), work.head as i32, row);
        }
    }
}

/// The first channel of a panel.
#[cube]
fn channel(#[comptime] panel: usize) -> i32 {
    comptime!((panel * PANEL) as i32).runtime()
}

/// Loads all work of the cube, as far ahead as there are stages. One thread.
///
/// Blocks are loaded from the last one that a row sees to the first one. The first block of keys of the next work does not wait for
/// its queries to have room.
#[cube]
pub(super) fn load_all(
    maps: &Maps,
    schedule: &Schedule,
    tiles: &[i32],
    taken: &[Atomic<u32>],
    queries_at: u32,
    words: &mut Shared<[u32]>,
    slot: Slot,
    keys: Ring,
    values: Ring,
    #[comptime] form: Form,
) {
    let (mut slot, mut keys, mut values) = (slot, keys, values);
    let mut number = CUBE_POS_X;
    while number < schedule.count {
        let work = schedule.read(tiles, number);
        let mut block = work.tile.blocks;
        if block > 0 {
            maps.load_keys(&mut keys, &work, block - 1, form);
        }
        slot.write(words, &work);
        if block > 0 {
            mbarrier::arrive_expect(slot.full, comptime!(form.query_bytes()).runtime());
            maps.load_queries(queries_at, slot.full, &work, form);
        } else {
            mbarrier::arrive(slot.full);
        }
        while block > work.tile.hidden_blocks {
            block -= 1;
            if block > work.tile.hidden_blocks {
                maps.load_keys(&mut keys, &work, block - 1, form);
            }
            maps.load_values(&mut values, &work, block, form);
        }
        // With the last loads under way, and not before: a cube that asked at a long tile's beginning could be given another long one.
        number = CUBE_COUNT_X + taken[0].fetch_add(1u32);
    }
    slot.write(words, &Work::none());
    mbarrier::arrive(slot.full);
}

/// Zeros for the values past the end of a sequence, in the last block of each work that has such: their weights are zero, but
/// what is there may be NaN. A warp, which arrives at `cleared` then.
#[cube]
pub(super) fn clear_values(
    memory: &mut Shared<[u32]>,
    words: &Shared<[u32]>,
    slot: Slot,
    values: Ring,
    cleared: u32,
    #[comptime] form: Form,
) {
    let (mut slot, mut values) = (slot, values);
    let lane = UNIT_POS % 32;
    let mut work = slot.read(words);
    while work.is_some() {
        slot.release(lane);
        if work.has_tail() {
            values.wait();
            let stage = values.stage() * comptime!(form.value_bytes() / 4);
            let mut at = work.values_of_last() * 32 + lane;
            while at < comptime!(KEYS as u32 * 32) {
                #[unroll]
                for panel in 0..form.value_panels {
                    memory[(stage + at + comptime!(panel as u32 * PANEL_BYTES / 4)) as usize] = 0u32;
                }
                at += 32;
            }
            fence::async_shared();
            sync_plane();
            mbarrier::arrive_if(cleared, lane == 0);
        }
        values.skip(work.tile.blocks - work.tile.hidden_blocks);
        work = slot.read(words);
    }
}
