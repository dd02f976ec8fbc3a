//! The size of a paged cache, and its pools.

use burn::tensor::{DType, FloatDType};

use super::pool::RowFormat;
use crate::MlaError;
use crate::check::Check;
use crate::independent::is_flex;
use crate::limits::bytes_of;
use crate::ops::scratch_bytes;

pub(super) const OP: &str = "PagedCache";

/// The size of a [`PagedCache`](super::PagedCache). None of its numbers may be zero; no pools are a cache of pages
/// alone.
///
/// ```
/// use burn::tensor::FloatDType;
/// use mla_ops::cache::{CacheConfig, PoolConfig};
///
/// // DeepSeek-V3: 61 layers, latents of 512 channels with 64 rotary ones behind each, in bf16.
/// let pools = vec![PoolConfig::per_token(512 + 64); 61];
/// // As many pages as 32 requests of 4,096 tokens fill; with fewer of them not all can be as long.
/// let config = CacheConfig::new(pools, 32, 4096, FloatDType::BF16);
/// assert_eq!(config.bytes()? / (32 * 4096), 70_272); // for each token
/// let config = CacheConfig { num_pages: 1024, ..config };
/// assert_eq!(config.bytes()? / (1024 * 64), 70_272);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheConfig {
    /// The pools, by number. A layer has one or two.
    pub pools: Vec<PoolConfig>,
    /// Pages of each pool (P).
    pub num_pages: usize,
    /// Tokens of a page, a power of two; P times this must fit into an i32.
    pub page_size: usize,
    /// Requests that may live at once (R).
    pub max_requests: usize,
    /// Tokens that a request may have (T).
    pub max_tokens: usize,
    /// Element type of the pools: f32, f16 or bf16.
    pub dtype: FloatDType,
}

/// A pool of a [`PagedCache`](super::PagedCache).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolConfig {
    /// Channels of a row: 576 for MLA (512 latent + 64 rope), 128 for index keys.
    pub width: usize,
    /// Tokens that a row stands for, a divisor of the page size: 1 for latents, more for compressed entries.
    pub tokens_per_row: usize,
    /// How rows are stored.
    pub format: RowFormat,
}

impl PoolConfig {
    /// A dense row for each token.
    pub fn per_token(width: usize) -> Self {
        Self { width, tokens_per_row: 1, format: RowFormat::Dense }
    }

    /// Bytes of a row in a cache of this dtype, with its scales; 0 where the format knows no such rows.
    pub fn row_bytes(&self, dtype: FloatDType) -> usize {
        self.format.row_bytes(self.width, dtype.into())
    }
}

impl CacheConfig {
    /// Pages of 64 tokens, as many as all requests need at their longest.
    pub fn new(pools: Vec<PoolConfig>, max_requests: usize, max_tokens: usize, dtype: FloatDType) -> Self {
        let page_size = 64;
        let num_pages = max_requests.saturating_mul(max_tokens.div_ceil(page_size));
        Self { pools, num_pages, page_size, max_requests, max_tokens, dtype }
    }

    /// The cache can be built on the device of the call.
    pub(super) fn check(&self, check: &Check) -> Result<(), MlaError> {
        let bytes = self.bytes()?;
        check.float_type("dtype", self.dtype.into())?;
        // Of equal pools once: a host is asked for its memory.
        for pool in self.pools.chunk_by(PartialEq::eq).filter_map(|equal| equal.first()) {
            let (dtype, shape) = self.stored(pool)?;
            check.allocation("pools", dtype, shape)?;
        }
        // Of a GPU only the largest buffer is known; the host gives the pools from one memory.
        if is_flex(check.device()) {
            check.allocation("pools", DType::U8, [bytes])?;
        }
        Ok(())
    }

