//! Attention of each query token over rows that are named one by one, in one launch where a device has a kernel for it.
//!
//! A query token has one or two lists of slots, each into rows of its own. A tile is 64 heads of a token, a block 64 entries of a
//! list: those of the first list come first, and no block has entries of both. Where there are fewer tiles than multiprocessors,
//! the blocks of a tile are split among cubes, and a second launch merges what they have, or on Hopper they themselves as a cluster.

#[cfg(feature = "cuda")]
mod codes;
#[cfg(feature = "cuda")]
mod ends;
#[cfg(feature = "cuda")]
mod form;
#[cfg(feature = "cuda")]
mod launch;
#[cfg(feature = "cuda")]
mod merge;
mod select;
#[cfg(feature = "cuda")]
mod sm100;
#[cfg(feature = "cuda")]
mod sm90;
#[cfg(feature = "cuda")]
mod work;

use cubecl::prelude::*;
use thiserror::Error;

#[cfg(feature = "cuda")]
use self::launch::Kernel;
#[cfg(feature = "cuda")]
use self::select::Pairs;
use crate::cache_rows::{CacheArg, RowFormat};
use crate::common::select::Available;
#[cfg(feature = "cuda")]
use crate::common::select::Path;

/// Rows, and which of them each query token sees.
pub struct ScopeArgs {
    /// `[rows, D]`: keys, of which the first channels are the value.
    pub rows: CacheArg,
    /// i32 `[N, K]`: rows, or negative for none.
    pub slots: BufferArg,
    /// i32 `[N]`: only so many entries of a list count. Absent: all.
    pub lengths: Option<BufferArg>,
    /// How many rows there are.
    pub row_count: usize,
    /// K.
    pub most: usize,
}

/// Arguments of [`launch`]. N query tokens, H heads, E is `elem`; buffers start at a multiple of 16 bytes.
pub struct SparseMlaArgs {
    /// E `[N, H, D]`.
    pub q: BufferArg,
    /// What it sees.
    pub first: ScopeArgs,
    /// More that it sees.
    pub second: Option<ScopeArgs>,
    /// Where `first` is pages and not slots. They need a plan.
    pub pages: Option<Pages>,
    /// How the blocks are divided. Without it each query token has as many splits as the others, or none.
    pub plan: Option<SparsePlan>,
    /// What is wanted of it.
    pub results: SparseMlaResults,
    /// Their sizes.
    pub sizes: SparseMlaSizes,
    /// The factor of the scores.
    pub softmax_scale: f32,
    /// Whether the bits of a token must not depend on how many there are: its blocks are not split then, unless a plan says so.
    pub batch_invariant: bool,
}

/// The keys of a sequence one after the other, for each of its query tokens: `slots` of the first scope are then page ids
/// i32 `[N / query_len, most / page_size]`, `lengths` the keys of each sequence. There is no second scope.
pub struct Pages {
    /// Query tokens of a sequence.
    pub query_len: usize,
    /// Keys of a page, a power of two.
    pub page_size: usize,
    /// Query token `i` sees the keys `j <= length - query_len + i`; otherwise all.
    pub causal: bool,
}

/// What [`mla_plan`](crate::mla_plan) made of the sequences, or of query tokens, whose keys are the entries of their lists in whole
/// blocks: tiles of 64 keys. B is the number of those.
pub struct SparsePlan {
    /// i32 `[capacity, 4]`.
    pub items: BufferArg,
    /// i32 `[cubes + 1]`.
    pub cube_ptr: BufferArg,
    /// i32 `[B + 1]`.
    pub split_ptr: BufferArg,
    /// Cubes of the plan.
    pub cubes: usize,
    /// Rows of `items`.
    pub capacity: usize,
    /// Where the results of items go of which a sequence has several, if who calls merges them.
    pub partials: Option<Partials>,
}

/// Results of items, for n query tokens each.
pub struct Partials {
    /// f32 `[capacity, n * H, Dv]`, written: normalised by its own sum.
    pub out: BufferArg,
    /// f32 `[capacity, n * H]`, written: the natural logarithm of the sum.
    pub lse: BufferArg,
}

/// What [`launch`] writes.
pub enum SparseMlaResults {
    /// The mean of the values.
    Output {
        /// E `[N, H, Dv]`, written; 0 where a token sees no row.
        out: BufferArg,
        /// f32 `[N, H]`, written: the natural logarithm of the sum, without the sink; -inf where a token sees no row.
        lse: BufferArg,
        /// f32 `[H]`: the logarithm of what joins the denominator of each head.
        sink: Option<BufferArg>,
    },
    /// The sums before they are divided. The blocks of a tile are not split.
    Parts {
        /// f32 `[N, H, Dv]`, written: the sum of `exp(score - max) * value`.
        acc: BufferArg,
        /// f32 `[N, H]`, written: the largest score; -inf where a token sees no row.
        max: BufferArg,
        /// f32 `[N, H]`, written: the sum of `exp(score - max)`.
        row_sum: BufferArg,
    },
}

/// The sizes that decide whether a device has a kernel.
#[derive(Debug, Clone, Copy)]
pub struct SparseMlaSizes {
    /// N: query tokens.
    pub tokens: usize,
    /// H.
    pub heads: usize,
    /// D: channels of a row.
    pub key_width: usize,
    /// Dv: its leading channels that are the value.
    pub value_width: usize,
    /// f32, f16 or bf16.
    pub elem: ElemType,
    /// How the rows are stored.
    pub rows: RowFormat,
    /// How those of the second scope are stored, if there is one.
    pub second_rows: Option<RowFormat>,
}

/// Why nothing is launched.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SparseMlaError {
    /// The device has no kernel for this: see [`available`].
    #[error("the device has no kernel that attends to rows named one by one with these sizes and elements")]
    NoKernel,
}

/// The kernels that the device has for it, the fastest first; there may be none.
pub fn available(client: &Client, sizes: &SparseMlaSizes) -> Vec<Available> {
    select::TABLE.available(client, sizes)
}

/// Writes the results. Without tokens or heads nothing is launched.
///
/// # Errors
/// [`SparseMlaError`]: nothing has been launched.
pub fn launch(client: &Client, args: SparseMlaArgs) -> Result<(), SparseMlaError> {
    if args.sizes.tokens * args.sizes.heads == 0 {
        return Ok(());
    }
    match select::TABLE.choose(client, &args.sizes) {
        #[cfg(feature = "cuda")]
        Some((Path::Sm100, tile)) => {
            launch::launch(client, args, tile, Kernel { launch: sm100::launch, pairs: Pairs::OfManyHeads })
        }
        #[cfg(feature = "cuda")]
        Some((Path::Sm90, tile)) => {
            launch::launch(client, args, tile, Kernel { launch: sm90::launch, pairs: Pairs::OfFp8Rows })
        }
        _ => Err(SparseMlaError::NoKernel),
    }
}

/// The kernels of all paths.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    let mut entries = select::TABLE.offline();
    entries.extend(merge::offline());
    entries
}
