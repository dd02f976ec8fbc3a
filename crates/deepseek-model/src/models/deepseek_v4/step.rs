//! What one forward pass of DeepSeek-V4 works on: new tokens of some sequences, where they go, and what they see.

use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use mla_ops::Determinism;
use mla_ops::cache::PagedCache;

use super::cache::{Place, V4Cache};
use super::config::DeepseekV4Config;
use super::partial_rotary::{PartialRotary, PartialRotation};
use super::schedule::{AttentionSpec, CompressorSpec};
use crate::Result;
use crate::index_keys::{IndexSizes, IndexedKeys};
use crate::step::{Chunk, ints, padded};

/// The inputs of a forward pass, on the device: `B` sequences with `N` new tokens in all.
#[derive(Debug)]
pub(crate) struct V4Step {
    /// Whether a token's bits may depend on the others.
    pub(crate) determinism: Determinism,
    /// i32 `[N]`.
    pub(crate) input_ids: Tensor<1, Int>,
    /// Of the layers without compression.
    pub(crate) rotation: PartialRotation,
    /// Of the layers with compression.
    pub(crate) compress_rotation: PartialRotation,
    /// The sequences' rows in the states, i32 `[B]`.
    pub(crate) state_rows: Tensor<1, Int>,
    /// Positions of their first new tokens, i32 `[B]`.
    pub(crate) starts: Tensor<1, Int>,
    /// i32 `[B + 1]`.
    pub(crate) cu_seqlens: Tensor<1, Int>,
    pub(crate) window: WindowStep,
    /// For each kind of layer with entries.
    entries: Vec<(AttentionSpec, EntryStep)>,
}

/// The windows of all layers.
#[derive(Debug)]
pub(crate) struct WindowStep {
    /// Where the new keys go, i32 `[N]`; -1 for those that leave the window within this step.
    pub(crate) slots: Tensor<1, Int>,
    pub(crate) keys: WindowKeys,
    /// The rows that each token sees, among [`Self::keys`], i32 `[N, 1, K]`.
    pub(crate) seen: Tensor<3, Int>,
}

/// Where the keys of the windows are when the new tokens look at them.
#[derive(Debug)]
pub(crate) enum WindowKeys {
    /// In the state, the new ones too: each sequence has one new token.
    State,
    /// The sequences' windows as they were before, one after the other if there are any tokens in them, and then the new
    /// keys, which would overwrite what earlier new tokens see.
    BeforeAndNew {
        /// Whether there are windows of before.
        before: bool,
    },
}

/// Entries of one kind: those that the new tokens complete, and those that they see.
#[derive(Debug)]
pub(crate) struct EntryStep {
    /// Where the new keys and gates go in what the compressor carries, i32 `[N]`; -1 for those that no later entry needs.
    pub(crate) carried_slots: Tensor<1, Int>,
    /// Where the entries go in the pool, as many of each sequence as one of them completes, i32 `[B * n]`; -1 where a
    /// sequence completes fewer.
    pub(crate) slots: Tensor<1, Int>,
    /// Their rotations, f32 `[B, n, dr / 2]`.
    pub(crate) cos: Tensor<3>,
    pub(crate) sin: Tensor<3>,
    /// How many entries each new token sees, i32 `[N, 1]`.
    pub(crate) visible: Tensor<2, Int>,
    pub(crate) seen: SeenEntries,
}

/// Which of the visible entries a token attends to.
#[derive(Debug)]
pub(crate) enum SeenEntries {
    /// There are none yet.
    None,
    /// All, in these slots of the pool: i32 `[N, 1, K]`, of which as many count as are visible.
    All(Tensor<3, Int>),
    /// Those that the indexer picks from these.
    Picked(Vec<IndexedKeys>),
}

