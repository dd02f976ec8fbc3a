//! The ring of stages between the warps that load tiles of keys and the warpgroups that multiply them.

use cubecl::prelude::*;

use super::form::{Form, GROUP, KEYS, LOADERS, WARP_KEYS, WARPS, key_bytes, stage_bytes, stages};
use crate::ptx::{copy, mbarrier};

/// Mark of a tile: it is of the first warpgroup's list.
pub(super) const OF_FIRST: u32 = 1;
/// It is of the second's.
pub(super) const OF_SECOND: u32 = 2;
/// Its rows have been copied one by one.
pub(super) const GATHERED: u32 = 4;
/// There is no tile, but the end of a work.
pub(super) const END: u32 = 8;

/// The mark of a warpgroup's tiles.
#[cube]
pub(super) fn mark_of(group: u32) -> u32 {
    1u32 << group
}

/// What is to be known of the tile of each stage.
#[derive(CubeType)]
pub(super) struct Notes {
    /// The positions of its keys.
    pub positions: Shared<[u32]>,
    /// [`OF_FIRST`], and so on.
    pub marks: Shared<[u32]>,
}

/// Where the stages are and their barriers, and which one is next for this unit.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Stages {
    at: u32,
    /// Barriers of stages that have been loaded; behind them those of stages that no warp needs any longer.
    full: u32,
    /// Tiles so far.
    turn: u32,
    #[cube(comptime)]
    form: Form,
}

#[cube]
impl Stages {
    pub fn new(at: u32, barriers_at: u32, #[comptime] form: Form) -> Stages {
        Stages { at, full: barriers_at, turn: 0u32, form }
    }

    /// Initialises the barriers. One thread, before all synchronise.
    pub fn init(&self) {
        let count = comptime!(stages(self.form));
        #[unroll]
        for i in 0..count {
            // A loading warp arrives once for its notes, and each of its units when its copies have come.
            mbarrier::init(self.full + i * 8, comptime!(LOADERS + GROUP));
            mbarrier::init(self.full + (count + i) * 8, WARPS);
        }
    }

    /// Which stage is next.
    pub fn stage(&self) -> u32 {
        self.turn % comptime!(stages(self.form))
    }

    pub fn keys_at(&self, stage: u32) -> u32 {
        self.at + stage * comptime!(stage_bytes(self.form))
    }

    pub fn values_at(&self, stage: u32) -> u32 {
        self.keys_at(stage) + comptime!(key_bytes(self.form))
    }

    pub fn full_at(&self) -> u32 {
        self.full + self.stage() * 8
    }

    fn empty_at(&self, stage: u32) -> u32 {
        self.full + (comptime!(stages(self.form)) + stage) * 8
    }

    fn phase(&self) -> u32 {
        self.turn / comptime!(stages(self.form)) % 2
    }

    /// Waits until the stage may be loaded, and takes notes of its tile: a position for each of the warp's first lanes. A loading warp.
    pub fn open(&self, notes: &mut Notes, position: u32, mark: u32, warp: u32) {
        let (stage, lane) = (self.stage(), UNIT_POS % 32);
        mbarrier::wait(self.empty_at(stage), self.phase() ^ 1);
        if lane < WARP_KEYS {
            notes.positions[(stage * comptime!(KEYS as u32) + warp * WARP_KEYS + lane) as usize] = position;
        }
        if warp == 0 && lane == 0 {
            notes.marks[stage as usize] = mark;
        }
        // One lane arrives for the notes of all.
        sync_plane();
    }

    /// Arrives for a warp that has nothing under way but tile loads. One lane.
    pub fn close(&self) {
        mbarrier::arrive_times(self.full_at(), comptime!(1 + GROUP / LOADERS));
    }

    /// Arrives for a warp when its copies have come. All lanes.
    pub fn close_with_copies(&self) {
        copy::arrive_with_copies(self.full_at());
        let lane = UNIT_POS % 32;
        mbarrier::arrive_if(self.full_at(), lane == 0);
    }

    /// Waits until the stage has been loaded.
    pub fn wait(&self) {
        mbarrier::wait(self.full_at(), self.phase());
        sync_plane();
    }

    /// Gives a stage back, and its notes. A warp that computes.
    pub fn release(&self, stage: u32) {
        // All lanes have read the notes.
        sync_plane();
        let lane = UNIT_POS % 32;
        mbarrier::arrive_if(self.empty_at(stage), lane == 0);
    }

    /// Goes on to the next one.
    pub fn advance(&mut self) {
        self.turn += 1;
    }
}
