//! In which form chunks of new tokens see their keys.

use burn::tensor::Device;
use mla_ops::cache::PagedCache;
use mla_ops::{Determinism, MlaDecodeProblem, Path, explain_path};

use super::config::DeepseekV3Config;

/// Whether the chunks of a step see each other in the naive form, and what the cache held before in the absorbed form; otherwise
/// they see all keys in the absorbed form.
///
/// The absorbed one has 3.4 times the arithmetic of the naive one in DeepSeek-V3's sizes, but runs on the tensor cores of Hopper and
/// Blackwell, and keys and values of every head need not be computed.
pub(super) fn is_naive(cache: &PagedCache, sizes: (&DeepseekV3Config, usize), device: &Device) -> bool {
    !matches!(absorbed_path(cache, sizes, device), Path::Sm90 | Path::Sm100)
}

/// Whether tokens of a prompt have to be decoded one by one for the bits of each to be its own. In the naive form they are others
/// than in the absorbed one, and kernels may compute another order of sums for other numbers of query tokens; Hopper's does
/// not.
pub(super) fn is_one_by_one(
    cache: &PagedCache,
    sizes: (&DeepseekV3Config, usize),
    determinism: Determinism,
    device: &Device,
) -> bool {
    determinism.is_batch_invariant() && absorbed_path(cache, sizes, device) != Path::Sm90
}

/// What computes attention in the absorbed form, of the heads of a rank.
fn absorbed_path(cache: &PagedCache, (config, heads): (&DeepseekV3Config, usize), device: &Device) -> Path {
    let problem = MlaDecodeProblem {
        batch: 1,
        query_len: 1,
        heads,
        key_width: config.kv_lora_rank + config.qk_rope_head_dim,
        value_width: config.kv_lora_rank,
        page_size: cache.config().page_size,
        dtype: cache.config().dtype.into(),
    };
    explain_path(&problem, device).path
}
