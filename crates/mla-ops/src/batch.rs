//! What a step of a model needs besides weights: where the tokens of a ragged batch are, in which slots, and where each sequence
//! begins. All on the host, in whole numbers; [`index_tensor`] takes them to a device.
//!
//! The tokens of a sequence are a range of its positions: new ones `past..past + new`, all that it has `0..len`. The ranges of a
//! batch stand one after the other, without padding, as the rows of a ragged batch do.
//!
//! ```
//! use mla_ops::batch::{cu_seqlens, positions, slots};
//!
//! // Two prompts: one of 3 tokens, and 2 more tokens of one that has 4 already. Pages of 4 tokens.
//! let (new, pages) = ([0..3, 4..6], [&[7][..], &[2, 5]]);
//! assert_eq!(positions(&new)?, [0, 1, 2, 4, 5]);
//! assert_eq!(slots(&new, &pages, 4)?, [28, 29, 30, 20, 21]); // page * 4 + offset
//! assert_eq!(cu_seqlens(&[3, 2])?, [0, 3, 5]);
//! # Ok::<(), mla_ops::MlaError>(())
//! ```

use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::MlaError;

/// Positions, slots and sums are i32 on a device.
const MOST: usize = i32::MAX as usize;

/// i32 `[n]` on a device: the type of all index tensors of the operations, whatever the device's default for integers is.
///
/// ```
/// use burn::tensor::{DType, Device};
/// use mla_ops::batch::index_tensor;
///
/// let seq_lens = index_tensor(vec![5, 3], &Device::flex());
/// assert_eq!((seq_lens.dims(), seq_lens.dtype()), ([2], DType::I32));
/// ```
pub fn index_tensor(values: Vec<i32>, device: &Device) -> Tensor<1, Int> {
    let shape = [values.len()];
    Tensor::from_data(TensorData::new(values, shape), (device, DType::I32))
}

/// Positions of the tokens of a ragged batch, one sequence after the other: what RoPE turns them by
/// ([`RopeConfig::tables`](crate::RopeConfig::tables)).
///
/// ```
/// use mla_ops::batch::positions;
///
/// assert_eq!(positions(&[0..2, 9..10])?, [0, 1, 9]);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// [`MlaError::Value`] for a range that ends before it begins, or more than i32 counts.
pub fn positions(tokens: &[Range<usize>]) -> Result<Vec<usize>, MlaError> {
    let count = checked_count("positions", tokens)?;
    let mut positions = Vec::with_capacity(count);
    positions.extend(tokens.iter().flat_map(Range::clone));
    Ok(positions)
}

/// Slots of the tokens of a ragged batch, `page * page_size + offset`, one sequence after the other: where
/// [`write_latent`](crate::write_latent) and [`rope_write`](crate::rope_write) put their rows, or where the rows of cached tokens are.
///
/// `pages` has the page ids of each sequence, in the order of its tokens: [`PagedCache::pages`](crate::cache::PagedCache::pages), or
/// a page table of one's own.
///
/// ```
/// use mla_ops::batch::slots;
///
/// // One more token of a sequence with 5, and of one with 8: pages of 4 tokens.
/// assert_eq!(slots(&[5..6, 8..9], &[&[3, 0][..], &[1, 6, 2]], 4)?, [1, 8]);
/// // The second sequence has no page for it.
/// let error = slots(&[5..6, 8..9], &[&[3, 0][..], &[1, 6]], 4).unwrap_err();
/// assert_eq!(error.to_string(), "slots: `pages` is 2 pages of sequence 1, expected 3, for the tokens 8..9 in pages of 4");
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// [`MlaError::Value`] for a page size that is no power of two, another number of sequences in `pages`, a sequence with too few
/// pages, a slot or a number of tokens that i32 does not count, a range that ends before it begins.
pub fn slots(tokens: &[Range<usize>], pages: &[&[u32]], page_size: usize) -> Result<Vec<i32>, MlaError> {
    const OP: &str = "slots";
    let count = checked_count(OP, tokens)?;
    if !(page_size.is_power_of_two() && page_size <= MOST) {
        return Err(wrong(OP, "page_size", page_size, "a power of two that fits in an i32"));
    }
    if pages.len() != tokens.len() {
        let actual = format!("the pages of {} sequences", pages.len());
        return Err(wrong(OP, "pages", actual, format!("those of {}, as in `tokens`", tokens.len())));
    }
    let mut slots = Vec::with_capacity(count);
    for (sequence, (tokens, pages)) in tokens.iter().zip(pages).enumerate() {
        let needed = if tokens.is_empty() { 0 } else { tokens.end.div_ceil(page_size) };
        if pages.len() < needed {
            let actual = format!("{} pages of sequence {sequence}", pages.len());
            return Err(wrong(
                OP,
                "pages",
                actual,
                format!("{needed}, for the tokens {tokens:?} in pages of {page_size}"),
            ));
        }
        for position in tokens.clone() {
            let page = pages[position / page_size];
            let slot = u64::from(page) * page_size as u64 + (position % page_size) as u64;
            let slot = i32::try_from(slot).map_err(|_| {
                let expected = format!("a page whose slots, {page_size} each, are i32");
                wrong(OP, "pages", format!("page {page} in sequence {sequence}"), expected)
            })?;
            slots.push(slot);
        }
    }
    Ok(slots)
}

