//! Attention with one key that is also the value, over a window and compressed entries (DeepSeek-V4).

use burn::tensor::Tensor;
use mla_ops::{
    CompressKvArgs, CompressKvOptions, CompressedKv, Determinism, InverseRope, RopeWritten, SparseMlaArgs,
    SparseMlaOptions, SparseScope, StackedWeight, linear_by_head, linear_each, linear_each_normed, sparse_mla,
};

use super::cache::V4Cache;
use super::compressor::Compressor;
use super::config::DeepseekV4Config;
use super::indexer::EntryIndexer;
use super::partial_rotary::PartialRotation;
use super::schedule::AttentionSpec;
use super::states::State;
use super::step::{EntryStep, SeenEntries, V4Step, WindowKeys};
use crate::Result;
use crate::layers::{Linear, RmsNorm};
use crate::parallel::Cut;
use crate::weights::WeightLoader;

/// Attention of one layer.
#[derive(Debug, Clone)]
pub(crate) struct SharedKvAttention {
    layer: usize,
    wq_a: Linear,
    q_norm: RmsNorm,
    wq_b: Linear,
    wkv: Linear,
    /// f32 `[d]`.
    kv_norm: Tensor<1>,
    compression: Compression,
    /// f32 `[H]`.
    attn_sink: Tensor<1>,
    /// `[G, o_lora_rank, H / G · d]`.
    wo_a: StackedWeight,
    wo_b: Linear,
    spec: AttentionSpec,
    /// Of this rank.
    heads: usize,
    head_dim: usize,
    norm_eps: f64,
}

/// What a layer sees beyond its window.
#[derive(Debug, Clone)]
enum Compression {
    None,
    /// All entries.
    Heavy(Compressor),
    /// The entries that the indexer picks.
    Sparse {
        compressor: Compressor,
        indexer: Box<EntryIndexer>,
    },
}

/// What the weights make of a layer's input.
struct Projected {
    /// Normed.
    q_latent: Tensor<2>,
    kv: Tensor<2>,
    compressed: Compressed,
}

/// The part of it that [`Compression`] takes.
#[derive(Default)]
struct Compressed {
    /// `[N, 2 C]` of each compressor.
    kv_gates: Vec<Tensor<2>>,
    /// `[N, Hi]`, where an indexer picks.
    head_weights: Option<Tensor<2>>,
}

