//! The indexer of DeepSeek-V4, which picks the entries that a token sees.

use burn::module::Module;
use burn::tensor::{Int, Tensor};
use mla_ops::cache::PagedCache;
use mla_ops::{Determinism, IndexForm, LightningIndexOptions};

use super::compressor::{Compressor, CompressorState};
use super::layer_configs::EntryIndexerConfig;
use super::step::EntryIndexerStep;
use crate::index_keys::{self, IndexedKeys};
use crate::layers::Linear;
use crate::parallel::Cut;
use crate::step::Chunk;
use crate::weights::WeightLoader;
use crate::{ModelError, Result};

/// Picks the entries that each token attends to, by keys of its own: entries of a narrower [`Compressor`] in a pool of the cache
/// (DeepSeek-V4, compressed sparse attention).
///
/// ```
/// use burn::tensor::{Device, Distribution, FloatDType, Tensor};
/// use deepseek_model::Chunk;
/// use deepseek_model::layers::{CompressorConfig, EntryIndexerConfig};
/// use mla_ops::Determinism::Fast;
/// use mla_ops::cache::{CacheConfig, PagedCache};
///
/// let (device, dtype) = (Device::flex(), FloatDType::F32);
/// // Width of the stream, channels of a key, tokens of a window, channels with RoPE; width of the query latent.
/// let keys = CompressorConfig::new(64, 16, 4, 8).with_overlap(true);
/// let config = EntryIndexerConfig::new(keys, 48).with_index_n_heads(2).with_index_topk(3);
/// let indexer = config.init(7, &device, dtype)?;
/// let mut cache = PagedCache::new(CacheConfig::new(vec![config.pool()], 2, 128, dtype), &device)?;
/// let mut state = indexer.new_state(&cache)?;
///
/// let request = cache.admit()?;
/// let (tokens, slots) = (vec![1; 22], cache.append(request, 22)?); // five windows are full
/// let random = |width| Tensor::<2>::random([22, width], Distribution::Default, &device);
/// let (x, q_latent) = (random(64), random(48));
/// let step = indexer.step(&[Chunk { request, tokens, slots }], &cache, Fast)?;
/// indexer.write_keys(x.clone(), &step, &mut state, &mut cache)?;
/// let slots = indexer.pick(q_latent, x, &step, &cache)?; // of a pool of entries, for `sparse_mla`
/// assert_eq!(slots.dims(), [22, 1, 3]);
/// # Ok::<(), deepseek_model::ModelError>(())
/// ```
#[derive(Module, Debug)]
pub struct EntryIndexer {
    pub(super) compressor: Compressor,
    pub(crate) wq_b: Linear,
    pub(crate) weights_proj: Linear,
    pub(super) heads: usize,
    pub(super) width: usize,
    top_k: usize,
}

impl EntryIndexer {
    /// Loads `{name}.*`, with the keys of compressor `number`.
    pub(super) fn load(loader: &mut WeightLoader, name: &str, number: usize, config: &EntryIndexerConfig) -> Self {
        let EntryIndexerConfig { compressor, q_lora_rank: rank, index_n_heads: heads, index_topk: top_k } = config;
        let (&heads, &top_k, width) = (heads, top_k, compressor.head_dim);
        Self {
            compressor: Compressor::load(loader, &format!("{name}.compressor"), number, compressor),
            wq_b: Linear::load(loader, &format!("{name}.wq_b"), [heads * width, *rank], Cut::Whole),
            weights_proj: Linear::load(
                loader,
                &format!("{name}.weights_proj"),
                [heads, compressor.hidden_size],
                Cut::Whole,
            ),
            heads,
            width,
            top_k,
        }
    }

    /// With its keys in another pool of the cache.
    pub fn with_pool(self, pool: usize) -> Self {
        Self { compressor: self.compressor.with_pool(pool), ..self }
    }

    /// The state of its compressor: [`Compressor::new_state`].
    ///
    /// # Errors
    /// As there.
    pub fn new_state(&self, cache: &PagedCache) -> Result<CompressorState> {
        self.compressor.new_state(cache)
    }

    /// [`Compressor::step`], and which entries each new token may see: those of the windows that are full when it is there.
    ///
    /// # Errors
    /// As there.
    pub fn step(&self, chunks: &[Chunk], cache: &PagedCache, determinism: Determinism) -> Result<EntryIndexerStep> {
        self.compressor.check_pool(cache)?;
        let sizes = (self.heads, self.width);
        EntryIndexerStep::new(chunks, cache, self.compressor.parts(), sizes, determinism, &self.compressor.device())
    }

    /// Takes in the new tokens, x `[N, hidden]`, the norm of a residual stream, of the weights' dtype: [`Compressor::forward`].
    ///
    /// # Errors
    /// As there.
    pub fn write_keys(
        &self,
        x: Tensor<2>,
        step: &EntryIndexerStep,
        state: &mut CompressorState,
        cache: &mut PagedCache,
    ) -> Result<()> {
        self.compressor.forward(x, &step.keys, state, cache).map(drop)
    }

    /// The slots of the best entries for each new token, i32 `[N, 1, k]`, from its query latent `[N, q_lora_rank]`, normed, and x
    /// `[N, hidden]`; -1 where there are fewer. The keys of the step have to be there. A pool of entries with as many tokens of a row as
    /// the keys' has the same slots.
    ///
    /// # Errors
    /// Another number of rows than the step has tokens, another width, dtype or device than that of the weights, a cache without the
    /// pool.
    pub fn pick(
        &self,
        q_latent: Tensor<2>,
        x: Tensor<2>,
        step: &EntryIndexerStep,
        cache: &PagedCache,
    ) -> Result<Tensor<3, Int>> {
        self.compressor.check_pool(cache)?;
        for (argument, rows) in [("q_latent", q_latent.dims()[0]), ("x", x.dims()[0])] {
            if rows != step.tokens {
                let expected = format!("{}, one for each token", step.tokens);
                return Err(ModelError::request(argument, format!("{rows} rows"), expected));
            }
        }
        let determinism = step.keys.determinism;
        let q = self.wq_b.forward(q_latent, determinism)?.reshape([step.tokens, self.heads, self.width]);
        let head_weights = self.weights_proj.forward(x, determinism)?;
        self.pick_from(step.rotation.rotate(q)?, &head_weights, &step.seen, cache)
    }

    /// The same; q `[N, Hi, di]` is with RoPE applied, and head_weights `[N, Hi]` are what `weights_proj` makes of x.
    pub(super) fn pick_from(
        &self,
        q: Tensor<3>,
        head_weights: &Tensor<2>,
        keys: &[IndexedKeys],
        cache: &PagedCache,
    ) -> Result<Tensor<3, Int>> {
        let scale = ((self.width * self.heads) as f32).sqrt().recip();
        let options = LightningIndexOptions { form: IndexForm::Slots, ..LightningIndexOptions::new(self.top_k, scale) };
        index_keys::pick(&q, head_weights, &cache.pool(self.compressor.pool())?, keys, &options)
    }
}
