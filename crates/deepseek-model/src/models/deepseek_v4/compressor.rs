//! Compression of windows of tokens into single entries (DeepSeek-V4).

use std::mem;

use burn::module::{Module, Param};
use burn::tensor::{Device, FloatDType, Tensor};
use mla_ops::cache::{PagedCache, Pool, PoolConfig, RowFormat, new_pool};
use mla_ops::{
    CompressKvArgs, CompressKvOptions, CompressedKv, Determinism, EntryCache, MlaError, WriteLatentError, compress_kv,
};

use super::cache::V4Cache;
use super::layer_configs::CompressorConfig;
use super::partial_rotary::PartialRotary;
use super::schedule::CompressorSpec;
use super::states::State;
use super::step::{CompressorStep, EntryStep, Sequences, V4Step};
use crate::layers::{Linear, param};
use crate::parallel::Cut;
use crate::step::Chunk;
use crate::weights::WeightLoader;
use crate::{ModelError, Result};

/// Pools each window of tokens into an entry, by a softmax over its tokens for every channel (DeepSeek-V4, compressed attention). What
/// the next window needs of the tokens so far is a state, a row for each request; entries go into pages of the cache, which has a row
/// for as many tokens as a window has.
///
/// ```
/// use burn::tensor::{Device, Distribution, FloatDType, Tensor};
/// use deepseek_model::Chunk;
/// use deepseek_model::layers::CompressorConfig;
/// use mla_ops::Determinism::Fast;
/// use mla_ops::cache::{CacheConfig, PagedCache};
///
/// let (device, dtype) = (Device::flex(), FloatDType::F32);
/// // Width of the stream, channels of an entry, tokens of a window, channels with RoPE.
/// let config = CompressorConfig::new(64, 32, 4, 8);
/// let compressor = config.init(7, &device, dtype)?;
/// let pools = vec![config.pool()];
/// let size = CacheConfig { pools, num_pages: 8, page_size: 8, max_requests: 2, max_tokens: 32, dtype };
/// let mut cache = PagedCache::new(size, &device)?;
/// let mut state = compressor.new_state(&cache)?;
///
/// let request = cache.admit()?;
/// // Six tokens fill one window, two more fill the second one.
/// for tokens in [vec![1; 6], vec![2; 2]] {
///     let x = Tensor::random([tokens.len(), 64], Distribution::Default, &device);
///     cache.append(request, tokens.len())?;
///     let step = compressor.step(&[Chunk { request, tokens, slots: vec![] }], &cache, Fast)?;
///     let entries = compressor.forward(x, &step, &mut state, &mut cache)?;
///     assert_eq!(entries.dims(), [1, 1, 32]);
/// }
/// # Ok::<(), deepseek_model::ModelError>(())
/// ```
#[derive(Module, Debug)]
pub struct Compressor {
    /// Its pool in the cache, and its state.
    number: usize,
    #[module(skip)]
    spec: CompressorSpec,
    /// `wkv` above `wgate`.
    kv_gates: Linear,
    /// f32 `[rate, C]` (`ape`).
    position_bias: Param<Tensor<2>>,
    /// f32 `[width]`.
    norm: Param<Tensor<1>>,
    norm_eps: f32,
    #[module(skip)]
    rotary: PartialRotary,
}

/// What a [`Compressor`] carries of the last tokens of each request, f32 `[R, L, 2 C]`.
#[derive(Debug)]
pub struct CompressorState(Tensor<3>);

