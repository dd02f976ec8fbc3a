//! Which problems the kernel takes, what its code depends on, and how shared memory is divided.

use cubecl::ir::FloatKind;
use cubecl::prelude::*;

use crate::cache_rows::RowFormat;
use crate::lightning_index::problem::LightningIndexSizes;
use crate::ptx::wgmma::{Elem, Layout, Mma, Source};

/// Keys of a block.
pub(super) const KEYS: usize = 128;
/// Keys of a product, half a block: what a warpgroup multiplies at a time.
pub(super) const HALF: usize = KEYS / 2;
/// Columns of a product: the heads of the query tokens that a warpgroup has.
pub(super) const COLUMNS: usize = 256;
/// Scores of a unit before they are summed.
pub(super) const PRODUCTS: usize = COLUMNS / 2;
/// Warpgroups that compute.
pub(super) const GROUPS: u32 = 2;
/// Units of a warpgroup.
pub(super) const GROUP: u32 = 128;
/// Warps of a warpgroup, and all that compute.
pub(super) const GROUP_WARPS: u32 = GROUP / 32;
pub(super) const WARPS: u32 = GROUPS * GROUP_WARPS;
/// Units of a cube: one warpgroup more, which loads.
pub(super) const UNITS: u32 = (GROUPS + 1) * GROUP;
/// Registers of a unit that computes, and of one of the loading warpgroup. Together what a cube is launched with, 168 for each.
pub(super) const COMPUTE_REGISTERS: u32 = 232;
pub(super) const LOAD_REGISTERS: u32 = 40;
/// Channels of a panel: 128 bytes, the width of the swizzle.
pub(super) const PANEL: usize = 64;
/// Heads of 16 columns are the fewest: a unit has four weights of them.
const LEAST_HEADS: usize = 16;
/// Query tokens of a warpgroup at least: their sums are divided among four units.
const LEAST_TOKENS: usize = 2;
/// Query tokens of a tile at most.
pub(super) const MOST_TOKENS: usize = GROUPS as usize * COLUMNS / LEAST_HEADS;
/// Rows of a tile load at least: a whole pattern of the swizzle.
const LEAST_BOX: usize = 8;
/// Shared memory for queries and keys: what is left beside the weights and the barriers.
const TILES_BYTES: u32 = 224 << 10;
/// Stages at most: more hide no more.
const MOST_STAGES: u32 = 4;

/// How keys and queries lie: panels of all keys of a block, and of all heads of a warpgroup.
pub(super) const BLOCK: Layout = Layout::Terms { rows: KEYS };
pub(super) const HEADS: Layout = Layout::Terms { rows: COLUMNS };

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::lightning_index) struct Form {
    pub heads: usize,
    /// Panels of a query and a key.
    pub panels: usize,
    /// Keys that one tile load brings: a block, or a page if that is shorter.
    pub box_keys: usize,
    /// bf16, otherwise f16.
    pub bf16: bool,
}

/// The form for a problem, where the device and the kernel take it.
pub(in crate::lightning_index) fn form(client: &Client, sizes: &LightningIndexSizes) -> Option<Form> {
    let &LightningIndexSizes { query_len, heads, width, page_size, elem, .. } = sizes;
    // wgmma reads numbers from shared memory, where tile loads would bring codes. Who has FP8 keys dequantises them before.
    if sizes.rows != RowFormat::Dense {
        return None;
    }
    let hopper = client.properties().identity.fingerprint == "ptx_sm90";
    let bf16 = match elem {
        ElemType::Float(FloatKind::BF16) => true,
        ElemType::Float(FloatKind::F16) => false,
        _ => return None,
    };
    let form = Form { heads, panels: width / PANEL, box_keys: page_size.min(KEYS), bf16 };
    let whole = heads.is_power_of_two() && (LEAST_HEADS..=COLUMNS / LEAST_TOKENS).contains(&heads);
    let widths = matches!(width, 64 | 128);
    // Coordinates of tile loads are i32.
    let in_range = sizes.rows() * heads <= i32::MAX as usize && sizes.slots() <= i32::MAX as usize;
    // Fewer query tokens would leave columns without a head.
    let takes = hopper && whole && widths && page_size >= LEAST_BOX && in_range && query_len >= form.tokens();
    takes.then_some(form)
}

impl Form {
    pub(super) fn elem(self) -> Elem {
        if self.bf16 { Elem::Bf16 } else { Elem::F16 }
    }

    /// Query tokens of a warpgroup.
    pub(super) fn group_tokens(self) -> usize {
        COLUMNS / self.heads
    }

    /// Query tokens of a tile.
    pub(super) fn tokens(self) -> usize {
        GROUPS as usize * self.group_tokens()
    }

    /// Bytes of the queries of a warpgroup.
    pub(super) fn query_bytes(self) -> u32 {
        (COLUMNS * self.panels * PANEL * 2) as u32
    }

    /// Bytes of a block of keys.
    pub(super) fn key_bytes(self) -> u32 {
        (KEYS * self.panels * PANEL * 2) as u32
    }

    /// Blocks of keys in shared memory.
    pub(super) fn stages(self) -> u32 {
        ((TILES_BYTES - GROUPS * self.query_bytes()) / self.key_bytes()).min(MOST_STAGES)
    }

    /// Products of half a block with the heads of a warpgroup.
    pub(super) fn products(self) -> Mma {
        let steps = self.panels * PANEL / 16;
        Mma { n: COLUMNS, steps, elem: self.elem(), a: Source::Shared(BLOCK), b: HEADS, groups: 1, per_step: 1 }
    }
}
