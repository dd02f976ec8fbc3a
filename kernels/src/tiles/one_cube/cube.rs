//! What the warps of a cube have in common: where things lie, and the barriers.

use cubecl::prelude::*;

use crate::ptx::mbarrier;
use crate::tiles::form::{GROUP, STAGES};

/// Barriers.
pub(crate) const BARRIERS: usize = 4 * STAGES as usize + 6;

/// Where they are.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Barriers {
    /// Of each half of each stage: loaded, and no longer needed.
    pub full: u32,
    pub empty: u32,
    /// Scores of a block, for each of two.
    pub scored: u32,
    /// Weights of a block, and what its output is added to, are there.
    pub weighed: u32,
    /// The output of a block has been added.
    pub summed: u32,
    /// The query: loaded, and no longer needed.
    pub query_full: u32,
    pub query_empty: u32,
}

#[cube]
impl Barriers {
    pub fn new(full: u32) -> Barriers {
        let empty = full + comptime!(16 * STAGES);
        let scored = empty + comptime!(16 * STAGES);
        let weighed = scored + 16;
        let summed = weighed + 8;
        let query_full = summed + 8;
        Barriers { full, empty, scored, weighed, summed, query_full, query_empty: query_full + 8 }
    }

    /// One thread, before all synchronise. So many warps load a half of a stage.
    pub fn init(&self, #[comptime] loaders: u32) {
        #[unroll]
        for i in 0..comptime!(2 * STAGES) {
            mbarrier::init(self.full + i * 8, loaders);
            mbarrier::init(self.empty + i * 8, 1u32);
        }
        mbarrier::init(self.scored, 1u32);
        mbarrier::init(self.scored + 8, 1u32);
        mbarrier::init(self.weighed, GROUP);
        mbarrier::init(self.summed, 1u32);
        mbarrier::init(self.query_full, 1u32);
        mbarrier::init(self.query_empty, 1u32);
        mbarrier::fence_init();
    }
}

/// A cube, as one of its units sees it.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Cube {
    /// Where the stages of keys and the query are in shared memory, and its columns of tensor memory.
    pub keys_at: u32,
    pub query_at: u32,
    pub tensor: u32,
    pub barriers: Barriers,
    pub warp: u32,
    pub lane: u32,
}
