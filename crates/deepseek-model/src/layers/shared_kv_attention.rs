//! Attention with one key that is also the value, over a window and compressed entries (DeepSeek-V4).

use burn::tensor::{FloatDType, Int, Tensor};
use mla_ops::matmul;

use super::compressor::{Compressor, CompressorState, Gated};
use super::rms_norm::unit_rms;
use super::sparse_attention::{Scope, best_keys, index_rows, sparse_attention};
use super::{Linear, RmsNorm};
use crate::Result;
use crate::cache::V4Cache;
use crate::config::{AttentionSpec, DeepseekV4Config};
use crate::step_v4::{SequenceStep, V4Step};
use crate::weights::WeightLoader;

/// Attention of one layer.
#[derive(Debug, Clone)]
pub(crate) struct SharedKvAttention {
    layer: usize,
    wq_a: Linear,
    q_norm: RmsNorm,
    wq_b: Linear,
    wkv: Linear,
    kv_norm: RmsNorm,
    compression: Compression,
    /// f32 `[H]`.
    attn_sink: Tensor<1>,
    /// `[G, H / G · d, o_lora_rank]`.
    wo_a: Tensor<3>,
    wo_b: Linear,
    heads: usize,
    head_dim: usize,
    sliding_window: usize,
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
        indexer: Box<Indexer>,
    },
}

/// Picks entries for each query, by keys of its own.
#[derive(Debug, Clone)]
struct Indexer {
    compressor: Compressor,
    wq_b: Linear,
    weights_proj: Linear,
    heads: usize,
    width: usize,
    top_k: usize,
}

/// What one layer remembers of one sequence.
#[derive(Debug, Clone, Default)]
pub(crate) struct LayerState {
    /// The last tokens' keys, at most `sliding_window - 1`, turned: `[n, d]`; `None` before the first.
    window: Option<Tensor<2>>,
    entries: CompressorState,
    index_keys: CompressorState,
}

/// What the new tokens of all sequences bring along for the compressor and the indexer.
enum Projected {
    None,
    Heavy(Gated),
    Sparse {
        entries: Gated,
        index_keys: Gated,
        /// `[N, Hi, di]`, turned.
        q: Tensor<3>,
        /// f32 `[N, Hi]`.
        head_weights: Tensor<2>,
    },
}

impl SharedKvAttention {
    /// Loads `{name}.*` of layer number `layer`.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, layer: usize, config: &DeepseekV4Config) -> Self {
        let (hidden, heads, width) = (config.hidden_size, config.num_attention_heads, config.head_dim);
        let (rank, eps) = (config.q_lora_rank, config.rms_norm_eps);
        let (groups, group_rank) = (config.o_groups, config.o_lora_rank);
        let group_width = heads / groups * width;
        let wo_a: Tensor<2> = loader.tensor(&format!("{name}.wo_a.weight"), [groups * group_rank, group_width]);
        Self {
            layer,
            wq_a: Linear::load(loader, &format!("{name}.wq_a"), rank, hidden),
            q_norm: RmsNorm::load(loader, &format!("{name}.q_norm"), rank, eps),
            wq_b: Linear::load(loader, &format!("{name}.wq_b"), heads * width, rank),
            wkv: Linear::load(loader, &format!("{name}.wkv"), width, hidden),
            kv_norm: RmsNorm::load(loader, &format!("{name}.kv_norm"), width, eps),
            compression: Compression::load(loader, name, config, config.layers[layer].attention),
            attn_sink: loader.tensor_f32(&format!("{name}.attn_sink"), [heads]),
            wo_a: wo_a.reshape([groups, group_rank, group_width]).swap_dims(1, 2),
            wo_b: Linear::load(loader, &format!("{name}.wo_b"), hidden, groups * group_rank),
            heads,
            head_dim: width,
            sliding_window: config.sliding_window,
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
        let q_latent = self.q_norm.forward(self.wq_a.forward(x.clone()));
        let q = rotation.apply(self.normed_heads(self.wq_b.forward(q_latent.clone())));
        let kv = self.kv_norm.forward(self.wkv.forward(x.clone()));
        let kv = rotation.apply(kv.reshape([tokens, 1, self.head_dim])).reshape([tokens, self.head_dim]);
        let projected = self.compression.project(&x, q_latent, step);

        let mut outputs = Vec::new();
        for sequence in &step.sequences {
            let state = cache.layer(sequence.request, self.layer)?;
            let rows = |x: &Tensor<2>| x.clone().narrow(0, sequence.tokens.start, sequence.tokens.len());
            let mut scopes = vec![self.window(rows(&kv), sequence, state)];
            scopes.extend(self.compression.entries(&projected, sequence, state, step, x.dtype().into())?);
            let q = q.clone().narrow(0, sequence.tokens.start, sequence.tokens.len());
            outputs.push(sparse_attention(q, scopes, &self.attn_sink, (self.head_dim as f32).sqrt().recip()));
        }
        Ok(self.project_output(rotation.invert(Tensor::cat(outputs, 0))))
    }

