//! The inputs of a decode step of DeepSeek-V4 in buffers that stay where they are, so that a captured step finds the next ones
//! there.

use burn::tensor::{Device, Int, Tensor, s};
use mla_ops::Determinism;

use super::batch::{Batch, filled_up};
use super::cache::V4Cache;
use super::config::DeepseekV4Config;
use super::partial_rotary::PartialRotation;
use super::schedule::{AttentionSpec, CompressorSpec};
use super::step::{EntryStep, SeenEntries, Sequences, V4Step, WindowKeys, WindowStep};
use crate::Result;
use crate::index_keys::IndexedKeys;
use crate::step::{Chunk, ints, padded};

/// One token of each of `B` requests. Rows without a request have no slots: they write nothing and see nothing.
///
/// All that changes is in one tensor, in the order of [`Sizes::numbers`]: a refresh is one copy to the device.
#[derive(Debug, Clone)]
pub(super) struct StepBuffers {
    sizes: Sizes,
    numbers: Tensor<1, Int>,
    /// At all positions of these pages, without and with compression.
    rotations: [PartialRotation; 2],
    determinism: Determinism,
}

/// What a step is made for.
#[derive(Debug, Clone)]
struct Sizes {
    batch: usize,
    max_pages: usize,
    page_size: usize,
    window: usize,
    kinds: Vec<EntryKind>,
}

/// Layers whose tokens attend to the same entries.
#[derive(Debug, Clone)]
struct EntryKind {
    spec: AttentionSpec,
    of: CompressorSpec,
    /// How many an indexer picks, if it does.
    picked: Option<usize>,
}

impl StepBuffers {
    /// For steps without requests; `rotations` at all positions of `max_pages` pages of `page_size` tokens.
    pub(super) fn new(
        batch: usize,
        [max_pages, page_size]: [usize; 2],
        rotations: [PartialRotation; 2],
        (config, determinism): (&DeepseekV4Config, Determinism),
        device: &Device,
    ) -> Self {
        let kind = |(spec, of): (AttentionSpec, CompressorSpec)| {
            let picks = config.picks(&of, max_pages * (page_size / of.rate), determinism);
            let picked = picks.then_some(config.index_topk);
            EntryKind { spec, of, picked }
        };
        let kinds = config.entry_kinds().into_iter().map(kind).collect();
        let sizes = Sizes { batch, max_pages, page_size, window: config.sliding_window, kinds };
        let numbers = ints(sizes.numbers(&Batch::default(), &[]), device);
        Self { sizes, numbers, rotations, determinism }
    }

    /// Whether this is the only handle of the buffer, so that [`Self::fill`] stays in it.
    pub(super) fn has_only_handles(&self) -> bool {
        self.numbers.can_mut()
    }

    /// Takes the inputs of a step: chunks of one token, at most `B`, of requests with at most `maxP` pages. Their states count the
    /// tokens as computed.
    pub(super) fn fill(&mut self, chunks: &[Chunk], cache: &mut V4Cache, device: &Device) -> Result<()> {
        let ids: Vec<i32> = chunks.iter().map(|chunk| chunk.tokens[0] as i32).collect();
        let numbers = ints(self.sizes.numbers(&Batch::begin(chunks, cache)?, &ids), device);
        // An assignment to the only handle of a buffer stays in it.
        self.numbers.inplace(|buffer| {
            let [len] = buffer.dims();
            buffer.slice_assign(s![..len], numbers)
        });
        Ok(())
    }

    /// Puts tokens that are still on the device, i32 `[n]`, in the place of those of the first requests. Where there is none
    /// (-1), what follows is not read.
    pub(super) fn feed(&mut self, ids: Tensor<1, Int>) {
        let [len] = ids.dims();
        // The embedding has to be read within its bounds: 1 is a token, too.
        self.numbers.inplace(|buffer| buffer.slice_assign(s![..len], ids.abs()));
    }

    /// The step, made on the device from the buffers alone.
    pub(super) fn step(&self) -> V4Step {
        let Sizes { batch, max_pages, page_size, window, ref kinds } = self.sizes;
        let mut parts = Parts { numbers: &self.numbers, next: 0 };
        let input_ids = parts.take([batch]);
        let starts = parts.take([batch]);
        let state_rows = parts.take([batch]);
        let cu_seqlens = parts.take([batch + 1]);
        let slots: Tensor<1, Int> = parts.take([batch]);
        let padded_slots = (batch > 1).then(|| slots.clone());
        let seen = parts.take([batch, 1, padded(window)]);
        let pages: Tensor<2, Int> = parts.take([batch, padded(max_pages)]);
        let entries = kinds.iter().map(|&EntryKind { spec, of, picked }| {
            let carried_slots = parts.take([batch]);
            let slots = parts.take([batch]);
            let (cos, sin) = self.rotations[1].tables(parts.take([batch]), [batch, 1]);
            let visible: Tensor<2, Int> = parts.take([batch, 1]);
            let (seen, lengths) = if picked.is_some() {
                let keys = IndexedKeys { tokens: 0..batch, page_table: pages.clone(), visible };
                (SeenEntries::Picked(vec![keys]), parts.take([batch, 1]))
            } else {
                (SeenEntries::All(parts.take([batch, 1, padded(max_pages * (page_size / of.rate))])), visible)
            };
            (spec, EntryStep { carried_slots, marked: None, slots, cos, sin, lengths, seen })
        });
        V4Step {
            determinism: self.determinism,
            entries: entries.collect(),
            input_ids,
            rotation: self.rotations[0].select(&starts),
            compress_rotation: self.rotations[1].select(&starts),
            sequences: Sequences { state_rows, starts, cu_seqlens },
            window: WindowStep { slots, keys: WindowKeys::State, seen, marked: None },
            padded_slots,
        }
    }
}

