//! The inputs of a decode step in buffers that stay where they are, so that a captured step finds the next ones there.

use burn::tensor::{Device, Int, Tensor, s};
use mla_ops::cache::PagedCache;
use mla_ops::{Determinism, MlaPlanArgs, mla_plan};

use super::indexer_config::IndexerConfig;
use super::keys::{Keys, PagedKeys, PickedKeys, indexer_of, splits};
use super::mla_config::MlaConfig;
use super::rotary::{RotaryEmbedding, Rotation};
use super::step::MlaStep;
use crate::Result;
use crate::index_keys::IndexedKeys;
use crate::step::{Chunk, Parts, end_part, ints};

/// One token of each of `B` requests. Rows without a request have length 0 and slot -1: they write nothing and see nothing.
///
/// All that changes is in one tensor: a refresh is one copy to the device.
#[derive(Debug, Clone)]
pub(crate) struct StepBuffers {
    batch: usize,
    max_pages: usize,
    page_size: usize,
    /// Keys that an indexer picks, if there is one.
    topk: Option<usize>,
    /// i32, in [`Parts`]: ids `[B]`, slots `[B]`, lengths `[B]` with the new token, positions `[B]` of it, how many keys are picked
    /// `[B]`, pages `[B, maxP]`.
    numbers: Tensor<1, Int>,
    /// At all positions of these pages, and more: all steps have the same table.
    rotations: Rotation,
}

impl StepBuffers {
    /// For steps without requests.
    pub(crate) fn new(
        batch: usize,
        [max_pages, page_size]: [usize; 2],
        (rotary, topk): (&RotaryEmbedding, Option<usize>),
        device: &Device,
    ) -> Result<Self> {
        let numbers = ints(Numbers::new(batch, max_pages).concat(), device);
        let rotations = rotary.first(max_pages * page_size, device)?;
        Ok(Self { batch, max_pages, page_size, topk, numbers, rotations })
    }

    /// Whether this is the only handle of the buffer, so that [`Self::fill`] stays in it.
    pub(crate) fn has_only_handles(&self) -> bool {
        self.numbers.can_mut()
    }

    /// Takes the inputs of a step: chunks of one token, at most `B`, of requests with at most `maxP` pages.
    pub(crate) fn fill(&mut self, chunks: &[Chunk], cache: &PagedCache, device: &Device) -> Result<()> {
        let max_pages = self.max_pages;
        let mut numbers = Numbers::new(self.batch, max_pages);
        for (i, chunk) in chunks.iter().enumerate() {
            let len = cache.len(chunk.request)?;
            // The cache's sizes and the vocabulary are bounded by i32::MAX.
            numbers.ids[i] = chunk.tokens[0] as i32;
            numbers.slots[i] = chunk.slots[0];
            numbers.lens[i] = len as i32;
            numbers.positions[i] = len as i32 - 1;
            numbers.picked[i] = self.topk.map_or(0, |topk| len.min(topk) as i32);
            for (entry, &page) in
                numbers.pages[i * max_pages..][..max_pages].iter_mut().zip(cache.pages(chunk.request)?)
            {
                *entry = page as i32;
            }
        }
        let numbers = ints(numbers.concat(), device);
        // An assignment to the only handle of a buffer stays in it.
        self.numbers.inplace(|buffer| {
            let [len] = buffer.dims();
            buffer.slice_assign(s![..len], numbers)
        });
        Ok(())
    }

    /// Puts tokens that are still on the device, i32 `[n]`, in the place of those of the first requests. Where there is none
    /// (-1), what follows is not read.
    pub(crate) fn feed(&mut self, ids: Tensor<1, Int>) {
        let [len] = ids.dims();
        // The embedding has to be read within its bounds: 1 is a token, too.
        self.numbers.inplace(|buffer| buffer.slice_assign(s![..len], ids.abs()));
    }

