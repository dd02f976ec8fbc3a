//! Any of the models, by what `config.json` says.

use std::path::Path;

use burn::tensor::{Device, FloatDType, Tensor};
use mla_ops::cache::{CacheConfig, PagedCache};
use mla_ops::{MlaDecodeProblem, PathChoice, explain_path};

use crate::config::{DeepseekV3Config, GenerationDefaults, read_config};
use crate::models::{DeepseekV3, Hidden};
use crate::step::Chunk;
use crate::weights::{Checkpoint, LoadProgress, WeightLoader};
use crate::{ModelError, Result};

/// A model loaded from a checkpoint folder.
#[derive(Debug)]
pub struct DeepseekModel {
    architecture: DeepseekV3,
    device: Device,
    dtype: FloatDType,
    defaults: GenerationDefaults,
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
        if !device.supports_dtype(dtype) {
            let expected = format!("a type that {device:?} can compute with; f32 always works");
            return Err(ModelError::request("dtype", format!("{dtype:?}"), expected));
        }
        let config = read_config(dir)?;
        let defaults = GenerationDefaults::read(dir, &config)?;
        let checkpoint = Checkpoint::open(dir)?;
        let mut loader = WeightLoader::new(&checkpoint, device, dtype, Some(on_progress));
        loader.skip_unused(&config);
        let architecture = DeepseekV3::load(config, &mut loader, device);
        loader.finish()?;
        Ok(Self { architecture, device: device.clone(), dtype, defaults })
    }

    /// Where the model computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The configuration.
    pub fn config(&self) -> &DeepseekV3Config {
        self.architecture.config()
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
        self.config().vocab_size
    }

    /// Tokens that a sequence may have.
    pub fn max_positions(&self) -> usize {
        self.config().max_position_embeddings
    }

    /// Pools and dtype of the cache that the model needs; the sizes are for the caller to choose.
    pub fn cache_config(&self) -> CacheConfig {
        CacheConfig {
            widths: self.config().pool_widths(),
            dtype: self.dtype,
            num_pages: 1,
            page_size: 64,
            max_requests: 1,
            max_tokens: self.max_positions(),
        }
    }

    /// Which implementation of the decode attention runs for a batch, and why.
    pub fn attention_path(&self, batch: usize, page_size: usize) -> PathChoice {
        let config = self.config();
        let problem = MlaDecodeProblem {
            batch,
            query_len: 1,
            heads: config.num_attention_heads,
            key_width: config.cache_width(),
            value_width: config.kv_lora_rank,
            page_size,
            dtype: self.dtype.into(),
        };
        explain_path(&problem, &self.device)
    }

    /// One forward pass over the new tokens of some requests: logits `[N, vocab]` of every token. `observe` sees the
    /// hidden states `[N, hidden]` on the way.
    ///
    /// # Errors
    /// An operation that refuses its arguments, or a cache that does not know a request.
    pub fn forward(
        &self,
        chunks: &[Chunk],
        cache: &mut PagedCache,
        observe: &mut dyn FnMut(Hidden, &Tensor<2>),
    ) -> Result<Tensor<2>> {
        let hidden = self.architecture.forward(chunks, cache, observe)?;
        Ok(self.architecture.logits(hidden))
    }

    /// Logits `[chunks, vocab]` of the last new token of each request.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn next_token_logits(&self, chunks: &[Chunk], cache: &mut PagedCache) -> Result<Tensor<2>> {
        self.architecture.next_token_logits(chunks, cache)
    }
}
