//! Multi-head latent attention (DeepSeek-V2 §2.1; DeepSeek-V3 §2.1.1), in V3.2 over the keys that an indexer picks.

mod prefill;

use burn::tensor::{Int, Tensor};
use mla_ops::cache::PagedCache;
use mla_ops::{
    Decoded, Determinism, HeadRows, MlaDecodeArgs, MlaDecodeOptions, Normed, RopeQuery, SparseMlaArgs,
    SparseMlaOptions, SparseScope, StackedWeight, linear_by_head, linear_pair, mla_decode, sparse_mla,
};

use super::config::DeepseekV3Config;
use super::indexer::Indexer;
use super::keys::{Keys, NewKeys, PagedKeys};
use super::step::Step;
use crate::Result;
use crate::layers::{Linear, RmsNorm};
use crate::parallel::Cut;
use crate::weights::WeightLoader;

/// The norms inside the attention have this epsilon, whatever `rms_norm_eps` says.
const INNER_NORM_EPS: f64 = 1e-6;

/// Multi-head latent attention of one layer.
#[derive(Debug, Clone)]
pub(crate) struct MultiHeadLatentAttention {
    /// The pool of its latents.
    pool: usize,
    query: Query,
    indexer: Option<Indexer>,
    kv_a_proj_with_mqa: Linear,
    kv_a_layernorm: RmsNorm,
    /// Of all heads the keys, and then the values.
    kv_b_proj: Linear,
    /// `[H, R, dn]`: the key half of `kv_b_proj`, absorbed into the query; a copy, for its transposed matrices.
    w_uk: StackedWeight,
    /// `[H, dv, R]`: the value half, applied to the attention's output.
    w_uv: StackedWeight,
    o_proj: Linear,
    /// Of this rank.
    heads: usize,
    qk_nope_head_dim: usize,
    qk_rope_head_dim: usize,
    kv_lora_rank: usize,
    v_head_dim: usize,
    softmax_scale: f32,
}

/// The query projection: low-rank in V3, whole in V2-Lite.
#[derive(Debug, Clone)]
enum Query {
    LowRank { q_a_proj: Linear, q_a_layernorm: RmsNorm, q_b_proj: Linear },
    Whole { q_proj: Linear },
}

impl Query {
    fn load(loader: &mut WeightLoader, name: &str, config: &DeepseekV3Config) -> Self {
        let (hidden, heads) = (config.hidden_size, config.num_attention_heads);
        let width = heads * config.qk_head_dim();
        match config.q_lora_rank {
            Some(rank) => Self::LowRank {
                q_a_proj: Linear::load(loader, &format!("{name}.q_a_proj"), [rank, hidden], Cut::Whole),
                q_a_layernorm: RmsNorm::load(loader, &format!("{name}.q_a_layernorm"), rank, INNER_NORM_EPS),
                q_b_proj: Linear::load(loader, &format!("{name}.q_b_proj"), [width, rank], Cut::Heads(heads)),
            },
            None => Self::Whole {
                q_proj: Linear::load(loader, &format!("{name}.q_proj"), [width, hidden], Cut::Heads(heads)),
            },
        }
    }

    /// The projection of x that it begins with.
    fn first_projection(&self) -> &Linear {
        match self {
            Self::LowRank { q_a_proj, .. } => q_a_proj,
            Self::Whole { q_proj } => q_proj,
        }
    }

    /// The query `[N, H·(dn + dr)]`, and what it was projected from: the query latent, or x itself.
    fn forward(&self, x: Tensor<2>, projected: Tensor<2>, determinism: Determinism) -> Result<(Tensor<2>, Tensor<2>)> {
        Ok(match self {
            Self::LowRank { q_a_layernorm, q_b_proj, .. } => {
                let latent = q_a_layernorm.apply(projected)?;
                (q_b_proj.forward(latent.clone(), determinism)?, latent)
            }
            Self::Whole { .. } => (projected, x),
        })
    }
}

