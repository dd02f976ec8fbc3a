//! Prefill: chunks of new tokens see their keys in the naive form, with keys and values of every head, or in the absorbed form;
//! `attention_form.rs` says when.

use burn::tensor::{Int, Tensor, s};
use mla_ops::cache::PagedCache;
use mla_ops::{MergeStateArgs, RaggedAttentionArgs, RaggedAttentionOptions, merge_state, ragged_attention};

use super::MultiHeadLatentAttention;
use crate::Result;
use crate::models::deepseek_v3::keys::{CachedKeys, ChunkKeys, NewKeys};
use crate::models::deepseek_v3::step::MlaStep;

impl MultiHeadLatentAttention {
    /// Attention of chunks of new tokens over their keys: parts of out `[N, H, dv]`, in order.
    pub(super) fn prefill_attention(
        &self,
        q: Tensor<3>,
        latent: Tensor<2>,
        keys: &NewKeys,
        step: &MlaStep,
        cache: &PagedCache,
    ) -> Result<Vec<Tensor<3>>> {
        match keys {
            NewKeys::Naive { cu_seqlens, last, before } => {
                let latent = last.as_ref().map_or(Ok(latent), |keys| self.cached(keys, cache))?;
                let cu_seqlens_k = last.as_ref().map(|keys| keys.cu_seqlens.clone());
                let mut state = self.naive((&q, cu_seqlens), (latent, cu_seqlens_k), true, step)?;
                for keys in before {
                    let cached = (self.cached(keys, cache)?, Some(keys.cu_seqlens.clone()));
                    let (out_b, lse_b) = self.naive((&q, cu_seqlens), cached, false, step)?;
                    let (out_a, lse_a) = state;
                    state = merge_state(MergeStateArgs { out_a, lse_a, out_b, lse_b })?;
                }
                Ok(vec![state.0])
            }
            NewKeys::Absorbed(chunks) => {
                let attend = |chunk: &ChunkKeys| {
                    let q = q.clone().slice(s![chunk.tokens.clone(), .., ..]);
                    self.decode_attention(self.absorb(q, step)?, &chunk.keys, step, cache)
                };
                chunks.iter().map(attend).collect()
            }
        }
    }

    /// Rows of the cache `[K, R + dr]`.
    fn cached(&self, keys: &CachedKeys, cache: &PagedCache) -> Result<Tensor<2>> {
        Ok(cache.pool(self.pool)?.read(keys.slots.clone()))
    }

