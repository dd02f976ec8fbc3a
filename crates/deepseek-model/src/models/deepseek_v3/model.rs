//! DeepSeek-V3 (arXiv 2412.19437); with an indexer in every layer, DeepSeek-V3.2; with whole query projections and softmax
//! routing, DeepSeek-V2-Lite (arXiv 2405.04434).

use burn::tensor::{Device, Tensor};
use mla_ops::cache::PagedCache;
use mla_ops::{Addend, Determinism, Normed, Residual};

use super::config::DeepseekV3Config;
use super::mla::MultiHeadLatentAttention;
use super::mla_config::MlaConfig;
use super::moe::load_moe;
use super::rotary::RotaryEmbedding;
use super::step::MlaStep;
use crate::Result;
use crate::layers::{Linear, Mlp, Moe, MoeTokens, RmsNorm};
use crate::models::architecture::{Hidden, Observer};
use crate::parallel::{Cut, Parallel};
use crate::step::Chunk;
use crate::weights::WeightLoader;

/// The model: embedding, decoder layers, norm and head.
#[derive(Debug)]
pub(super) struct DeepseekV3 {
    pub(super) config: DeepseekV3Config,
    pub(super) mla: MlaConfig,
    pub(super) device: Device,
    pub(super) rotary: RotaryEmbedding,
    /// `[vocab, hidden]`, on every rank.
    embed_tokens: Tensor<2>,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    lm_head: Linear,
    pub(super) parallel: Parallel,
}

#[derive(Debug)]
struct DecoderLayer {
    parallel: Parallel,
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
    pub(super) fn load(config: DeepseekV3Config, loader: &mut WeightLoader, device: &Device) -> Self {
        let (vocab, hidden, mla) = (config.vocab_size, config.hidden_size, config.mla());
        Self {
            device: device.clone(),
            embed_tokens: loader.tensor("model.embed_tokens.weight", [vocab, hidden], Cut::Whole),
            layers: (0..config.num_hidden_layers)
                .map(|layer| DecoderLayer::load((&config, &mla), loader, layer))
                .collect(),
            norm: RmsNorm::load(loader, "model.norm", hidden, config.rms_norm_eps),
            lm_head: Linear::load(loader, "lm_head", [vocab, hidden], Cut::Vocabulary),
            parallel: loader.parallel().clone(),
            rotary: mla.rotary(),
            mla,
            config,
        }
    }

    /// Heads of this rank.
    pub(super) fn heads(&self) -> usize {
        self.parallel.local(self.config.num_attention_heads)
    }

    /// The inputs of a forward pass over the new tokens of some requests.
    pub(super) fn step(&self, chunks: &[Chunk], cache: &PagedCache, determinism: Determinism) -> Result<MlaStep> {
        MlaStep::new(chunks, cache, &self.rotary, (&self.mla, self.heads()), determinism, &self.device)
    }

    /// The final hidden states `[N, hidden]` of a step, normed. The latents of its tokens are in the cache afterwards.
    pub(super) fn forward(
        &self,
        step: &MlaStep,
        cache: &mut PagedCache,
        mut observe: Option<Observer<'_>>,
    ) -> Result<Tensor<2>> {
        let embeddings = self.embed_tokens.clone().select(0, step.input_ids.clone());
        Observer::hidden(&mut observe, Hidden::Embedding, || embeddings.clone());
        let mut residual = Residual::new(embeddings);
        for (number, layer) in self.layers.iter().enumerate() {
            layer.forward(&mut residual, step, cache, &mut observe)?;
            Observer::hidden(&mut observe, Hidden::Layer(number), || residual.tensor());
        }
        let h = self.norm.forward(&mut residual)?.tensor();
        Observer::hidden(&mut observe, Hidden::FinalNorm, || h.clone());
        Ok(h)
    }

    /// Logits `[N, vocab]` of final hidden states `[N, hidden]`.
    pub(super) fn logits(&self, hidden: Tensor<2>, determinism: Determinism) -> Result<Tensor<2>> {
        self.parallel.all_gather(self.lm_head.forward(hidden, determinism)?, self.config.vocab_size)
    }
}

impl DecoderLayer {
    fn load((config, mla): (&DeepseekV3Config, &MlaConfig), loader: &mut WeightLoader, layer: usize) -> Self {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
        let mlp = if layer < config.first_k_dense_replace {
            FeedForward::Dense(Mlp::load(loader, &name("mlp"), hidden, config.intermediate_size))
        } else {
            FeedForward::Moe(load_moe(loader, &name("mlp"), &config.moe()))
        };
        let self_attn = MultiHeadLatentAttention::load(loader, &name("self_attn"), mla);
        Self {
            parallel: loader.parallel().clone(),
            input_layernorm: RmsNorm::load(loader, &name("input_layernorm"), hidden, eps),
            self_attn: self_attn.with_pools(layer, config.num_hidden_layers + layer),
            post_attention_layernorm: RmsNorm::load(loader, &name("post_attention_layernorm"), hidden, eps),
            mlp,
        }
    }

    /// Adds attention and experts to the residual stream `[N, hidden]`.
    fn forward(
        &self,
        residual: &mut Residual,
        step: &MlaStep,
        cache: &mut PagedCache,
        observe: &mut Option<Observer<'_>>,
    ) -> Result<()> {
        let mut h = self.input_layernorm.forward(residual)?;
        let attention = self.self_attn.forward(&mut h, step, cache)?;
        residual.add(self.parallel.all_reduce(attention)?)?;
        let mut h = self.post_attention_layernorm.forward(residual)?;
        let experts = self.mlp.forward(&mut h, step, observe)?;
        Ok(residual.add(self.parallel.all_reduce(experts)?)?)
    }
}

impl FeedForward {
    /// The normed residual stream h `[N, hidden]` -> what is added to the stream.
    fn forward(&self, h: &mut Normed<'_>, step: &MlaStep, observe: &mut Option<Observer<'_>>) -> Result<Addend> {
        Ok(match self {
            Self::Dense(mlp) => mlp.forward(h, step.determinism)?.into(),
            Self::Moe(moe) => {
                let tokens = MoeTokens { ids: None, padded_slots: step.padded_slots.as_ref() };
                moe.forward_tokens(h, tokens, step.determinism, observe)?.into()
            }
        })
    }
}
