//! What the warps of a cube have in common: where things lie, and the barriers.

use cubecl::prelude::*;

use crate::ptx::mbarrier;

/// Chunks of the ring in shared memory.
pub(crate) const RING: u32 = 8;
/// Barriers.
pub(crate) const BARRIERS: usize = 3 * RING as usize + 7;

/// Where they are.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Barriers {
    /// Of each place of the ring: loaded into this cube, loaded into both (in the first cube), and no longer needed.
    pub full: u32,
    pub come: u32,
    pub empty: u32,
    /// Scores of a block, for each of two.
    pub scored: u32,
    /// In the first cube: weights of a block, and what its output is added to, are there in both.
    pub weighed: u32,
    /// In each: the output of a block has been added.
    pub summed: u32,
    /// Queries are here, in both (in the first cube), and no longer needed.
    pub query_full: u32,
    pub query_come: u32,
    pub query_empty: u32,
}

#[cube]
impl Barriers {
    pub fn new(full: u32) -> Barriers {
        let come = full + comptime!(8 * RING);
        let empty = come + comptime!(8 * RING);
        let scored = empty + comptime!(8 * RING);
        let weighed = scored + 16;
        let summed = weighed + 8;
        let query_full = summed + 8;
        let query_come = query_full + 8;
        let query_empty = query_come + 8;
        Barriers { full, come, empty, scored, weighed, summed, query_full, query_come, query_empty }
    }

    /// One thread, before all of both cubes synchronise. So many warps load a chunk.
    pub fn init(&self, #[comptime] loaders: u32) {
        #[unroll]
        for i in 0..RING {
            mbarrier::init(self.full + i * 8, loaders);
            mbarrier::init(self.come + i * 8, 2u32);
            mbarrier::init(self.empty + i * 8, 1u32);
        }
        mbarrier::init(self.scored, 1u32);
        mbarrier::init(self.scored + 8, 1u32);
        mbarrier::init(self.weighed, 8u32);
        mbarrier::init(self.summed, 1u32);
        mbarrier::init(self.query_full, 1u32);
        mbarrier::init(self.query_come, 2u32);
        mbarrier::init(self.query_empty, 1u32);
        mbarrier::fence_init();
    }
}

/// A cube of the pair, as one of its units sees it.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Cube {
    /// Where the ring, the query and the weights are in shared memory, and its columns of tensor memory.
    pub chunks_at: u32,
    pub query_at: u32,
    pub weights_at: u32,
    pub tensor: u32,
    pub barriers: Barriers,
    pub warp: u32,
    pub lane: u32,
}