    /// Each head normed without a weight: `[N, H · d]` -> `[N, H, d]`.
    fn normed_heads(&self, q: Tensor<2>) -> Tensor<3> {
        let dtype = FloatDType::from(q.dtype());
        let [tokens, _] = q.dims();
        let by_head = q.reshape([tokens * self.heads, self.head_dim]).cast(FloatDType::F32);
        unit_rms(by_head, self.norm_eps).cast(dtype).reshape([tokens, self.heads, self.head_dim])
    }

    /// The last tokens and the new ones; the state keeps what the next step can still see.
    fn window(&self, new: Tensor<2>, sequence: &SequenceStep, state: &mut LayerState) -> Scope {
        let rows = match state.window.take() {
            Some(before) => Tensor::cat(vec![before, new], 0),
            None => new,
        };
        let [count, _] = rows.dims();
        let keep = count.min(self.sliding_window - 1);
        state.window = (keep > 0).then(|| rows.clone().narrow(0, count - keep, keep));
        Scope { rows, indices: sequence.window.clone() }
    }

    /// Heads in groups, each group through a projection of its own, then all through one: `[N, H, d]` -> `[N, hidden]`.
    fn project_output(&self, out: Tensor<3>) -> Tensor<2> {
        let [tokens, ..] = out.dims();
        let [groups, group_width, rank] = self.wo_a.dims();
        let by_group = out.reshape([tokens, groups, group_width]).swap_dims(0, 1);
        let low = matmul(by_group, self.wo_a.clone()).swap_dims(0, 1);
        self.wo_b.forward(low.reshape([tokens, groups * rank]))
    }
}

impl Compression {
    fn load(loader: &mut WeightLoader, name: &str, config: &DeepseekV4Config, spec: AttentionSpec) -> Self {
        let mut compressor = |rate: usize, overlap: bool| {
            Compressor::load(loader, &format!("{name}.compressor"), config, rate, config.head_dim, overlap)
        };
        match spec {
            AttentionSpec::Sliding => Self::None,
            AttentionSpec::Hca { rate } => Self::Heavy(compressor(rate, false)),
            AttentionSpec::Csa { rate } => Self::Sparse {
                compressor: compressor(rate, true),
                indexer: Box::new(Indexer::load(loader, &format!("{name}.indexer"), config, rate)),
            },
        }
    }

    /// x `[N, hidden]`, q_latent `[N, q_lora_rank]`.
    fn project(&self, x: &Tensor<2>, q_latent: Tensor<2>, step: &V4Step) -> Projected {
        match self {
            Self::None => Projected::None,
            Self::Heavy(compressor) => Projected::Heavy(compressor.project(x)),
            Self::Sparse { compressor, indexer } => {
                let (q, head_weights) = indexer.queries(x, q_latent, step);
                let (entries, index_keys) = (compressor.project(x), indexer.compressor.project(x));
                Projected::Sparse { entries, index_keys, q, head_weights }
            }
        }
    }

