//! What the warpgroups of a cube have in common: where things lie in shared memory, the barriers, the rows and the items.

use cubecl::prelude::*;

use crate::ptx::mbarrier;
use crate::tiles::form::{GROUP, STAGES};
use crate::tiles::loader::{Item, Plan, Tile};

/// Barriers.
pub(super) const BARRIERS: usize = 4 * STAGES as usize + 4;

/// Where they are.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Barriers {
    /// Of each half of each stage: loaded, and no longer needed.
    pub full: u32,
    pub empty: u32,
    /// Weights and factors of a block: there, and no longer needed.
    pub weighed: u32,
    pub used: u32,
    /// The query: likewise.
    pub query_full: u32,
    pub query_empty: u32,
}

#[cube]
impl Barriers {
    pub fn new(full: u32) -> Barriers {
        let empty = full + comptime!(16 * STAGES);
        let weighed = empty + comptime!(16 * STAGES);
        let used = weighed + 8;
        let query_full = used + 8;
        Barriers { full, empty, weighed, used, query_full, query_empty: query_full + 8 }
    }

    /// One thread, before all synchronise.
    pub fn init(&self) {
        #[unroll]
        for i in 0..comptime!(2 * STAGES) {
            mbarrier::init(self.full + i * 8, 1u32);
            mbarrier::init(self.empty + i * 8, 8u32);
        }
        mbarrier::init(self.weighed, GROUP);
        mbarrier::init(self.used, comptime!(2 * GROUP));
        mbarrier::init(self.query_full, 1u32);
        mbarrier::init(self.query_empty, GROUP);
        mbarrier::fence_init();
    }
}

/// A cube, as one of its units sees it.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Cube {
    /// Where the stages of keys, the query and the weights are.
    pub keys_at: u32,
    pub query_at: u32,
    pub weights_at: u32,
    pub barriers: Barriers,
    /// Of the warpgroup.
    pub warp: u32,
    pub lane: u32,
    /// Query rows of a sequence, the first of the tile, and in the tile the first of the two that this unit has a part of, in
    /// scores and output alike.
    pub rows: u32,
    pub tile_row: u32,
    pub own_row: u32,
    pub tile: Tile,
    /// Its items, and one past the last.
    pub first: u32,
    pub end: u32,
}

#[cube]
impl Cube {
    /// One past the last key that a row of the tile sees. Rows past the end see what the last one does.
    pub fn visible_end(&self, plan: &Plan, item: &Item, row: u32) -> u32 {
        self.tile.visible_end(plan, item.sequence, min(self.tile_row + row, self.rows - 1), item.end_key)
    }
}