    /// Bytes of all pools.
    ///
    /// # Errors
    /// [`MlaError::Value`] for a size that [`PagedCache::new`](super::PagedCache::new) refuses, or pools of more bytes than can be
    /// addressed.
    pub fn bytes(&self) -> Result<usize, MlaError> {
        self.check_sizes()?;
        let add = |bytes: u128, pool| {
            let (dtype, shape) = self.stored(pool)?;
            Ok::<_, MlaError>(bytes.saturating_add(bytes_of(dtype, shape)))
        };
        let bytes = self.pools.iter().try_fold(0, add)?;
        let wrong = || MlaError::Value {
            op: OP,
            argument: "pools",
            actual: format!("pools of {bytes} bytes"),
            expected: format!("at most {}", isize::MAX),
        };
        isize::try_from(bytes).map(isize::unsigned_abs).map_err(|_| wrong())
    }

    /// Bytes beside the pools that [`lightning_index`](crate::lightning_index) takes during a call on Hopper, at most: index keys in FP8 are
    /// dequantised then, those of one pool at a time. 0 where it does not.
    ///
    /// # Errors
    /// As [`Self::bytes`].
    pub fn index_scratch_bytes(&self) -> Result<usize, MlaError> {
        self.check_sizes()?;
        let keys = self.pools.iter().filter(|pool| pool.format == RowFormat::Fp8IndexKeys);
        let bytes = |pool| scratch_bytes(self.pool_shape(pool), DType::from(self.dtype).size());
        Ok(keys.filter_map(bytes).max().unwrap_or(0))
    }

    fn check_sizes(&self) -> Result<(), MlaError> {
        let sizes = [
            ("num_pages", self.num_pages),
            ("page_size", self.page_size),
            ("max_requests", self.max_requests),
            ("max_tokens", self.max_tokens),
        ];
        for (argument, size) in sizes.into_iter().chain(self.pools.iter().map(|pool| ("pools.width", pool.width))) {
            if size == 0 || size > i32::MAX as usize {
                let expected = format!("1 to {}", i32::MAX);
                return Err(wrong_value(argument, size, expected));
            }
        }
        if !self.page_size.is_power_of_two() {
            let expected = "a power of two".to_string();
            return Err(wrong_value("page_size", self.page_size, expected));
        }
        let divides = |rows: usize| rows > 0 && self.page_size.is_multiple_of(rows);
        if let Some(pool) = self.pools.iter().find(|pool| !divides(pool.tokens_per_row)) {
            let expected = format!("a divisor of the page size, {}", self.page_size);
            return Err(wrong_value("pools.tokens_per_row", pool.tokens_per_row, expected));
        }
        let slots = self.num_pages.saturating_mul(self.page_size);
        if slots > i32::MAX as usize {
            let expected = format!("at most {} (slots are i32)", i32::MAX);
            return Err(wrong_value("num_pages * page_size", slots, expected));
        }
        Ok(())
    }

    pub(super) fn pool_shape(&self, pool: &PoolConfig) -> [usize; 3] {
        [self.num_pages, self.page_size / pool.tokens_per_row, pool.width]
    }

    /// What a pool is stored as, and the shape of that.
    fn stored(&self, pool: &PoolConfig) -> Result<(DType, [usize; 3]), MlaError> {
        pool.format.stored(OP, self.pool_shape(pool), self.dtype.into())
    }

    /// Of all pools together.
    pub(super) fn bytes_per_page(&self) -> usize {
        let bytes = |pool: &PoolConfig| {
            let [_, page_size, width] = self.pool_shape(pool);
            let stored = pool.format.stored(OP, [1, page_size, width], self.dtype.into());
            stored.map_or(0, |(dtype, shape)| bytes_of(dtype, shape))
        };
        self.pools.iter().map(bytes).sum::<u128>().try_into().unwrap_or(usize::MAX)
    }
}

pub(super) fn wrong_value(argument: &'static str, actual: usize, expected: String) -> MlaError {
    MlaError::Value { op: OP, argument, actual: actual.to_string(), expected }
}
