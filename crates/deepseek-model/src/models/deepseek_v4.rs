//! DeepSeek-V4: hyper-connected streams, attention over a window and compressed entries, clamped experts.

use burn::tensor::{Device, Tensor};

use super::Hidden;
use crate::Result;
use crate::cache::V4Cache;
use crate::config::DeepseekV4Config;
use crate::layers::{HyperConnection, HyperHead, Linear, MoeV4, PartialRotary, RmsNorm, SharedKvAttention};
use crate::step::{Chunk, last_rows};
use crate::step_v4::V4Step;
use crate::weights::WeightLoader;

/// The model: embedding, decoder layers between hyper-connections, norm and head.
#[derive(Debug)]
pub struct DeepseekV4 {
    config: DeepseekV4Config,
    device: Device,
    rotary: PartialRotary,
    compress_rotary: PartialRotary,
    /// `[vocab, hidden]`.
    embed: Tensor<2>,
    layers: Vec<DecoderLayer>,
    hc_head: HyperHead,
    norm: RmsNorm,
    head: Linear,
}

#[derive(Debug)]
struct DecoderLayer {
    hc_attn: HyperConnection,
    attn_norm: RmsNorm,
    attn: SharedKvAttention,
    hc_ffn: HyperConnection,
    ffn_norm: RmsNorm,
    ffn: MoeV4,
}

impl DeepseekV4 {
    /// Takes the weights out of a loader; what is missing or wrong shows when the loader is finished.
    pub(crate) fn load(config: DeepseekV4Config, loader: &mut WeightLoader, device: &Device) -> Self {
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        Self {
            device: device.clone(),
            rotary: PartialRotary::new(&config.rope, config.qk_rope_head_dim),
            compress_rotary: PartialRotary::new(&config.compress_rope, config.qk_rope_head_dim),
            embed: loader.tensor("embed.weight", [vocab, hidden]),
            layers: (0..config.layers.len()).map(|layer| DecoderLayer::load(&config, loader, layer)).collect(),
            hc_head: HyperHead::load(loader, "hc_head", &config),
            norm: RmsNorm::load(loader, "norm", hidden, config.rms_norm_eps),
            head: Linear::load(loader, "head", vocab, hidden),
            config,
        }
    }

    /// The configuration.
    pub fn config(&self) -> &DeepseekV4Config {
        &self.config
    }

    /// One forward pass over the new tokens of some requests: their final hidden states `[N, hidden]`, normed.
    ///
    /// The cache has taken in the tokens afterwards; after an error their requests can only be freed. `observe` sees the
    /// hidden states on the way, `[N, hidden]`, after a layer all streams of a token in one row `[N, hc_mult · hidden]`.
    ///
    /// # Errors
    /// A cache that does not know a request or has no token to compute for it, an operation that refuses its arguments.
    pub fn forward(
        &self,
        chunks: &[Chunk],
        cache: &mut V4Cache,
        observe: &mut dyn FnMut(Hidden, &Tensor<2>),
    ) -> Result<Tensor<2>> {
        let step = V4Step::new(chunks, cache, &self.rotary, &self.compress_rotary, &self.config, &self.device)?;
        let x = self.embed.clone().select(0, step.input_ids.clone());
        observe(Hidden::Embedding, &x);
        let [tokens, hidden] = x.dims();
        let streams = self.config.hc_mult;
        let mut x: Tensor<3> = x.unsqueeze_dim::<3>(1).repeat_dim(1, streams);
        for (number, layer) in self.layers.iter().enumerate() {
            x = layer.forward(x, &step, cache)?;
            observe(Hidden::Layer(number), &x.clone().reshape([tokens, streams * hidden]));
        }
        let x = self.hc_head.forward(x);
        observe(Hidden::HyperHead, &x);
        let x = self.norm.forward(x)?;
        observe(Hidden::FinalNorm, &x);
        Ok(x)
    }

    /// Logits `[N, vocab]` of final hidden states `[N, hidden]`.
    pub fn logits(&self, hidden: Tensor<2>) -> Tensor<2> {
        self.head.forward(hidden)
    }

    /// Logits `[chunks, vocab]` of the last new token of each request.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn next_token_logits(&self, chunks: &[Chunk], cache: &mut V4Cache) -> Result<Tensor<2>> {
        let hidden = self.forward(chunks, cache, &mut |_, _| {})?;
        Ok(self.logits(last_rows(&hidden, chunks)))
    }
}

impl DecoderLayer {
    fn load(config: &DeepseekV4Config, loader: &mut WeightLoader, layer: usize) -> Self {
        let name = |part: &str| format!("layers.{layer}.{part}");
        let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
        Self {
            hc_attn: HyperConnection::load(loader, &name("hc_attn"), config),
            attn_norm: RmsNorm::load(loader, &name("attn_norm"), hidden, eps),
            attn: SharedKvAttention::load(loader, &name("attn"), layer, config),
            hc_ffn: HyperConnection::load(loader, &name("hc_ffn"), config),
            ffn_norm: RmsNorm::load(loader, &name("ffn_norm"), hidden, eps),
            ffn: MoeV4::load(loader, &name("ffn"), config, config.layers[layer].mlp),
        }
    }

    fn forward(&self, x: Tensor<3>, step: &V4Step, cache: &mut V4Cache) -> Result<Tensor<3>> {
        let (h, mixing) = self.hc_attn.read(&x);
        let x = mixing.write(x, self.attn.forward(self.attn_norm.forward(h)?, step, cache)?);
        let (h, mixing) = self.hc_ffn.read(&x);
        Ok(mixing.write(x, self.ffn.forward(self.ffn_norm.forward(h)?, &step.input_ids)?))
    }
}