impl V4Step {
    pub(crate) fn new(
        chunks: &[Chunk],
        cache: &mut V4Cache,
        [rotary, compress_rotary]: [&PartialRotary; 2],
        config: &DeepseekV4Config,
        determinism: Determinism,
        device: &Device,
    ) -> Result<Self> {
        let mut batch = Batch { sequences: Vec::new(), device };
        for chunk in chunks {
            let (place, first) = (cache.begin(chunk.request, chunk.tokens.len())?, batch.tokens());
            let pages = cache.entries().pages(chunk.request)?.to_vec();
            batch.sequences.push(Sequence { place, tokens: first..first + chunk.tokens.len(), pages });
        }
        let positions: Vec<usize> = batch.sequences.iter().flat_map(Sequence::positions).collect();
        let ids = chunks.iter().flat_map(|chunk| chunk.tokens.iter().map(|&id| id as i32)).collect();
        let per_sequence = |value: fn(&Sequence) -> usize| batch.ints(batch.sequences.iter().map(value));
        let ends = batch.sequences.iter().map(|sequence| sequence.tokens.end);
        let mut entries: Vec<(AttentionSpec, EntryStep)> = Vec::new();
        for (layer, spec) in config.layers.iter().map(|layer| layer.attention).enumerate() {
            if let (Some(of), false) =
                (config.layer_compressors(layer).first(), entries.iter().any(|(known, _)| *known == spec))
            {
                let indexer = of.overlap.then(|| Picks::new(config, of, cache.entries(), determinism));
                entries.push((spec, batch.entries(of, indexer.as_ref(), compress_rotary, cache.entries())));
            }
        }
        Ok(Self {
            determinism,
            input_ids: ints(ids, device),
            rotation: rotary.at(&positions, device),
            compress_rotation: compress_rotary.at(&positions, device),
            state_rows: per_sequence(|sequence| sequence.place.row),
            starts: per_sequence(|sequence| sequence.place.start),
            cu_seqlens: batch.ints([0].into_iter().chain(ends)),
            window: batch.window(config.sliding_window),
            entries,
        })
    }

    /// The entries of a layer of this kind.
    pub(crate) fn entries(&self, spec: AttentionSpec) -> Option<&EntryStep> {
        self.entries.iter().find(|(known, _)| *known == spec).map(|(_, entries)| entries)
    }
}

/// What an indexer picks, of what there is.
struct Picks {
    /// Entries of a token.
    most: usize,
    sizes: IndexSizes,
    determinism: Determinism,
}

impl Picks {
    fn new(config: &DeepseekV4Config, of: &CompressorSpec, cache: &PagedCache, determinism: Determinism) -> Self {
        let (page_size, dtype) = (cache.config().page_size / of.rate, cache.config().dtype.into());
        let sizes = IndexSizes { heads: config.index_n_heads, width: config.index_head_dim, page_size, dtype };
        Self { most: config.index_topk, sizes, determinism }
    }
}

/// The sequences of a step.
struct Batch<'a> {
    sequences: Vec<Sequence>,
    device: &'a Device,
}

struct Sequence {
    place: Place,
    /// Its new tokens among those of the step.
    tokens: Range<usize>,
    pages: Vec<u32>,
}

impl Sequence {
    /// Of the new tokens.
    fn positions(&self) -> Range<usize> {
        self.place.start..self.place.start + self.tokens.len()
    }

    /// The slots of the new tokens in a state with a ring of `len` tokens for each request; -1 for those that others of
    /// this step overwrite.
    fn ring_slots(&self, len: usize) -> impl Iterator<Item = i32> {
        let (row, end) = (self.place.row, self.positions().end);
        self.positions().map(
            move |position| {
                if position + len < end { -1 } else { (row * len + position % len) as i32 }
            },
        )
    }

    /// The entries that the new tokens complete.
    fn completed(&self, rate: usize) -> Range<usize> {
        self.place.start / rate..self.positions().end / rate
    }

    /// Where the entries of the sequence are in a pool with `per_page` of them in a page.
    fn entry_slot(&self, entry: usize, per_page: usize) -> i32 {
        (self.pages[entry / per_page] as usize * per_page + entry % per_page) as i32
    }
}

