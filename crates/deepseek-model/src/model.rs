//! Any of the models, by what `config.json` says.

use std::path::Path;

use burn::tensor::{Device, FloatDType, Tensor};
use mla_ops::cache::{CacheConfig, PagedCache, PoolConfig};
use mla_ops::{MlaDecodeProblem, PathChoice, batch_invariant, explain_path};

use crate::cache::{CacheSize, ModelCache, V4Cache};
use crate::config::{DeepseekV3Config, GenerationDefaults, ModelConfig};
use crate::decode_graph::DecodeGraphs;
use crate::models::{DeepseekV3, DeepseekV4, Hidden};
use crate::step::Chunk;
use crate::weights::{Checkpoint, LoadProgress, WeightLoader, check_headers, device_bytes, weight_specs};
use crate::{ModelError, Result};

/// A model loaded from a checkpoint folder.
#[derive(Debug)]
pub struct DeepseekModel {
    config: ModelConfig,
    architecture: Architecture,
    device: Device,
    dtype: FloatDType,
    defaults: GenerationDefaults,
}

#[derive(Debug)]
pub(crate) enum Architecture {
    V3(Box<DeepseekV3>),
    V4(Box<DeepseekV4>),
}

impl Architecture {
    /// Takes the weights out of a loader; what is missing or wrong shows when the loader is finished.
    pub(crate) fn load(config: &ModelConfig, loader: &mut WeightLoader, device: &Device) -> Self {
        match config.clone() {
            ModelConfig::V3(config) => {
                loader.skip_unused(&config);
                Self::V3(Box::new(DeepseekV3::load(config, loader, device)))
            }
            ModelConfig::V4(config) => {
                loader.expect_v4();
                Self::V4(Box::new(DeepseekV4::load(config, loader, device)))
            }
        }
    }
}

fn check_dtype(device: &Device, dtype: FloatDType) -> Result<()> {
    if device.supports_dtype(dtype) {
        return Ok(());
    }
    let expected = format!("a type that {device:?} can compute with; f32 always works");
    Err(ModelError::request("dtype", format!("{dtype:?}"), expected))
}

