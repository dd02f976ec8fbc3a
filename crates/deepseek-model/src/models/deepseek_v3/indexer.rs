//! The indexer of DeepSeek-V3.2, which picks the keys that a token sees (DeepSeek sparse attention).

use burn::module::Module;
use burn::tensor::{FloatDType, Int, Tensor};
use mla_ops::cache::PagedCache;
use mla_ops::{Determinism, IndexForm, LightningIndexOptions};

use super::indexer_config::IndexerConfig;
use super::keys::Keys;
use super::layer_norm::LayerNorm;
use super::mla_config::MlaConfig;
use super::rotary::{RotaryEmbedding, Rotation};
use super::step::MlaStep;
use crate::index_keys;
use crate::layers::Linear;
use crate::parallel::Cut;
use crate::step::Chunk;
use crate::weights::WeightLoader;
use crate::{ModelError, Result};

/// The norm of the index keys has this epsilon.
const NORM_EPS: f64 = 1e-6;

/// The indexer of one layer (DeepSeek-V3.2, "DeepSeek sparse attention"): picks the keys that each token attends to, by keys of its
/// own in a pool of the cache. A [`MultiHeadLatentAttention`](super::MultiHeadLatentAttention) with one uses it where a token could see
/// more; every rank has all of it, and picks the same keys.
///
/// ```
/// use burn::tensor::{Device, Distribution, FloatDType, Tensor};
/// use deepseek_model::layers::MlaConfig;
/// use deepseek_model::{Chunk, IndexerConfig};
/// use mla_ops::Determinism::Fast;
/// use mla_ops::cache::{CacheConfig, PagedCache, PoolConfig};
///
/// let (device, dtype) = (Device::flex(), FloatDType::F32);
/// let indexer = IndexerConfig { heads: 2, head_dim: 16, topk: 2 };
/// let config = MlaConfig::new(64, 4, 32, 16, 8, 16).with_q_lora_rank(Some(48)).with_indexer(Some(indexer));
/// let indexer = config.init_indexer(7, &device, dtype)?.expect("of a config with one");
/// let pools = vec![PoolConfig::per_token(16)]; // of index keys
/// let size = CacheConfig { pools, num_pages: 8, page_size: 4, max_requests: 2, max_tokens: 16, dtype };
/// let mut cache = PagedCache::new(size, &device)?;
///
/// let request = cache.admit()?;
/// let (tokens, slots) = (vec![1, 2, 3], cache.append(request, 3)?);
/// let random = |width| Tensor::<2>::random([3, width], Distribution::Default, &device);
/// let (x, q_latent) = (random(64), random(48));
/// let step = indexer.step(&[Chunk { request, tokens, slots }], &cache, Fast)?;
/// indexer.write_keys(x.clone(), &step, &mut cache)?;
/// let slots = indexer.pick(q_latent, x, &step, &cache)?; // for `sparse_mla`
/// assert_eq!(slots.dims(), [3, 1, 2]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Module, Debug)]
pub struct Indexer {
    /// The pool of its keys.
    pool: usize,
    wq_b: Linear,
    wk: Linear,
    k_norm: LayerNorm,
    weights_proj: Linear,
    #[module(skip)]
    sizes: IndexerConfig,
    #[module(skip)]
    config: MlaConfig,
    #[module(skip)]
    rotary: RotaryEmbedding,
}

