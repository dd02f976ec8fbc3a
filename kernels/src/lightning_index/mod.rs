//! The keys that each query token attends to, chosen by their scores with a few small heads.
//!
//! Two kernels. A cube of the first (`plain.rs`) scores a tile of keys for one query token: products of 16 to 64 heads and
//! 64 keys in registers, made from slices of channels in shared memory. It writes no scores but their ranks, numbers of 32
//! bits in the order of the scores.
//!
//! A cube of the second (`top_k.rs`) chooses the `k` greatest of up to 32768 ranks, which it keeps in registers. It finds the
//! rank of the last one that is chosen by counting (`border.rs`): two guesses from a sample, after which so few ranks are left
//! as a rule that counting them is cheap, and halving the interval in which this rank is takes at most 34 counts, whatever
//! the ranks are. A sum over the units then says where each chosen key belongs (`places.rs`). So the result is in ascending
//! order and depends on no order in time.
//!
//! More keys are cut into chunks of consecutive ones, with a cube for each. What they choose are candidates, ranks and
//! positions, from which the same kernel chooses again. That is exact: of the keys in the order of ranks, and of positions
//! where these are equal, one that is among the first `k` of all is among the first `k` of its chunk.
//!
//! A query token that sees at most `k` keys gets all of them, and is not scored. Ranks of some query tokens exist at a time,
//! as many as fit into the buffer that the caller gives.

mod border;
#[cfg(feature = "cuda")]
mod mma;
mod places;
mod plain;
mod select;
mod sums;
mod top_k;

use cubecl::ir::AddressType;
use cubecl::prelude::*;
use thiserror::Error;

use crate::common::device::{DeviceError, check_device};
use crate::common::launch::or_dummy;
use crate::common::select::Available;

/// Ranks that exist at a time, if that is more than those of one query token: 256 MiB.
const MAX_RANKS: usize = 1 << 26;
/// Arguments of [`launch`]. Rows are the `batch * query_len` query tokens; E is `elem`.
pub struct LightningIndexArgs {
    /// E `[batch, query_len, heads, width]`.
    pub q: BufferArg,
    /// E `[pages, page_size, width]`.
    pub keys: BufferArg,
    /// Page ids i32 `[batch, max_pages]`. Entries past the last key that is seen are not read.
    pub page_table: BufferArg,
    /// f32 `[batch, query_len, heads]`.
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
}

/// Why [`launch`] did not launch anything.
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
    /// More slots than 32-bit numbers can count.
    #[error("{0} tokens in the pages, expected at most 2^32 - 1")]
    Slots(usize),
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
    pub(crate) fn max_keys(&self) -> usize {
        self.max_pages.saturating_mul(self.page_size).min(i32::MAX as usize)
    }

    fn rows(&self) -> usize {
        self.batch * self.query_len
    }

    pub(crate) fn slots(&self) -> usize {
        self.pages.saturating_mul(self.page_size)
    }

    /// Ranks of a query token in the buffer `scores`.
    pub fn score_stride(&self) -> usize {
        self.max_keys().next_multiple_of(top_k::LOAD)
    }

    /// Query tokens that should be scored at a time on a device: all, or as many as a buffer of moderate size has room for.
    pub fn score_rows(&self, client: &Client) -> usize {
        let most = MAX_RANKS.min(client.properties().memory.max_page_size as usize / size_of::<u32>());
        (most / self.score_stride().max(1)).clamp(1, self.rows().max(1))
    }

    /// Numbers of a query token in the buffer `candidates`; 0 where no candidates are chosen on a device. Not more than
    /// [`score_stride`](Self::score_stride).
    pub fn candidate_stride(&self, client: &Client) -> usize {
        select::plan(client, self).candidate_stride()
    }

    /// 32-bit offsets where they reach: 64-bit ones are slow, and wgpu has none.
    fn address_type(&self, client: &Client) -> Result<AddressType, LightningIndexError> {
        let lens = [
            ("q", self.rows() * self.heads * self.width),
            ("keys", self.slots().saturating_mul(self.width)),
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

/// The implementations of the scores that a device has for these sizes, the fastest first.
pub fn available(client: &Client, sizes: &LightningIndexSizes) -> Vec<Available> {
    select::TABLE.available(client, sizes)
}

/// Whether [`launch`] would run this on a device. Reads nothing and launches nothing.
///
/// # Errors
/// What [`launch`] would give.
pub fn check(client: &Client, sizes: &LightningIndexSizes) -> Result<(), LightningIndexError> {
    if sizes.rows() == 0 { Ok(()) } else { prepare(client, sizes).map(|_| ()) }
}

/// All checks, and the width of offsets.
fn prepare(client: &Client, sizes: &LightningIndexSizes) -> Result<AddressType, LightningIndexError> {
    check_device(client, sizes.elem, plain::shared_bytes(sizes))?;
    let (needed, available) =
        (sizes.score_stride().saturating_mul(size_of::<u32>()), client.properties().memory.max_page_size);
    if needed as u64 > available {
        return Err(LightningIndexError::Scores { keys: sizes.max_keys(), needed, available });
    }
    if sizes.slots() > u32::MAX as usize {
        return Err(LightningIndexError::Slots(sizes.slots()));
    }
    sizes.address_type(client)
}

/// Writes `indices`: the keys with the `k` greatest scores of each query token.
///
/// # Errors
/// What the device lacks; nothing was launched.
pub fn launch(client: &Client, args: LightningIndexArgs) -> Result<(), LightningIndexError> {
    let sizes = args.sizes;
    if sizes.rows() == 0 || sizes.k == 0 {
        return Ok(());
    }
    let address = prepare(client, &sizes)?;
    let args = LightningIndexArgs {
        keys: or_dummy(client, args.keys, sizes.slots()),
        page_table: or_dummy(client, args.page_table, sizes.max_pages),
        scores: or_dummy(client, args.scores, sizes.score_stride()),
        candidates: or_dummy(client, args.candidates, sizes.candidate_stride(client)),
        ..args
    };
    for first_row in (0..sizes.rows()).step_by(args.score_rows.max(1)) {
        let rows = args.score_rows.max(1).min(sizes.rows() - first_row);
        // Who sees no more than `k` keys is not scored.
        if sizes.max_keys() > sizes.k {
            score_keys(client, &args, address, [first_row, rows]);
        }
        top_k::launch(client, &args, address, first_row, rows);
    }
    Ok(())
}

/// Ranks of the keys of `rows` query tokens, from `first_row` on.
fn score_keys(client: &Client, args: &LightningIndexArgs, address: AddressType, [first_row, rows]: [usize; 2]) {
    match select::TABLE.choose(client, &args.sizes) {
        #[cfg(feature = "cuda")]
        Some((_, select::Form::Mma(form))) => mma::launch(client, args, form, address, [first_row, rows]),
        _ => plain::launch(client, args, address, first_row, rows),
    }
}

/// So many cubes, spread over the axes as their limits demand: there may be more than asked for.
pub(crate) fn one_each(client: &Client, cubes: usize) -> CubeCount {
    cubecl::calculate_cube_count_elemwise(client, cubes, CubeDim::new_1d(1))
}

/// Keys that a query token sees.
#[cube]
pub(crate) fn visible_keys(visible: &[i32], row: usize, max_keys: u32) -> usize {
    min(max(visible[row], 0i32) as u32, max_keys) as usize
}

/// The scores and the selection.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    select::TABLE.offline().into_iter().chain(top_k::offline()).collect()
}
