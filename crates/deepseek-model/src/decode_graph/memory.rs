//! What captured steps take.

use super::buckets::MAX_GRAPHS;
use crate::cache::CacheSize;

/// Device memory that captured steps take at most, in bytes, as far as sizes tell: a graph keeps the pages of memory that its step
/// ran in, and no one else gets any of them. The largest graphs that may be kept at a time count.
pub(crate) fn captured_bytes(vocab_size: usize, size: CacheSize) -> u128 {
    let buckets = |most: usize| (0..=most.max(1).next_power_of_two().ilog2()).rev();
    let pages = buckets(size.max_tokens.div_ceil(size.page_size.max(1))).count();
    let of_batch = |log: u32| std::iter::repeat_n(step_bytes(vocab_size.saturating_mul(1 << log)), pages);
    buckets(size.max_requests).flat_map(of_batch).take(MAX_GRAPHS).sum()
}

/// Bytes of the memory of a step with so many logits. CubeCL has buffers of at most 64 KiB in pages of their own of 8 MiB, of which
/// it takes one; of the others, four as large as the largest: logits, or the partial results of split attention, which grow with
/// the multiprocessors.
pub(super) fn step_bytes(logits: usize) -> u128 {
    (8 << 20) + 4 * (logits as u128 * size_of::<f32>() as u128).max(16 << 20)
}
