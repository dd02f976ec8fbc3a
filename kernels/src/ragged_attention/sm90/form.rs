//! What the kernel's code depends on, and how shared memory is divided.

use cubecl::ir::FloatKind;
use cubecl::prelude::*;

use crate::ptx::wgmma::{Elem, Layout, Mma, Source};
use crate::ragged_attention::problem::RaggedAttentionSizes;

/// Query rows of a warpgroup: what it multiplies at a time.
pub(super) const GROUP_ROWS: usize = 64;
/// Warpgroups that compute.
pub(super) const GROUPS: u32 = 2;
/// Query rows of a tile.
pub(super) const ROWS: usize = GROUP_ROWS * GROUPS as usize;
/// Keys of a block.
pub(super) const KEYS: usize = 128;
/// Channels of a panel: 128 bytes, the width of the swizzle.
pub(super) const PANEL: usize = 64;
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

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::ragged_attention) struct Form {
    /// Panels of a query and a key.
    pub key_panels: usize,
    /// Panels of a value.
    pub value_panels: usize,
    /// Panels of a key, the last ones, that all heads share.
    pub shared_panels: usize,
    /// bf16, otherwise f16.
    pub bf16: bool,
    /// Whether the factor of the scores is negative.
    pub negative: bool,
}

/// The form for a problem, where the device and the kernel take it.
pub(in crate::ragged_attention) fn form(client: &Client, sizes: &RaggedAttentionSizes) -> Option<Form> {
    let &RaggedAttentionSizes { heads, kv_heads, key_width, value_width, shared_width, elem, .. } = sizes;
    let hopper = client.properties().identity.fingerprint == "ptx_sm90";
    let bf16 = match elem {
        ElemType::Float(FloatKind::BF16) => true,
        ElemType::Float(FloatKind::F16) => false,
        _ => return None,
    };
    let widths = matches!((key_width, value_width), (192, 128) | (128, 128) | (64, 64));
    let shared = shared_width == 0 || (shared_width == PANEL && key_width > PANEL);
    let grouped = kv_heads > 0 && heads.is_multiple_of(kv_heads);
    (hopper && widths && shared && grouped).then_some(Form {
        key_panels: key_width / PANEL,
        value_panels: value_width / PANEL,
        shared_panels: shared_width / PANEL,
        bf16,
        negative: false,
    })
}

impl Form {
    pub(super) fn elem(self) -> Elem {
        if self.bf16 { Elem::Bf16 } else { Elem::F16 }
    }

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
