//! Multi-head latent attention (DeepSeek-V2 §2.1; DeepSeek-V3 §2.1.1), in V3.2 over the keys that an indexer picks.

mod decode;
mod kv_up;
mod prefill;
mod query;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use mla_ops::cache::PagedCache;
use mla_ops::{Determinism, RopeQuery, Rows, linear_each};

use self::kv_up::KvUpProjection;
use self::query::Query;
use super::indexer::Indexer;
use super::keys::{Keys, NewKeys, PagedKeys};
use super::mla_config::MlaConfig;
use super::rotary::RotaryEmbedding;
use super::step::MlaStep;
use crate::layers::{Linear, RmsNorm};
use crate::parallel::Cut;
use crate::step::Chunk;
use crate::weights::WeightLoader;
use crate::{ModelError, Result};

/// The norms inside the attention have this epsilon, whatever `rms_norm_eps` says.
const INNER_NORM_EPS: f64 = 1e-6;

/// Multi-head latent attention of one layer (DeepSeek-V2, arXiv 2405.04434, section 2.1; DeepSeek-V3, arXiv 2412.19437, section 2.1.1),
/// with an indexer in V3.2: projections, norms, RoPE, and attention over a paged cache of latents, naive or absorbed, whichever is
/// faster.
///
/// ```
/// use burn::tensor::{Device, Distribution, FloatDType, Tensor};
/// use deepseek_model::Chunk;
/// use deepseek_model::layers::MlaConfig;
/// use mla_ops::Determinism::Fast;
/// use mla_ops::cache::{CacheConfig, PagedCache, RowFormat};
///
/// let (device, dtype) = (Device::flex(), FloatDType::F32);
/// // Width of the stream, heads, latent, channels of a head without and with RoPE, of a value.
/// let config = MlaConfig::new(64, 4, 32, 16, 8, 16).with_q_lora_rank(Some(48));
/// let layer = config.init(7, &device, dtype)?; // random, by a seed
/// let pools = config.pools(RowFormat::Dense);
/// let size = CacheConfig { pools, num_pages: 8, page_size: 4, max_requests: 2, max_tokens: 16, dtype };
/// let mut cache = PagedCache::new(size, &device)?;
///
/// let request = cache.admit()?;
/// // A prompt of three tokens, and a decode step behind it.
/// for tokens in [vec![1, 2, 3], vec![4]] {
///     let x = Tensor::random([tokens.len(), 64], Distribution::Default, &device);
///     let slots = cache.append(request, tokens.len())?;
///     let step = layer.step(&[Chunk { request, tokens, slots }], &cache, Fast)?; // for all layers like this one
///     let out = layer.forward(x.clone(), &step, &mut cache)?;
///     assert_eq!(out.dims(), x.dims());
/// }
///
/// // Its record, into a file or, here, into memory, and from there into a layer of the same config.
/// use burn::module::Module;
/// use burn::store::ModuleRecord;
/// let bytes = layer.into_record().into_bytes()?;
/// let loaded = config.init(0, &device, dtype)?.try_load_record(ModuleRecord::from_bytes(bytes)?)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Records
/// Projections `[out, in]` are `kv_a_proj_with_mqa.weight` and so on, with `codes` and `scales` below where they are in FP8. The rows of
/// `kv_b_proj` are not in the order of the published files: the keys of all heads come first, and then the values. Burn refuses
/// records of other shapes, and of a layer in another format. The dtype of a record becomes that of the layer, unless it is told to cast
/// (`ModuleRecord::cast_to_module_dtype`).
#[derive(Module, Debug)]
pub struct MultiHeadLatentAttention {
    /// The pool of its latents.
    pool: usize,
    query: Query,
    indexer: Option<Indexer>,
    kv_a_proj_with_mqa: Linear,
    kv_a_layernorm: RmsNorm,
    kv_b_proj: KvUpProjection,
    o_proj: Linear,
    /// Of this rank.
    heads: usize,
    softmax_scale: f32,
    #[module(skip)]
    config: MlaConfig,
    #[module(skip)]
    rotary: RotaryEmbedding,
}

