//! What the rest of the crate asks of DeepSeek-V3.

use std::sync::Arc;

use burn::tensor::{Device, FloatDType, Int, Tensor};
use mla_ops::cache::{CacheConfig, CacheError, PagedCache, RowFormat};
use mla_ops::{Determinism, MlaDecodeProblem};

use super::buffers::StepBuffers;
use super::config::DeepseekV3Config;
use super::model::DeepseekV3;
use super::names;
use crate::cache::{CacheSize, KvCacheFormat, ModelCache, check_fp8_index_keys};
use crate::config::LayerSummary;
use crate::models::architecture::{
    Architecture, BufferedStep, Capture, Model, Observer, PrefixSupport, RANKS_TALK, Sizes,
};
use crate::step::Chunk;
use crate::weights::{LoadAs, Published, WeightLoader};
use crate::{ModelError, Result, memory};

impl Architecture for DeepseekV3Config {
    fn sizes(&self) -> Sizes<'_> {
        Sizes {
            num_hidden_layers: self.num_hidden_layers,
            vocab_size: self.vocab_size,
            max_position_embeddings: self.max_position_embeddings,
            n_routed_experts: self.n_routed_experts,
            num_experts_per_tok: self.num_experts_per_tok,
            eos_token_ids: &self.eos_token_ids,
            quantization: self.quantization,
        }
    }

    fn layers(&self, load_as: LoadAs) -> Vec<LayerSummary> {
        self.layer_summaries(load_as)
    }

    fn cache_bytes(&self, size: CacheSize, load_as: LoadAs) -> Result<u128> {
        Ok(self.cache_config(size, load_as)?.bytes().map_err(CacheError::from)? as u128)
    }

    fn index_scratch_bytes(&self, size: CacheSize, load_as: LoadAs) -> Result<u128> {
        Ok(self.cache_config(size, load_as)?.index_scratch_bytes().map_err(CacheError::from)? as u128)
    }

    fn row_format(&self, kv_cache: KvCacheFormat) -> Result<RowFormat> {
        let (latent, rope) = (self.kv_lora_rank, self.qk_rope_head_dim);
        match kv_cache {
            KvCacheFormat::Auto => Ok(RowFormat::Dense),
            KvCacheFormat::Fp8 if latent.is_multiple_of(4) && rope.is_multiple_of(2) => {
                self.indexer.map_or(Ok(()), |indexer| check_fp8_index_keys(indexer.head_dim))?;
                Ok(RowFormat::Fp8 { rope })
            }
            KvCacheFormat::Fp8 => {
                let expected = format!("auto: in FP8 `kv_lora_rank` = {latent} would have to be a multiple of 4");
                Err(ModelError::request("kv_cache", "fp8", expected))
            }
        }
    }

    fn activations_per_token(&self) -> usize {
        let (key, latent) = (self.qk_nope_head_dim + self.qk_rope_head_dim, self.kv_lora_rank);
        // Queries, keys, values and outputs, and both ends of the absorbed form.
        let head = 2 * key + 2 * self.v_head_dim + 2 * latent + self.qk_rope_head_dim;
        let low_rank = self.q_lora_rank.unwrap_or(0) + latent + self.qk_rope_head_dim;
        let index = self.indexer.as_ref().map_or(0, |index| index.heads * (index.head_dim + 1) + index.topk);
        // Gate, the other factor and their product; of routed experts the outputs, too.
        let experts = self.num_experts_per_tok * (3 * self.moe_intermediate_size + self.hidden_size);
        let mlp = (experts + 3 * self.n_shared_experts * self.moe_intermediate_size).max(3 * self.intermediate_size);
        4 * self.hidden_size + low_rank + self.num_attention_heads * head + index + mlp
    }

    fn prefix_support(&self, _dtype: FloatDType) -> PrefixSupport {
        PrefixSupport::Pages
    }

    fn with_layers(&self, layers: usize) -> Arc<dyn Architecture> {
        let first_k_dense_replace = self.first_k_dense_replace.min(layers);
        Arc::new(Self { num_hidden_layers: layers, first_k_dense_replace, ..self.clone() })
    }

    fn published(&self) -> Published {
        names::published(self)
    }

    fn load(&self, loader: &mut WeightLoader, device: &Device) -> Box<dyn Model> {
        names::skip_unused(loader, self);
        Box::new(DeepseekV3::load(self.clone(), loader, device))
    }
}

