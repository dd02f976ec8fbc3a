//! What the rest of the crate asks of DeepSeek-V4.

use std::sync::Arc;

use burn::tensor::{Device, FloatDType, Tensor};
use mla_ops::{Determinism, MlaDecodeProblem, Path};

use super::cache::V4Cache;
use super::config::DeepseekV4Config;
use super::model::DeepseekV4;
use super::names;
use crate::cache::{CacheSize, ModelCache};
use crate::config::LayerSummary;
use crate::models::architecture::{Architecture, Capture, Model, Observer, Sizes};
use crate::step::Chunk;
use crate::weights::{Published, WeightLoader};
use crate::{ModelError, Result};

impl Architecture for DeepseekV4Config {
    fn sizes(&self) -> Sizes<'_> {
        Sizes {
            num_hidden_layers: self.layers.len(),
            vocab_size: self.vocab_size,
            max_position_embeddings: self.max_position_embeddings,
            n_routed_experts: self.n_routed_experts,
            num_experts_per_tok: self.num_experts_per_tok,
            eos_token_ids: &self.eos_token_ids,
            quantization: self.quantization,
        }
    }

    fn layers(&self, dtype: FloatDType) -> Vec<LayerSummary> {
        self.layer_summaries(dtype)
    }

    fn cache_bytes(&self, size: CacheSize, dtype: FloatDType) -> Result<u128> {
        V4Cache::bytes(self, size, dtype)
    }

    fn with_layers(&self, layers: usize) -> Arc<dyn Architecture> {
        Arc::new(Self { layers: self.layers[..layers].to_vec(), ..self.clone() })
    }

    fn published(&self) -> Published {
        names::PUBLISHED
    }

    fn load(&self, loader: &mut WeightLoader, device: &Device) -> Box<dyn Model> {
        names::expect(loader);
        Box::new(DeepseekV4::load(self.clone(), loader, device))
    }
}

impl Model for DeepseekV4 {
    fn new_cache(&self, size: CacheSize, dtype: FloatDType) -> Result<ModelCache> {
        Ok(ModelCache::new(V4Cache::new(&self.config, size, dtype, &self.device)?))
    }

    fn forward(
        &self,
        chunks: &[Chunk],
        cache: &mut ModelCache,
        determinism: Determinism,
        observe: Option<Observer<'_>>,
    ) -> Result<Tensor<2>> {
        let cache = cache.get_mut()?;
        self.forward(&self.step(chunks, cache, determinism)?, cache, observe)
    }

    fn logits(&self, hidden: Tensor<2>, determinism: Determinism) -> Result<Tensor<2>> {
        self.logits(hidden, determinism)
    }

    fn decode_problem(&self, batch: usize, _page_size: usize, dtype: FloatDType) -> MlaDecodeProblem {
        MlaDecodeProblem {
            batch,
            query_len: 1,
            heads: self.parallel.local(self.config.num_attention_heads),
            key_width: self.config.head_dim,
            value_width: self.config.head_dim,
            // The rows that a token sees are gathered by index, one by one.
            page_size: 1,
            dtype: dtype.into(),
        }
    }

    fn check_deterministic(&self, path: Path) -> Result<()> {
        if path == Path::Reference {
            return Ok(());
        }
        Err(ModelError::request(
            "deterministic",
            format!("true, for DeepSeek-V4 on {:?}", self.device),
            "false, or the CPU: on GPUs its logits in f32 are not the same in every batch",
        ))
    }

    fn capture(&self) -> std::result::Result<&dyn Capture, &'static str> {
        Err("a step of DeepSeek-V4 advances the state of its requests, and a capture runs a step several times")
    }
}
