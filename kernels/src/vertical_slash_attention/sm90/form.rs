//! How tiles are divided among warpgroups, and shared memory among tiles.

use cubecl::prelude::*;

use crate::ptx::wgmma::{Layout, Mma, Source};
pub(super) use crate::tiles::prefill::form::Form;
use crate::tiles::prefill::form::PANEL;
use crate::tiles::prefill::wgmma::is_hopper;
pub(super) use crate::tiles::prefill::wgmma::{GROUP, GROUP_ROWS, GROUPS, STAGING_BYTES, UNITS, WARPS};
use crate::vertical_slash_attention::problem::{ROWS, VerticalSlashSizes};

/// Keys of a tile.
pub(super) const KEYS: usize = 64;
/// Scores of a unit: of two rows (a and b, 8 apart), every other pair of columns.
pub(super) const SCORES: usize = KEYS / 2;
/// Pairs of weights of a unit.
pub(super) const PAIRS: usize = SCORES / 2;
/// Warps that load.
pub(super) const LOADERS: u32 = GROUP / 32;
/// Keys of a tile that a warp gathers.
pub(super) const WARP_KEYS: u32 = KEYS as u32 / LOADERS;
/// Registers of a unit that computes, and of one that loads. Together what a cube is launched with, 168 for each.
pub(super) const COMPUTE_REGISTERS: u32 = 208;
pub(super) const LOAD_REGISTERS: u32 = 88;
/// Bytes of a panel of queries of a warpgroup, and of one of keys or values of a tile.
pub(super) const PANEL_BYTES: u32 = (KEYS * PANEL * 2) as u32;
/// Shared memory for queries, keys and values: what is left beside the outputs, positions and barriers.
const TILES_BYTES: u32 = 208 << 10;
/// Stages at most: more hide no more.
const MOST_STAGES: u32 = 6;

/// How keys lie, seen as rows of terms.
pub(super) const KEY_ROWS: Layout = Layout::Terms { rows: KEYS };
/// How values lie: a row is one term for all channels.
pub(super) const VALUES: Layout = Layout::Across { terms: KEYS };

const _: () = assert!(GROUP_ROWS == ROWS, "a warpgroup has a part of a block row");
const _: () = assert!(GROUP_ROWS == KEYS, "panels of queries and of keys have the same size");

/// The form for a problem, where the device and the kernel take it.
pub(in crate::vertical_slash_attention) fn form(client: &Client, sizes: &VerticalSlashSizes) -> Option<Form> {
    let form = Form::of(GROUP_ROWS, sizes.elem, [sizes.key_width, sizes.value_width, 0])?;
    let legal = sizes.check().is_ok() && sizes.grid(client).is_ok() && works(sizes).is_some();
    (is_hopper(client) && legal).then_some(form)
}

/// Whether registers are moved to the warps that compute. With values of 64 channels these need no more than all have, and ptxas does
/// not know how many that are.
pub(super) fn moves_registers(form: Form) -> bool {
    form.value_panels > 1
}

/// Bytes of the queries of a warpgroup.
pub(super) fn query_bytes(form: Form) -> u32 {
    form.key_panels as u32 * PANEL_BYTES
}

/// Pairs of channels of its queries that a unit has.
pub(super) fn query_words(form: Form) -> usize {
    GROUP_ROWS * form.key_panels * PANEL / 2 / GROUP as usize
}

/// Bytes of the keys of a tile.
pub(super) fn key_bytes(form: Form) -> u32 {
    form.key_panels as u32 * PANEL_BYTES
}

/// Bytes of a tile: its keys, and their values behind them.
pub(super) fn stage_bytes(form: Form) -> u32 {
    key_bytes(form) + form.value_panels as u32 * PANEL_BYTES
}

/// Tiles in shared memory.
pub(super) fn stages(form: Form) -> u32 {
    ((TILES_BYTES - GROUPS * query_bytes(form)) / stage_bytes(form)).min(MOST_STAGES)
}

/// Scores of a tile.
pub(super) fn scores(form: Form) -> Mma {
    let (a, steps) = (Source::Registers, query_words(form) / 4);
    Mma { n: KEYS, steps, elem: form.elem(), a, b: KEY_ROWS, groups: 1, per_step: 1 }
}

/// Output of a tile.
pub(super) fn output(form: Form) -> Mma {
    let (a, n) = (Source::Registers, form.value_panels * PANEL);
    Mma { n, steps: KEYS / 16, elem: form.elem(), a, b: VALUES, groups: 1, per_step: 1 }
}

/// Numbers of work, where they and the cubes beside them can be counted.
pub(super) fn works(sizes: &VerticalSlashSizes) -> Option<u32> {
    let parts = sizes.rows.checked_mul(sizes.block_size_m.div_ceil(ROWS))?;
    let works = parts.div_ceil(GROUPS as usize).checked_mul(sizes.heads)?.checked_mul(sizes.batch)?;
    i32::try_from(works).ok().map(|works| works as u32)
}