    /// Attention of the new tokens over these latents, with keys and values of every head: out `[N, H, dv]`, lse `[N, H]`.
    fn naive(
        &self,
        (q, cu_seqlens): (&Tensor<3>, &Tensor<1, Int>),
        (latent, cu_seqlens_k): (Tensor<2>, Option<Tensor<1, Int>>),
        causal: bool,
        step: &MlaStep,
    ) -> Result<(Tensor<3>, Tensor<2>)> {
        let ([keys, _], dn) = (latent.dims(), self.config.qk_nope_head_dim);
        let k_pe = latent.clone().narrow(1, self.config.kv_lora_rank, self.config.qk_rope_head_dim);
        let latent = latent.narrow(1, 0, self.config.kv_lora_rank);
        let kv = self.kv_b_proj.projection.forward(latent, step.determinism)?;
        // The keys of all heads and their values are views of it.
        let half = |first, width| kv.clone().narrow(1, first, self.heads * width).reshape([keys, self.heads, width]);
        let args = RaggedAttentionArgs {
            q: q.clone(),
            k: half(0, dn),
            k_pe: Some(k_pe),
            v: half(self.heads * dn, self.config.v_head_dim),
            cu_seqlens: cu_seqlens.clone(),
            cu_seqlens_k,
        };
        let options = RaggedAttentionOptions { causal, ..RaggedAttentionOptions::new(self.softmax_scale) };
        Ok(ragged_attention(args, &options)?)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::path::Path;

    use burn::tensor::{Device, FloatDType};
    use mla_ops::Determinism;

    use super::*;
    use crate::cache::CacheSize;
    use crate::models::architecture::Model;
    use crate::models::deepseek_v3::DeepseekV3Config;
    use crate::models::deepseek_v3::keys::Keys;
    use crate::models::deepseek_v3::model::DeepseekV3;
    use crate::step::Chunk;
    use crate::weights::WeightLoader;

    /// Logits of these tokens' requests, behind so many others, with so many numbers of keys and values expanded at once; and how
    /// many blocks of keys there were before the last.
    fn logits(model: &DeepseekV3, prompts: &[(&[u32], usize)], most_expanded: usize) -> (Vec<f32>, usize) {
        let size = CacheSize { num_pages: 64, page_size: 4, max_requests: 3, max_tokens: 100 };
        let mut cache = model.new_cache(size, FloatDType::F32.into()).expect("a cache");
        let cache: &mut PagedCache = cache.get_mut().expect("of this model");
        let ids: Vec<_> = prompts.iter().map(|_| cache.admit().expect("room")).collect();
        let append = |cache: &mut PagedCache, i: usize, tokens: &[u32]| {
            let slots = cache.append(ids[i], tokens.len()).expect("room");
            Chunk { request: ids[i], tokens: tokens.to_vec(), slots }
        };
        for (i, &(tokens, past)) in prompts.iter().enumerate().filter(|(_, (_, past))| *past > 0) {
            let step = model.step(&[append(cache, i, &tokens[..past])], cache, Determinism::Fast).expect("a step");
            model.forward(&step, cache, None).expect("hidden states");
        }
        let new = prompts.iter().enumerate();
        let chunks: Vec<Chunk> = new.map(|(i, &(tokens, past))| append(cache, i, &tokens[past..])).collect();
        let mut step = model.step(&chunks, cache, Determinism::Fast).expect("a step");
        let sizes = (&model.mla, model.heads(), Determinism::Fast);
        let keys = NewKeys::new(&chunks, cache, sizes, most_expanded, &model.device).expect("keys");
        let NewKeys::Naive { before, .. } = &keys else { panic!("{keys:?}") };
        let blocks = before.len();
        step.keys = Keys::All { single: None, new: Some(keys) };
        let hidden = model.forward(&step, cache, None).expect("hidden states");
        let logits = model.logits(hidden, Determinism::Fast).expect("logits");
        (logits.into_data().try_to_vec().expect("f32"), blocks)
    }

    #[test]
    fn long_chunks_see_what_the_cache_held_before_in_blocks() {
        const LENS: [(usize, usize); 3] = [(40, 60), (0, 50), (30, 64)];
        let file = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/v2lite-tiny/config.json"));
        let config = DeepseekV3Config::read(file).expect("a configuration");
        let device = Device::flex();
        let mut loader = WeightLoader::random(1.into(), &device, FloatDType::F32, 0, None);
        let model = DeepseekV3::load(config, &mut loader, &device);
        loader.finish().expect("weights");
        let prompt = |i: usize, len: usize| (0..len).map(|t| ((t * 37 + i * 101) % 512) as u32).collect::<Vec<_>>();
        let prompts: Vec<_> = LENS.iter().enumerate().map(|(i, (past, new))| prompt(i, past + new)).collect();
        let requests: Vec<(&[u32], usize)> = prompts.iter().zip(LENS).map(|(p, (past, _))| (&p[..], past)).collect();
        let (whole, none) = logits(&model, &requests, usize::MAX);
        let (in_blocks, blocks) = logits(&model, &requests, 1 << 12);
        assert!(none == 0 && blocks > 1, "{none} and {blocks} blocks");
        let mut first = 0;
        for (i, (&(tokens, past), (_, new))) in requests.iter().zip(LENS).enumerate() {
            let rows = first * 512..(first + new) * 512;
            first += new;
            let (alone, _) = logits(&model, &[(tokens, 0)], usize::MAX);
            let alone = &alone[past * 512..];
            let largest = alone.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            for together in [&whole, &in_blocks] {
                for (a, b) in together[rows.clone()].iter().zip(alone) {
                    assert!((a - b).abs() <= 1e-5 * largest, "request {i}: {a} and {b}, of {largest}");
                }
            }
        }
    }
}
