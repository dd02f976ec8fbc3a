//! What the code of the kernels depends on.

use crate::cache_rows::{Fp8Layout, Fp8Scales, RowFormat};
use crate::tiles::form::Form as TileForm;
use crate::tiles::softmax::SLACK;

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
    /// Whether two cubes with 128 heads of a token bring half of the FP8 rows each, for both, or compute products together.
    pub pair: bool,
    /// Whether they compute blocks two at a time.
    pub by_two: bool,
    /// Cubes of the cluster that has the splits of a tile and merges them; 1 where another launch does.
    pub merging: u32,
    /// Whether the first list is the pages of a sequence, of which a query token may see fewer keys than the next.
    pub pages: Option<Causal>,
    pub writes: Writes,
}

/// How rows are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Stored {
    Dense,
    /// FP8 of DeepSeek-V3, with scales in the row, or of DeepSeek-V4, with scales behind the rows of a page.
    V3,
    V4,
}

impl Stored {
    /// That of a format, if it is one of these, for queries of bf16 or f16.
    pub fn of(format: RowFormat, bf16: bool) -> Option<Self> {
        match format {
            RowFormat::Dense => Some(Self::Dense),
            RowFormat::Fp8(Fp8Layout { codes: 512, rope: 64, scales: Fp8Scales::F32InRow }) => Some(Self::V3),
            RowFormat::Fp8(Fp8Layout { codes: 448, rope: 64, scales: Fp8Scales::E8m0BehindPage { .. } }) => {
                Some(Self::V4)
            }
            RowFormat::Fp8(_) => None,
        }
        .filter(|stored| bf16 || *stored == Self::Dense)
    }
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

    /// Whether the scales of FP8 rows lie behind the rows of their page.
    pub fn paged_scales(self) -> bool {
        self.rows.contains(&Stored::V4)
    }

    /// Tiles of an FP8 row that are codes. The one behind them is its rotary channels.
    pub fn code_tiles(self) -> u32 {
        self.tile.tiles as u32 - 1
    }

    /// The list of dense rows beside FP8 rows, or 0 where there is none.
    pub fn dense_list(self) -> u32 {
        match self.rows.map(|rows| rows == Stored::Dense) {
            [true, false] => 1,
            [false, true] => 2,
            _ => 0,
        }
    }

    /// Cubes that work together.
    pub fn cubes(self) -> u32 {
        if self.pair { 2 } else { 1 }
    }

    /// Cubes of a cluster. A pair merges nothing.
    pub fn cluster(self) -> u32 {
        self.cubes() * self.merging
    }

    /// Whether the cubes of a cluster merge the splits that they have.
    pub fn merges(self) -> bool {
        self.merging > 1
    }
}

#[cfg(feature = "offline")]
impl Form {
    /// The forms that DeepSeek's models use, by names: rows of 576 channels in one list, and of 512 in two with a sink. f16 once.
    pub fn of_models() -> Vec<(&'static str, Self)> {
        let tile = |tiles, bf16| TileForm { tiles, box_keys: 1, bf16, causal: false };
        let [none, first, second] = [[false; 2], [true, false], [false, true]];
        let v32 = Self {
            tile: tile(9, true),
            second: false,
            lengths: none,
            sink: false,
            rows: [Stored::Dense; 2],
            pair: false,
            by_two: false,
            merging: 1,
            pages: None,
            writes: Writes::Whole,
        };
        let v4 = Self { tile: tile(8, true), second: true, lengths: second, sink: true, ..v32 };
        vec![
            ("576", v32),
            ("576.split", Self { lengths: first, writes: Writes::Split, ..v32 }),
            ("576.plan", Self { lengths: first, writes: Writes::Planned, ..v32 }),
            ("512.two", v4),
            ("512.two.split", Self { writes: Writes::Split, ..v4 }),
            ("512.two.plan", Self { writes: Writes::Planned, ..v4 }),
            ("512.two.parts", Self { sink: false, writes: Writes::Parts, ..v4 }),
            ("576.two", Self { tile: tile(9, false), lengths: [true; 2], ..v4 }),
        ]
    }
}