impl Batch<'_> {
    fn tokens(&self) -> usize {
        self.sequences.last().map_or(0, |sequence| sequence.tokens.end)
    }

    fn window(&self, window: usize) -> WindowStep {
        let one_each = self.sequences.iter().all(|sequence| sequence.tokens.len() == 1);
        let before = !one_each && self.sequences.iter().any(|sequence| sequence.place.start > 0);
        let first_new = if before { self.sequences.len() * window } else { 0 };
        let mut seen = Vec::new();
        for (number, sequence) in self.sequences.iter().enumerate() {
            // The row of a position: in the state, in a copy of this sequence's window, or among the new keys.
            let block = if one_each { sequence.place.row } else { number };
            let start = sequence.place.start;
            let row = |position: usize| match one_each || position < start {
                true => block * window + position % window,
                false => first_new + sequence.tokens.start + position - start,
            };
            seen.extend(sequence.positions().map(|own| {
                let positions = (own + 1).saturating_sub(window)..own + 1;
                positions.map(|position| row(position) as i32).collect::<Vec<i32>>()
            }));
        }
        let keys = if one_each { WindowKeys::State } else { WindowKeys::BeforeAndNew { before } };
        WindowStep { slots: self.ring_slots(window), keys, seen: self.lists(&seen).unsqueeze_dim(1) }
    }

    fn entries(
        &self,
        of: &CompressorSpec,
        indexer: Option<&Picks>,
        rotary: &PartialRotary,
        cache: &PagedCache,
    ) -> EntryStep {
        let (rate, per_page) = (of.rate, cache.config().page_size / of.rate);
        let completed = self.sequences.iter().map(|sequence| sequence.completed(rate).len()).max().unwrap_or(0);
        let (mut slots, mut positions) = (Vec::new(), Vec::new());
        for sequence in &self.sequences {
            let own = sequence.completed(rate);
            slots.extend(own.clone().map(|entry| sequence.entry_slot(entry, per_page)));
            slots.resize(slots.len() + completed - own.len(), -1);
            positions.extend((own.start..own.start + completed).map(|entry| entry * rate));
        }
        let (cos, sin) = rotary.tables(&positions, [self.sequences.len(), completed], self.device);
        let visible: Vec<usize> =
            self.sequences.iter().flat_map(Sequence::positions).map(|position| (position + 1) / rate).collect();
        let most = visible.iter().copied().max().unwrap_or(0);
        let seen = match indexer {
            _ if most == 0 => SeenEntries::None,
            Some(picks) if most > picks.most => SeenEntries::Picked(self.indexed(picks, &visible)),
            _ => {
                let slots = |sequence: &Sequence| {
                    let entries = 0..sequence.positions().end / rate;
                    entries.map(|entry| sequence.entry_slot(entry, per_page)).collect()
                };
                SeenEntries::All(self.of_each_token(slots).unsqueeze_dim(1))
            }
        };
        EntryStep {
            carried_slots: self.ring_slots(of.carried_tokens()),
            slots: ints(slots, self.device),
            cos,
            sin,
            visible: self.ints(visible.into_iter()).unsqueeze_dim(1),
            seen,
        }
    }

    /// The pages of each sequence, from which an indexer picks.
    fn indexed(&self, picks: &Picks, visible: &[usize]) -> Vec<IndexedKeys> {
        let pages = |sequence: &Sequence| sequence.pages.iter().map(|&page| page as i32).collect();
        let page_table = self.lists(&self.sequences.iter().map(pages).collect::<Vec<_>>());
        let lens: Vec<usize> = self.sequences.iter().map(|sequence| sequence.tokens.len()).collect();
        let visible: Vec<i32> = visible.iter().map(|&entries| entries as i32).collect();
        IndexedKeys::of_step(&lens, &page_table, &visible, (&picks.sizes, picks.determinism), self.device)
    }

    /// Where the new tokens go in a state with rings of `len` tokens, i32 `[N]`.
    fn ring_slots(&self, len: usize) -> Tensor<1, Int> {
        ints(self.sequences.iter().flat_map(|sequence| sequence.ring_slots(len)).collect(), self.device)
    }

    /// A list for each sequence, given to each of its tokens: i32 `[N, K]`.
    fn of_each_token(&self, list: impl Fn(&Sequence) -> Vec<i32>) -> Tensor<2, Int> {
        let lists: Vec<Vec<i32>> = self.sequences.iter().map(list).collect();
        let owners =
            self.sequences.iter().enumerate().flat_map(|(i, sequence)| sequence.tokens.clone().map(move |_| i));
        self.lists(&lists).select(0, self.ints(owners))
    }

    /// i32 `[lists.len(), K]`, each list filled up with -1.
    fn lists(&self, lists: &[Vec<i32>]) -> Tensor<2, Int> {
        let longest = padded(lists.iter().map(Vec::len).max().unwrap_or(0));
        let mut values = Vec::with_capacity(lists.len() * longest);
        for (number, list) in lists.iter().enumerate() {
            values.extend_from_slice(list);
            values.resize((number + 1) * longest, -1);
        }
        Tensor::from_data(TensorData::new(values, [lists.len(), longest]), (self.device, DType::I32))
    }

    fn ints(&self, values: impl Iterator<Item = usize>) -> Tensor<1, Int> {
        ints(values.map(|value| value as i32).collect(), self.device)
    }
}