impl Sizes {
    /// The whole numbers of a step, in the order in which [`StepBuffers::step`] takes them.
    fn numbers(&self, batch: &Batch, ids: &[i32]) -> Vec<i32> {
        let rows = self.batch;
        let mut numbers = Vec::new();
        let mut put = |values: &[i32], len: usize, filling: i32| {
            let end = numbers.len() + len;
            numbers.extend_from_slice(values);
            numbers.resize(end, filling);
        };
        put(ids, rows, 0);
        put(&batch.starts(), rows, 0);
        put(&batch.state_rows(), rows, 0);
        // Rows without a request are sequences of one token, too.
        put(&(0..=rows as i32).collect::<Vec<_>>(), rows + 1, 0);
        put(&batch.ring_slots(self.window), rows, -1);
        let window = padded(self.window);
        put(&filled_up(&batch.windows(self.window), window), rows * window, -1);
        let pages = padded(self.max_pages);
        put(&filled_up(&batch.pages(), pages), rows * pages, -1);
        for &EntryKind { of, picked, .. } in &self.kinds {
            let per_page = self.page_size / of.rate;
            let entries = batch.entries(&of, per_page, 1);
            put(&entries.carried_slots, rows, -1);
            put(&entries.slots, rows, -1);
            put(&entries.positions, rows, 0);
            put(&entries.visible, rows, 0);
            if let Some(most) = picked {
                let lengths: Vec<i32> = entries.visible.iter().map(|&visible| visible.min(most as i32)).collect();
                put(&lengths, rows, 0);
            } else {
                let most = padded(self.max_pages * per_page);
                put(&filled_up(&batch.entry_slots(of.rate, per_page), most), rows * most, -1);
            }
        }
        numbers
    }
}

/// Parts of a buffer, one after the other.
struct Parts<'a> {
    numbers: &'a Tensor<1, Int>,
    next: usize,
}

impl Parts<'_> {
    fn take<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<D, Int> {
        let (first, len) = (self.next, shape.iter().product::<usize>());
        self.next += len;
        self.numbers.clone().slice(s![first..first + len]).reshape(shape)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::path::Path;

    use burn::tensor::FloatDType;

    use super::*;
    use crate::{CacheSize, DeepseekModel};

    const SIZE: CacheSize = CacheSize { num_pages: 16, page_size: 16, max_requests: 4, max_tokens: 64 };

    /// Steps in buffers, with rows that are padding, have the logits of others, also where they run twice; through window and
    /// entries of two requests, which are complete at different steps, and in buckets without and with an indexer.
    #[test]
    fn a_step_in_buffers_is_a_step() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/v4-tiny");
        let device = Device::flex();
        let model = DeepseekModel::load(Path::new(dir), &device, FloatDType::F32, &mut |_| {}).expect("the fixture");
        let capture = model.capture().expect("one rank");
        let mut cache = model.new_cache(SIZE).expect("a small cache");
        let prompts: [&[u32]; 2] = [&[7, 8, 9], &[5; 14]];
        let requests = prompts.map(|prompt| {
            let request = cache.admit().expect("room");
            let chunk = cache.append(request, prompt).expect("room");
            model.next_token_logits(&[chunk], &mut cache, Determinism::Fast).expect("a prompt");
            request
        });
        let values = |logits: Tensor<2>| logits.try_into_vec_as::<f32>().expect("logits");
        for token in 0..18 {
            let chunks = requests.map(|request| cache.append(request, &[20 + token]).expect("room"));
            let pages = if token < 2 { 1 } else { 2 };
            let mut step = capture.buffered_step(4, [pages, 16], Determinism::Fast).unwrap();
            let twice = [(); 2].map(|()| {
                step.fill(&chunks, &mut cache).expect("the cache of the model");
                assert!(step.is_in_place());
                values(step.logits(&mut cache).expect("a step").narrow(0, 0, 2))
            });
            let exact = values(model.next_token_logits(&chunks, &mut cache, Determinism::Fast).expect("a step"));
            assert_eq!(twice[0], twice[1], "token {token}");
            for (logit, exact) in twice[0].iter().zip(exact) {
                assert!((logit - exact).abs() < 2e-4, "{logit} is not {exact}, token {token}");
            }
        }
    }
}