/// Where each sequence of a ragged batch begins, `B + 1` numbers from 0 to the sum of `lens`: the `cu_seqlens` of
/// [`ragged_attention`](crate::ragged_attention), once [`index_tensor`] has taken them to a device.
///
/// ```
/// use mla_ops::batch::cu_seqlens;
///
/// assert_eq!(cu_seqlens(&[4, 0, 2])?, [0, 4, 4, 6]);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// [`MlaError::Value`] for a sum that i32 does not count.
pub fn cu_seqlens(lens: &[usize]) -> Result<Vec<i32>, MlaError> {
    let mut sums = Vec::with_capacity(lens.len() + 1);
    let mut sum = 0_i32;
    sums.push(sum);
    for &len in lens {
        let next = i32::try_from(len).ok().and_then(|len| sum.checked_add(len));
        let too_many =
            || wrong("cu_seqlens", "lens", format!("{sum} and {len} tokens"), format!("at most {MOST} in all"));
        sum = next.ok_or_else(too_many)?;
        sums.push(sum);
    }
    Ok(sums)
}

/// How many tokens there are; all positions are i32.
fn checked_count(op: &'static str, tokens: &[Range<usize>]) -> Result<usize, MlaError> {
    let mut count = 0_usize;
    for range in tokens {
        if range.start > range.end || range.end > MOST {
            return Err(wrong(
                op,
                "tokens",
                format!("{range:?}"),
                format!("positions in ascending order, up to {MOST}"),
            ));
        }
        count = count.saturating_add(range.len());
    }
    match count <= MOST {
        true => Ok(count),
        false => Err(wrong(op, "tokens", format!("{count} tokens"), format!("at most {MOST} in all"))),
    }
}

fn wrong(op: &'static str, argument: &'static str, actual: impl ToString, expected: impl ToString) -> MlaError {
    MlaError::Value { op, argument, actual: actual.to_string(), expected: expected.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every page size and cut, against loops over single tokens.
    #[test]
    fn slots_and_positions_are_those_of_single_tokens() {
        let pages: [&[u32]; 3] = [&[9, 0, 4, 7, 3, 12, 5, 1], &[], &[2, 11, 6]];
        for page_size in [1, 2, 8] {
            for (first, last) in [(0..0, 0..1), (0..1, 1..3), (3..7, 2..2), (1..8, 0..3)] {
                let tokens = [first, 5..5, last];
                let (mut at, mut places) = (Vec::new(), Vec::new());
                for (range, pages) in tokens.iter().zip(pages) {
                    let mut position = range.start;
                    while position < range.end {
                        at.push(position);
                        places.push(
                            pages[position / page_size] as i32 * page_size as i32 + (position % page_size) as i32,
                        );
                        position += 1;
                    }
                }
                assert_eq!(positions(&tokens).unwrap(), at);
                assert_eq!(slots(&tokens, &pages, page_size).unwrap(), places, "{tokens:?}, {page_size}");
            }
        }
        assert_eq!((positions(&[]).unwrap(), slots(&[], &[], 4).unwrap()), (vec![], vec![]));
    }

    #[test]
    fn sums_are_those_before_each() {
        let lens = [3, 0, 1, 127, 64];
        let expected: Vec<i32> = (0..=lens.len()).map(|end| lens[..end].iter().sum::<usize>() as i32).collect();
        assert_eq!(cu_seqlens(&lens).unwrap(), expected);
        assert_eq!(cu_seqlens(&[]).unwrap(), [0]);
        assert_eq!(cu_seqlens(&[MOST, 0]).unwrap(), [0, i32::MAX, i32::MAX]);
    }

    #[test]
    #[allow(clippy::reversed_empty_ranges, clippy::single_range_in_vec_init, reason = "they are refused")]
    fn what_i32_does_not_count_is_refused_by_name() {
        let named = |error: MlaError| match error {
            MlaError::Value { op, argument, .. } => (op, argument),
            other => panic!("{other}"),
        };
        assert_eq!(named(cu_seqlens(&[MOST, 1]).unwrap_err()), ("cu_seqlens", "lens"));
        assert_eq!(named(cu_seqlens(&[usize::MAX]).unwrap_err()), ("cu_seqlens", "lens"));
        assert_eq!(named(positions(&[3..2]).unwrap_err()), ("positions", "tokens"));
        assert_eq!(named(positions(&[0..usize::MAX]).unwrap_err()), ("positions", "tokens"));
        assert_eq!(named(positions(&[0..MOST, 0..1]).unwrap_err()), ("positions", "tokens"));
        assert_eq!(named(slots(&[0..1], &[&[0]], 3).unwrap_err()), ("slots", "page_size"));
        assert_eq!(named(slots(&[0..1], &[&[0]], 0).unwrap_err()), ("slots", "page_size"));
        assert_eq!(named(slots(&[0..1], &[], 4).unwrap_err()), ("slots", "pages"));
        assert_eq!(named(slots(&[0..5], &[&[0]], 4).unwrap_err()), ("slots", "pages"));
        assert_eq!(named(slots(&[0..1], &[&[u32::MAX]], 1 << 30).unwrap_err()), ("slots", "pages"));
        assert_eq!(slots(&[1..2], &[&[1 << 29]], 2).unwrap(), [(1 << 30) + 1]);
    }
}
