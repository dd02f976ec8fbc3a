//! How tiles are divided among warpgroups, and shared memory among tiles.

use cubecl::prelude::*;

use crate::ptx::wgmma::{Layout, Mma, Source};
use crate::ragged_attention::problem::RaggedAttentionSizes;
pub(super) use crate::tiles::prefill::form::{Form, PANEL};
use crate::tiles::prefill::wgmma::is_hopper;
pub(super) use crate::tiles::prefill::wgmma::{GROUP, GROUP_ROWS, GROUPS, STAGING_BYTES, UNITS, WARPS};

/// Query rows of a tile.
pub(super) const ROWS: usize = GROUP_ROWS * GROUPS as usize;
/// Keys of a block.
pub(super) const KEYS: usize = 128;
/// Scores of a unit: of two rows (a and b, 8 apart), every other pair of columns.
pub(super) const SCORES: usize = KEYS / 2;
/// Pairs of weights of a unit.
pub(super) const PAIRS: usize = SCORES / 2;
/// Registers of a unit that computes, and of one of the loading warpgroup. Together what a cube is launched with, 168 for each.
pub(super) const COMPUTE_REGISTERS: u32 = 240;
pub(super) const LOAD_REGISTERS: u32 = 24;
/// Shared memory for queries, keys and values: what is left beside the outputs and the barriers.
const TILES_BYTES: u32 = 208 << 10;
/// Stages at most: more hide no more.
const MOST_STAGES: u32 = 4;

/// The form for a problem, where the device and the kernel take it.
pub(in crate::ragged_attention) fn form(client: &Client, sizes: &RaggedAttentionSizes) -> Option<Form> {
    is_hopper(client).then(|| sizes.form(ROWS)).flatten()
}

impl Form {
    /// Bytes of a tile of queries.
    pub(super) fn query_bytes(self) -> u32 {
        (ROWS * self.key_panels * PANEL * 2) as u32
    }

    /// Bytes of a block of keys.
    pub(super) fn key_bytes(self) -> u32 {
        (KEYS * self.key_panels * PANEL * 2) as u32
    }

    /// Bytes of a block of values.
    pub(super) fn value_bytes(self) -> u32 {
        (KEYS * self.value_panels * PANEL * 2) as u32
    }

    /// Blocks of keys, and as many of values, in shared memory.
    pub(super) fn stages(self) -> u32 {
        let fit = (TILES_BYTES - self.query_bytes()) / (self.key_bytes() + self.value_bytes());
        // A power of two: places in the ring are numbers modulo this.
        if fit >= MOST_STAGES { MOST_STAGES } else { 2 }
    }

    /// Whether the warpgroups take turns at issuing their products.
    pub(super) fn takes_turns(self) -> bool {
        self.key_panels <= 2
    }

    /// Scores of a block.
    pub(super) fn scores(self) -> Mma {
        let (a, b) = (Source::Shared(QUERIES), Layout::Terms { rows: KEYS });
        Mma { n: KEYS, steps: self.key_panels * PANEL / 16, elem: self.elem(), a, b, groups: 1, per_step: 1 }
    }

    /// Output of a block.
    pub(super) fn output(self) -> Mma {
        let (a, b) = (Source::Registers, VALUES);
        Mma { n: self.value_panels * PANEL, steps: KEYS / 16, elem: self.elem(), a, b, groups: 1, per_step: 1 }
    }
}

/// How queries lie: panels of all rows of the tile.
pub(super) const QUERIES: Layout = Layout::Terms { rows: ROWS };
/// How values lie: a row is one term for all channels.
pub(super) const VALUES: Layout = Layout::Across { terms: KEYS };