impl Compressor {
    /// Loads `{name}.wkv`, `wgate`, `ape` and `norm` of compressor `number`.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, number: usize, config: &CompressorConfig) -> Self {
        let (spec, hidden) = (config.spec(), config.hidden_size);
        let channels = spec.channels();
        let halves = ["wkv", "wgate"].map(|part| format!("{name}.{part}.weight"));
        Self {
            number,
            spec,
            kv_gates: Linear::new(loader.joined(&halves, [2 * channels, hidden], Cut::Whole)),
            position_bias: param(loader.tensor_f32(&format!("{name}.ape"), [spec.rate, channels], Cut::Whole)),
            norm: param(loader.tensor_f32(&format!("{name}.norm.weight"), [spec.width], Cut::Whole)),
            norm_eps: config.rms_norm_eps as f32,
            rotary: PartialRotary::new(&config.rope, config.qk_rope_head_dim),
        }
    }

    /// The compressor with its entries in another pool of the cache than the first one.
    pub fn with_pool(self, pool: usize) -> Self {
        Self { number: pool, ..self }
    }

    /// A state with a row for each request that the cache may have.
    ///
    /// # Errors
    /// As [`new_pool`].
    pub fn new_state(&self, cache: &PagedCache) -> Result<CompressorState> {
        let shape = [cache.config().max_requests, self.spec.carried_tokens(), 2 * self.spec.channels()];
        Ok(CompressorState(new_pool(shape, FloatDType::F32, &self.device())?))
    }

    /// What a forward pass is over: the new tokens of some requests, for which [`PagedCache::append`] has made room. Every token of a
    /// request is new once, in order: a pass moves the state on.
    ///
    /// # Errors
    /// Chunks that are not the last tokens of their requests; a request in two chunks; a cache without the pool of
    /// [`CompressorConfig::pool`].
    pub fn step(&self, chunks: &[Chunk], cache: &PagedCache, determinism: Determinism) -> Result<CompressorStep> {
        self.check_pool(cache)?;
        CompressorStep::new(chunks, cache, self.parts(), determinism, &self.device())
    }

    /// Takes in the new tokens, x `[N, hidden]`, the norm of a residual stream, of the weights' dtype. The windows that they fill become
    /// entries in the cache, and are returned, `[B, n, head_dim]`: 0 where another request fills more.
    ///
    /// # Errors
    /// Another number of rows than the step has tokens, another width, dtype or device than that of the weights, the state of another
    /// compressor, a cache without the pool.
    pub fn forward(
        &self,
        x: Tensor<2>,
        step: &CompressorStep,
        state: &mut CompressorState,
        cache: &mut PagedCache,
    ) -> Result<Tensor<3>> {
        self.check_pool(cache)?;
        let kv_gates = self.kv_gates.forward(x, step.determinism)?;
        Ok(cache.write_pool(self.number, |pool| {
            let carried = mem::replace(&mut state.0, Tensor::empty([0; 3], &self.device()));
            let (carried, pool, entries) = self.compress(kv_gates, &step.sequences, &step.entries, carried, pool);
            state.0 = carried;
            match entries {
                Ok(entries) => Ok((pool, entries)),
                Err(error) => Err(Box::new(WriteLatentError { error, cache: pool })),
            }
        })?)
    }

    /// What its steps are made with.
    pub(super) fn parts(&self) -> (&CompressorSpec, &PartialRotary) {
        (&self.spec, &self.rotary)
    }

    pub(super) fn device(&self) -> Device {
        self.kv_gates.weight().device()
    }

    pub(super) fn check_pool(&self, cache: &PagedCache) -> Result<()> {
        let (expected, pool) = (self.spec.pool(RowFormat::Dense), cache.config().pools.get(self.number));
        // In whichever format.
        if pool.is_some_and(|pool| PoolConfig { format: expected.format, ..*pool } == expected) {
            return Ok(());
        }
        let actual = format!("one whose pool {} is {pool:?}", self.number);
        Err(ModelError::request("cache", actual, format!("one where it is {expected:?}")))
    }

    /// Its pool in the cache.
    pub(crate) fn pool(&self) -> usize {
        self.number
    }

    /// What makes [`Self::begin`]'s keys and gates of tokens.
    pub(crate) fn kv_gates(&self) -> &Linear {
        &self.kv_gates
    }

    /// The call that takes in the keys and gates `[N, 2 C]` of the new tokens; the windows that they fill become entries. State and pool are
    /// out of the cache until [`Self::end`].
    pub(crate) fn begin(
        &self,
        kv_gates: Tensor<2>,
        step: &V4Step,
        entries: &EntryStep,
        cache: &mut V4Cache,
    ) -> Result<(CompressKvArgs, CompressKvOptions)> {
        let state = State::Carried(self.number);
        if let Some(marked) = &entries.marked {
            cache.write_marked(state, &kv_gates, marked)?;
        }
        let pool = cache.take_entries(self.number)?;
        let carried = cache.take(state)?;
        Ok(self.call(kv_gates, &step.sequences, entries, carried, pool))
    }

    /// Gives back what the call took.
    pub(crate) fn end(&self, carried: Tensor<3>, pool: Option<Pool>, cache: &mut V4Cache) -> Result<()> {
        cache.put(State::Carried(self.number), carried);
        cache.put_entries(self.number, pool.expect("the one that it was given"))
    }

    /// State and pool with the new tokens in them, or as they were, and the entries.
    fn compress(
        &self,
        kv_gates: Tensor<2>,
        sequences: &Sequences,
        entries: &EntryStep,
        state: Tensor<3>,
        pool: Pool,
    ) -> (Tensor<3>, Pool, Result<Tensor<3>, MlaError>) {
        let (args, options) = self.call(kv_gates, sequences, entries, state, pool);
        let (carried, pool, outcome) = match compress_kv(args, &options) {
            Ok(CompressedKv { entries, state, cache }) => (state, cache, Ok(entries)),
            Err(refused) => (refused.state, refused.cache, Err(refused.error)),
        };
        (carried, pool.expect("the one that it was given"), outcome)
    }

    fn call(
        &self,
        kv_gates: Tensor<2>,
        sequences: &Sequences,
        entries: &EntryStep,
        state: Tensor<3>,
        pool: Pool,
    ) -> (CompressKvArgs, CompressKvOptions) {
        let dtype = FloatDType::from(kv_gates.dtype());
        let args = CompressKvArgs {
            kv_gates,
            state,
            state_rows: sequences.state_rows.clone(),
            state_slots: entries.carried_slots.clone(),
            cu_seqlens: sequences.cu_seqlens.clone(),
            starts: sequences.starts.clone(),
            position_bias: self.position_bias.val(),
            norm_weight: self.norm.val(),
            cos: entries.cos.clone(),
            sin: entries.sin.clone(),
            cache: Some(EntryCache { cache: pool, slots: entries.slots.clone() }),
        };
        (args, CompressKvOptions { overlap: self.spec.overlap, norm_eps: self.norm_eps, dtype })
    }
}
