//! The arguments and sizes of the operation, and what is wrong with them.

use cubecl::ir::AddressType;
use cubecl::prelude::*;
use thiserror::Error;

use super::form::LOAD;
use crate::cache_rows::{CacheArg, RowFormat};
use crate::common::device::DeviceError;
use crate::common::select::Path;

/// Ranks that exist at a time, if that is more than those of one query token: 256 MiB.
const MAX_RANKS: usize = 1 << 26;

/// Arguments of [`launch`](super::launch). Rows are the `batch * query_len` query tokens; E is `elem`.
pub struct LightningIndexArgs {
    /// E `[batch, query_len, heads, width]`.
    pub q: BufferArg,
    /// Rows `[pages, page_size, width]`.
    pub keys: CacheArg,
    /// Page ids i32 `[batch, max_pages]`. Entries past the last key that is seen are not read.
    pub page_table: BufferArg,
    /// W `[batch, query_len, heads]`.
    pub head_weights: BufferArg,
    /// i32 `[batch, query_len]`: a query token sees the keys before this one; taken as within the page table.
    pub visible: BufferArg,
    /// u32 `[score_rows, score_stride]`, for intermediate results.
    pub scores: BufferArg,
    /// u32 `[score_rows, candidate_stride]`, for intermediate results.
    pub candidates: BufferArg,
    /// Query tokens that are scored at a time, at least 1.
    pub score_rows: usize,
    /// i32 `[batch, query_len, k]`, written: the chosen keys, ascending in position, then -1.
    pub indices: BufferArg,
    /// Their sizes.
    pub sizes: LightningIndexSizes,
    /// W: f32, or E.
    pub weights_elem: ElemType,
    /// The factor of the scores.
    pub scale: f32,
    /// Write slots `page * page_size + offset` in place of positions.
    pub slots: bool,
}

/// The sizes of [`LightningIndexArgs`], which decide whether a device can do it.
#[derive(Debug, Clone, Copy)]
pub struct LightningIndexSizes {
    /// Number of sequences.
    pub batch: usize,
    /// Query tokens of each.
    pub query_len: usize,
    /// Index heads, at least 1.
    pub heads: usize,
    /// Channels of a head, at least 1.
    pub width: usize,
    /// Pages of the keys.
    pub pages: usize,
    /// Tokens in a page, a power of two.
    pub page_size: usize,
    /// Columns of the page table.
    pub max_pages: usize,
    /// Keys that are chosen.
    pub k: usize,
    /// f32, f16 or bf16.
    pub elem: ElemType,
    /// How keys are stored: dense, or as codes that all have one scale.
    pub rows: RowFormat,
}

/// Why [`launch`](super::launch) did not launch anything.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LightningIndexError {
    /// The device does not have the element type or the room for a cube.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The scores of one query token do not fit into a buffer.
    #[error("the scores of {keys} keys take a buffer of {needed} bytes, and the largest has {available}")]
    Scores {
        /// What the page table has room for.
        keys: usize,
        /// Bytes.
        needed: usize,
        /// Bytes of the largest buffer.
        available: u64,
    },
    /// The kernel of this path has to know the buffers, and got an alias.
    #[error("no kernel of path {0:?} for aliased buffers")]
    NoKernel(Path),
    /// More slots than 32-bit numbers can count.
    #[error("{0} tokens in the pages, expected at most 2^32 - 1")]
    Slots(usize),
    /// Keys that are not one of the formats.
    #[error("keys of {0:?}, expected dense ones of the width of queries or codes with a scale for each key")]
    Rows(RowFormat),
    /// More than 2^32 elements in a tensor, on a device with 32-bit offsets.
    #[error("`{name}` of {len} elements needs 64-bit offsets, which the device does not have")]
    Offsets {
        /// Which tensor.
        name: &'static str,
        /// Its elements.
        len: usize,
    },
}

impl LightningIndexSizes {
    /// Keys that a sequence has at most. Their number is an i32.
    pub(super) fn max_keys(&self) -> usize {
        self.max_pages.saturating_mul(self.page_size).min(i32::MAX as usize)
    }

    pub(super) fn rows(&self) -> usize {
        self.batch * self.query_len
    }

    pub(super) fn slots(&self) -> usize {
        self.pages.saturating_mul(self.page_size)
    }

    /// Ranks of a query token in the buffer `scores`.
    pub fn score_stride(&self) -> usize {
        self.max_keys().next_multiple_of(LOAD)
    }

    /// Query tokens that should be scored at a time on a device: all, or as many as a buffer of moderate size has room for.
    pub fn score_rows(&self, client: &Client) -> usize {
        let most = MAX_RANKS.min(client.properties().memory.max_page_size as usize / size_of::<u32>());
        (most / self.score_stride().max(1)).clamp(1, self.rows().max(1))
    }

    /// What keys are stored as: elements, or words of 4 bytes.
    pub(super) fn key_len(&self) -> usize {
        match self.rows {
            RowFormat::Dense => self.slots().saturating_mul(self.width),
            RowFormat::Fp8(layout) => self.slots().div_ceil(layout.page_rows()).saturating_mul(layout.page_words()),
        }
    }

    /// 32-bit offsets where they reach: 64-bit ones are slow, and wgpu has none.
    pub(super) fn address_type(&self, client: &Client) -> Result<AddressType, LightningIndexError> {
        let lens = [
            ("q", self.rows() * self.heads * self.width),
            ("keys", self.key_len()),
            ("page_table", self.batch * self.max_pages),
            ("k", self.rows().saturating_mul(self.k)),
        ];
        let (name, len) = lens.into_iter().max_by_key(|(_, len)| *len).unwrap_or(lens[0]);
        let address = AddressType::from_len(len);
        match client.properties().supports_address(address) {
            true => Ok(address),
            false => Err(LightningIndexError::Offsets { name, len }),
        }
    }
}

/// So many cubes, spread over the axes as their limits demand: there may be more than asked for.
pub(super) fn one_each(client: &Client, cubes: usize) -> CubeCount {
    cubecl::calculate_cube_count_elemwise(client, cubes, CubeDim::new_1d(1))
}

/// Keys that a query token sees.
#[cube]
pub(super) fn visible_keys(visible: &[i32], row: usize, max_keys: u32) -> usize {
    min(max(visible[row], 0i32) as u32, max_keys) as usize
}
