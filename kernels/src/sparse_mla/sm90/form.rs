//! Parts of a block, and products.

use crate::ptx::wgmma::{Layout, Mma, Source};
use crate::sparse_mla::form::Form;
use crate::tiles::form::{GROUP, KEYS, ROWS, VALUE_WIDTH};

/// Parts of a block that are multiplied with their weights one after the other, and loaded anew as soon as that is done: a step of
/// wgmma each.
pub(super) const PARTS: u32 = 4;
/// Rows of a part.
pub(super) const PART_KEYS: u32 = KEYS as u32 / PARTS;

/// How queries and keys lie, seen as rows of terms.
pub(super) const ROWS_OF_TERMS: Layout = Layout::Terms { rows: ROWS };
/// How keys lie, seen as values: a row is one term for all channels.
pub(super) const VALUES: Layout = Layout::Across { terms: KEYS };
/// How weights lie.
pub(super) const WEIGHTS: Layout = Layout::Cores { rows: ROWS };

/// Units of the cube: a warpgroup each for scores, left half of the output, right half, and FP8 rows.
pub(super) fn units(form: Form) -> u32 {
    if form.fp8() { 4 * GROUP } else { 3 * GROUP }
}

/// Parts of a block that have a barrier each, which says that their rows have come.
pub(super) fn parts(form: Form) -> u32 {
    if form.fp8() { 1 } else { PARTS }
}

/// Scores of a block.
pub(super) fn scores(form: Form) -> Mma {
    let (steps, elem, b) = (4 * form.tile.tiles, form.tile.elem(), ROWS_OF_TERMS);
    Mma { n: KEYS, steps, elem, a: Source::Shared(ROWS_OF_TERMS), b, groups: 1, per_step: 1 }
}

/// Half of the output of a block. Of dense rows a group for each part, so that the first parts are done with before the last.
pub(super) fn output(form: Form) -> Mma {
    let (n, steps, elem, b) = (VALUE_WIDTH / 2, KEYS / 16, form.tile.elem(), VALUES);
    let (groups, per_step) = (parts(form) as usize, if form.fp8() { 2 } else { 1 });
    Mma { n, steps, elem, a: Source::Shared(WEIGHTS), b, groups, per_step }
}
