//! What the code of the kernels depends on.

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
    /// Whether rows are FP8.
    pub fp8: bool,
    /// Whether two cubes with 128 heads of a token bring half of the FP8 rows each, for both.
    pub pair: bool,
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

    /// Cubes of a cluster.
    pub fn cubes(self) -> u32 {
        if self.pair { 2 } else { 1 }
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
            fp8: false,
            pair: false,
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
