//! What the warpgroups of a cube have in common: where things lie in shared memory, the barriers, and the range of its work.

use cubecl::prelude::*;

use super::form::parts;
use crate::ptx::{barrier, mbarrier};
use crate::sparse_mla::form::Form;
use crate::sparse_mla::work::next;
use crate::tiles::form::{GROUP, STAGES};

/// Warps of the output.
const OUTPUT_WARPS: u32 = 2 * GROUP / 32;

/// How many barriers there are.
pub(super) fn barrier_count(form: Form) -> usize {
    let empty = if form.fp8() { STAGES } else { 0 };
    (parts(form) * STAGES + empty) as usize + 4
}

/// Where they are.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Barriers {
    /// Of each part of each stage: its rows have come.
    pub full: u32,
    /// Weights and factors of a block, and the slots of the block after the next: there, and no longer needed.
    pub weighed: u32,
    pub used: u32,
    /// The query: there, and no longer needed.
    pub query_full: u32,
    pub query_empty: u32,
    /// Of each stage of FP8 rows: it is no longer needed, in either cube of a pair.
    pub empty: u32,
}

/// Waits until all of the cube, or the pair, are here: before what is initialised is used, and before a cube of a pair ends.
#[cube]
pub(super) fn sync(#[comptime] form: Form) {
    if comptime!(form.pair) {
        barrier::sync_cluster();
    } else {
        sync_cube();
    }
}

#[cube]
impl Barriers {
    pub fn new(full: u32, #[comptime] form: Form) -> Barriers {
        let weighed = full + comptime!(8 * parts(form) * STAGES);
        let used = weighed + 8;
        let query_full = used + 8;
        let query_empty = query_full + 8;
        Barriers { full, weighed, used, query_full, query_empty, empty: query_empty + 8 }
    }

    /// One thread, before all synchronise.
    pub fn init(&self, #[comptime] form: Form) {
        // Of FP8 rows each unit arrives twice, and the other cube's rows count as bytes.
        #[unroll]
        for i in 0..comptime!(parts(form) * STAGES) {
            mbarrier::init(self.full + i * 8, comptime!(2 * GROUP));
        }
        if comptime!(form.fp8()) {
            #[unroll]
            for i in 0..STAGES {
                mbarrier::init(self.empty + i * 8, comptime!(form.cubes() * OUTPUT_WARPS));
            }
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
    pub heads: u32,
    /// The first of the two rows of a tile that this unit has a part of, in scores and output alike.
    pub own_row: u32,
    /// Its work: every `step`-th from `first` on.
    pub first: u32,
    pub end: u32,
    pub step: u32,
    #[cube(comptime)]
    pub form: Form,
}

#[cube]
impl Cube {
    /// The number of the work behind this one.
    pub fn next(&self, index: u32) -> u32 {
        next(index, self.step, self.form)
    }
}
