//! A ring of stages of shared memory between the thread that loads blocks and the warpgroups that multiply them.

use cubecl::prelude::*;

use crate::ptx::mbarrier;

/// Where stages and their barriers are, and which one is next for this thread.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Ring {
    at: u32,
    /// Barriers of stages that have been loaded; behind them those of stages that no warp needs any longer.
    full: u32,
    /// Blocks so far.
    turn: u32,
    #[cube(comptime)]
    bytes: u32,
    #[cube(comptime)]
    stages: u32,
}

#[cube]
impl Ring {
    /// Of so many stages of so many bytes; there are two barriers for each.
    pub fn new(at: u32, barriers_at: u32, #[comptime] bytes: u32, #[comptime] stages: u32) -> Ring {
        Ring { at, full: barriers_at, turn: 0u32, bytes, stages }
    }

    /// Initialises the barriers, of which so many warps give a stage back. One thread, before all synchronise.
    pub fn init(&self, #[comptime] warps: u32) {
        #[unroll]
        for i in 0..self.stages {
            mbarrier::init(self.full + i * 8, 1u32);
            mbarrier::init(self.full + (self.stages + i) * 8, warps);
        }
    }

    /// Which stage is next.
    pub fn stage(&self) -> u32 {
        self.turn % self.stages
    }

    /// Where it is.
    pub fn stage_at(&self) -> u32 {
        self.at + self.stage() * self.bytes
    }

    /// The barrier that says that it has been loaded.
    pub fn full_at(&self) -> u32 {
        self.full + self.stage() * 8
    }

    /// Waits until the stage may be loaded, and announces its bytes. The loading thread.
    pub fn open(&self) {
        let empty = self.full + (self.stages + self.stage()) * 8;
        mbarrier::wait(empty, (self.turn / self.stages % 2) ^ 1);
        mbarrier::arrive_expect(self.full_at(), self.bytes.runtime());
    }

    /// Waits until the stage has been loaded.
    pub fn wait(&self) {
        mbarrier::wait(self.full_at(), self.turn / self.stages % 2);
    }

    /// Gives the stage back and goes on to the next. A warp, after its products.
    pub fn release(&mut self, lane: u32) {
        let empty = self.full + (self.stages + self.stage()) * 8;
        mbarrier::arrive_if(empty, lane == 0);
        self.turn += 1;
    }

    /// Goes on by some blocks.
    pub fn skip(&mut self, blocks: u32) {
        self.turn += blocks;
    }
}
