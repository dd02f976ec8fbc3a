//! What the kernel's code depends on, and its products.

use crate::ptx::wgmma::{Layout, Mma, Source};
use crate::tiles::form::{Form as TileForm, GROUP, KEYS, ROWS, VALUE_WIDTH};
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
    /// How the rows of both lists are stored.
    pub rows: [Stored; 2],
    /// Whether two cubes with 128 heads of a token bring half of the FP8 rows each, for both.
    pub pair: bool,
    /// Whether the first list is the pages of a sequence, of which a query token may see fewer keys than the next.
    pub pages: Option<Causal>,
    pub writes: Writes,
}

/// How rows are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::sparse_mla) enum Stored {
    Dense,
    /// FP8 as `fp8.rs` reads it: DeepSeek-V3's, with scales in the row, or DeepSeek-V4's, with scales behind the rows of a page.
    V3,
    V4,
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
    /// One or the other, as the plan says.
    Planned,
    /// As they are, with the largest score and the sum of the weights.
    Parts,
}

impl Form {
    /// By how much scores may exceed what the weights are relative to. Parts are relative to the largest.
    pub fn slack(self) -> f32 {
        if self.writes == Writes::Parts { 0.0 } else { SLACK }
    }

    /// Whether a plan divides the blocks.
    pub fn planned(self) -> bool {
        self.writes == Writes::Planned
    }

    /// Whether there are FP8 rows.
    pub fn fp8(self) -> bool {
        self.rows != [Stored::Dense; 2]
    }

    /// Whether there are dense rows beside them.
    pub fn mixed(self) -> bool {
        self.fp8() && self.rows.contains(&Stored::Dense)
    }

    /// Whether the scales of FP8 rows lie behind the rows of their page.
    pub fn paged_scales(self) -> bool {
        self.rows.contains(&Stored::V4)
    }

    /// Tiles of an FP8 row that are codes. The one behind them is its rotary channels.
    pub fn code_tiles(self) -> u32 {
        self.tile.tiles as u32 - 1
    }

    /// Units of the cube: a warpgroup each for scores, left half of the output, right half, and FP8 rows.
    pub fn units(self) -> u32 {
        if self.fp8() { 4 * GROUP } else { 3 * GROUP }
    }

    /// Cubes of a cluster.
    pub fn cubes(self) -> u32 {
        if self.pair { 2 } else { 1 }
    }

    /// Parts of a block that have a barrier each, which says that their rows have come.
    pub fn parts(self) -> u32 {
        if self.fp8() { 1 } else { PARTS }
    }

    /// Scores of a block.
    pub fn scores(self) -> Mma {
        let (steps, elem, b) = (4 * self.tile.tiles, self.tile.elem(), ROWS_OF_TERMS);
        Mma { n: KEYS, steps, elem, a: Source::Shared(ROWS_OF_TERMS), b, groups: 1, per_step: 1 }
    }

    /// Half of the output of a block. Of dense rows a group for each part, so that the first parts are done with before the last.
    pub fn output(self) -> Mma {
        let (n, steps, elem, b) = (VALUE_WIDTH / 2, KEYS / 16, self.tile.elem(), VALUES);
        let (groups, per_step) = (self.parts() as usize, if self.fp8() { 2 } else { 1 });
        Mma { n, steps, elem, a: Source::Shared(WEIGHTS), b, groups, per_step }
    }
}
