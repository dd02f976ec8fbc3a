//! How tiles are divided among warpgroups, and shared memory among tiles.

use cubecl::prelude::*;

use crate::ptx::wgmma::{Layout, Mma, Source};
use crate::ragged_attention::problem::RaggedAttentionSizes;
pub(super) use crate::tiles::prefill::form::{Form, PANEL};

/// Query rows of a warpgroup: what it multiplies at a time.
pub(super) const GROUP_ROWS: usize = 64;
/// Warpgroups that compute.
pub(super) const GROUPS: u32 = 2;
/// Query rows of a tile.
pub(super) const ROWS: usize = GROUP_ROWS * GROUPS as usize;
/// Keys of a block.
pub(super) const KEYS: usize = 128;
/// Scores of a unit: of two rows (a and b, 8 apart), every other pair of columns.
pub(super) const SCORES: usize = KEYS / 2;
/// Pairs of weights of a unit.
pub(super) const PAIRS: usize = SCORES / 2;
/// Units of a warpgroup.
pub(super) const GROUP: u32 = 128;
/// Warps that compute.
pub(super) const WARPS: u32 = GROUPS * GROUP / 32;
/// Units of a cube: one warpgroup more, which loads.
pub(super) const UNITS: u32 = (GROUPS + 1) * GROUP;
/// Registers of a unit that computes, and of one of the loading warpgroup. Together what a cube is launched with, 168 for each.
pub(super) const COMPUTE_REGISTERS: u32 = 240;
pub(super) const LOAD_REGISTERS: u32 = 24;
/// Shared memory for outputs on their way: 64 channels of a tile.
pub(super) const STAGING_BYTES: u32 = (ROWS * PANEL * 2) as u32;
/// Shared memory for queries, keys and values: what is left beside the outputs and the barriers.
const TILES_BYTES: u32 = 208 << 10;
/// Stages at most: more hide no more.
const MOST_STAGES: u32 = 4;

/// The form for a problem, where the device and the kernel take it.
pub(in crate::ragged_attention) fn form(client: &Client, sizes: &RaggedAttentionSizes) -> Option<Form> {
    let hopper = client.properties().identity.fingerprint == "ptx_sm90";
    hopper.then(|| sizes.form(ROWS)).flatten()
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
        Mma { n: KEYS, steps: self.key_panels * PANEL / 16, elem: self.elem(), a, b, groups: 1 }
    }

    /// Output of a block.
    pub(super) fn output(self) -> Mma {
        let (a, b) = (Source::Registers, VALUES);
        Mma { n: self.value_panels * PANEL, steps: KEYS / 16, elem: self.elem(), a, b, groups: 1 }
    }
}

/// How queries lie: panels of all rows of the tile.
pub(super) const QUERIES: Layout = Layout::Terms { rows: ROWS };
/// How values lie: a row is one term for all channels.
pub(super) const VALUES: Layout = Layout::Across { terms: KEYS };
