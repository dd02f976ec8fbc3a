//! In which form chunks of new tokens see their keys, where both forms are possible.

use std::cmp::Ordering;

use burn::tensor::Device;
use mla_ops::cache::PagedCache;
use mla_ops::{Determinism, MlaDecodeProblem, Path, RaggedAttentionProblem, explain_path};

use super::mla_config::MlaConfig;

/// Where the keys of a chunk are.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChunkLengths {
    /// New tokens.
    pub(super) new: usize,
    /// Tokens that the cache held before.
    pub(super) past: usize,
}

/// Whether the chunks of a step see all keys in the naive form, with keys and values of every head, those that the cache held before
/// among them; otherwise all in the absorbed form.
///
/// The one whose kernel is of the faster kind: made for the tensor cores of Hopper or Blackwell, for the matrix instructions of any
/// GPU, or for plain arithmetic. Where both are of the same, the form with fewer multiplications. The naive one for prompts that begin
/// in the step, and for long chunks of longer ones: in DeepSeek-V3's sizes from 171 new tokens on, over which the keys and values of
/// those before are as much work as they save.
pub(super) fn is_naive(
    chunks: &[ChunkLengths],
    cache: &PagedCache,
    (config, heads): (&MlaConfig, usize),
    device: &Device,
) -> bool {
    let dtype = cache.config().dtype.into();
    let naive = RaggedAttentionProblem {
        heads,
        kv_heads: heads,
        key_width: config.qk_head_dim(),
        value_width: config.v_head_dim,
        shared_width: config.qk_rope_head_dim,
        dtype,
    };
    let (naive, absorbed) = (explain_path(&naive, device).path, absorbed_path(cache, (config, heads), device));
    match speed(naive).cmp(&speed(absorbed)) {
        Ordering::Equal => saved(chunks, config) >= 0,
        faster => faster.is_gt(),
    }
}

/// Of which kind a kernel is: of a faster one, a higher number.
fn speed(path: Path) -> usize {
    match path {
        Path::Sm90 | Path::Sm100 => 2,
        Path::PortableMma => 1,
        _ => 0,
    }
}

/// What computes attention in the absorbed form.
fn absorbed_path(cache: &PagedCache, (config, heads): (&MlaConfig, usize), device: &Device) -> Path {
    let problem = MlaDecodeProblem {
        batch: 1,
        query_len: 1,
        heads,
        key_width: config.kv_lora_rank + config.qk_rope_head_dim,
        value_width: config.kv_lora_rank,
        page_size: cache.config().page_size,
        dtype: cache.config().dtype.into(),
        rows: cache.config().pools.first().map(|pool| pool.format).unwrap_or_default(),
    };
    explain_path(&problem, device).path
}

/// Whether tokens of a prompt have to be decoded one by one for the bits of each to be its own. In the naive form they are others
/// than in the absorbed one, and kernels may compute another order of sums for other numbers of query tokens; Hopper's does
/// not.
pub(super) fn is_one_by_one(
    cache: &PagedCache,
    sizes: (&MlaConfig, usize),
    determinism: Determinism,
    device: &Device,
) -> bool {
    determinism.is_batch_invariant() && absorbed_path(cache, sizes, device) != Path::Sm90
}

/// Multiplications of a head that the naive form saves.
fn saved(chunks: &[ChunkLengths], config: &MlaConfig) -> i64 {
    let (rank, dr) = (config.kv_lora_rank, config.qk_rope_head_dim);
    let (naive, absorbed) = (config.qk_head_dim() + config.v_head_dim, 2 * rank + dr);
    // Of a token that the cache held before: its keys and values. For a new one they are as many as for its query in the space of the
    // latents and for its values from there.
    let expansion = rank * (config.qk_nope_head_dim + config.v_head_dim);
    let of_chunk = |&ChunkLengths { new, past }: &ChunkLengths| {
        // A query sees half of the new tokens, on average.
        let seen = (new * past + new * new / 2) as i64;
        seen * (absorbed as i64 - naive as i64) - (past * expansion) as i64
    };
    chunks.iter().map(of_chunk).sum()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::DeepseekV3Config;

    #[test]
    fn new_prompts_and_long_chunks_are_naive() {
        let sizes_of_v3 = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/v3-realdims/config.json");
        let config = DeepseekV3Config::read(Path::new(sizes_of_v3)).expect("a config").mla();
        let saved = |new, past| saved(&[ChunkLengths { new, past }], &config);
        assert!(saved(2, 0) > 0 && saved(4096, 0) > 0, "they begin");
        assert!(saved(4, 4096) < 0 && saved(170, 1 << 20) < 0, "few of many");
        assert!(saved(2048, 4096) > 0 && saved(171, 1 << 20) > 0, "many, whatever the past");
    }
}