    /// The step of a rank with so many heads, made on the device from the buffers alone.
    pub(crate) fn step(&self, (config, heads): (&MlaConfig, usize), determinism: Determinism) -> Result<MlaStep> {
        let Self { batch, max_pages, page_size, .. } = *self;
        let mut parts = Parts::of(&self.numbers);
        let [input_ids, slots, seq_lens, positions, picked] = [(); 5].map(|()| parts.take([batch]));
        let page_table = parts.take([batch, max_pages]);
        let keys = if let Some(IndexerConfig { topk, .. }) = indexer_of(config, max_pages * page_size, determinism) {
            let [visible, picked] = [seq_lens, picked].map(|numbers| numbers.reshape([batch, 1]));
            let keys = vec![IndexedKeys { tokens: 0..batch, page_table, visible }];
            Keys::Indexed { keys, picked: PickedKeys::new(picked, topk, (heads, determinism))? }
        } else {
            let plan = mla_plan(MlaPlanArgs {
                seq_lens: seq_lens.clone(),
                query_len: 1,
                heads,
                page_size,
                max_seq_len: max_pages * page_size,
                splits: splits(determinism),
            })?;
            Keys::All { single: Some(PagedKeys { batch, page_table, seq_lens, plan }), new: None }
        };
        let rotation = self.rotations.select(positions);
        let padded_slots = (batch > 1).then(|| slots.clone());
        Ok(MlaStep { determinism, input_ids, slots, rotation, keys, padded_slots })
    }
}

/// The whole numbers of a step, on the host.
struct Numbers {
    ids: Vec<i32>,
    slots: Vec<i32>,
    lens: Vec<i32>,
    positions: Vec<i32>,
    picked: Vec<i32>,
    pages: Vec<i32>,
}

impl Numbers {
    /// Of a step without requests.
    fn new(batch: usize, max_pages: usize) -> Self {
        let [ids, slots, lens, positions, picked] = [0, -1, 0, 0, 0].map(|nothing| vec![nothing; batch]);
        Self { ids, slots, lens, positions, picked, pages: vec![-1; batch * max_pages] }
    }

    fn concat(self) -> Vec<i32> {
        let mut parts = [self.ids, self.slots, self.lens, self.positions, self.picked, self.pages];
        parts.iter_mut().for_each(end_part);
        parts.concat()
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::path::Path;

    use burn::tensor::FloatDType;
    use mla_ops::cache::{CacheConfig, PoolConfig};

    use super::*;
    use crate::DeepseekV3Config;

    #[test]
    fn buffers_know_whether_somebody_else_has_a_handle() {
        let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/v3-tiny/config.json");
        let config = DeepseekV3Config::read(Path::new(fixture)).unwrap().mla();
        let device = Device::flex();
        let rotary = config.rotary();
        let mut buffers = StepBuffers::new(2, [4, 8], (&rotary, None), &device).unwrap();
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
            buffers.fill(&[Chunk { request, tokens: vec![token], slots }], &cache, &device).unwrap();
            assert!(buffers.has_only_handles());
            let step = buffers.step((&config, config.num_attention_heads), Determinism::Fast).unwrap();
            assert_eq!((step.input_ids.dims(), step.slots.dims(), step.padded_slots.is_some()), ([2], [2], true));
            let handles = buffers.clone();
            assert!(!buffers.has_only_handles(), "somebody else has handles");
            drop((step, handles));
            assert!(buffers.has_only_handles());
        }
    }

    /// Steps of all sizes read one table, as long as none needs more positions than it has.
    #[test]
    fn steps_of_different_sizes_share_the_rotations() {
        let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/v3-tiny/config.json");
        let config = DeepseekV3Config::read(Path::new(fixture)).unwrap().mla();
        let device = Device::flex();
        let rotary = config.rotary();
        let [small, large] =
            [4, 64].map(|pages| StepBuffers::new(2, [pages, 8], (&rotary, None), &device).unwrap().rotations);
        assert_eq!(small.addresses(), large.addresses());
    }
}
