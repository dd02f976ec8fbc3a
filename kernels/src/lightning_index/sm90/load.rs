//! The warp that loads blocks of keys and tiles of queries.

use cubecl::prelude::*;

use super::form::{COLUMNS, Form, GROUP_WARPS, GROUPS, KEYS, PANEL};
use super::work::{Rows, Share, Tile};
use crate::ptx::{mbarrier, tma, warp};
use crate::tiles::ring::Ring;

/// Where queries come to in shared memory, with the barriers of each warpgroup's: loaded, and no longer needed.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Queries {
    at: u32,
    full: u32,
    /// Tiles so far.
    turn: u32,
    #[cube(comptime)]
    form: Form,
}

#[cube]
impl Queries {
    pub fn new(at: u32, barriers_at: u32, #[comptime] form: Form) -> Queries {
        Queries { at, full: barriers_at, turn: 0u32, form }
    }

    /// Initialises the barriers. One thread, before all synchronise.
    pub fn init(&self) {
        #[unroll]
        for i in 0..GROUPS {
            mbarrier::init(self.full + i * 8, 1u32);
            mbarrier::init(self.full + comptime!((GROUPS + i) * 8), GROUP_WARPS);
        }
    }

    /// Where those of a warpgroup are.
    pub fn of(&self, group: u32) -> u32 {
        self.at + group * comptime!(self.form.query_bytes())
    }

    /// Waits until those of a warpgroup have come.
    pub fn wait(&self, group: u32) {
        mbarrier::wait(self.full + group * 8, self.turn % 2);
    }

    /// Gives those of a warpgroup back. A warp of it, after its products.
    pub fn release_if(&self, group: u32, condition: bool) {
        mbarrier::arrive_if(self.full + (GROUPS + group) * 8, condition);
    }

    pub fn advance(&mut self) {
        self.turn += 1;
    }

    /// Loads the heads of a tile's query tokens, as soon as there is room. One thread.
    fn load(&self, map: u64, tile: &Tile) {
        #[unroll]
        for group in 0..GROUPS {
            let full = self.full + group * 8;
            mbarrier::wait(self.full + comptime!((GROUPS + group) * 8), (self.turn % 2) ^ 1);
            mbarrier::arrive_expect(full, comptime!(self.form.query_bytes()).runtime());
            let head = (tile.row_of(group, self.form) * comptime!(self.form.heads as u32)) as i32;
            #[unroll]
            for panel in 0..self.form.panels {
                let to = self.at + comptime!(group * self.form.query_bytes() + (panel * COLUMNS * PANEL * 2) as u32);
                tma::load_2d(to, map, full, channel(panel), head);
            }
        }
    }
}

/// Where keys and queries come from.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Source {
    pub rows: Rows,
    pub queries: u64,
    pub keys: u64,
    pub max_pages: usize,
    pub page_shift: u32,
}

#[cube]
impl Source {
    /// Loads a block of a tile's keys into the ring's next stage: a page in each of the first lanes. A warp.
    fn load_keys(&self, page_table: &[i32], tile: &Tile, block: u32, ring: &mut Ring, #[comptime] form: Form) {
        let lane = UNIT_POS % 32;
        let box_keys = comptime!(form.box_keys as u32);
        // Past the last key that is seen, its box once more: pages after it may be anything.
        let place = min(lane, comptime!((KEYS / form.box_keys - 1) as u32));
        let key = min(block * comptime!(KEYS as u32) + place * box_keys, tile.keys - 1);
        let page = page_table[tile.sequence as usize * self.max_pages + (key >> self.page_shift) as usize] as u32;
        let offset = key & ((1u32 << self.page_shift) - 1);
        let row = ((page << self.page_shift) + offset / box_keys * box_keys) as i32;
        if lane == 0 {
            ring.open();
        }
        sync_plane();
        if lane < comptime!((KEYS / form.box_keys) as u32) {
            let (to, full) = (ring.stage_at() + lane * comptime!(box_keys * 128), ring.full_at());
            #[unroll]
            for panel in 0..form.panels {
                tma::load_2d(to + comptime!((panel * KEYS * PANEL * 2) as u32), self.keys, full, channel(panel), row);
            }
        }
        ring.skip(1u32);
    }

    /// Loads all blocks of a cube, as far ahead as there are stages. The first block of a tile does not wait for its queries to
    /// have room. A warp.
    pub fn load_all(
        &self,
        visible: &[i32],
        page_table: &[i32],
        share: Share,
        queries: Queries,
        ring: Ring,
        #[comptime] form: Form,
    ) {
        let (mut share, mut queries, mut ring) = (share, queries, ring);
        while share.left > 0 {
            let part = share.next(&self.rows, visible, form);
            self.load_keys(page_table, &part.tile, part.first, &mut ring, form);
            let lane = UNIT_POS % 32;
            if lane == 0 {
                queries.load(self.queries, &part.tile);
            }
            queries.advance();
            let mut block = part.first + 1;
            while block < part.end {
                self.load_keys(page_table, &part.tile, block, &mut ring, form);
                block = warp::next(block);
            }
        }
    }
}

/// The first channel of a panel.
#[cube]
fn channel(#[comptime] panel: usize) -> i32 {
    comptime!((panel * PANEL) as i32).runtime()
}
