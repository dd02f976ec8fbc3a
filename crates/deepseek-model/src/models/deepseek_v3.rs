//! DeepSeek-V3 (arXiv 2412.19437); with an indexer in every layer, DeepSeek-V3.2; with whole query projections and softmax
//! routing, DeepSeek-V2-Lite (arXiv 2405.04434).

use burn::tensor::{Device, Tensor};
use mla_ops::cache::PagedCache;

use crate::Result;
use crate::config::DeepseekV3Config;
use crate::layers::{AttentionInput, Linear, Mlp, Moe, MultiHeadLatentAttention, RmsNorm, RotaryEmbedding};
use crate::step::{Chunk, Step, StepBuffers, last_rows};
use crate::weights::WeightLoader;

/// The model: embedding, decoder layers, norm and head.
#[derive(Debug)]
pub struct DeepseekV3 {
    config: DeepseekV3Config,
    device: Device,
    rotary: RotaryEmbedding,
    /// `[vocab, hidden]`.
    embed_tokens: Tensor<2>,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    lm_head: Linear,
}

/// A point of the forward pass that can be looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hidden {
    /// After the embedding.
    Embedding,
    /// The residual stream after this layer; DeepSeek-V4: all streams of a token, one after the other.
    Layer(usize),
    /// DeepSeek-V4: after the streams have been added up.
    HyperHead,
    /// After the final norm.
    FinalNorm,
}

/// Sees the hidden states `[N, hidden]` on the way.
type Observer<'o> = &'o mut dyn FnMut(Hidden, &Tensor<2>);

#[derive(Debug)]
struct DecoderLayer {
    input_layernorm: RmsNorm,
    self_attn: MultiHeadLatentAttention,
    post_attention_layernorm: RmsNorm,
    mlp: FeedForward,
}

#[derive(Debug)]
enum FeedForward {
    Dense(Mlp),
    Moe(Moe),
}

impl DeepseekV3 {
    /// Takes the weights out of a loader; what is missing or wrong shows when the loader is finished.
    pub(crate) fn load(config: DeepseekV3Config, loader: &mut WeightLoader, device: &Device) -> Self {
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        Self {
            device: device.clone(),
            rotary: RotaryEmbedding::new(&config.rope, config.qk_rope_head_dim, config.rope_interleave),
            embed_tokens: loader.tensor("model.embed_tokens.weight", [vocab, hidden]),
            layers: (0..config.num_hidden_layers).map(|layer| DecoderLayer::load(&config, loader, layer)).collect(),
            norm: RmsNorm::load(loader, "model.norm", hidden, config.rms_norm_eps),
            lm_head: Linear::load(loader, "lm_head", vocab, hidden),
            config,
        }
    }

    /// The configuration.
    pub fn config(&self) -> &DeepseekV3Config {
        &self.config
    }

    /// One forward pass over the new tokens of some requests: their final hidden states `[N, hidden]`, normed.
    ///
    /// The latents of the tokens are in the cache afterwards. `observe` sees the hidden states `[N, hidden]` on the way.
    ///
    /// # Errors
    /// An operation that refuses its arguments, or a cache that does not know a request.
    pub fn forward(
        &self,
        chunks: &[Chunk],
        cache: &mut PagedCache,
        observe: &mut dyn FnMut(Hidden, &Tensor<2>),
    ) -> Result<Tensor<2>> {
        self.run(&self.step(chunks, cache)?, cache, Some(observe))
    }

    fn step(&self, chunks: &[Chunk], cache: &PagedCache) -> Result<Step> {
        Step::new(chunks, cache, &self.rotary, &self.config, &self.device)
    }

