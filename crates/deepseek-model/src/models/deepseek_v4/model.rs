//! DeepSeek-V4: hyper-connected streams, attention over a window and compressed entries, clamped experts.

use burn::tensor::{Device, Int, Tensor};
use mla_ops::{Determinism, Streams, mhc_post};

use super::attention::SharedKvAttention;
use super::cache::V4Cache;
use super::config::DeepseekV4Config;
use super::hyper_connection::{HyperConnection, HyperHead};
use super::moe::load_moe;
use super::partial_rotary::PartialRotary;
use super::step::V4Step;
use crate::Result;
use crate::layers::{Linear, Moe, MoeTokens, RmsNorm};
use crate::models::architecture::{Hidden, Observer};
use crate::parallel::{Cut, Parallel};
use crate::step::Chunk;
use crate::weights::WeightLoader;

/// The model: embedding, decoder layers between hyper-connections, norm and head.
#[derive(Debug)]
pub(super) struct DeepseekV4 {
    pub(super) config: DeepseekV4Config,
    pub(super) device: Device,
    pub(super) rotary: PartialRotary,
    pub(super) compress_rotary: PartialRotary,
    /// `[vocab, hidden]`, on every rank.
    embed: Tensor<2>,
    layers: Vec<DecoderLayer>,
    hc_head: HyperHead,
    norm: RmsNorm,
    head: Linear,
    pub(super) parallel: Parallel,
}

#[derive(Debug)]
struct DecoderLayer {
    parallel: Parallel,
    hc_attn: HyperConnection,
    attn: SharedKvAttention,
    hc_ffn: HyperConnection,
    ffn: Moe,
}

impl DeepseekV4 {
    /// Takes the weights out of a loader; what is missing or wrong shows when the loader is finished.
    pub(super) fn load(config: DeepseekV4Config, loader: &mut WeightLoader, device: &Device) -> Self {
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        Self {
            device: device.clone(),
            rotary: PartialRotary::new(&config.rope, config.qk_rope_head_dim),
            compress_rotary: PartialRotary::new(&config.compress_rope, config.qk_rope_head_dim),
            embed: loader.tensor("embed.weight", [vocab, hidden], Cut::Whole),
            layers: (0..config.layers.len()).map(|layer| DecoderLayer::load(&config, loader, layer)).collect(),
            hc_head: HyperHead::load(loader, "hc_head", &config.hyper_connection()),
            norm: RmsNorm::load(loader, "norm", hidden, config.rms_norm_eps),
            head: Linear::load(loader, "head", [vocab, hidden], Cut::Vocabulary),
            parallel: loader.parallel().clone(),
            config,
        }
    }

    /// The inputs of a forward pass over the new tokens of some requests; their states count them as computed.
    pub(super) fn step(&self, chunks: &[Chunk], cache: &mut V4Cache, determinism: Determinism) -> Result<V4Step> {
        let rotary = [&self.rotary, &self.compress_rotary];
        V4Step::new(chunks, cache, rotary, &self.config, determinism, &self.device)
    }

    /// The final hidden states `[N, hidden]` of a step, normed. The cache has taken in the tokens afterwards; after an error
    /// their requests can only be freed. `observe` sees after a layer all streams of a token in one row
    /// `[N, hc_mult · hidden]`.
    pub(super) fn forward(
        &self,
        step: &V4Step,
        cache: &mut V4Cache,
        mut observe: Option<Observer<'_>>,
    ) -> Result<Tensor<2>> {
        let embed = |ids: Tensor<1, Int>| self.embed.clone().select(0, ids);
        Observer::hidden(&mut observe, Hidden::Embedding, || embed(step.input_ids.clone()));
        let ([tokens], [_, hidden], n) = (step.input_ids.dims(), self.embed.dims(), self.config.hc_mult);
        let ids = step.input_ids.clone();
        let mut streams: Streams = match tokens {
            // A selection reads an id as often as asked to, with no copy.
            1 => embed(ids.expand([n])).reshape([1, n, hidden]),
            _ => embed(ids).unsqueeze_dim::<3>(1).repeat_dim(1, n),
        }
        .into();
        for (number, layer) in self.layers.iter().enumerate() {
            streams = layer.forward(streams, step, cache, &mut observe)?;
            Observer::hidden(&mut observe, Hidden::Layer(number), || streams.tensor().reshape([tokens, n * hidden]));
        }
        let x = self.hc_head.forward(streams, step.determinism)?;
        Observer::hidden(&mut observe, Hidden::HyperHead, || x.clone());
        let x = self.norm.apply(x)?;
        Observer::hidden(&mut observe, Hidden::FinalNorm, || x.clone());
        Ok(x)
    }

    /// Logits `[N, vocab]` of final hidden states `[N, hidden]`.
    pub(super) fn logits(&self, hidden: Tensor<2>, determinism: Determinism) -> Result<Tensor<2>> {
        self.parallel.all_gather(self.head.forward(hidden, determinism)?, self.config.vocab_size)
    }
}

impl DecoderLayer {
    fn load(config: &DeepseekV4Config, loader: &mut WeightLoader, layer: usize) -> Self {
        let name = |part: &str| format!("layers.{layer}.{part}");
        let connection = config.hyper_connection();
        Self {
            parallel: loader.parallel().clone(),
            hc_attn: HyperConnection::load(loader, &name("hc_attn"), &name("attn_norm"), &connection),
            attn: SharedKvAttention::load(loader, &name("attn"), layer, config),
            hc_ffn: HyperConnection::load(loader, &name("hc_ffn"), &name("ffn_norm"), &connection),
            ffn: load_moe(loader, &name("ffn"), config, config.layers[layer].mlp),
        }
    }

    fn forward(
        &self,
        streams: Streams,
        step: &V4Step,
        cache: &mut V4Cache,
        observe: &mut Option<Observer<'_>>,
    ) -> Result<Streams> {
        let determinism = step.determinism;
        let (h, mixing) = self.hc_attn.read(streams, determinism)?;
        let attention = self.attn.forward(h, step, cache)?;
        let streams = mhc_post(self.parallel.all_reduce(attention)?, mixing)?;
        let (h, mixing) = self.hc_ffn.read(streams, determinism)?;
        let tokens = MoeTokens { ids: Some(&step.input_ids), padded_slots: step.padded_slots.as_ref() };
        let experts = self.ffn.forward_tokens(h, tokens, determinism, observe)?;
        Ok(mhc_post(self.parallel.all_reduce(experts)?, mixing)?)
    }
}