impl DeepseekModel {
    /// Loads `config.json`, `generation_config.json` and the weights of a checkpoint folder; `on_progress` sees how far
    /// the weights are. The architecture is that of the config's `model_type`.
    ///
    /// # Errors
    /// Files that are missing or damaged, a config that contradicts itself, tensors that are missing, left over or of the
    /// wrong shape (all of them in one error), a dtype that the device does not have.
    pub fn load(
        dir: &Path,
        device: &Device,
        dtype: FloatDType,
        on_progress: &mut dyn FnMut(LoadProgress<'_>),
    ) -> Result<Self> {
        check_dtype(device, dtype)?;
        let config = ModelConfig::read(dir)?;
        let defaults = GenerationDefaults::read(dir, config.eos_token_ids())?;
        let checkpoint = Checkpoint::open(dir)?;
        check_headers(&config, &checkpoint, device)?;
        let loader = WeightLoader::new(&checkpoint, device, dtype, Some(on_progress));
        let mut loader = loader.with_quantization(config.quantization());
        let architecture = Architecture::load(&config, &mut loader, device);
        loader.finish()?;
        Ok(Self { config, architecture, device: device.clone(), dtype, defaults })
    }

    /// A model without a checkpoint: its weights are drawn on the device, by `seed`, of sizes that keep activations finite.
    /// No token ends a text. `on_progress` sees how far the weights are, in bytes on the device.
    ///
    /// # Errors
    /// A dtype that the device does not have.
    pub fn random(
        config: ModelConfig,
        seed: u64,
        device: &Device,
        dtype: FloatDType,
        on_progress: &mut dyn FnMut(LoadProgress<'_>),
    ) -> Result<Self> {
        check_dtype(device, dtype)?;
        let bytes = device_bytes(&weight_specs(&config), dtype);
        let mut loader = WeightLoader::random(seed, device, dtype, bytes, Some(on_progress));
        let architecture = Architecture::load(&config, &mut loader, device);
        loader.finish()?;
        let eos_token_ids = Vec::new();
        let defaults =
            GenerationDefaults { eos_token_ids, do_sample: false, temperature: None, top_p: None, top_k: None };
        Ok(Self { config, architecture, device: device.clone(), dtype, defaults })
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
    /// A size that is zero or too large, or a page size that is no power of two.
    pub fn new_cache(&self, size: CacheSize) -> Result<ModelCache> {
        match &self.config {
            ModelConfig::V3(config) => {
                let cache = PagedCache::new(latent_cache_config(config, size, self.dtype), &self.device)?;
                Ok(ModelCache::Latent(cache))
            }
            ModelConfig::V4(config) => Ok(ModelCache::V4(V4Cache::new(config, size, self.dtype, &self.device)?)),
        }
    }

    /// Decode steps that are captured, where the model and its device have them.
    pub(crate) fn decode_graphs(&self) -> Option<DecodeGraphs<'_>> {
        match &self.architecture {
            Architecture::V3(model) => DecodeGraphs::new(model, &self.device),
            Architecture::V4(_) => None,
        }
    }

    /// Whether a token's logits can be computed in a way that does not depend on the other tokens.
    ///
    /// # Errors
    /// [`ModelError::Request`] for DeepSeek-V4 on a GPU, [`ModelError::Ops`] for a device that cannot.
    pub(crate) fn check_deterministic(&self) -> Result<()> {
        batch_invariant(&self.device, || ())?;
        match &self.architecture {
            Architecture::V4(_) if self.attention_path(1, 1).path != mla_ops::Path::Reference => {
                Err(ModelError::request(
                    "deterministic",
                    format!("true, for DeepSeek-V4 on {:?}", self.device),
                    "false, or the CPU: on GPUs its logits in f32 are not the same in every batch",
                ))
            }
            _ => Ok(()),
        }
    }

    /// Which implementation of the decode attention runs for a batch, and why.
    pub fn attention_path(&self, batch: usize, page_size: usize) -> PathChoice {
        let (heads, key_width, value_width, page_size) = match &self.config {
            ModelConfig::V3(config) => {
                (config.num_attention_heads, config.cache_width(), config.kv_lora_rank, page_size)
            }
            // The rows that a token sees are named one by one.
            ModelConfig::V4(config) => (config.num_attention_heads, config.head_dim, config.head_dim, 1),
        };
        let problem = MlaDecodeProblem {
            batch,
            query_len: 1,
            heads,
            key_width,
            value_width,
            page_size,
            dtype: self.dtype.into(),
        };
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
        observe: &mut dyn FnMut(Hidden, &Tensor<2>),
    ) -> Result<Tensor<2>> {
        match &self.architecture {
            Architecture::V3(model) => Ok(model.logits(model.forward(chunks, cache.latent()?, observe)?)),
            Architecture::V4(model) => Ok(model.logits(model.forward(chunks, cache.v4()?, observe)?)),
        }
    }

    /// Logits `[chunks, vocab]` of the last new token of each request.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn next_token_logits(&self, chunks: &[Chunk], cache: &mut ModelCache) -> Result<Tensor<2>> {
        match &self.architecture {
            Architecture::V3(model) => model.next_token_logits(chunks, cache.latent()?),
            Architecture::V4(model) => model.next_token_logits(chunks, cache.v4()?),
        }
    }
}

fn latent_cache_config(config: &DeepseekV3Config, size: CacheSize, dtype: FloatDType) -> CacheConfig {
    CacheConfig {
        pools: config.pool_widths().into_iter().map(PoolConfig::per_token).collect(),
        dtype,
        num_pages: size.num_pages,
        page_size: size.page_size,
        max_requests: size.max_requests,
        max_tokens: size.max_tokens,
    }
}
