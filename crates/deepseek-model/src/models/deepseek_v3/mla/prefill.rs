//! Prefill: chunks of new tokens see each other in the naive form, with keys and values of every head, and what the cache held
//! before in the absorbed form; the two are merged. Or they see all keys in the absorbed form: `attention_form.rs` says when.

use burn::tensor::{Int, Tensor, s};
use mla_ops::cache::PagedCache;
use mla_ops::{MergeStateArgs, RaggedAttentionArgs, RaggedAttentionOptions, merge_state, ragged_attention};

use super::MultiHeadLatentAttention;
use crate::Result;
use crate::models::deepseek_v3::step::{ChunkKeys, NewKeys, Step};

impl MultiHeadLatentAttention {
    /// Attention of chunks of new tokens over themselves and what the cache held before: parts of out `[N, H, dv]`, in order.
    pub(super) fn chunks(
        &self,
        q: Tensor<3>,
        latent: Tensor<2>,
        keys: &NewKeys,
        step: &Step,
        cache: &PagedCache,
    ) -> Result<Vec<Tensor<3>>> {
        match keys {
            NewKeys::Naive { cu_seqlens, past } => {
                let mut state = self.naive(q.clone(), latent, cu_seqlens, step)?;
                for chunk in past {
                    state = self.add_past(state, &q, chunk, step, cache)?;
                }
                Ok(vec![state.0])
            }
            NewKeys::Absorbed(chunks) => {
                let attend = |chunk: &ChunkKeys| {
                    let q = q.clone().slice(s![chunk.tokens.clone(), .., ..]);
                    self.absorbed(self.absorb(q, step)?, &chunk.keys, step, cache)
                };
                chunks.iter().map(attend).collect()
            }
        }
    }

    /// Attention of the new tokens over themselves, with keys and values of every head: out `[N, H, dv]`, lse `[N, H]`.
    fn naive(
        &self,
        q: Tensor<3>,
        latent: Tensor<2>,
        cu_seqlens: &Tensor<1, Int>,
        step: &Step,
    ) -> Result<(Tensor<3>, Tensor<2>)> {
        let ([tokens, heads, _], dn) = (q.dims(), self.qk_nope_head_dim);
        let k_pe = latent.clone().narrow(1, self.kv_lora_rank, self.qk_rope_head_dim);
        let latent = latent.narrow(1, 0, self.kv_lora_rank);
        let kv = self.kv_b_proj.forward(latent, step.determinism)?.reshape([tokens, heads, dn + self.v_head_dim]);
        let args = RaggedAttentionArgs {
            q,
            k: kv.clone().narrow(2, 0, dn),
            k_pe: Some(k_pe),
            v: kv.narrow(2, dn, self.v_head_dim),
            cu_seqlens: cu_seqlens.clone(),
            cu_seqlens_k: None,
        };
        let options = RaggedAttentionOptions { softmax_scale: self.softmax_scale, causal: true };
        Ok(ragged_attention(args, &options)?)
    }

    /// Merges the attention over what the cache already held into that over the new tokens, for one sequence.
    fn add_past(
        &self,
        (out, lse): (Tensor<3>, Tensor<2>),
        q: &Tensor<3>,
        chunk: &ChunkKeys,
        step: &Step,
        cache: &PagedCache,
    ) -> Result<(Tensor<3>, Tensor<2>)> {
        let rows = |x: &Tensor<3>| x.clone().slice(s![chunk.tokens.clone(), .., ..]);
        let (past_out, past_lse) = self.decode(self.absorb(rows(q), step)?, &chunk.keys, false, cache)?.materialise();
        let (tokens, heads) = (chunk.tokens.len(), self.heads);
        let (merged_out, merged_lse) = merge_state(MergeStateArgs {
            out_a: self.expand(past_out.reshape([tokens, heads, self.kv_lora_rank]), step)?,
            lse_a: past_lse.reshape([tokens, heads]),
            out_b: rows(&out),
            lse_b: lse.clone().slice(s![chunk.tokens.clone(), ..]),
        })?;
        if chunk.tokens.len() == out.dims()[0] {
            return Ok((merged_out, merged_lse));
        }
        let out = out.slice_assign(s![chunk.tokens.clone(), .., ..], merged_out);
        Ok((out, lse.slice_assign(s![chunk.tokens.clone(), ..], merged_lse)))
    }
}
