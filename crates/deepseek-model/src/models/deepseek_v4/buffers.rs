//! The inputs of a decode step of DeepSeek-V4 in buffers that stay where they are, so that a captured step finds the next ones
//! there.

use burn::tensor::{Device, Int, Tensor, s};
use mla_ops::Determinism;

use super::batch::{Batch, filled_up};
use super::cache::V4Cache;
use super::config::DeepseekV4Config;
use super::partial_rotary::PartialRotation;
use super::schedule::{AttentionSpec, CompressorSpec};
use super::step::{EntryStep, LazyEntries, SeenEntries, Sequences, V4Step, WindowKeys, WindowStep};
use crate::Result;
use crate::index_keys::IndexedKeys;
use crate::step::{Chunk, PART, Parts, end_part, ints, padded, part};

/// One token of each of `B` requests. Rows without a request have no slots: they write nothing and see nothing.
///
/// All that changes is in one tensor, in the order of [`Sizes::numbers`]: a refresh is one copy to the device. A step reads its [`Parts`]
/// where they lie, and launches nothing for them but a selection from each table of rotations.
#[derive(Debug, Clone)]
pub(super) struct StepBuffers {
    sizes: Sizes,
    numbers: Tensor<1, Int>,
    /// Cosines and sines at all positions of these pages, without and with compression.
    rotations: [Tensor<2>; 2],
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
    /// Positions of each table of rotations, and the pairs of channels of a row.
    rotations: [[usize; 2]; 2],
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
        rotations: [Tensor<2>; 2],
        (config, determinism): (&DeepseekV4Config, Determinism),
        device: &Device,
    ) -> Self {
        let kind = |(spec, of): (AttentionSpec, CompressorSpec)| {
            let picks = config.picks(&of, max_pages * (page_size / of.rate), determinism);
            let picked = picks.then_some(config.index_topk);
            EntryKind { spec, of, picked }
        };
        let kinds = config.entry_kinds().into_iter().map(kind).collect();
        let sizes_of = |table: &Tensor<2>| [table.dims()[0] / 2, table.dims()[1]];
        let tables = [0, 1].map(|table| sizes_of(&rotations[table]));
        let sizes = Sizes { batch, max_pages, page_size, window: config.sliding_window, kinds, rotations: tables };
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
        let Sizes { batch, max_pages, page_size, window, ref kinds, .. } = self.sizes;
        let mut parts = Parts::of(&self.numbers);
        let input_ids = parts.take([batch]);
        let starts = parts.take([batch]);
        let state_rows = parts.take([batch]);
        let cu_seqlens = parts.take([batch + 1]);
        let slots: Tensor<1, Int> = parts.take([batch]);
        let padded_slots = (batch > 1).then(|| slots.clone());
        let seen = parts.take([batch, 1, padded(window)]);
        let pages: Tensor<2, Int> = parts.take([batch, padded(max_pages)]);
        let [mut rotations, mut compress_rotations] = [0, 1].map(|table| self.rotations_of(table, &mut parts));
        let [rotation, compress_rotation] = [&mut rotations, &mut compress_rotations].map(|of| of.remove(0));
        let entries = kinds.iter().zip(compress_rotations).map(|(&EntryKind { spec, of, picked }, rotation)| {
            let carried_slots = parts.take([batch]);
            let slots = parts.take([batch]);
            let (cos, sin) = rotation.of_entries();
            let visible: Tensor<2, Int> = parts.take([batch, 1]);
            let (seen, lengths) = if picked.is_some() {
                let keys = IndexedKeys { tokens: 0..batch, page_table: pages.clone(), visible };
                (SeenEntries::Picked(vec![keys]), parts.take([batch, 1]))
            } else {
                (SeenEntries::All(parts.take([batch, 1, padded(max_pages * (page_size / of.rate))])), visible)
            };
            let entries = EntryStep { carried_slots, marked: None, slots, cos, sin, lengths, seen };
            (spec, LazyEntries::new(Box::new(|| entries)))
        });
        V4Step {
            determinism: self.determinism,
            entries: entries.collect(),
            input_ids,
            rotation,
            compress_rotation,
            sequences: Sequences { state_rows, starts, cu_seqlens },
            window: WindowStep { slots, keys: WindowKeys::State, seen, marked: None },
            padded_slots,
        }
    }

    /// The rotations of the tokens, and of one entry of each kind and sequence, from a table: by one launch.
    fn rotations_of(&self, table: usize, parts: &mut Parts<'_>) -> Vec<PartialRotation> {
        let (sizes, [_, pairs]) = (&self.sizes, self.sizes.rotations[table]);
        let (rows, count) = (sizes.rows_of_rotation(pairs), sizes.rotated(table));
        let places = parts.take([2 * count * rows]);
        let selected = self.rotations[table].clone().select(0, places).reshape([2 * count * rows * pairs]);
        let half = |number: usize| part(&selected, number * rows * pairs, [sizes.batch, pairs]);
        (0..count).map(|number| PartialRotation::of([half(2 * number), half(2 * number + 1)])).collect()
    }
}

