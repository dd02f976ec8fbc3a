//! How the rows of a pool are stored.

use burn::tensor::DType;

use super::fp8::{Fp8Rows, Fp8Scales};
use crate::MlaError;

/// How the rows of a [`Pool`](super::Pool) are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum RowFormat {
    /// One number of the dtype for each channel.
    #[default]
    Dense,
    /// E4M3 codes with an f32 scale, a power of two, for every 128 of them; the last channels in bf16. A row of 512 + 64 channels is that of
    /// FlashMLA (its README, "FP8 KV cache"): 512 bytes of codes, 16 of scales, 128 of rotary channels. Not every device computes with
    /// bf16; this is only stored.
    Fp8 {
        /// The channels in bf16, an even number; the others are a multiple of 4.
        rope: usize,
    },
    /// The same with a byte (E8M0) for every 64 codes as their scale, and the scales of a page's rows behind the rows of the page: those of
    /// FlashMLA for DeepSeek-V4 (its `tests/quant.py`). A row of 448 + 64 channels is 448 bytes of codes and 128 of rotary channels; its
    /// seven scales and a byte that stands for nothing make it 584. A page, of a power of two rows, is as long as a whole number of rows
    /// without scales, 576 bytes.
    Fp8E8m0 {
        /// The channels in bf16, an even number; the others are a multiple of 4.
        rope: usize,
    },
    /// Index keys: E4M3 codes of all channels, a multiple of 4 and at most 512, and an f32 scale for each key. In each page, of a power of
    /// two rows, first the codes of all rows, then their scales: 132 bytes for a key of 128 channels, as DeepGEMM's `fp8_paged_mqa_logits`
    /// reads them (its `tests/test_attention.py`) and vLLM's `indexer_k_quant_and_cache` writes them.
    ///
    /// Scales are written as DeepSeek-V3.2's inference code has them (`act_quant`, with the `scale_fmt` "ue8m0" of its configuration): the
    /// smallest power of two by which no code overflows, of a key whose largest number is taken as 1e-4 at least; 2^-22 is the smallest. So
    /// what a code stands for is exact in bf16, and of the same bits on every device. What is read may have any other scale that is not
    /// negative.
    Fp8IndexKeys,
}

/// Channels of FP8 index keys at most.
const MOST_INDEX_CHANNELS: usize = 512;

impl RowFormat {
    /// What a pool of this shape `[P, S, D]` and dtype is stored as.
    ///
    /// # Errors
    /// [`MlaError::Value`] for rows that the format does not know.
    pub(crate) fn stored(
        self,
        op: &'static str,
        shape: [usize; 3],
        dtype: DType,
    ) -> Result<(DType, [usize; 3]), MlaError> {
        Ok(match self.fp8(op, shape, dtype)? {
            None => (dtype, shape),
            Some(rows) => (DType::I32, rows.stored(shape)),
        })
    }

    pub(super) fn fp8(
        self,
        op: &'static str,
        [_, page_size, width]: [usize; 3],
        dtype: DType,
    ) -> Result<Option<Fp8Rows>, MlaError> {
        let Some((rope, scales)) = self.parts(page_size) else { return Ok(None) };
        let holds = rope < width && rope.is_multiple_of(2) && width.saturating_sub(rope).is_multiple_of(4);
        let wrong =
            |actual, expected: &str| Err(MlaError::Value { op, argument: "format", actual, expected: expected.into() });
        if self == Self::Fp8IndexKeys && !(holds && width <= MOST_INDEX_CHANNELS) {
            return wrong(format!("FP8 index keys of {width} channels"), "a multiple of 4, from 4 to 512");
        }
        if !holds {
            let actual = format!("FP8 rows of {width} channels, {rope} of them rotary");
            return wrong(actual, "an even number of rotary channels, and a multiple of 4 others");
        }
        if scales != Fp8Scales::F32InRow && page_size > 0 && !page_size.is_power_of_two() {
            return wrong(format!("scales behind pages of {page_size} rows"), "pages of a power of two");
        }
        Ok(Some(Fp8Rows { codes: width - rope, rope, scales, dtype }))
    }

    /// Bytes of a row of so many channels with its scales; 0 where the format knows no such rows.
    pub(in crate::cache) fn row_bytes(self, width: usize, dtype: DType) -> usize {
        match self.fp8("RowFormat", [1, 1, width], dtype) {
            Ok(None) => width.saturating_mul(dtype.size()),
            Ok(Some(rows)) => 4 * (rows.row_words() + rows.scale_words()),
            Err(_) => 0,
        }
    }

    /// The rotary channels of FP8 rows, and their scales.
    fn parts(self, page_size: usize) -> Option<(usize, Fp8Scales)> {
        match self {
            Self::Dense => None,
            Self::Fp8 { rope } => Some((rope, Fp8Scales::F32InRow)),
            Self::Fp8E8m0 { rope } => Some((rope, Fp8Scales::E8m0BehindPage { page_rows: page_size, page_size })),
            Self::Fp8IndexKeys => Some((0, Fp8Scales::F32BehindPage { page_rows: page_size, page_size })),
        }
    }

    /// As kernels take it, of rows of so many channels in pages of so many rows.
    #[cfg(feature = "_gpu")]
    pub(crate) fn kernel(self, page_size: usize, width: usize) -> mla_kernels::cache_rows::RowFormat {
        use mla_kernels::cache_rows::RowFormat;
        match self.parts(page_size) {
            None => RowFormat::Dense,
            Some((rope, scales)) => {
                let rows = Fp8Rows { codes: width.saturating_sub(rope), rope, scales, dtype: DType::F32 };
                RowFormat::Fp8(rows.layout())
            }
        }
    }
}
