//! What the rest of the crate asks of DeepSeek-V4.

use std::sync::Arc;

use burn::tensor::{Device, FloatDType, Int, Tensor};
use mla_ops::cache::RowFormat;
use mla_ops::{Determinism, MlaDecodeProblem};

use super::buffers::StepBuffers;
use super::cache::V4Cache;
use super::config::DeepseekV4Config;
use super::model::DeepseekV4;
use super::names;
use super::partial_rotary::PartialRotary;
use crate::cache::{CacheSize, KvCacheFormat, ModelCache, check_fp8_index_keys};
use crate::config::LayerSummary;
use crate::models::architecture::{
    Architecture, BufferedStep, Capture, Model, Observer, PrefixSupport, RANKS_TALK, Sizes,
};
use crate::step::Chunk;
use crate::weights::{LoadAs, Published, WeightLoader};
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

    fn layers(&self, load_as: LoadAs) -> Vec<LayerSummary> {
        self.layer_summaries(load_as)
    }

    fn cache_bytes(&self, size: CacheSize, load_as: LoadAs) -> Result<u128> {
        V4Cache::bytes(self, size, load_as)
    }

    fn index_scratch_bytes(&self, size: CacheSize, load_as: LoadAs) -> Result<u128> {
        V4Cache::index_scratch_bytes(self, size, load_as)
    }

    fn row_format(&self, kv_cache: KvCacheFormat) -> Result<RowFormat> {
        let (latent, rope) = (self.head_dim - self.qk_rope_head_dim, self.qk_rope_head_dim);
        match kv_cache {
            KvCacheFormat::Auto => Ok(RowFormat::Dense),
            KvCacheFormat::Fp8 if latent > 0 && latent.is_multiple_of(4) && rope.is_multiple_of(2) => {
                check_fp8_index_keys(self.index_head_dim)?;
                Ok(RowFormat::Fp8E8m0 { rope })
            }
            KvCacheFormat::Fp8 => {
                let expected =
                    format!("auto: FP8 rows are not known of {latent} channels with {rope} rotary ones behind them");
                Err(ModelError::request("kv_cache", "fp8", expected))
            }
        }
    }

    fn activations_per_token(&self) -> usize {
        // Queries before and after the rotation, outputs, and what is gathered of them.
        let heads = 4 * self.num_attention_heads * self.head_dim + self.o_groups * self.o_lora_rank;
        let index = self.index_n_heads * (self.index_head_dim + 1) + self.index_topk;
        // Gate, the other factor and their product; of routed experts the outputs, too.
        let experts = self.num_experts_per_tok * (3 * self.moe_intermediate_size + self.hidden_size);
        let streams = (3 * self.hc_mult + 4) * self.hidden_size;
        streams + self.q_lora_rank + heads + index + experts + 3 * self.moe_intermediate_size
    }

    fn prefix_support(&self, dtype: FloatDType) -> PrefixSupport {
        PrefixSupport::Snapshots { bytes: self.bytes_per_request(dtype) }
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
    fn new_cache(&self, size: CacheSize, load_as: LoadAs) -> Result<ModelCache> {
        Ok(ModelCache::new(V4Cache::new(&self.config, size, load_as, &self.device)?))
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

    fn decode_problem(&self, batch: usize, _page_size: usize, load_as: LoadAs) -> MlaDecodeProblem {
        MlaDecodeProblem {
            batch,
            query_len: 1,
            heads: self.parallel.local(self.config.num_attention_heads),
            key_width: self.config.head_dim,
            value_width: self.config.head_dim,
            // The rows that a token sees are gathered by index, one by one.
            page_size: 1,
            dtype: load_as.dtype.into(),
            rows: RowFormat::Dense,
        }
    }

    fn capture(&self) -> std::result::Result<&dyn Capture, &'static str> {
        match self.parallel.can_be_captured() {
            true => Ok(self),
            false => Err(RANKS_TALK),
        }
    }
}

impl Capture for DeepseekV4 {
    fn buffered_step(
        &self,
        batch: usize,
        pages: [usize; 2],
        determinism: Determinism,
    ) -> Result<Box<dyn BufferedStep + '_>> {
        let [max_pages, page_size] = pages;
        let table = |rotary: &PartialRotary| rotary.joined(max_pages * page_size, &self.device);
        let rotations = [table(&self.rotary)?, table(&self.compress_rotary)?];
        let buffers = StepBuffers::new(batch, pages, rotations, (&self.config, determinism), &self.device);
        Ok(Box::new(DecodeStep { model: self, buffers }))
    }

    fn stand_in(&self, cache: &ModelCache) -> Result<ModelCache> {
        Ok(ModelCache::new(cache.get::<V4Cache>()?.stand_in(&self.config)?))
    }
}

/// A decode step in buffers. What it writes into the state of a request goes where its position says, so that it may run several
/// times.
struct DecodeStep<'m> {
    model: &'m DeepseekV4,
    buffers: StepBuffers,
}

impl BufferedStep for DecodeStep<'_> {
    fn is_in_place(&self) -> bool {
        self.buffers.has_only_handles()
    }

    fn fill(&mut self, chunks: &[Chunk], cache: &mut ModelCache) -> Result<()> {
        self.buffers.fill(chunks, cache.get_mut()?, &self.model.device)
    }

    fn feed(&mut self, ids: Tensor<1, Int>) {
        self.buffers.feed(ids);
    }

    fn logits(&self, cache: &mut ModelCache) -> Result<Tensor<2>> {
        let step = self.buffers.step();
        self.model.logits(self.model.forward(&step, cache.get_mut()?, None)?, step.determinism)
    }

    #[cfg(all(test, feature = "_gpu"))]
    fn handles(&self) -> Box<dyn std::any::Any> {
        Box::new(self.buffers.clone())
    }
}
