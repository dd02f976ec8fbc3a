//! What the words of FP8 rows stand for.

use burn::tensor::DType;

use super::RowFormat;

/// FP8 rows of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fp8Rows {
    /// Channels that are codes.
    pub(crate) codes: usize,
    /// Channels behind them in bf16.
    pub(crate) rope: usize,
    /// The scales of the codes.
    pub(crate) scales: Fp8Scales,
    /// Of the numbers that they are read as.
    pub(crate) dtype: DType,
}

/// What scales are, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fp8Scales {
    /// An f32 for every 128 codes, between those and the rotary channels of the row.
    F32InRow,
    /// A byte for every 64 codes, in a multiple of 8 bytes for a row, behind the rows of the page.
    E8m0BehindPage {
        /// Rows of a page.
        page_rows: usize,
        /// The same as operations see it: 1 where they take each row for a page.
        page_size: usize,
    },
    /// An f32 for all codes of a row, behind the rows of the page.
    F32BehindPage {
        /// Rows of a page.
        page_rows: usize,
        /// As above.
        page_size: usize,
    },
}

impl Fp8Rows {
    /// Channels.
    pub(crate) fn width(self) -> usize {
        self.codes + self.rope
    }

    /// Codes that share a scale.
    pub(crate) fn scaled(self) -> usize {
        match self.scales {
            Fp8Scales::F32InRow => 128,
            Fp8Scales::E8m0BehindPage { .. } => 64,
            Fp8Scales::F32BehindPage { .. } => self.codes,
        }
    }

    /// Words of four bytes of a row, without the scales that lie elsewhere.
    pub(crate) fn row_words(self) -> usize {
        let scales = match self.scales {
            Fp8Scales::F32InRow => self.codes.div_ceil(self.scaled()),
            Fp8Scales::E8m0BehindPage { .. } | Fp8Scales::F32BehindPage { .. } => 0,
        };
        self.codes / 4 + scales + self.rope / 2
    }

    /// Words of a row's scales that lie elsewhere.
    pub(crate) fn scale_words(self) -> usize {
        match self.scales {
            Fp8Scales::F32InRow => 0,
            Fp8Scales::E8m0BehindPage { .. } => self.codes.div_ceil(self.scaled()).next_multiple_of(8) / 4,
            Fp8Scales::F32BehindPage { .. } => 1,
        }
    }

    /// The shape of the words of a pool `[P, S, D]`.
    pub(crate) fn stored(self, [pages, page_size, _]: [usize; 3]) -> [usize; 3] {
        match self.scales {
            Fp8Scales::F32InRow => [pages, page_size, self.row_words()],
            Fp8Scales::E8m0BehindPage { page_rows, .. } | Fp8Scales::F32BehindPage { page_rows, .. } => {
                let rows = pages.saturating_mul(page_size);
                [rows.checked_div(page_rows).unwrap_or(0), 1, self.page_words(page_rows)]
            }
        }
    }

    /// `[P, S, D]` of words of this shape.
    pub(crate) fn dims(self, [pages, rows, _]: [usize; 3]) -> [usize; 3] {
        match self.scales {
            Fp8Scales::F32InRow => [pages, rows, self.width()],
            Fp8Scales::E8m0BehindPage { page_rows, page_size } | Fp8Scales::F32BehindPage { page_rows, page_size } => {
                [pages * page_rows / page_size.max(1), page_size, self.width()]
            }
        }
    }

    /// Words of a page of so many rows, with their scales.
    fn page_words(self, page_rows: usize) -> usize {
        let words = page_rows.saturating_mul(self.row_words() + self.scale_words());
        match self.scales {
            Fp8Scales::F32InRow | Fp8Scales::F32BehindPage { .. } => words,
            Fp8Scales::E8m0BehindPage { .. } => words.checked_next_multiple_of(self.row_words()).unwrap_or(usize::MAX),
        }
    }

    /// The first word of a row, and that of its scales, where those lie elsewhere.
    #[cfg(feature = "flex")]
    pub(crate) fn words_of(self, slot: usize) -> (usize, Option<usize>) {
        match self.scales {
            Fp8Scales::F32InRow => (slot * self.row_words(), None),
            Fp8Scales::E8m0BehindPage { page_rows, .. } | Fp8Scales::F32BehindPage { page_rows, .. } => {
                let (page, row) = (slot / page_rows * self.page_words(page_rows), slot % page_rows);
                let scales = page + page_rows * self.row_words() + row * self.scale_words();
                (page + row * self.row_words(), Some(scales))
            }
        }
    }

    /// The same rows, each of them a page.
    pub(crate) fn with_pages_of_one(self) -> Self {
        let scales = match self.scales {
            Fp8Scales::F32InRow => Fp8Scales::F32InRow,
            Fp8Scales::E8m0BehindPage { page_rows, .. } => Fp8Scales::E8m0BehindPage { page_rows, page_size: 1 },
            Fp8Scales::F32BehindPage { page_rows, .. } => Fp8Scales::F32BehindPage { page_rows, page_size: 1 },
        };
        Self { scales, ..self }
    }

    /// The format of their pool.
    pub(crate) fn format(self) -> RowFormat {
        match self.scales {
            Fp8Scales::F32InRow => RowFormat::Fp8 { rope: self.rope },
            Fp8Scales::E8m0BehindPage { .. } => RowFormat::Fp8E8m0 { rope: self.rope },
            Fp8Scales::F32BehindPage { .. } => RowFormat::Fp8IndexKeys,
        }
    }

    /// As kernels take it.
    #[cfg(feature = "_gpu")]
    pub(crate) fn layout(self) -> mla_kernels::cache_rows::Fp8Layout {
        use mla_kernels::cache_rows::{Fp8Layout, Fp8Scales as Scales};
        let scales = match self.scales {
            Fp8Scales::F32InRow => Scales::F32InRow,
            Fp8Scales::E8m0BehindPage { page_rows, .. } => Scales::E8m0BehindPage { page_rows },
            Fp8Scales::F32BehindPage { page_rows, .. } => Scales::F32BehindPage { page_rows },
        };
        Fp8Layout { codes: self.codes, rope: self.rope, scales }
    }
}
