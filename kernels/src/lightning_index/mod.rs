//! The keys that each query token attends to, chosen by their scores with a few small heads.
//!
//! Two kernels. A cube of the first (`plain.rs`) scores a tile of keys for one query token: products of 16 to 64 heads and
//! 64 keys in registers, made from slices of channels in shared memory. It writes no scores but their ranks, numbers of 32
//! bits in the order of the scores. `mma.rs` and `sm90` do the same with matrix instructions, the latter for several query tokens
//! of a sequence.
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
//! Keys are dense, or codes of FP8 with a scale for each key ([`cache_rows`](crate::cache_rows)). A scale is not negative, so that it
//! passes `relu`: codes are multiplied as the numbers that they are, exact in every dtype, and the sum of a key by its scale. Of scales
//! that are powers of two that is the score of the dequantised key, to the bit.
//!
//! A query token that sees at most `k` keys gets all of them, and is not scored. Ranks of some query tokens exist at a time,
//! as many as fit into the buffer that the caller gives.

mod border;
mod form;
#[cfg(feature = "cuda")]
mod mma;
mod places;
mod plain;
mod problem;
mod select;
#[cfg(feature = "cuda")]
mod sm90;
mod sums;
mod top_k;

use cubecl::ir::AddressType;
use cubecl::prelude::*;

pub use self::problem::{LightningIndexArgs, LightningIndexError, LightningIndexSizes};
use crate::cache_rows::RowFormat;
use crate::common::device::check_device;
use crate::common::launch::or_dummy;
use crate::common::select::Available;
use crate::compiler::names_all_sizes;

impl LightningIndexSizes {
    /// Numbers of a query token in the buffer `candidates`; 0 where no candidates are chosen on a device. Not more than
    /// [`score_stride`](Self::score_stride).
    pub fn candidate_stride(&self, client: &Client) -> usize {
        select::plan(client, self).candidate_stride()
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
    if let RowFormat::Fp8(layout) = sizes.rows
        && !(layout.is_index_key() && layout.width() == sizes.width && layout.page_rows() == sizes.page_size)
    {
        return Err(LightningIndexError::Rows(sizes.rows));
    }
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
        page_table: or_dummy(client, args.page_table, sizes.max_pages),
        scores: or_dummy(client, args.scores, sizes.score_stride()),
        candidates: or_dummy(client, args.candidates, sizes.candidate_stride(client)),
        ..args
    };
    for first_row in (0..sizes.rows()).step_by(args.score_rows.max(1)) {
        let rows = args.score_rows.max(1).min(sizes.rows() - first_row);
        // Who sees no more than `k` keys is not scored.
        if sizes.max_keys() <= sizes.k || !score_keys(client, &args, address, [first_row, rows])? {
            top_k::launch(client, &args, address, first_row, rows);
        }
    }
    Ok(())
}

/// Ranks of the keys of `rows` query tokens, from `first_row` on, and whether the keys are chosen, too.
fn score_keys(
    client: &Client,
    args: &LightningIndexArgs,
    address: AddressType,
    [first_row, rows]: [usize; 2],
) -> Result<bool, LightningIndexError> {
    let sizes = &args.sizes;
    // The numbers of query tokens of other steps.
    let others = if names_all_sizes() { &select::QUERY_LENS[..] } else { &[] };
    let mut are_chosen = false;
    for query_len in others.iter().copied().chain([sizes.query_len]) {
        are_chosen = false;
        match select::TABLE.choose(client, &LightningIndexSizes { query_len, ..*sizes }) {
            #[cfg(feature = "cuda")]
            Some((_, select::Form::Sm90(form))) => sm90::launch(client, args, form, address, [first_row, rows])?,
            #[cfg(feature = "cuda")]
            Some((_, select::Form::Mma(form))) => {
                are_chosen = mma::launch(client, args, form, address, [first_row, rows]);
            }
            _ => plain::launch(client, args, address, first_row, rows),
        }
    }
    // Of another number of tokens they may not be.
    Ok(are_chosen && !names_all_sizes())
}

/// The scores and the selection.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    select::TABLE.offline().into_iter().chain(top_k::offline()).collect()
}
