//! Any of the models, by what `config.json` says.

use std::path::Path;

use burn::tensor::{Device, FloatDType, Int, Tensor};
use mla_ops::{Determinism, PathChoice, check_opens, explain_path};

use crate::cache::{CacheSize, ModelCache};
use crate::config::GenerationDefaults;
use crate::decode_graph::{DecodeGraphs, GraphSupport};
use crate::inspection::check_headers;
use crate::models::{Capture, Hidden, Model, ModelConfig, Observer, PrefixSupport};
use crate::parallel::Parallel;
use crate::step::{Chunk, last_rows};
use crate::weights::{Checkpoint, Listed, LoadAs, LoadProgress, RandomInit, WeightLoader};
use crate::{ModelError, Result, memory};

/// A model loaded from a checkpoint folder, or the part of it that one rank has.
#[derive(Debug)]
pub struct DeepseekModel {
    config: ModelConfig,
    model: Box<dyn Model>,
    parallel: Parallel,
    device: Device,
    load_as: LoadAs,
    defaults: GenerationDefaults,
}

/// Refuses a device that does not open, and a dtype that it does not have.
pub(crate) fn check_device(device: &Device, dtype: FloatDType) -> Result<()> {
    check_opens(device)?;
    if device.supports_dtype(dtype) {
        return Ok(());
    }
    let expected = format!("a type that {device:?} can compute with; f32 always works");
    Err(ModelError::request("dtype", format!("{dtype:?}"), expected))
}

