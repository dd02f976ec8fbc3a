//! Attention in the absorbed form: of each token over its paged latents, or over those that the indexer has picked.

use burn::tensor::{Int, Tensor};
use mla_ops::cache::PagedCache;
use mla_ops::{
    Decoded, HeadRows, MlaDecodeArgs, MlaDecodeOptions, SparseMlaArgs, SparseMlaOptions, SparseScope, linear_by_head,
    mla_decode, sparse_mla,
};

use super::MultiHeadLatentAttention;
use crate::Result;
use crate::models::deepseek_v3::keys::{PagedKeys, PickedKeys};
use crate::models::deepseek_v3::step::MlaStep;

impl MultiHeadLatentAttention {
    /// The query against rows of the cache: `[N, H, dn + dr]` -> `[N, H, R + dr]`.
    pub(super) fn absorb(&self, q: Tensor<3>, step: &MlaStep) -> Result<Tensor<3>> {
        Ok(linear_by_head(q, &self.kv_b_proj.w_uk, step.determinism)?)
    }

    /// The values of attended latents: `[N, H, R]` -> `[N, H, dv]`.
    pub(super) fn expand(&self, out: impl Into<HeadRows>, step: &MlaStep) -> Result<Tensor<3>> {
        Ok(linear_by_head(out, &self.kv_b_proj.w_uv, step.determinism)?)
    }

    /// Attention of each token's absorbed query over the latents in these slots, i32 `[N, 1, k]`, and so many of them: out
    /// `[N, H, dv]`.
    pub(super) fn sparse_attention(
        &self,
        q: Tensor<3>,
        (indices, picked): (Tensor<3, Int>, &PickedKeys),
        step: &MlaStep,
        cache: &PagedCache,
    ) -> Result<Tensor<3>> {
        let [tokens, heads, _] = q.dims();
        let rank = self.config.kv_lora_rank;
        let scope = SparseScope { rows: cache.pool(self.pool)?, indices, lengths: Some(picked.lengths.clone()) };
        let args = SparseMlaArgs { plan: picked.plan.clone(), ..SparseMlaArgs::new(q.unsqueeze_dim(1), scope) };
        let (softmax_scale, determinism) = (self.softmax_scale, step.determinism);
        let options = SparseMlaOptions { value_width: rank, softmax_scale, determinism };
        let (out, _) = sparse_mla(args, &options)?;
        self.expand(out.reshape([tokens, heads, rank]), step)
    }

    /// Attention of each token's absorbed query over its own paged latents: out `[N, H, dv]`.
    pub(super) fn decode_attention(
        &self,
        q: Tensor<3>,
        keys: &PagedKeys,
        step: &MlaStep,
        cache: &PagedCache,
    ) -> Result<Tensor<3>> {
        self.expand(self.decode(q, keys, cache)?, step)
    }

    /// A decode step with an absorbed query `[N, H, R + dr]`.
    pub(super) fn decode(&self, q: Tensor<3>, keys: &PagedKeys, cache: &PagedCache) -> Result<Decoded> {
        let [tokens, heads, _] = q.dims();
        let (batch, rank) = (keys.batch, self.config.kv_lora_rank);
        let q = q.reshape([batch, tokens / batch, heads, rank + self.config.qk_rope_head_dim]);
        let args = MlaDecodeArgs::new(q, cache.pool(self.pool)?, keys.page_table.clone(), keys.seq_lens.clone());
        Ok(mla_decode(args, &MlaDecodeOptions::new(rank, self.softmax_scale), Some(&keys.plan))?)
    }
}
