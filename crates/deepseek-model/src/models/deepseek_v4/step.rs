//! What one forward pass of DeepSeek-V4 works on: new tokens of some sequences, where they go, and what they see.

use std::cell::LazyCell;
use std::convert::Infallible;

use burn::tensor::{Device, Int, Tensor};
use mla_ops::Determinism;
use mla_ops::cache::PagedCache;

use super::batch::{Batch, EntryNumbers};
use super::cache::V4Cache;
use super::config::DeepseekV4Config;
use super::partial_rotary::{PartialRotary, PartialRotation};
use super::schedule::{AttentionSpec, CompressorSpec};
use super::states::MarkedRows;
use crate::Result;
use crate::index_keys::{IndexSizes, IndexedKeys, list_lengths};
use crate::step::{Chunk, Numbers, Uploaded, ints, padded};

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
    pub(crate) sequences: Sequences,
    pub(crate) window: WindowStep,
    /// For each kind of layer with entries.
    pub(super) entries: Vec<(AttentionSpec, LazyEntries)>,
    /// i32 `[N]`, where some tokens may be padding: those have none, and no expert works for them.
    pub(crate) padded_slots: Option<Tensor<1, Int>>,
}

/// Made when the first layer of its kind asks: what layers before it compute begins earlier.
pub(super) type LazyEntries = LazyCell<EntryStep, Box<dyn FnOnce() -> EntryStep>>;

/// What makes them.
type EntriesOf = Box<dyn FnOnce(&Uploaded) -> EntryStep>;

/// Where the new tokens of each sequence are.
#[derive(Debug)]
pub(crate) struct Sequences {
    /// The sequences' rows in the states, i32 `[B]`.
    pub(crate) state_rows: Tensor<1, Int>,
    /// Positions of their first new tokens, i32 `[B]`.
    pub(crate) starts: Tensor<1, Int>,
    /// i32 `[B + 1]`.
    pub(crate) cu_seqlens: Tensor<1, Int>,
}

/// What a forward pass of a [`Compressor`](super::Compressor) works on: new tokens of some requests, and the entries that they
/// complete. [`Compressor::step`](super::Compressor::step) makes it.
#[derive(Debug)]
pub struct CompressorStep {
    pub(crate) determinism: Determinism,
    pub(crate) sequences: Sequences,
    pub(crate) entries: EntryStep,
}

/// What a forward pass of an [`EntryIndexer`](super::EntryIndexer) works on: what its compressor does, and the entries that the new
/// tokens may see. [`EntryIndexer::step`](super::EntryIndexer::step) makes it.
#[derive(Debug)]
pub struct EntryIndexerStep {
    pub(super) keys: CompressorStep,
    /// Of the queries.
    pub(super) rotation: PartialRotation,
    pub(super) seen: Vec<IndexedKeys>,
    pub(super) tokens: usize,
}

/// The windows of all layers.
#[derive(Debug)]
pub(crate) struct WindowStep {
    /// Where the new keys go, i32 `[N]`; -1 for those that leave the window within this step.
    pub(crate) slots: Tensor<1, Int>,
    pub(crate) keys: WindowKeys,
    /// The rows that each token sees, among [`Self::keys`], i32 `[N, 1, K]`.
    pub(crate) seen: Tensor<3, Int>,
    /// What snapshots take of the new keys.
    pub(crate) marked: Option<MarkedRows>,
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
    /// What snapshots take of them.
    pub(crate) marked: Option<MarkedRows>,
    /// Where the entries go in the pool, as many of each sequence as one of them completes, i32 `[B * n]`; -1 where a
    /// sequence completes fewer.
    pub(crate) slots: Tensor<1, Int>,
    /// Their rotations, f32 `[B, n, dr / 2]`.
    pub(crate) cos: Tensor<3>,
    pub(crate) sin: Tensor<3>,
    /// To how many entries each new token attends, i32 `[N, 1]`.
    pub(crate) lengths: Tensor<2, Int>,
    pub(crate) seen: SeenEntries,
}

/// Which of the visible entries a token attends to.
#[derive(Debug)]
pub(crate) enum SeenEntries {
    /// There are none yet.
    None,
    /// All, in these slots of the pool: i32 `[N, 1, K]`.
    All(Tensor<3, Int>),
    /// Those that the indexer picks from these.
    Picked(Vec<IndexedKeys>),
}