impl MultiHeadLatentAttention {
    /// Loads `{name}.*` of layer number `layer`.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, layer: usize, config: &DeepseekV3Config) -> Self {
        let heads = config.num_attention_heads;
        let (dn, dr, dv) = (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim);
        let rank = config.kv_lora_rank;
        let kv_b = loader.tensor(&format!("{name}.kv_b_proj.weight"), [heads * (dn + dv), rank], Cut::Heads(heads));
        let local = loader.parallel().local(heads);
        let by_head: Tensor<3> = loader.reshape(kv_b, [local, dn + dv, rank]);
        let (keys, values) = (by_head.clone().narrow(1, 0, dn), by_head.narrow(1, dn, dv));
        let rows = |half: Tensor<3>, width| loader.reshape(loader.contiguous(half), [local * width, rank]);
        let kv_b: Tensor<2> = loader.cat(vec![rows(keys.clone(), dn), rows(values, dv)]);
        Self {
            pool: layer,
            query: Query::load(loader, name, config),
            indexer: config
                .indexer
                .map(|indexer| Indexer::load(loader, &format!("{name}.indexer"), layer, indexer, config)),
            kv_a_proj_with_mqa: Linear::load(
                loader,
                &format!("{name}.kv_a_proj_with_mqa"),
                [rank + dr, config.hidden_size],
                Cut::Whole,
            ),
            kv_a_layernorm: RmsNorm::load(loader, &format!("{name}.kv_a_layernorm"), rank, INNER_NORM_EPS),
            w_uk: loader.contiguous(keys.swap_dims(1, 2)).into(),
            w_uv: loader.reshape(loader.last_rows(&kv_b, local * dv), [local, dv, rank]).into(),
            kv_b_proj: Linear::new(kv_b),
            o_proj: Linear::load(loader, &format!("{name}.o_proj"), [config.hidden_size, heads * dv], Cut::Columns),
            heads: local,
            qk_nope_head_dim: dn,
            qk_rope_head_dim: dr,
            kv_lora_rank: rank,
            v_head_dim: dv,
            softmax_scale: config.softmax_scale() as f32,
        }
    }

    /// The normed residual stream h `[N, hidden]` -> `[N, hidden]`; the latents of the new tokens go into the cache.
    pub(crate) fn forward(&self, h: &mut Normed<'_>, step: &Step, cache: &mut PagedCache) -> Result<Tensor<2>> {
        let ([tokens, _], determinism) = (h.dims(), step.determinism);
        let (query, kv) = (self.query.first_projection().weight(), self.kv_a_proj_with_mqa.weight());
        let (query, compressed) = linear_pair(&mut *h, query, kv, determinism)?;
        let x = h.tensor();
        let (q, q_latent) = self.query.forward(x.clone(), query, determinism)?;
        let q = q.reshape([tokens, self.heads, self.qk_nope_head_dim + self.qk_rope_head_dim]);
        let projected = (q, compressed);
        let out = match &step.keys {
            Keys::All { single: Some(keys), new: None } => {
                let q = self.write_and_absorb(projected, &x, step, cache)?;
                self.absorbed(q, keys, step, cache)?
            }
            Keys::All { single, new } => self.mixed(projected, &x, (single.as_ref(), new.as_ref()), step, cache)?,
            Keys::Indexed(keys) => {
                let q = self.write_and_absorb(projected, &x, step, cache)?;
                let indexer = self.indexer.as_ref().expect("only the steps of a model with an indexer have such keys");
                let slots = indexer.pick(q_latent, x, step, keys, cache)?;
                self.picked(q, slots, step, cache)?
            }
        };
        self.o_proj.forward(out.reshape([tokens, self.heads * self.v_head_dim]), determinism)
    }

    /// Writes the new tokens into the KV cache: normed latents, and behind each the rotary key that all heads share, with RoPE
    /// applied. Returns the query with RoPE applied and absorbed, `[N, H, R + dr]`.
    fn write_and_absorb(
        &self,
        (q, latent): (Tensor<3>, Tensor<2>),
        x: &Tensor<2>,
        step: &Step,
        cache: &mut PagedCache,
    ) -> Result<Tensor<3>> {
        let query = RopeQuery::Absorbed { q, weight: self.w_uk.clone(), determinism: step.determinism };
        let (q, _) = step.rope_and_write(cache, self.pool, query, latent, &self.kv_a_layernorm)?;
        self.write_keys(x, step, cache)?;
        Ok(q)
    }

    fn write_keys(&self, x: &Tensor<2>, step: &Step, cache: &mut PagedCache) -> Result<()> {
        self.indexer.as_ref().map_or(Ok(()), |indexer| indexer.write_keys(x.clone(), step, cache))
    }

    /// Some tokens alone, in the absorbed form, and chunks of new ones behind them: out `[N, H, dv]`.
    fn mixed(
        &self,
        (q, latent): (Tensor<3>, Tensor<2>),
        x: &Tensor<2>,
        (single, new): (Option<&PagedKeys>, Option<&NewKeys>),
        step: &Step,
        cache: &mut PagedCache,
    ) -> Result<Tensor<3>> {
        let (q, latent) = step.rope_and_write(cache, self.pool, RopeQuery::Heads(q), latent, &self.kv_a_layernorm)?;
        let latent = latent.expect("of queries that are not absorbed");
        self.write_keys(x, step, cache)?;
        let ([tokens, ..], alone) = (q.dims(), single.map_or(0, |keys| keys.batch));
        let mut outs = Vec::new();
        if let Some(keys) = single {
            outs.push(self.absorbed(self.absorb(q.clone().narrow(0, 0, alone), step)?, keys, step, cache)?);
        }
        if let Some(keys) = new {
            let (q, latent) = (q.narrow(0, alone, tokens - alone), latent.narrow(0, alone, tokens - alone));
            outs.extend(self.chunks(q, latent, keys, step, cache)?);
        }
        Ok(if outs.len() > 1 { Tensor::cat(outs, 0) } else { outs.remove(0) })
    }

    /// The query against rows of the cache: `[N, H, dn + dr]` -> `[N, H, R + dr]`.
    fn absorb(&self, q: Tensor<3>, step: &Step) -> Result<Tensor<3>> {
        Ok(linear_by_head(q, &self.w_uk, step.determinism)?)
    }

    /// The values of attended latents: `[N, H, R]` -> `[N, H, dv]`.
    fn expand(&self, out: impl Into<HeadRows>, step: &Step) -> Result<Tensor<3>> {
        Ok(linear_by_head(out, &self.w_uv, step.determinism)?)
    }

    /// Attention of each token's absorbed query over the latents in these slots, i32 `[N, 1, k]`: out `[N, H, dv]`.
    fn picked(&self, q: Tensor<3>, slots: Tensor<3, Int>, step: &Step, cache: &PagedCache) -> Result<Tensor<3>> {
        let [tokens, heads, _] = q.dims();
        let rank = self.kv_lora_rank;
        let args = SparseMlaArgs::new(q.unsqueeze_dim(1), SparseScope::new(cache.pool(self.pool)?, slots));
        let (softmax_scale, determinism) = (self.softmax_scale, step.determinism);
        let options = SparseMlaOptions { value_width: rank, softmax_scale, determinism };
        let (out, _) = sparse_mla(args, &options)?;
        self.expand(out.reshape([tokens, heads, rank]), step)
    }

    /// Attention of each token's absorbed query over its own paged latents: out `[N, H, dv]`.
    fn absorbed(&self, q: Tensor<3>, keys: &PagedKeys, step: &Step, cache: &PagedCache) -> Result<Tensor<3>> {
        self.expand(self.decode(q, keys, cache)?, step)
    }

    /// A decode step with an absorbed query `[N, H, R + dr]`.
    fn decode(&self, q: Tensor<3>, keys: &PagedKeys, cache: &PagedCache) -> Result<Decoded> {
        let [tokens, heads, _] = q.dims();
        let (batch, rank) = (keys.batch, self.kv_lora_rank);
        let q = q.reshape([batch, tokens / batch, heads, rank + self.qk_rope_head_dim]);
        let args = MlaDecodeArgs::new(q, cache.pool(self.pool)?, keys.page_table.clone(), keys.seq_lens.clone());
        Ok(mla_decode(args, &MlaDecodeOptions::new(rank, self.softmax_scale), Some(&keys.plan))?)
    }
}