    fn run(&self, step: &Step, cache: &mut PagedCache, mut observe: Option<Observer<'_>>) -> Result<Tensor<2>> {
        let mut x = self.embed_tokens.clone().select(0, step.input_ids.clone());
        if let Some(observe) = &mut observe {
            observe(Hidden::Embedding, &x);
        }
        // A layer ends with the norm of the next one, and may end with what that computes first.
        let norm = |layer: usize| self.layers.get(layer).map_or(&self.norm, |layer| &layer.input_layernorm);
        let mut h = AttentionInput::from(norm(0).forward(x.clone())?);
        for (number, layer) in self.layers.iter().enumerate() {
            let next = self.layers.get(number + 1).map(|layer| &layer.self_attn);
            (x, h) = layer.forward(x, h, (norm(number + 1), next), step, cache)?;
            if let Some(observe) = &mut observe {
                observe(Hidden::Layer(number), &x);
            }
        }
        let h = h.x;
        if let Some(observe) = &mut observe {
            observe(Hidden::FinalNorm, &h);
        }
        Ok(h)
    }

    /// Buffers for the inputs of steps with one token of each request, with at most so many pages of so many tokens.
    pub(crate) fn step_buffers(&self, batch: usize, pages: [usize; 2]) -> StepBuffers {
        StepBuffers::new(batch, pages, &self.rotary, &self.device)
    }

    /// Logits `[B, vocab]` of a step whose inputs are in buffers. It reads nothing else, and may be computed several times.
    pub(crate) fn buffered_logits(&self, buffers: &StepBuffers, cache: &mut PagedCache) -> Result<Tensor<2>> {
        let step = buffers.step(&self.config)?;
        Ok(self.logits(self.run(&step, cache, None)?))
    }

    /// Puts the inputs of a step into buffers.
    pub(crate) fn fill(&self, buffers: &mut StepBuffers, chunks: &[Chunk], cache: &PagedCache) -> Result<()> {
        buffers.fill(chunks, cache, &self.device)
    }

    /// Logits `[N, vocab]` of final hidden states `[N, hidden]`.
    pub fn logits(&self, hidden: Tensor<2>) -> Tensor<2> {
        self.lm_head.forward(hidden)
    }

    /// Logits `[chunks, vocab]` of the last new token of each request.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn next_token_logits(&self, chunks: &[Chunk], cache: &mut PagedCache) -> Result<Tensor<2>> {
        let hidden = self.run(&self.step(chunks, cache)?, cache, None)?;
        Ok(self.logits(last_rows(&hidden, chunks)))
    }
}

impl DecoderLayer {
    fn load(config: &DeepseekV3Config, loader: &mut WeightLoader, layer: usize) -> Self {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
        let mlp = if layer < config.first_k_dense_replace {
            FeedForward::Dense(Mlp::load(loader, &name("mlp"), hidden, config.intermediate_size))
        } else {
            FeedForward::Moe(Moe::load(loader, &name("mlp"), config))
        };
        Self {
            input_layernorm: RmsNorm::load(loader, &name("input_layernorm"), hidden, eps),
            self_attn: MultiHeadLatentAttention::load(loader, &name("self_attn"), layer, config),
            post_attention_layernorm: RmsNorm::load(loader, &name("post_attention_layernorm"), hidden, eps),
            mlp,
        }
    }

    /// The residual stream x and its normed form h become those after this layer, with the norm of the next one and for its
    /// attention, if there is one.
    fn forward(
        &self,
        x: Tensor<2>,
        h: AttentionInput,
        (next_norm, next): (&RmsNorm, Option<&MultiHeadLatentAttention>),
        step: &Step,
        cache: &mut PagedCache,
    ) -> Result<(Tensor<2>, AttentionInput)> {
        let attention = self.self_attn.forward(h, step, cache)?;
        let norm = &self.post_attention_layernorm;
        match &self.mlp {
            FeedForward::Dense(mlp) => {
                let (x, h) = norm.forward_sum(x, attention)?;
                let (x, h) = next_norm.forward_sum(x, mlp.forward(h))?;
                Ok((x, h.into()))
            }
            FeedForward::Moe(moe) => moe.forward_sum((x, attention), [norm, next_norm], next, step.padding.as_ref()),
        }
    }
}