impl V4Step {
    pub(crate) fn new(
        chunks: &[Chunk],
        cache: &mut V4Cache,
        rotary: [&PartialRotary; 2],
        config: &DeepseekV4Config,
        determinism: Determinism,
        device: &Device,
    ) -> Result<Self> {
        let batch = Batch::begin(chunks, cache)?;
        let positions = batch.positions()?;
        let page_size = cache.entries().config().page_size;
        let upload = Upload { batch: &batch, rotary: rotary[1], page_size, determinism, device };
        let mut numbers = Numbers::default();
        let ids = numbers.put(chunks.iter().flat_map(|chunk| chunk.tokens.iter().map(|&id| id as i32)));
        let sequences = Sequences::put(&batch, &mut numbers)?;
        let window = upload.window(config.sliding_window, &mut numbers);
        let kinds = config.entry_kinds().into_iter();
        let kinds = kinds.map(|(spec, of)| Ok((spec, upload.entries(&of, config, cache, &mut numbers)?)));
        let kinds = kinds.collect::<Result<Vec<_>>>()?;
        let numbers = numbers.upload(device);
        let [rotation, compress_rotation] = [rotary[0].at(&positions, device)?, rotary[1].at(&positions, device)?];
        let lazy = |(spec, of): (_, EntriesOf)| {
            let numbers = numbers.clone();
            (spec, LazyEntries::new(Box::new(move || of(&numbers))))
        };
        Ok(Self {
            determinism,
            input_ids: numbers.row(ids),
            rotation,
            compress_rotation,
            sequences: sequences(&numbers),
            window: window(&numbers),
            entries: kinds.into_iter().map(lazy).collect(),
            padded_slots: None,
        })
    }

    /// The entries of a layer of this kind.
    pub(crate) fn entries(&self, spec: AttentionSpec) -> Option<&EntryStep> {
        self.entries.iter().find(|(known, _)| *known == spec).map(|(_, entries)| &**entries)
    }
}

impl Sequences {
    /// What makes them of the numbers on the device, as all that follows.
    fn put(batch: &Batch, numbers: &mut Numbers) -> Result<impl FnOnce(&Uploaded) -> Self + use<>> {
        let (state_rows, starts) = (numbers.put(batch.state_rows()), numbers.put(batch.starts()));
        let cu_seqlens = numbers.put(batch.cu_seqlens()?);
        Ok(|numbers: &Uploaded| Self {
            state_rows: numbers.row(state_rows),
            starts: numbers.row(starts),
            cu_seqlens: numbers.row(cu_seqlens),
        })
    }
}

impl CompressorStep {
    pub(super) fn new(
        chunks: &[Chunk],
        cache: &PagedCache,
        (of, rotary): (&CompressorSpec, &PartialRotary),
        determinism: Determinism,
        device: &Device,
    ) -> Result<Self> {
        let (batch, page_size) = (Batch::of_pages(chunks, cache)?, cache.config().page_size);
        let upload = Upload { batch: &batch, rotary, page_size, determinism, device };
        let mut numbers = Numbers::default();
        let sequences = Sequences::put(&batch, &mut numbers)?;
        let own = batch.entries(of, page_size / of.rate, 0);
        let entries = upload.entry_step(of, own, 0, &mut numbers)?;
        let numbers = numbers.upload(device);
        Ok(Self { determinism, sequences: sequences(&numbers), entries: entries(&numbers, SeenEntries::None) })
    }
}

impl EntryIndexerStep {
    pub(super) fn new(
        chunks: &[Chunk],
        cache: &PagedCache,
        (of, rotary): (&CompressorSpec, &PartialRotary),
        (heads, width): (usize, usize),
        determinism: Determinism,
        device: &Device,
    ) -> Result<Self> {
        let keys = CompressorStep::new(chunks, cache, (of, rotary), determinism, device)?;
        let (batch, page_size) = (Batch::of_pages(chunks, cache)?, cache.config().page_size);
        let (positions, per_page) = (batch.positions()?, page_size / of.rate);
        let sizes = IndexSizes::new([heads, width], per_page, cache.config());
        let visible = batch.entries(of, per_page, 0).visible;
        let upload = Upload { batch: &batch, rotary, page_size, determinism, device };
        let mut numbers = Numbers::default();
        let seen = upload.indexed(sizes, visible, &mut numbers);
        let (rotation, seen) = (rotary.at(&positions, device)?, seen(&numbers.upload(device)));
        Ok(Self { keys, rotation, seen, tokens: positions.len() })
    }
}

/// Puts the numbers of some sequences among those that go to a device, and says what they are made into there.
struct Upload<'a> {
    batch: &'a Batch,
    /// Of the layers with compression.
    rotary: &'a PartialRotary,
    page_size: usize,
    determinism: Determinism,
    device: &'a Device,
}

