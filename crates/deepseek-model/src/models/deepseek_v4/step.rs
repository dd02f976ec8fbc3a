//! What one forward pass of DeepSeek-V4 works on: new tokens of some sequences, where they go, and what they see.

use burn::tensor::{DType, Device, Int, Tensor};
use mla_ops::Determinism;
use mla_ops::cache::PagedCache;

use super::batch::{Batch, EntryNumbers, filled_up};
use super::cache::V4Cache;
use super::config::DeepseekV4Config;
use super::partial_rotary::{PartialRotary, PartialRotation};
use super::schedule::{AttentionSpec, CompressorSpec};
use super::states::MarkedRows;
use crate::Result;
use crate::index_keys::{IndexSizes, IndexedKeys, list_lengths};
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
    pub(crate) sequences: Sequences,
    pub(crate) window: WindowStep,
    /// For each kind of layer with entries.
    pub(super) entries: Vec<(AttentionSpec, EntryStep)>,
    /// i32 `[N]`, where some tokens may be padding: those have none, and no expert works for them.
    pub(crate) padded_slots: Option<Tensor<1, Int>>,
}

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
        let ids = chunks.iter().flat_map(|chunk| chunk.tokens.iter().map(|&id| id as i32)).collect();
        let page_size = cache.entries().config().page_size;
        let upload = Upload { batch: &batch, rotary: rotary[1], page_size, determinism, device };
        let kinds = config.entry_kinds().into_iter();
        let entries = kinds.map(|(spec, of)| Ok((spec, upload.entries(&of, config, cache)?))).collect::<Result<_>>()?;
        let [rotation, compress_rotation] = [rotary[0].at(&positions, device)?, rotary[1].at(&positions, device)?];
        Ok(Self {
            determinism,
            input_ids: ints(ids, device),
            rotation,
            compress_rotation,
            sequences: Sequences::new(&batch, device)?,
            window: upload.window(config.sliding_window),
            entries,
            padded_slots: None,
        })
    }

    /// The entries of a layer of this kind.
    pub(crate) fn entries(&self, spec: AttentionSpec) -> Option<&EntryStep> {
        self.entries.iter().find(|(known, _)| *known == spec).map(|(_, entries)| entries)
    }
}

impl Sequences {
    fn new(batch: &Batch, device: &Device) -> Result<Self> {
        Ok(Self {
            state_rows: ints(batch.state_rows(), device),
            starts: ints(batch.starts(), device),
            cu_seqlens: ints(batch.cu_seqlens()?, device),
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
        let numbers = batch.entries(of, page_size / of.rate, 0);
        let entries = upload.entry_step(of, numbers, (SeenEntries::None, 0))?;
        Ok(Self { determinism, sequences: Sequences::new(&batch, device)?, entries })
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
        let (rotation, seen) = (rotary.at(&positions, device)?, upload.indexed(&sizes, &visible)?);
        Ok(Self { keys, rotation, seen, tokens: positions.len() })
    }
}

/// Takes the numbers of some sequences to a device.
struct Upload<'a> {
    batch: &'a Batch,
    /// Of the layers with compression.
    rotary: &'a PartialRotary,
    page_size: usize,
    determinism: Determinism,
    device: &'a Device,
}

impl Upload<'_> {
    fn window(&self, window: usize) -> WindowStep {
        let keys = match self.batch.has_one_token_each() {
            true => WindowKeys::State,
            false => WindowKeys::BeforeAndNew { before: self.batch.goes_on() },
        };
        WindowStep {
            slots: ints(self.batch.ring_slots(window), self.device),
            keys,
            seen: self.lists(&self.batch.windows(window)).unsqueeze_dim(1),
            marked: self.marked(window),
        }
    }

    fn entries(&self, of: &CompressorSpec, config: &DeepseekV4Config, cache: &V4Cache) -> Result<EntryStep> {
        let per_page = self.page_size / of.rate;
        let numbers = self.batch.entries(of, per_page, 0);
        let most = numbers.visible.iter().copied().max().unwrap_or(0) as usize;
        let seen = match () {
            () if most == 0 => (SeenEntries::None, 0),
            () if config.picks(of, most, self.determinism) => {
                let heads = [config.index_n_heads, config.index_head_dim];
                let sizes = IndexSizes::new(heads, per_page, cache.entries().config());
                (SeenEntries::Picked(self.indexed(&sizes, &numbers.visible)?), config.index_topk)
            }
            () => {
                let slots = self.lists(&self.batch.entry_slots(of.rate, per_page));
                (SeenEntries::All(slots.select(0, ints(self.batch.owners(), self.device)).unsqueeze_dim(1)), most)
            }
        };
        self.entry_step(of, numbers, seen)
    }

    /// With what tokens see, and of how many entries at most.
    fn entry_step(
        &self,
        of: &CompressorSpec,
        numbers: EntryNumbers,
        (seen, most): (SeenEntries, usize),
    ) -> Result<EntryStep> {
        let shape = [self.batch.lens().len(), numbers.completed];
        let (cos, sin) = self.rotary.tables(&numbers.positions, shape, self.device)?;
        Ok(EntryStep {
            carried_slots: ints(numbers.carried_slots, self.device),
            marked: self.marked(of.carried_tokens()),
            slots: ints(numbers.slots, self.device),
            cos,
            sin,
            lengths: list_lengths(&numbers.visible, most, self.device),
            seen,
        })
    }

    fn marked(&self, len: usize) -> Option<MarkedRows> {
        let [tokens, slots] = self.batch.marked(len);
        let upload = |numbers| ints(numbers, self.device);
        (!tokens.is_empty()).then(|| MarkedRows { tokens: upload(tokens), slots: upload(slots) })
    }

    /// The pages of each sequence, from which an indexer picks.
    fn indexed(&self, sizes: &IndexSizes, visible: &[i32]) -> Result<Vec<IndexedKeys>> {
        let page_table = self.lists(&self.batch.pages());
        let pages = |owners| Ok(page_table.clone().select(0, ints(owners, self.device)));
        IndexedKeys::of_step(&self.batch.lens(), pages, visible, (sizes, self.determinism), self.device)
    }

    /// i32 `[lists.len(), K]`, each list filled up with -1.
    fn lists(&self, lists: &[Vec<i32>]) -> Tensor<2, Int> {
        let longest = padded(lists.iter().map(Vec::len).max().unwrap_or(0));
        match longest {
            // A reshape to 0 of something would keep the dimension that is there.
            0 => Tensor::empty([lists.len(), 0], (self.device, DType::I32)),
            _ => ints(filled_up(lists, longest), self.device).reshape([lists.len(), longest]),
        }
    }
}
