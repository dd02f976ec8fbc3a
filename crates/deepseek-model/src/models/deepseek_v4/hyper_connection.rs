//! Manifold-constrained hyper-connections: several residual streams, mixed by doubly stochastic matrices (DeepSeek-V4).

use burn::tensor::Tensor;
use mla_ops::{Determinism, MhcOptions, MhcPreArgs, Mixer, Mixing, Streams, mhc_head, mhc_pre};

use super::config::DeepseekV4Config;
use crate::Result;
use crate::parallel::Cut;
use crate::weights::WeightLoader;

/// How one block reads from the residual streams, with the norm before it, and writes to them.
#[derive(Debug, Clone)]
pub(crate) struct HyperConnection {
    mixer: Mixer,
    /// f32 `[D]`.
    norm: Tensor<1>,
    options: MhcOptions,
}

/// The end of the streams: their weighted sum.
#[derive(Debug, Clone)]
pub(crate) struct HyperHead {
    mixer: Mixer,
    options: MhcOptions,
}

impl HyperConnection {
    /// Loads `{name}_fn`, `{name}_base` and `{name}_scale`, and the weight of `{norm}`.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, norm: &str, config: &DeepseekV4Config) -> Self {
        let n = config.hc_mult;
        Self {
            mixer: load_mixer(loader, name, [(2 + n) * n, 3], config),
            norm: loader.tensor_f32(&format!("{norm}.weight"), [config.hidden_size], Cut::Whole),
            options: options(config),
        }
    }

    /// The block's input `[N, D]` from the streams `[N, n, D]`, normed, and how its output will be mixed in.
    pub(crate) fn read(&self, streams: Streams, determinism: Determinism) -> Result<(Tensor<2>, Mixing)> {
        let Self { mixer, norm, options } = self.clone();
        let args = MhcPreArgs { streams, mixer, norm_weight: norm };
        Ok(mhc_pre(args, &MhcOptions { determinism, ..options })?)
    }
}

impl HyperHead {
    /// Loads `{name}_fn`, `{name}_base` and `{name}_scale`.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, config: &DeepseekV4Config) -> Self {
        Self { mixer: load_mixer(loader, name, [config.hc_mult, 1], config), options: options(config) }
    }

    /// `[N, n, D]` -> `[N, D]`.
    pub(crate) fn forward(&self, streams: Streams, determinism: Determinism) -> Result<Tensor<2>> {
        Ok(mhc_head(streams, self.mixer.clone(), &MhcOptions { determinism, ..self.options })?)
    }
}

fn load_mixer(loader: &mut WeightLoader, name: &str, sizes: [usize; 2], config: &DeepseekV4Config) -> Mixer {
    let [rows, factors] = sizes;
    Mixer {
        weight: loader.weight_f32(&format!("{name}_fn"), [rows, config.hc_mult * config.hidden_size], Cut::Whole),
        scale: loader.tensor_f32(&format!("{name}_scale"), [factors], Cut::Whole),
        base: loader.tensor_f32(&format!("{name}_base"), [rows], Cut::Whole),
    }
}

fn options(config: &DeepseekV4Config) -> MhcOptions {
    MhcOptions {
        norm_eps: config.rms_norm_eps as f32,
        eps: config.hc_eps as f32,
        sinkhorn_iters: config.hc_sinkhorn_iters,
        determinism: Determinism::Fast,
    }
}