impl Upload<'_> {
    fn window(&self, window: usize, numbers: &mut Numbers) -> impl FnOnce(&Uploaded) -> WindowStep + use<> {
        let keys = match self.batch.has_one_token_each() {
            true => WindowKeys::State,
            false => WindowKeys::BeforeAndNew { before: self.batch.goes_on() },
        };
        let slots = numbers.put(self.batch.ring_slots(window));
        let (tokens, width) = (self.batch.lens().iter().sum(), padded(self.batch.longest_window(window)));
        let seen = numbers.put_with(tokens * width, |seen| self.batch.windows(window, width, seen));
        let marked = self.marked(window, numbers);
        move |numbers| WindowStep {
            slots: numbers.row(slots),
            keys,
            seen: numbers.take(seen, [tokens, 1, width]),
            marked: marked(numbers),
        }
    }

    fn entries(
        &self,
        of: &CompressorSpec,
        config: &DeepseekV4Config,
        cache: &V4Cache,
        numbers: &mut Numbers,
    ) -> Result<EntriesOf> {
        let per_page = self.page_size / of.rate;
        let own = self.batch.entries(of, per_page, 0);
        let most = own.visible.iter().copied().max().unwrap_or(0) as usize;
        let (picked, all, most) = match () {
            () if most == 0 => (None, None, 0),
            () if config.picks(of, most, self.determinism) => {
                let heads = [config.index_n_heads, config.index_head_dim];
                let sizes = IndexSizes::new(heads, per_page, cache.entries().config());
                (Some(self.indexed(sizes, own.visible.clone(), numbers)), None, config.index_topk)
            }
            () => {
                let (slots, shape) = numbers.put_lists(&self.batch.entry_slots(of.rate, per_page));
                (None, Some((slots, shape, numbers.put(self.batch.owners()))), most)
            }
        };
        let entries = self.entry_step(of, own, most, numbers)?;
        Ok(Box::new(|numbers: &Uploaded| {
            let seen = match (picked, all) {
                (Some(picked), _) => SeenEntries::Picked(picked(numbers)),
                (_, Some((slots, shape, owners))) => {
                    SeenEntries::All(numbers.take(slots, shape).select(0, numbers.row(owners)).unsqueeze_dim(1))
                }
                _ => SeenEntries::None,
            };
            entries(numbers, seen)
        }))
    }

    /// With what tokens see, of so many entries at most.
    fn entry_step(
        &self,
        of: &CompressorSpec,
        own: EntryNumbers,
        most: usize,
        numbers: &mut Numbers,
    ) -> Result<impl FnOnce(&Uploaded, SeenEntries) -> EntryStep + use<>> {
        let shape = [self.batch.lens().len(), own.completed];
        let end = own.positions.iter().max().map_or(0, |&last| last as usize + 1);
        let rotation = self.rotary.first(end, self.device)?;
        let lengths = numbers.put(list_lengths(&own.visible, most));
        let [carried_slots, slots, positions] =
            [own.carried_slots, own.slots, own.positions].map(|own| numbers.put(own));
        let marked = self.marked(of.carried_tokens(), numbers);
        Ok(move |numbers: &Uploaded, seen| {
            let (cos, sin) = rotation.tables(&numbers.row(positions), shape);
            EntryStep {
                carried_slots: numbers.row(carried_slots),
                marked: marked(numbers),
                slots: numbers.row(slots),
                cos,
                sin,
                lengths: numbers.row(lengths).unsqueeze_dim(1),
                seen,
            }
        })
    }

    fn marked(&self, len: usize, numbers: &mut Numbers) -> impl FnOnce(&Uploaded) -> Option<MarkedRows> + use<> {
        let [tokens, slots] = self.batch.marked(len).map(|marked| numbers.put(marked));
        |numbers| (!tokens.is_empty()).then(|| MarkedRows { tokens: numbers.row(tokens), slots: numbers.row(slots) })
    }

    /// The pages of each sequence, from which an indexer picks.
    fn indexed(
        &self,
        sizes: IndexSizes,
        visible: Vec<i32>,
        numbers: &mut Numbers,
    ) -> impl FnOnce(&Uploaded) -> Vec<IndexedKeys> + use<> {
        let (pages, shape) = numbers.put_lists(&self.batch.pages());
        let (lens, determinism, device) = (self.batch.lens(), self.determinism, self.device.clone());
        move |numbers| {
            let page_table = numbers.take(pages, shape);
            let pages = |owners: Vec<i32>| {
                // Of prompts there is one group most often.
                let all = owners.iter().copied().eq(0..lens.len() as i32);
                Ok(if all { page_table.clone() } else { page_table.clone().select(0, ints(owners, &device)) })
            };
            let Ok::<_, Infallible>(keys) =
                IndexedKeys::of_step(&lens, pages, &visible, (&sizes, determinism), &device);
            keys
        }
    }
}
