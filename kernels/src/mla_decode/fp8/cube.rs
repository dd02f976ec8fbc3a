//! What the warps of a cube have in common: where things lie in shared memory, the barriers, the rows and the items.

use cubecl::prelude::*;

use super::form::{Form, STAGES};
use crate::ptx::{matrix, mbarrier};
use crate::tiles::loader::{Item, Plan, Tile};

/// A cube, as one of its units sees it.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Cube {
    /// The stages, `[64][row]`.
    pub keys_at: u32,
    /// Scores of a block: f32 `[scale][row][64]`, of what the codes of each scale contribute.
    pub scores_at: u32,
    /// Weights of a block: f16 `[scale][row][64]`, times the scale of their key.
    pub weights_at: u32,
    /// Scales of a block's keys as the softmax takes them, f32 `[scales of two][key pair][scale][key]`.
    pub scales_at: u32,
    /// u32 `[warp]`: the last turn in which a scale was too large for its power of two.
    pub exceeded_at: u32,
    /// f32 `[scale][row]`: what the output so far is to be multiplied with, and at the end.
    pub factors_at: u32,
    pub ends_at: u32,
    /// f32 `[row]`: the power of two that a query is multiplied with.
    pub powers_at: u32,
    /// A barrier for each stage: its block has come.
    pub full: u32,
    pub warp: u32,
    pub lane: u32,
    /// Query rows of a sequence, and the first that is the cube's.
    pub rows: u32,
    pub tile_row: u32,
    pub tile: Tile,
    /// Its items, and one past the last.
    pub first: u32,
    pub end: u32,
    #[cube(comptime)]
    pub form: Form,
}

#[cube]
impl Cube {
    /// One thread, before all synchronise: barriers, and turns that there are not.
    pub fn init(&self) {
        #[unroll]
        for warp in 0..comptime!(self.form.warps() as u32) {
            matrix::store_4(self.exceeded_at, comptime!(warp * 4), comptime!(u32::MAX).runtime());
        }
        #[unroll]
        for stage in 0..STAGES {
            mbarrier::init(self.full + stage * 8, 1u32);
        }
        mbarrier::fence_init();
    }

    /// One past the last key of an item that a row of the cube sees. Rows past the end see what the last one does.
    pub fn visible_end(&self, plan: &Plan, item: &Item, row: u32) -> u32 {
        self.tile.visible_end(plan, item.sequence, min(self.tile_row + row, self.rows - 1), item.end_key)
    }
}