impl Indexer {
    /// Loads `{name}.*`, if the configuration has an indexer.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, config: &MlaConfig) -> Option<Self> {
        let sizes @ IndexerConfig { heads, head_dim, .. } = config.indexer?;
        let (hidden, rank) = (config.hidden_size, config.q_lora_rank.unwrap_or(config.hidden_size));
        Some(Self {
            pool: 1,
            wq_b: Linear::load(loader, &format!("{name}.wq_b"), [heads * head_dim, rank], Cut::Whole),
            wk: Linear::load(loader, &format!("{name}.wk"), [head_dim, hidden], Cut::Whole),
            k_norm: LayerNorm::load(loader, &format!("{name}.k_norm"), head_dim, NORM_EPS),
            weights_proj: Linear::load(loader, &format!("{name}.weights_proj"), [heads, hidden], Cut::Whole),
            sizes,
            config: config.clone(),
            rotary: config.rotary(),
        })
    }

    /// With its keys in another pool of the cache.
    pub fn with_pool(self, pool: usize) -> Self {
        Self { pool, ..self }
    }

    /// [`MultiHeadLatentAttention::step`](super::MultiHeadLatentAttention::step), but the indexer picks the keys of all tokens, also of
    /// those that see few.
    ///
    /// # Errors
    /// As there.
    pub fn step(&self, chunks: &[Chunk], cache: &PagedCache, determinism: Determinism) -> Result<MlaStep> {
        // In a batch-invariant step it always does.
        let sizes = (&self.config, self.config.num_attention_heads);
        let invariant = Determinism::BatchInvariant;
        let step = MlaStep::alone(chunks, cache, &self.rotary, sizes, invariant, &self.wk.weight().device())?;
        Ok(MlaStep { determinism, ..step })
    }

    /// Puts the index keys of the new tokens into the cache; x `[N, hidden]`, the norm of a residual stream, of the weights' dtype.
    ///
    /// # Errors
    /// Another number of rows than the step has tokens, another width, dtype or device than that of the weights, a cache without the
    /// indexer's pool, or with one of other rows.
    pub fn write_keys(&self, x: Tensor<2>, step: &MlaStep, cache: &mut PagedCache) -> Result<()> {
        step.check_rows("x", x.dims())?;
        let [tokens, _] = x.dims();
        let keys = self.k_norm.forward(self.wk.forward(x, step.determinism)?).reshape([tokens, 1, self.sizes.head_dim]);
        let keys = self.rotate(keys, &step.rotation).reshape([tokens, self.sizes.head_dim]);
        step.write(cache, self.pool, keys)
    }

    /// The slots of the keys that each new token sees, i32 `[N, 1, k]`, from its query latent `[N, q_lora_rank]`, normed, and x
    /// `[N, hidden]`; -1 where there are fewer. Those of the step have to be there.
    ///
    /// # Errors
    /// As [`Self::write_keys`], and a step in which tokens read all keys.
    pub fn pick(
        &self,
        q_latent: Tensor<2>,
        x: Tensor<2>,
        step: &MlaStep,
        cache: &PagedCache,
    ) -> Result<Tensor<3, Int>> {
        let Keys::Indexed { keys, .. } = &step.keys else {
            return Err(ModelError::request("step", "one in which tokens read all keys", "one of `Indexer::step`"));
        };
        step.check_rows("x", x.dims())?;
        step.check_rows("q_latent", q_latent.dims())?;
        let ([tokens, _], IndexerConfig { heads, head_dim, topk }) = (x.dims(), self.sizes);
        let q = self
            .rotate(self.wq_b.forward(q_latent, step.determinism)?.reshape([tokens, heads, head_dim]), &step.rotation);
        let head_weights =
            self.weights_proj.forward(x, step.determinism)?.cast(FloatDType::F32).mul_scalar((heads as f64).powf(-0.5));
        let scale = (head_dim as f32).powf(-0.5);
        let options = LightningIndexOptions { k: topk, scale, form: IndexForm::Slots };
        index_keys::pick(&q, &head_weights, &cache.pool(self.pool)?, keys, &options)
    }

    /// Applies RoPE to the leading channels of `[N, heads, di]`: here the rotary part comes first, and is not interleaved.
    fn rotate(&self, x: Tensor<3>, rotation: &Rotation) -> Tensor<3> {
        let width = self.config.qk_rope_head_dim;
        let rotated = rotation.rotate_halves(x.clone().narrow(2, 0, width));
        if width == self.sizes.head_dim {
            return rotated;
        }
        Tensor::cat(vec![rotated, x.narrow(2, width, self.sizes.head_dim - width)], 2)
    }
}
