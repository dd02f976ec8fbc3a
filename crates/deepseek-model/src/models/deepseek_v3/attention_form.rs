//! In which form chunks of new tokens see their keys, where both forms are possible.

use burn::tensor::Device;
use mla_ops::cache::PagedCache;
use mla_ops::{Determinism, MlaDecodeProblem, Path, RaggedAttentionProblem, explain_path};

use super::config::DeepseekV3Config;

/// Where the keys of a chunk are.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChunkLengths {
    /// New tokens.
    pub(super) new: usize,
    /// Tokens that the cache held before.
    pub(super) past: usize,
}

/// Whether the chunks of a step see each other in the naive form, and what the cache held before in the absorbed form; otherwise
/// all keys in the absorbed form.
///
/// The form with fewer multiplications, where both run on tensor cores: the naive one for all prompts that begin in the step,
/// and for long chunks of longer ones (in DeepSeek-V3's sizes from 341 new tokens on, of which keys and values of every head are
/// as much work as they save). Where only one does, that one. Elsewhere the naive form, which has less to do.
pub(super) fn is_naive(
    chunks: &[ChunkLengths],
    cache: &PagedCache,
    (config, heads): (&DeepseekV3Config, usize),
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
    let is_fast = |path| matches!(path, Path::Sm90 | Path::Sm100);
    match (is_fast(explain_path(&naive, device).path), is_fast(absorbed_path(cache, (config, heads), device))) {
        (true, true) => saved(chunks, config) >= 0,
        (naive, absorbed) => naive || !absorbed,
    }
}

/// What computes attention in the absorbed form.
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

/// Multiplications of a head that the naive form saves.
fn saved(chunks: &[ChunkLengths], config: &DeepseekV3Config) -> i64 {
    let (rank, dr) = (config.kv_lora_rank, config.qk_rope_head_dim);
    let (naive, absorbed) = (config.qk_head_dim() + config.v_head_dim, 2 * rank + dr);
    // Of a token: its keys and values; or its query in the latents' space, and its values from there. The same number.
    let projections = rank * (config.qk_nope_head_dim + config.v_head_dim);
    let of_chunk = |&ChunkLengths { new, past }: &ChunkLengths| {
        // A query sees half of the new tokens, on average.
        let attention = (new * new / 2) as i64 * (absorbed as i64 - naive as i64);
        // With a past, both projections.
        if past > 0 { attention - (new * projections) as i64 } else { attention }
    };
    chunks.iter().map(of_chunk).sum()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn new_prompts_and_long_chunks_are_naive() {
        let sizes_of_v3 = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/v3-realdims/config.json");
        let config = DeepseekV3Config::read(Path::new(sizes_of_v3)).expect("a config");
        let saved = |new, past| saved(&[ChunkLengths { new, past }], &config);
        assert!(saved(2, 0) > 0 && saved(4096, 0) > 0, "they begin");
        assert!(saved(4, 4096) < 0 && saved(256, 1) < 0, "few of many");
        assert!(saved(2048, 4096) > 0 && saved(512, 1 << 20) > 0, "many, whatever the past");
    }
}