    /// Takes the new tokens of a sequence into its state; the entries that they see, once there are any.
    fn entries(
        &self,
        projected: &Projected,
        sequence: &SequenceStep,
        state: &mut LayerState,
        step: &V4Step,
        dtype: FloatDType,
    ) -> Result<Option<Scope>> {
        let (first, len) = (sequence.tokens.start, sequence.tokens.len());
        match (self, projected) {
            (Self::Heavy(compressor), Projected::Heavy(new)) => {
                compressor.advance(&mut state.entries, new.rows(first, len), &step.compress_rotary, dtype);
                let all = |rows: &Tensor<2>| all_visible(sequence, compressor.rate(), rows);
                Ok(state.entries.entries().map(|rows| Scope { rows: rows.clone(), indices: all(rows) }))
            }
            (Self::Sparse { compressor, indexer }, Projected::Sparse { entries, index_keys, q, head_weights }) => {
                compressor.advance(&mut state.entries, entries.rows(first, len), &step.compress_rotary, dtype);
                let new_keys = index_keys.rows(first, len);
                indexer.compressor.advance(&mut state.index_keys, new_keys, &step.compress_rotary, dtype);
                let (Some(rows), Some(keys)) = (state.entries.entries(), state.index_keys.entries()) else {
                    return Ok(None);
                };
                let (q, weights) = (q.clone().narrow(0, first, len), head_weights.clone().narrow(0, first, len));
                let indices = indexer.choose(q, weights, keys, sequence)?;
                Ok(Some(Scope { rows: rows.clone(), indices }))
            }
            _ => Ok(None),
        }
    }
}

impl Indexer {
    fn load(loader: &mut WeightLoader, name: &str, config: &DeepseekV4Config, rate: usize) -> Self {
        let (heads, width) = (config.index_n_heads, config.index_head_dim);
        Self {
            compressor: Compressor::load(loader, &format!("{name}.compressor"), config, rate, width, true),
            wq_b: Linear::load(loader, &format!("{name}.wq_b"), heads * width, config.q_lora_rank),
            weights_proj: Linear::load(loader, &format!("{name}.weights_proj"), heads, config.hidden_size),
            heads,
            width,
            top_k: config.index_topk,
        }
    }

    /// Queries `[N, Hi, di]`, turned, and their weights f32 `[N, Hi]`.
    fn queries(&self, x: &Tensor<2>, q_latent: Tensor<2>, step: &V4Step) -> (Tensor<3>, Tensor<2>) {
        let [tokens, _] = x.dims();
        let q = self.wq_b.forward(q_latent).reshape([tokens, self.heads, self.width]);
        let weights = self.weights_proj.forward(x.clone()).cast(FloatDType::F32) / (self.heads as f64).sqrt();
        (step.compress_rotation.apply(q), weights)
    }

    /// The entries that each new token sees, i32 `[n, K]`.
    fn choose(
        &self,
        q: Tensor<3>,
        head_weights: Tensor<2>,
        keys: &Tensor<2>,
        sequence: &SequenceStep,
    ) -> Result<Tensor<2, Int>> {
        let [count, _] = keys.dims();
        if count <= self.top_k {
            // Nothing to choose.
            return Ok(all_visible(sequence, self.compressor.rate(), keys));
        }
        let visible: Vec<usize> = sequence.visible_entries(self.compressor.rate()).collect();
        let scale = (self.width as f32).sqrt().recip();
        best_keys(q, keys.clone(), head_weights, &visible, self.top_k, scale)
    }
}

/// All entries whose windows are full when a token has come, i32 `[n, T]`.
fn all_visible(sequence: &SequenceStep, rate: usize, entries: &Tensor<2>) -> Tensor<2, Int> {
    let rows = sequence.visible_entries(rate).map(|visible| 0..visible);
    index_rows(rows, entries.dims()[0], &entries.device())
}

impl LayerState {
    /// Bytes of all tensors.
    pub(crate) fn bytes(&self) -> usize {
        let window = self.window.as_ref().map_or(0, |rows| rows.shape().num_elements() * rows.dtype().size());
        window + self.entries.bytes() + self.index_keys.bytes()
    }
}