impl Sizes {
    /// For how many each token has rotations: itself, and behind it with compression an entry of each kind.
    fn rotated(&self, table: usize) -> usize {
        if table == 0 { 1 } else { 1 + self.kinds.len() }
    }

    /// Rows for a batch that are a [`part`] of those selected.
    fn rows_of_rotation(&self, pairs: usize) -> usize {
        self.batch.next_multiple_of(PART >> pairs.trailing_zeros().min(PART.ilog2()))
    }

    /// Where the rows of these positions are in a table: of their cosines, and of their sines.
    fn places(&self, table: usize, positions: &[i32], places: &mut Vec<i32>) {
        let [count, pairs] = self.rotations[table];
        for first in [0, count as i32] {
            let end = places.len() + self.rows_of_rotation(pairs);
            places.extend(positions.iter().map(|position| first + position));
            places.resize(end, 0);
        }
    }

    /// The whole numbers of a step, in the order in which [`StepBuffers::step`] takes them.
    fn numbers(&self, batch: &Batch, ids: &[i32]) -> Vec<i32> {
        let rows = self.batch;
        let mut numbers = Vec::new();
        let mut put = |values: &[i32], len: usize, filling: i32| {
            let end = numbers.len() + len;
            numbers.extend_from_slice(values);
            numbers.resize(end, filling);
            end_part(&mut numbers);
        };
        put(ids, rows, 0);
        put(&batch.starts(), rows, 0);
        put(&batch.state_rows(), rows, 0);
        // Rows without a request are sequences of one token, too.
        put(&(0..=rows as i32).collect::<Vec<_>>(), rows + 1, 0);
        put(&batch.ring_slots(self.window), rows, -1);
        let window = padded(self.window);
        let mut seen = Vec::new();
        batch.windows(self.window, window, &mut seen);
        put(&seen, rows * window, -1);
        let pages = padded(self.max_pages);
        put(&filled_up(&batch.pages(), pages), rows * pages, -1);
        let entries = self.kinds.iter().map(|kind| batch.entries(&kind.of, self.page_size / kind.of.rate, 1));
        let entries: Vec<_> = entries.collect();
        for table in [0, 1] {
            let mut places = Vec::new();
            self.places(table, &batch.starts(), &mut places);
            for entries in entries.iter().take(self.rotated(table) - 1) {
                self.places(table, &entries.positions, &mut places);
            }
            put(&places, places.len(), 0);
        }
        for (&EntryKind { of, picked, .. }, entries) in self.kinds.iter().zip(entries) {
            let per_page = self.page_size / of.rate;
            put(&entries.carried_slots, rows, -1);
            put(&entries.slots, rows, -1);
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
