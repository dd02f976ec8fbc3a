//! Formats of rows, and where the parts of a row are in its page.

use cubecl::prelude::*;

/// How rows are stored: what the choice of a kernel depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum RowFormat {
    /// A number for each channel.
    #[default]
    Dense,
    /// FP8 E4M3 with scales, and rotary channels in bf16.
    Fp8(Fp8Layout),
}

/// The parts of an FP8 row: codes, scales, rotary channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fp8Layout {
    /// Channels that are codes, a multiple of 4 and not 0.
    pub codes: usize,
    /// Channels behind them that are bf16, a multiple of 2.
    pub rope: usize,
    /// The scales of the codes.
    pub scales: Fp8Scales,
}

/// What the scales of FP8 rows are, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fp8Scales {
    /// An f32 for every 128 codes, between those and the rotary channels of the row.
    F32InRow,
    /// A byte, E8M0, for every 64 codes. They lie behind the rows of each page, those of a row in a multiple of 8 bytes; a page is as
    /// long as a whole number of rows.
    E8m0BehindPage {
        /// Rows of a page, a power of two.
        page_rows: usize,
    },
    /// An f32 for all codes of a row, of which there are at most 512. They lie behind the rows of each page, and the next page behind
    /// them.
    F32BehindPage {
        /// Rows of a page, a power of two.
        page_rows: usize,
    },
}

impl Fp8Layout {
    /// Channels.
    pub fn width(self) -> usize {
        self.codes + self.rope
    }

    /// Codes that share a scale, at most: a power of two.
    pub fn scaled(self) -> usize {
        match self.scales {
            Fp8Scales::F32InRow => 128,
            Fp8Scales::E8m0BehindPage { .. } => 64,
            Fp8Scales::F32BehindPage { .. } => self.codes.next_power_of_two(),
        }
    }

    /// Rows that lie together with their scales.
    pub fn page_rows(self) -> usize {
        match self.scales {
            Fp8Scales::F32InRow => 1,
            Fp8Scales::E8m0BehindPage { page_rows } | Fp8Scales::F32BehindPage { page_rows } => page_rows,
        }
    }

    /// Words of 4 bytes of a page of [`Self::page_rows`].
    pub fn page_words(self) -> usize {
        match self.scales {
            Fp8Scales::F32InRow => self.row_words(),
            Fp8Scales::E8m0BehindPage { page_rows } => {
                (page_rows * (self.row_words() + self.scale_words())).next_multiple_of(self.row_words())
            }
            Fp8Scales::F32BehindPage { page_rows } => page_rows * (self.row_words() + self.scale_words()),
        }
    }

    /// Words from a row of a page to the next.
    pub(crate) fn row_words(self) -> usize {
        self.rope_at() + self.rope / 2
    }

    /// Words from the scales of a row to those of the next, where they lie behind the page.
    pub(crate) fn scale_words(self) -> usize {
        match self.scales {
            Fp8Scales::F32InRow | Fp8Scales::F32BehindPage { .. } => self.codes.div_ceil(self.scaled()),
            Fp8Scales::E8m0BehindPage { .. } => self.codes.div_ceil(self.scaled()).next_multiple_of(8) / 4,
        }
    }

    /// The first word of the rotary channels.
    pub(super) fn rope_at(self) -> usize {
        match self.scales {
            Fp8Scales::F32InRow => self.codes / 4 + self.scale_words(),
            Fp8Scales::E8m0BehindPage { .. } | Fp8Scales::F32BehindPage { .. } => self.codes / 4,
        }
    }

    /// Whether rows are index keys: nothing but codes, all with one scale.
    pub(crate) fn is_index_key(self) -> bool {
        self.rope == 0 && matches!(self.scales, Fp8Scales::F32BehindPage { .. })
    }

    pub(super) fn in_row(self) -> bool {
        self.scales == Fp8Scales::F32InRow
    }

    /// Whether scales are f32, otherwise bytes.
    pub(super) fn is_f32(self) -> bool {
        !matches!(self.scales, Fp8Scales::E8m0BehindPage { .. })
    }

    /// Scales in a word.
    pub(super) fn scales_per_word(self) -> usize {
        if self.is_f32() { 1 } else { 4 }
    }

    /// The least exponent of a scale, with its bias.
    pub(super) fn least_scale(self) -> u32 {
        match self.scales {
            // 2^-13: that of FlashMLA's `tests/quant.py`, which has no quotient below 1e-4.
            Fp8Scales::F32InRow | Fp8Scales::E8m0BehindPage { .. } => 127 - 13,
            // 2^-22, the next power of two above 1e-4 / 448: the publisher's `act_quant` takes no largest number below 1e-4.
            Fp8Scales::F32BehindPage { .. } => 127 - 22,
        }
    }
}

impl RowFormat {
    /// Whether rows of so many channels can be stored so.
    #[cfg(feature = "cuda")]
    pub(crate) fn fits(self, width: usize) -> bool {
        match self {
            Self::Dense => true,
            Self::Fp8(layout) => layout.width() == width,
        }
    }

    /// The widths that vectors must divide, so that each is of one part of a row and has one scale.
    pub(crate) fn parts(self, width: usize) -> [usize; 3] {
        match self {
            Self::Dense => [width; 3],
            Self::Fp8(layout) => [layout.codes, layout.rope, layout.scaled()],
        }
    }
}

/// The first word of a row.
#[cube]
pub(crate) fn row_at(slot: usize, #[comptime] layout: Fp8Layout) -> usize {
    let page_rows = comptime!(layout.page_rows());
    slot / page_rows * comptime!(layout.page_words()) + slot % page_rows * comptime!(layout.row_words())
}

/// The word of a row's scale number `scale`: all of it, or a byte.
#[cube]
pub(crate) fn scale_at(slot: usize, scale: usize, #[comptime] layout: Fp8Layout) -> usize {
    if comptime!(layout.in_row()) {
        row_at(slot, layout) + comptime!(layout.codes / 4) + scale
    } else {
        let page_rows = comptime!(layout.page_rows());
        let in_page = comptime!(page_rows * layout.row_words()) + slot % page_rows * comptime!(layout.scale_words());
        slot / page_rows * comptime!(layout.page_words()) + in_page + scale / comptime!(layout.scales_per_word())
    }
}
