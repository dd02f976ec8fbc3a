//! What the kernel's code depends on, and its products.

use crate::ptx::wgmma::{Layout, Mma, Source};
use crate::tiles::form::{Form as TileForm, KEYS, ROWS, VALUE_WIDTH};
use crate::tiles::softmax::SLACK;

/// Blocks whose slots are in shared memory.
pub(super) const RING: u32 = 4;
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

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Form {
    pub tile: TileForm,
    /// Whether there is a second list.
    pub second: bool,
    /// Whether the lists have lengths.
    pub lengths: [bool; 2],
    /// Whether a sink takes a share.
    pub sink: bool,
    /// Whether rows are FP8, of the layout that `fp8.rs` reads.
    pub fp8: bool,
    /// Whether the first list is the pages of a sequence, of which a query token may see fewer keys than the next.
    pub pages: Option<Causal>,
    pub writes: Writes,
}

/// Whether later query tokens of a sequence see more keys than earlier ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Causal(pub bool);

/// What becomes of the sums of a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Writes {
    /// Divided by the sum of the weights, the result.
    Whole,
    /// The same of one of several splits, in f32.
    Split,
    /// As they are, with the largest score and the sum of the weights.
    Parts,
}

impl Form {
    /// By how much scores may exceed what the weights are relative to. Parts are relative to the largest.
    pub fn slack(self) -> f32 {
        if self.writes == Writes::Parts { 0.0 } else { SLACK }
    }

    /// Scores of a block.
    pub fn scores(self) -> Mma {
        let (steps, elem, b) = (4 * self.tile.tiles, self.tile.elem(), ROWS_OF_TERMS);
        Mma { n: KEYS, steps, elem, a: Source::Shared(ROWS_OF_TERMS), b, groups: 1 }
    }

    /// Half of the output of a block: a group for each part, so that the first parts are done with before the last.
    pub fn output(self) -> Mma {
        let (steps, elem, b) = (KEYS / 16, self.tile.elem(), VALUES);
        Mma { n: VALUE_WIDTH / 2, steps, elem, a: Source::Shared(WEIGHTS), b, groups: PARTS as usize }
    }
}