impl SharedKvAttention {
    /// Loads `{name}.*` of layer number `layer`.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, layer: usize, config: &DeepseekV4Config) -> Self {
        let (hidden, heads, width) = (config.hidden_size, config.num_attention_heads, config.head_dim);
        let (rank, eps) = (config.q_lora_rank, config.rms_norm_eps);
        let (groups, group_rank) = (config.o_groups, config.o_lora_rank);
        let group_width = heads / groups * width;
        let local_heads = loader.parallel().local(heads);
        Self {
            layer,
            wq_a: Linear::load(loader, &format!("{name}.wq_a"), [rank, hidden], Cut::Whole),
            q_norm: RmsNorm::load(loader, &format!("{name}.q_norm"), rank, eps),
            wq_b: Linear::load(loader, &format!("{name}.wq_b"), [heads * width, rank], Cut::Heads(heads)),
            wkv: Linear::load(loader, &format!("{name}.wkv"), [width, hidden], Cut::Whole),
            kv_norm: loader.tensor_f32(&format!("{name}.kv_norm.weight"), [width], Cut::Whole),
            compression: Compression::load(loader, name, layer, config),
            attn_sink: loader.tensor_f32(&format!("{name}.attn_sink"), [heads], Cut::Heads(heads)),
            wo_a: loader.by_head(&format!("{name}.wo_a.weight"), [groups, group_rank, group_width]),
            wo_b: Linear::load(loader, &format!("{name}.wo_b"), [hidden, groups * group_rank], Cut::Columns),
            spec: config.layers[layer].attention,
            heads: local_heads,
            head_dim: width,
            norm_eps: eps,
        }
    }

    /// x `[N, hidden]` -> `[N, hidden]`; the cache takes in the new tokens.
    pub(crate) fn forward(&self, x: Tensor<2>, step: &V4Step, cache: &mut V4Cache) -> Result<Tensor<2>> {
        let [tokens, _] = x.dims();
        let rotation = match self.compression {
            Compression::None => &step.rotation,
            _ => &step.compress_rotation,
        };
        let determinism = step.determinism;
        let entries = step.entries(self.spec);
        let Projected { q_latent, kv, compressed: Compressed { kv_gates, head_weights } } =
            self.project(x, entries, determinism)?;
        let indexer = entries.and_then(|entries| self.compression.indexer(entries));
        let (q, index_q) = match indexer {
            Some(indexer) => {
                let weights = [self.wq_b.weight(), indexer.wq_b.weight()];
                let [q, index_q] = linear_each(q_latent, weights, determinism)?;
                (q, Some(index_q.reshape([tokens, indexer.heads, indexer.width])))
            }
            None => (self.wq_b.forward(q_latent, determinism)?, None),
        };
        let q = q.reshape([tokens, self.heads, self.head_dim]);
        let calls = self.begin_entries(kv_gates, step, entries, cache)?;
        let (q, index_q, scope) = self.write_tokens((q, index_q), (kv, calls), rotation, step, cache)?;
        let second = match entries {
            Some(entries) => self.compression.seen(index_q.zip(head_weights), entries, cache)?,
            None => None,
        };
        let q = q.unsqueeze_dim(1);
        // Lists are short: with a plan a step takes as long (see the README of `sparse_mla`'s kernel).
        let args = SparseMlaArgs { q, scope, second, sink: Some(self.attn_sink.clone()), plan: None };
        let softmax_scale = (self.head_dim as f32).sqrt().recip();
        let options = SparseMlaOptions { value_width: self.head_dim, softmax_scale, determinism };
        let (out, _) = sparse_mla(args, &options)?;
        self.project_output(rotation.invert(out.squeeze_dim(1)), determinism)
    }

    /// All that this layer's weights make of x `[N, hidden]`, in one launch for a few tokens.
    fn project(&self, x: Tensor<2>, entries: Option<&EntryStep>, determinism: Determinism) -> Result<Projected> {
        let (wq_a, wkv) = (self.wq_a.weight(), self.wkv.weight());
        let norm = (self.q_norm.weight.val(), self.q_norm.eps);
        let (q_latent, kv, compressed) = match (&self.compression, entries) {
            (Compression::Heavy(compressor), Some(_)) => {
                let weights = [wq_a, wkv, compressor.kv_gates().weight()];
                let [q_latent, kv, kv_gates] = linear_each_normed(x, weights, norm, determinism)?;
                (q_latent, kv, Compressed { kv_gates: vec![kv_gates], head_weights: None })
            }
            (Compression::Sparse { compressor, indexer }, Some(entries)) => {
                let gates = [compressor, &indexer.compressor].map(|compressor| compressor.kv_gates().weight());
                if let SeenEntries::Picked(_) = entries.seen {
                    let weights = [wq_a, wkv, gates[0], gates[1], indexer.weights_proj.weight()];
                    let [q_latent, kv, own, index, head_weights] = linear_each_normed(x, weights, norm, determinism)?;
                    (q_latent, kv, Compressed { kv_gates: vec![own, index], head_weights: Some(head_weights) })
                } else {
                    let weights = [wq_a, wkv, gates[0], gates[1]];
                    let [q_latent, kv, own, index] = linear_each_normed(x, weights, norm, determinism)?;
                    (q_latent, kv, Compressed { kv_gates: vec![own, index], head_weights: None })
                }
            }
            _ => {
                let [q_latent, kv] = linear_each_normed(x, [wq_a, wkv], norm, determinism)?;
                (q_latent, kv, Compressed::default())
            }
        };
        Ok(Projected { q_latent, kv, compressed })
    }

    /// The calls that take in the keys and gates of the compressors.
    fn begin_entries(
        &self,
        kv_gates: Vec<Tensor<2>>,
        step: &V4Step,
        entries: Option<&EntryStep>,
        cache: &mut V4Cache,
    ) -> Result<Vec<(CompressKvArgs, CompressKvOptions)>> {
        let Some(entries) = entries else { return Ok(vec![]) };
        let of = self.compression.compressors().into_iter().zip(kv_gates);
        of.map(|(compressor, kv_gates)| compressor.begin(kv_gates, step, entries, cache)).collect()
    }

    /// Norms and RoPE of the heads q `[N, H, d]`, RoPE of those of an indexer, and of the keys kv `[N, d]`, which go into the state;
    /// compressors take in the tokens. Returns the heads, and the last tokens with the new ones.
    fn write_tokens(
        &self,
        (q, index_q): (Tensor<3>, Option<Tensor<3>>),
        (kv, calls): (Tensor<2>, Vec<(CompressKvArgs, CompressKvOptions)>),
        rotation: &PartialRotation,
        step: &V4Step,
        cache: &mut V4Cache,
    ) -> Result<(Tensor<3>, Option<Tensor<3>>, SparseScope)> {
        let (state, window) = (State::Window(self.layer), &step.window);
        // The new keys may overwrite them.
        let before = match window.keys {
            WindowKeys::BeforeAndNew { before: true } => {
                let before = cache.read(state)?.select(0, step.sequences.state_rows.clone());
                let [sequences, per_request, width] = before.dims();
                Some(before.reshape([sequences * per_request, width]))
            }
            _ => None,
        };
        let norm = (self.kv_norm.clone(), self.norm_eps as f32);
        let target = (cache.take(state)?, window.slots.clone());
        let (window_state, compressed, outcome) = match rotation.norm_and_write((q, index_q), kv, norm, target, calls) {
            Ok(RopeWritten { q, latent, index_q, cache, compressed }) => {
                let kept = compressed.into_iter().map(|CompressedKv { state, cache, .. }| (state, cache)).collect();
                (cache, kept, Ok((q, index_q, latent.expect("of queries that are not absorbed"))))
            }
            Err(refused) => (refused.cache, refused.compressors, Err(refused.error)),
        };
        cache.put(state, window_state.dense());
        for (compressor, (carried, pool)) in self.compression.compressors().into_iter().zip::<Vec<_>>(compressed) {
            compressor.end(carried, pool, cache)?;
        }
        let (q, index_q, kv) = outcome?;
        if let Some(marked) = &window.marked {
            cache.write_marked(state, &kv, marked)?;
        }
        let rows = match (&window.keys, before) {
            (WindowKeys::State, _) => cache.read(state)?,
            (_, Some(before)) => Tensor::cat(vec![before, kv], 0).unsqueeze(),
            (_, None) => kv.unsqueeze(),
        };
        Ok((q, index_q, SparseScope::new(rows, window.seen.clone())))
    }

    /// Heads in groups, each group through a projection of its own, then all through one: `[N, H, d]` -> `[N, hidden]`.
    fn project_output(&self, out: InverseRope, determinism: Determinism) -> Result<Tensor<2>> {
        let low = linear_by_head(out, &self.wo_a, determinism)?;
        let [tokens, groups, rank] = low.dims();
        self.wo_b.forward(low.reshape([tokens, groups * rank]), determinism)
    }
}