impl MultiHeadLatentAttention {
    /// Loads `{name}.*`.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, config: &MlaConfig) -> Self {
        let (hidden, heads) = (config.hidden_size, config.num_attention_heads);
        let (rank, dr) = (config.kv_lora_rank, config.qk_rope_head_dim);
        let kv_a = format!("{name}.kv_a_proj_with_mqa");
        Self {
            pool: 0,
            query: Query::load(loader, name, config),
            indexer: Indexer::load(loader, &format!("{name}.indexer"), config),
            kv_a_proj_with_mqa: Linear::load(loader, &kv_a, [rank + dr, hidden], Cut::Whole),
            kv_a_layernorm: RmsNorm::load(loader, &format!("{name}.kv_a_layernorm"), rank, INNER_NORM_EPS),
            kv_b_proj: KvUpProjection::load(loader, &format!("{name}.kv_b_proj.weight"), config),
            o_proj: Linear::load(loader, &format!("{name}.o_proj"), [hidden, heads * config.v_head_dim], Cut::Columns),
            heads: loader.parallel().local(heads),
            softmax_scale: config.softmax_scale() as f32,
            config: config.clone(),
            rotary: config.rotary(),
        }
    }

    /// The layer with its rows in other pools of the cache than the first two, of latents and of index keys; without an indexer
    /// `index_keys` is not looked at. Layers of one pool overwrite each other's rows, without an error.
    pub fn with_pools(self, latents: usize, index_keys: usize) -> Self {
        let indexer = self.indexer.map(|indexer| indexer.with_pool(index_keys));
        Self { pool: latents, indexer, ..self }
    }

    /// What the forward passes of this layer, and of others with its config on its device, are over: the new tokens of some requests,
    /// for which [`PagedCache::append`] has made room. Requests with a single new token are best put first: they are decoded together.
    ///
    /// # Errors
    /// Chunks that are not the last tokens of their requests, or have other slots than these; a request in two chunks.
    pub fn step(&self, chunks: &[Chunk], cache: &PagedCache, determinism: Determinism) -> Result<MlaStep> {
        MlaStep::alone(chunks, cache, &self.rotary, (&self.config, self.heads), determinism, &self.device())
    }

    fn device(&self) -> Device {
        self.kv_a_proj_with_mqa.weight().device()
    }

    /// x `[N, hidden]`, the norm of a residual stream, of the weights' dtype -> `[N, hidden]`, what is added to the stream. The latents
    /// of the new tokens go into the cache; on a GPU, a [`Normed`](mla_ops::Normed) may be computed in the same launch as the first
    /// projections.
    ///
    /// # Errors
    /// Another number of rows than the step has tokens, another width, dtype or device than that of the weights, a cache without the
    /// layer's pools, or with pools of other rows.
    pub fn forward<'a, 'r: 'a>(
        &self,
        x: impl Into<Rows<'a, 'r>>,
        step: &MlaStep,
        cache: &mut PagedCache,
    ) -> Result<Tensor<2>> {
        let mut x = x.into();
        step.check_rows("x", x.dims())?;
        let ([tokens, _], determinism) = (x.dims(), step.determinism);
        let (query, kv) = (self.query.first_projection().weight(), self.kv_a_proj_with_mqa.weight());
        let [query, compressed] = linear_each(x.reborrow(), [query, kv], determinism)?;
        let x = x.tensor();
        let (q, q_latent) = self.query.forward(x.clone(), query, determinism)?;
        let q = q.reshape([tokens, self.heads, self.config.qk_head_dim()]);
        let projected = (q, compressed);
        let out = match &step.keys {
            Keys::All { single: Some(keys), new: None } => {
                let q = self.write_and_absorb(projected, &x, step, cache)?;
                self.decode_attention(q, keys, step, cache)?
            }
            Keys::All { single, new } => self.mixed(projected, &x, (single.as_ref(), new.as_ref()), step, cache)?,
            Keys::Indexed { picked, .. } => {
                let no_indexer = || ModelError::request("step", "that of a layer with an indexer", "one of this layer");
                let indexer = self.indexer.as_ref().ok_or_else(no_indexer)?;
                let q = self.write_and_absorb(projected, &x, step, cache)?;
                let slots = indexer.pick(q_latent, x, step, cache)?;
                self.sparse_attention(q, (slots, picked), step, cache)?
            }
        };
        self.o_proj.forward(out.reshape([tokens, self.heads * self.config.v_head_dim]), determinism)
    }

    /// Writes the new tokens into the KV cache: normed latents, and behind each the rotary key that all heads share, with RoPE
    /// applied. Returns the query with RoPE applied and absorbed, `[N, H, R + dr]`.
    fn write_and_absorb(
        &self,
        (q, latent): (Tensor<3>, Tensor<2>),
        x: &Tensor<2>,
        step: &MlaStep,
        cache: &mut PagedCache,
    ) -> Result<Tensor<3>> {
        let query = RopeQuery::Absorbed { q, weight: self.kv_b_proj.w_uk.clone(), determinism: step.determinism };
        let (q, _) = step.rope_and_write(cache, self.pool, query, latent, &self.kv_a_layernorm)?;
        self.write_keys(x, step, cache)?;
        Ok(q)
    }

    fn write_keys(&self, x: &Tensor<2>, step: &MlaStep, cache: &mut PagedCache) -> Result<()> {
        self.indexer.as_ref().map_or(Ok(()), |indexer| indexer.write_keys(x.clone(), step, cache))
    }

    /// Some tokens alone, in the absorbed form, and chunks of new ones behind them: out `[N, H, dv]`.
    fn mixed(
        &self,
        (q, latent): (Tensor<3>, Tensor<2>),
        x: &Tensor<2>,
        (single, new): (Option<&PagedKeys>, Option<&NewKeys>),
        step: &MlaStep,
        cache: &mut PagedCache,
    ) -> Result<Tensor<3>> {
        let (q, latent) = step.rope_and_write(cache, self.pool, RopeQuery::Heads(q), latent, &self.kv_a_layernorm)?;
        let latent = latent.expect("of queries that are not absorbed");
        self.write_keys(x, step, cache)?;
        let ([tokens, ..], alone) = (q.dims(), single.map_or(0, |keys| keys.batch));
        let mut outs = Vec::new();
        if let Some(keys) = single {
            outs.push(self.decode_attention(self.absorb(q.clone().narrow(0, 0, alone), step)?, keys, step, cache)?);
        }
        if let Some(keys) = new {
            let (q, latent) = (q.narrow(0, alone, tokens - alone), latent.narrow(0, alone, tokens - alone));
            outs.extend(self.prefill_attention(q, latent, keys, step, cache)?);
        }
        Ok(if outs.len() > 1 { Tensor::cat(outs, 0) } else { outs.remove(0) })
    }
}
