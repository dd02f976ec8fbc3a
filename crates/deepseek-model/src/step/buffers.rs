//! The inputs of a decode step in buffers that stay where they are, so that a captured step finds the next ones there.

use burn::tensor::{Device, Int, Tensor, s};
use mla_ops::cache::PagedCache;
use mla_ops::{MlaPlanArgs, PagedBatchArgs, Splits, mla_plan, page_table};

use super::{Chunk, IndexedKeys, Keys, PagedKeys, Step, ints};
use crate::Result;
use crate::config::DeepseekV3Config;
use crate::layers::{RotaryEmbedding, Rotation};

/// One token of each of `B` requests. Rows without a request have length 0 and slot -1: they write nothing and see nothing.
#[derive(Debug)]
pub(crate) struct StepBuffers {
    /// i32 `[B]`.
    input_ids: Tensor<1, Int>,
    /// i32 `[B]`.
    slots: Tensor<1, Int>,
    /// i32 `[B]`, the new token included.
    seq_lens: Tensor<1, Int>,
    /// i32 `[B, maxP]`.
    page_table: Tensor<2, Int>,
    rotation: Rotation,
}

impl StepBuffers {
    /// For steps without requests.
    pub(crate) fn new(batch: usize, max_pages: usize, rotary: &RotaryEmbedding, device: &Device) -> Self {
        let none = |value| ints(vec![value; batch], device);
        Self {
            input_ids: none(0),
            slots: none(-1),
            seq_lens: none(0),
            page_table: ints(vec![-1; batch * max_pages], device).reshape([batch, max_pages]),
            rotation: rotary.at(&vec![0; batch], device),
        }
    }

    /// Whether nobody else has a handle of a buffer, so that [`Self::fill`] stays in all of them.
    pub(crate) fn has_only_handles(&self) -> bool {
        let rows = [&self.input_ids, &self.slots, &self.seq_lens];
        rows.iter().all(|buffer| buffer.can_mut()) && self.page_table.can_mut() && self.rotation.has_only_handles()
    }

    /// Takes the inputs of a step: chunks of one token, at most `B`, of requests with at most `maxP` pages.
    pub(crate) fn fill(
        &mut self,
        chunks: &[Chunk],
        cache: &PagedCache,
        rotary: &RotaryEmbedding,
        device: &Device,
    ) -> Result<()> {
        let [batch, max_pages] = self.page_table.dims();
        let mut positions = vec![0; batch];
        let [mut ids, mut lens, mut rows, mut slots] = [0, 0, 0, -1].map(|nothing| vec![nothing; batch]);
        for (i, chunk) in chunks.iter().enumerate() {
            let len = cache.len(chunk.request)?;
            positions[i] = len - 1;
            // The cache's sizes and the vocabulary are bounded by i32::MAX.
            (ids[i], lens[i]) = (chunk.tokens[0] as i32, len as i32);
            (rows[i], slots[i]) = (cache.row(chunk.request)? as i32, chunk.slots[0]);
        }
        let [ids, lens, rows, slots] = [ids, lens, rows, slots].map(|values| ints(values, device));
        let pages = PagedBatchArgs {
            req_to_token: cache.req_to_token(),
            req_rows: rows,
            seq_lens: lens.clone(),
            kv_start: None,
            page_size: cache.config().page_size,
        };
        let page_table = page_table(pages, max_pages)?;

        // An assignment to the only handle of a buffer stays in it.
        self.input_ids.inplace(|buffer| buffer.slice_assign(s![..batch], ids));
        self.slots.inplace(|buffer| buffer.slice_assign(s![..batch], slots));
        self.seq_lens.inplace(|buffer| buffer.slice_assign(s![..batch], lens));
        self.page_table.inplace(|buffer| buffer.slice_assign(s![..batch, ..max_pages], page_table));
        self.rotation.refresh(rotary.at(&positions, device));
        Ok(())
    }

    /// The step, made on the device from the buffers alone.
    pub(crate) fn step(&self, config: &DeepseekV3Config, page_size: usize) -> Result<Step> {
        let [batch, max_pages] = self.page_table.dims();
        let (page_table, seq_lens) = (self.page_table.clone(), self.seq_lens.clone());
        let keys = if config.indexer.is_some_and(|indexer| max_pages * page_size > indexer.topk) {
            Keys::Indexed(IndexedKeys { page_table, visible: seq_lens.reshape([batch, 1]) })
        } else {
            let plan = mla_plan(MlaPlanArgs {
                seq_lens: seq_lens.clone(),
                query_len: 1,
                heads: config.num_attention_heads,
                page_size,
                max_seq_len: max_pages * page_size,
                splits: Splits::Auto,
            })?;
            Keys::All { single: Some(PagedKeys { batch, page_table, seq_lens, plan }), new: None }
        };
        Ok(Step {
            input_ids: self.input_ids.clone(),
            slots: self.slots.clone(),
            rotation: self.rotation.clone(),
            keys,
            padding: (batch > 1).then(|| self.seq_lens.clone().equal_elem(0).reshape([batch, 1])),
        })
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::path::Path;

    use burn::tensor::FloatDType;
    use mla_ops::cache::{CacheConfig, PoolConfig};

    use super::*;
    use crate::config::ModelConfig;

    #[test]
    fn buffers_know_whether_somebody_else_has_a_handle() {
        let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/v3-tiny/config.json");
        let Ok(ModelConfig::V3(config)) = ModelConfig::read_file(Path::new(fixture)) else {
            unreachable!("a DeepSeek-V3");
        };
        let device = Device::flex();
        let rotary = RotaryEmbedding::new(&config.rope, config.qk_rope_head_dim, config.rope_interleave);
        let mut buffers = StepBuffers::new(2, 4, &rotary, &device);
        let size = CacheConfig {
            pools: vec![PoolConfig::per_token(8)],
            num_pages: 4,
            page_size: 8,
            max_requests: 2,
            max_tokens: 32,
            dtype: FloatDType::F32,
        };
        let mut cache = PagedCache::new(size, &device).unwrap();
        let request = cache.admit().unwrap();
        for token in 0..3 {
            let slots = cache.append(request, 1).unwrap();
            buffers.fill(&[Chunk { request, tokens: vec![token], slots }], &cache, &rotary, &device).unwrap();
            assert!(buffers.has_only_handles());
            let step = buffers.step(&config, 8).unwrap();
            assert!(!buffers.has_only_handles(), "the step has handles");
            drop(step);
            assert!(buffers.has_only_handles());
        }
    }
}