/// Refuses weights that the device has no memory for, before any is there.
pub(crate) fn check_memory(listed: &[Listed<'_>], load_as: LoadAs, parallel: &Parallel, device: &Device) -> Result<()> {
    let bytes = listed.iter().map(|listed| u128::from(listed.rank_bytes(load_as, parallel.size())));
    memory::check("weights", bytes.sum(), device)
}

impl DeepseekModel {
    /// Loads `config.json`, `generation_config.json` and the weights of a checkpoint folder; `on_progress` sees how far
    /// the weights are. The architecture is that of the config's `model_type`. Weights in blocks of codes stay as the files have
    /// them, unless `load_as` says otherwise; a dtype says nothing of that.
    ///
    /// # Errors
    /// Files that are missing or damaged, a config that contradicts itself, tensors that are missing, left over or of the
    /// wrong shape (all of them in one error), a device that does not open, a dtype that it does not have;
    /// [`ModelError::OutOfMemory`] for weights that do not fit into the memory, where that is known (the CPU on Linux, CUDA).
    pub fn load(
        dir: &Path,
        device: &Device,
        load_as: impl Into<LoadAs>,
        on_progress: &mut dyn FnMut(LoadProgress<'_>),
    ) -> Result<Self> {
        Self::load_rank(dir, Parallel::single(), device, load_as, on_progress)
    }

    /// [`Self::load`] of what one of several ranks has: its heads, its experts, its tokens of the head. Every rank loads its own
    /// model, and all call [`Self::forward`] or [`Self::next_token_logits`] with the same chunks; each gets all logits, the
    /// same bits. Weights take about `1 / size` of the memory, the KV cache all of it on each rank.
    ///
    /// # Errors
    /// As [`Self::load`], and heads, experts, channels or blocks of quantised weights that do not divide among the ranks: in the
    /// same error, before weights are read.
    pub fn load_rank(
        dir: &Path,
        parallel: Parallel,
        device: &Device,
        load_as: impl Into<LoadAs>,
        on_progress: &mut dyn FnMut(LoadProgress<'_>),
    ) -> Result<Self> {
        let load_as = load_as.into();
        let LoadAs { dtype, storage, kv_cache } = load_as;
        check_device(device, dtype)?;
        let config = ModelConfig::read(dir)?;
        config.row_format(kv_cache)?;
        let defaults = GenerationDefaults::read(dir, config.eos_token_ids())?;
        let checkpoint = Checkpoint::open(dir)?;
        let listed = check_headers(&config, Some(&checkpoint), &parallel, device)?;
        check_memory(&listed, load_as, &parallel, device)?;
        let loader = WeightLoader::new(&checkpoint, device, dtype, Some(on_progress)).with_parallel(parallel.clone());
        let mut loader = loader.with_quantization(config.quantization()).with_storage(storage);
        let model = config.load(&mut loader, device);
        loader.finish()?;
        Ok(Self { config, model, parallel, device: device.clone(), load_as, defaults })
    }

    /// A model with random weights, initialised on the device: by a seed, of sizes that keep activations finite, or as [`RandomInit`]
    /// says; codes and scales where the configuration names blocks, unless `load_as` says otherwise. Norms are 1. No token ends a text. `on_progress` sees how far the weights are, in bytes on the device.
    ///
    /// # Errors
    /// A device that does not open, a dtype that it does not have, a cache that the model does not have; [`ModelError::OutOfMemory`] as in
    /// [`Self::load`].
    pub fn random(
        config: ModelConfig,
        init: impl Into<RandomInit>,
        device: &Device,
        load_as: impl Into<LoadAs>,
        on_progress: &mut dyn FnMut(LoadProgress<'_>),
    ) -> Result<Self> {
        Self::random_rank(config, init, Parallel::single(), device, load_as, on_progress)
    }

    /// [`Self::random`] for what one of several ranks has, which is part of the model that a rank alone has with this seed:
    /// whole tensors are drawn, one at a time. See [`Self::load_rank`].
    ///
    /// # Errors
    /// As [`Self::random`], and what does not divide among the ranks.
    pub fn random_rank(
        config: ModelConfig,
        init: impl Into<RandomInit>,
        parallel: Parallel,
        device: &Device,
        load_as: impl Into<LoadAs>,
        on_progress: &mut dyn FnMut(LoadProgress<'_>),
    ) -> Result<Self> {
        let load_as = load_as.into();
        let LoadAs { dtype, kv_cache, .. } = load_as;
        check_device(device, dtype)?;
        config.row_format(kv_cache)?;
        let listed = check_headers(&config, None, &parallel, device)?;
        check_memory(&listed, load_as, &parallel, device)?;
        let bytes = listed.iter().map(|listed| listed.device_bytes(load_as)).sum();
        let loader = WeightLoader::random(init.into(), device, dtype, bytes, Some(on_progress)).with_parallel(parallel);
        Self::made(config, loader, device, load_as)
    }

    /// A model, or one of so many ranks, whose weights are anything: memory that nobody has written. It shows what is launched.
    ///
    /// # Errors
    /// A device that does not open, a dtype that it does not have, and what does not divide among the ranks.
    pub(crate) fn without_weights(config: ModelConfig, ranks: usize, device: &Device, load_as: LoadAs) -> Result<Self> {
        let LoadAs { dtype, kv_cache, .. } = load_as;
        check_device(device, dtype)?;
        config.row_format(kv_cache)?;
        let parallel = Parallel::pretended(0, ranks);
        check_headers(&config, None, &parallel, device)?;
        let loader = WeightLoader::unwritten(device, dtype).with_parallel(parallel);
        Self::made(config, loader, device, load_as)
    }

    /// A model whose weights come from no files, with defaults that nobody published.
    fn made(config: ModelConfig, loader: WeightLoader, device: &Device, load_as: LoadAs) -> Result<Self> {
        let loader = loader.with_storage(load_as.storage).with_quantization(config.quantization());
        let mut loader = loader.with_published(config.published());
        let parallel = loader.parallel().clone();
        let model = config.load(&mut loader, device);
        loader.finish()?;
        let eos_token_ids = Vec::new();
        let defaults =
            GenerationDefaults { eos_token_ids, do_sample: false, temperature: None, top_p: None, top_k: None };
        Ok(Self { config, model, parallel, device: device.clone(), load_as, defaults })
    }

    /// Which rank it is; alone, unless it was loaded as one of several.
    pub fn parallel(&self) -> &Parallel {
        &self.parallel
    }

    /// Where the model computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// How the publisher means the model to be sampled.
    pub fn generation_defaults(&self) -> &GenerationDefaults {
        &self.defaults
    }

    /// Token ids that end a text.
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.defaults.eos_token_ids
    }

    /// Token ids are below this.
    pub fn vocab_size(&self) -> usize {
        self.config.vocab_size()
    }

    /// Tokens that a sequence may have.
    pub fn max_positions(&self) -> usize {
        self.config.max_position_embeddings()
    }

    /// An empty cache for this model.
    ///
    /// # Errors
    /// A size that is zero or too large, or a page size that is no power of two; [`ModelError::OutOfMemory`].
    pub fn new_cache(&self, size: CacheSize) -> Result<ModelCache> {
        let cache = self.model.new_cache(size, self.load_as);
        cache.map_err(|error| memory::of_failure("a KV cache", error, &self.device))
    }

    /// What weights have become, and how caches store rows.
    pub(crate) fn load_as(&self) -> LoadAs {
        self.load_as
    }

    /// What requests that begin alike can share.
    pub(crate) fn prefix_support(&self) -> PrefixSupport {
        self.config.prefix_support(self.load_as.dtype)
    }

    /// What captures its decode steps.
    pub(crate) fn capture(&self) -> std::result::Result<&dyn Capture, &'static str> {
        self.model.capture()
    }

    /// Its captured decode steps, or why it has none.
    pub(crate) fn decode_graphs(
        &self,
        determinism: Determinism,
    ) -> std::result::Result<DecodeGraphs<'_>, GraphSupport> {
        DecodeGraphs::new(&*self.model, self.vocab_size(), &self.device, &self.parallel, determinism)
    }

    /// Which implementation of the decode attention runs for a batch, and why.
    pub fn attention_path(&self, batch: usize, page_size: usize) -> PathChoice {
        let problem = self.model.decode_problem(batch, page_size, self.load_as);
        explain_path(&problem, &self.device)
    }

    /// One forward pass over the new tokens of some requests: logits `[N, vocab]` of every token. `observe` sees the
    /// hidden states `[N, hidden]` on the way.
    ///
    /// # Errors
    /// An operation that refuses its arguments, or a cache that is another model's or does not know a request.
    pub fn forward(
        &self,
        chunks: &[Chunk],
        cache: &mut ModelCache,
        determinism: Determinism,
        observe: &mut dyn FnMut(Hidden, &Tensor<2>),
    ) -> Result<Tensor<2>> {
        self.model.logits(self.model.forward(chunks, cache, determinism, Some(Observer::Hidden(observe)))?, determinism)
    }

    /// One forward pass as [`Self::next_token_logits`], for which experts each token chooses: i32 `[N, k]` for each layer that has
    /// experts, first to last. The cache has taken in the tokens afterwards.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn chosen_experts(
        &self,
        chunks: &[Chunk],
        cache: &mut ModelCache,
        determinism: Determinism,
    ) -> Result<Vec<Tensor<2, Int>>> {
        let mut chosen = Vec::new();
        let mut observe = |indices| chosen.push(indices);
        self.model.forward(chunks, cache, determinism, Some(Observer::Experts(&mut observe)))?;
        Ok(chosen)
    }

    /// Logits `[chunks, vocab]` of the last new token of each request.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn next_token_logits(
        &self,
        chunks: &[Chunk],
        cache: &mut ModelCache,
        determinism: Determinism,
    ) -> Result<Tensor<2>> {
        let hidden = self.model.forward(chunks, cache, determinism, None)?;
        self.model.logits(last_rows(&hidden, chunks), determinism)
    }
}