impl DeepseekV3Config {
    fn cache_config(&self, size: CacheSize, load_as: LoadAs) -> Result<CacheConfig> {
        Ok(CacheConfig {
            pools: self.pools(self.row_format(load_as.kv_cache)?),
            dtype: load_as.dtype,
            num_pages: size.num_pages,
            page_size: size.page_size,
            max_requests: size.max_requests,
            max_tokens: size.max_tokens,
        })
    }
}

impl Model for DeepseekV3 {
    fn new_cache(&self, size: CacheSize, load_as: LoadAs) -> Result<ModelCache> {
        let config = self.config.cache_config(size, load_as)?;
        memory::check("a KV cache", config.bytes().map_err(CacheError::from)? as u128, &self.device)?;
        Ok(ModelCache::new(PagedCache::new(config, &self.device)?))
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

    fn decode_problem(&self, batch: usize, page_size: usize, load_as: LoadAs) -> MlaDecodeProblem {
        MlaDecodeProblem {
            batch,
            query_len: 1,
            heads: self.heads(),
            key_width: self.mla.cache_width(),
            value_width: self.config.kv_lora_rank,
            page_size,
            dtype: load_as.dtype.into(),
            rows: self.config.row_format(load_as.kv_cache).unwrap_or_default(),
        }
    }

    fn capture(&self) -> std::result::Result<&dyn Capture, &'static str> {
        match self.parallel.can_be_captured() {
            true => Ok(self),
            false => Err(RANKS_TALK),
        }
    }
}

impl Capture for DeepseekV3 {
    fn buffered_step(
        &self,
        batch: usize,
        pages: [usize; 2],
        determinism: Determinism,
    ) -> Result<Box<dyn BufferedStep + '_>> {
        let topk = self.mla.indexer.map(|indexer| indexer.topk);
        let buffers = StepBuffers::new(batch, pages, (&self.rotary, topk), &self.device)?;
        Ok(Box::new(DecodeStep { model: self, buffers, determinism }))
    }

    fn stand_in(&self, cache: &ModelCache) -> Result<ModelCache> {
        let config = cache.get::<PagedCache>()?.config().clone();
        let config = CacheConfig { num_pages: 1, max_requests: 1, max_tokens: 1, ..config };
        Ok(ModelCache::new(PagedCache::new(config, &self.device)?))
    }
}

/// A decode step in buffers.
struct DecodeStep<'m> {
    model: &'m DeepseekV3,
    buffers: StepBuffers,
    determinism: Determinism,
}

impl BufferedStep for DecodeStep<'_> {
    fn is_in_place(&self) -> bool {
        self.buffers.has_only_handles()
    }

    fn fill(&mut self, chunks: &[Chunk], cache: &mut ModelCache) -> Result<()> {
        self.buffers.fill(chunks, cache.get()?, &self.model.device)
    }

    fn feed(&mut self, ids: Tensor<1, Int>) {
        self.buffers.feed(ids);
    }

    fn logits(&self, cache: &mut ModelCache) -> Result<Tensor<2>> {
        let step = self.buffers.step((&self.model.mla, self.model.heads()), self.determinism)?;
        self.model.logits(self.model.forward(&step, cache.get_mut()?, None)?, step.determinism)
    }

    #[cfg(all(test, feature = "_gpu"))]
    fn handles(&self) -> Box<dyn std::any::Any> {
        Box::new(self.buffers.clone())
    }
}