impl Compression {
    fn load(loader: &mut WeightLoader, name: &str, layer: usize, config: &DeepseekV4Config) -> Self {
        let (specs, number) = (config.layer_compressors(layer), config.first_compressor(layer));
        match specs[..] {
            [entries] => {
                let compressor = config.compressor(entries);
                Self::Heavy(Compressor::load(loader, &format!("{name}.compressor"), number, &compressor))
            }
            [entries, index_keys] => Self::Sparse {
                compressor: Compressor::load(
                    loader,
                    &format!("{name}.compressor"),
                    number,
                    &config.compressor(entries),
                ),
                indexer: Box::new(EntryIndexer::load(
                    loader,
                    &format!("{name}.indexer"),
                    number + 1,
                    &config.indexer(index_keys),
                )),
            },
            _ => Self::None,
        }
    }

    /// What picks from these entries, if something has to.
    fn indexer(&self, entries: &EntryStep) -> Option<&EntryIndexer> {
        match (self, &entries.seen) {
            (Self::Sparse { indexer, .. }, SeenEntries::Picked(_)) => Some(indexer),
            _ => None,
        }
    }

    /// In the order of [`Compressed::kv_gates`].
    fn compressors(&self) -> Vec<&Compressor> {
        match self {
            Self::None => vec![],
            Self::Heavy(compressor) => vec![compressor],
            Self::Sparse { compressor, indexer } => vec![compressor, &indexer.compressor],
        }
    }

    /// The entries that the tokens see, once there are any. Where an indexer picks it takes its queries `[N, Hi, di]`, with RoPE applied, and
    /// the weights of its heads.
    fn seen(
        &self,
        index_q: Option<(Tensor<3>, Tensor<2>)>,
        entries: &EntryStep,
        cache: &V4Cache,
    ) -> Result<Option<SparseScope>> {
        let indices = match (&entries.seen, self, index_q) {
            (SeenEntries::All(slots), ..) => slots.clone(),
            (SeenEntries::Picked(keys), Self::Sparse { indexer, .. }, Some((q, head_weights))) => {
                indexer.pick_from(q, &head_weights, keys, cache.entries())?
            }
            // A step has none to be picked for layers that have no indexer.
            (SeenEntries::None | SeenEntries::Picked(_), ..) => return Ok(None),
        };
        let Some(compressor) = self.compressors().first().copied() else { return Ok(None) };
        let lengths = Some(entries.lengths.clone());
        Ok(Some(SparseScope { rows: cache.entries().pool(compressor.pool())?, indices, lengths }))
    }
}
