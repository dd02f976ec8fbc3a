//! Manifold-constrained hyper-connections: several residual streams, mixed by doubly stochastic matrices (DeepSeek-V4).

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, FloatDType, Tensor};
use mla_ops::{Determinism, MhcOptions, MhcPreArgs, Mixer, Mixing, Streams, Weight, mhc_head, mhc_pre};

use super::names::PUBLISHED;
use crate::Result;
use crate::config::Contradiction;
use crate::config::sizes::{Bound, MOST, impossible_size, is_positive, product, sum};
use crate::layers::{initialised, param};
use crate::parallel::Cut;
use crate::weights::{RandomInit, WeightLoader};

/// Residual streams: as many as the operations on them take.
const MOST_STREAMS: usize = 8;
/// Rounds of normalisation: every token pays for each.
const MOST_ROUNDS: usize = 1024;

/// The sizes of a [`HyperConnection`], by their names in `config.json`; the defaults are DeepSeek-V4's.
#[derive(Config, Debug, PartialEq)]
pub struct HyperConnectionConfig {
    /// Width of a residual stream.
    pub hidden_size: usize,
    /// Residual streams, at most 8.
    #[config(default = 4)]
    pub hc_mult: usize,
    /// Rounds of row and column normalisation of the mixing matrices.
    #[config(default = 20)]
    pub hc_sinkhorn_iters: usize,
    /// Added to what must not be zero.
    #[config(default = 1e-6)]
    pub hc_eps: f64,
    /// Epsilon of the norms.
    #[config(default = 1e-6)]
    pub rms_norm_eps: f64,
}

/// How one block, attention or experts, reads from the residual streams, with the norm before it, and writes to them
/// (manifold-constrained hyper-connections, DeepSeek-V4).
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use deepseek_model::layers::HyperConnectionConfig;
/// use mla_ops::Determinism::Fast;
/// use mla_ops::{Streams, mhc_post};
///
/// let device = Device::flex();
/// let config = HyperConnectionConfig::new(64);
/// let (connection, head) = (config.init(7, &device)?, config.init_head(8, &device)?);
/// // Embeddings of two tokens, in each of 4 streams.
/// let x = Tensor::<2>::random([2, 64], Distribution::Default, &device);
/// let mut streams = Streams::from(x.unsqueeze_dim::<3>(1).repeat_dim(1, 4));
/// for _ in 0..2 {
///     let (h, mixing) = connection.read(streams, Fast)?;
///     let block = h * 2.0; // attention, or experts
///     streams = mhc_post(block, mixing)?;
/// }
/// assert_eq!(head.forward(streams, Fast)?.dims(), [2, 64]);
/// # Ok::<(), deepseek_model::ModelError>(())
/// ```
#[derive(Module, Debug)]
pub struct HyperConnection {
    mixer: StreamMixer,
    /// f32 `[D]`.
    norm: Param<Tensor<1>>,
    #[module(skip)]
    options: MhcOptions,
}

/// The end of the streams: their weighted sum. [`HyperConnection`] has an example.
#[derive(Module, Debug)]
pub struct HyperHead {
    mixer: StreamMixer,
    #[module(skip)]
    options: MhcOptions,
}

/// A [`Mixer`], in f32.
#[derive(Module, Debug)]
struct StreamMixer {
    weight: Weight,
    scale: Param<Tensor<1>>,
    base: Param<Tensor<1>>,
}

impl HyperConnectionConfig {
    /// A connection with random weights, in f32 whatever the dtype of the streams; otherwise as
    /// [`MlaConfig::init`](crate::layers::MlaConfig::init).
    ///
    /// # Errors
    /// As there.
    pub fn init(&self, init: impl Into<RandomInit>, device: &Device) -> Result<HyperConnection> {
        let (norm, dtype) = ("layers.0.attn_norm", FloatDType::F32);
        let load = |loader: &mut WeightLoader| HyperConnection::load(loader, "layers.0.hc_attn", norm, self);
        initialised(self.wrong(), init, (device, dtype), (None, PUBLISHED), load)
    }

    /// A head with random weights.
    ///
    /// # Errors
    /// As [`Self::init`].
    pub fn init_head(&self, init: impl Into<RandomInit>, device: &Device) -> Result<HyperHead> {
        let load = |loader: &mut WeightLoader| HyperHead::load(loader, "hc_head", self);
        initialised(self.wrong(), init, (device, FloatDType::F32), (None, PUBLISHED), load)
    }

    fn wrong(&self) -> Option<Contradiction> {
        impossible_size(&self.bounds(), || self.most_parameters()).or_else(|| self.contradiction())
    }

    pub(super) fn bounds(&self) -> [Bound; 3] {
        [
            ("hidden_size", self.hidden_size, MOST),
            ("hc_mult", self.hc_mult, MOST_STREAMS),
            ("hc_sinkhorn_iters", self.hc_sinkhorn_iters, MOST_ROUNDS),
        ]
    }

    /// Numbers of a connection, or somewhat more.
    pub(super) fn most_parameters(&self) -> u128 {
        let streams = self.hc_mult;
        product(&[streams.saturating_add(3), streams]).saturating_mul(sum([product(&[streams, self.hidden_size]), 2]))
    }

    pub(super) fn contradiction(&self) -> Option<Contradiction> {
        let found = |field, actual: f64, expected: &str| Some((field, actual.to_string(), expected.to_string()));
        if !is_positive(self.rms_norm_eps) {
            return found("rms_norm_eps", self.rms_norm_eps, "a finite number above 0, in f32");
        }
        let holds = (self.hc_eps as f32).is_finite() && self.hc_eps >= 0.0;
        if holds { None } else { found("hc_eps", self.hc_eps, "a finite number of at least 0") }
    }

    fn options(&self) -> MhcOptions {
        MhcOptions {
            norm_eps: self.rms_norm_eps as f32,
            eps: self.hc_eps as f32,
            sinkhorn_iters: self.hc_sinkhorn_iters,
            determinism: Determinism::Fast,
        }
    }
}

impl HyperConnection {
    /// Loads `{name}_fn`, `{name}_base` and `{name}_scale`, and the weight of `{norm}`.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, norm: &str, config: &HyperConnectionConfig) -> Self {
        let n = config.hc_mult;
        Self {
            mixer: StreamMixer::load(loader, name, [(2 + n) * n, 3], config),
            norm: param(loader.tensor_f32(&format!("{norm}.weight"), [config.hidden_size], Cut::Whole)),
            options: config.options(),
        }
    }

    /// The block's input `[N, D]` from the streams `[N, n, D]`, normed, and how its output will be mixed in, by
    /// [`mhc_post`](mla_ops::mhc_post).
    ///
    /// # Errors
    /// Another width, number or device of the streams than that of the weights.
    pub fn read(&self, streams: Streams, determinism: Determinism) -> Result<(Tensor<2>, Mixing)> {
        let args = MhcPreArgs { streams, mixer: self.mixer.mixer(), norm_weight: self.norm.val() };
        Ok(mhc_pre(args, &MhcOptions { determinism, ..self.options })?)
    }
}

impl HyperHead {
    /// Loads `{name}_fn`, `{name}_base` and `{name}_scale`.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, config: &HyperConnectionConfig) -> Self {
        Self { mixer: StreamMixer::load(loader, name, [config.hc_mult, 1], config), options: config.options() }
    }

    /// `[N, n, D]` -> `[N, D]`.
    ///
    /// # Errors
    /// As [`HyperConnection::read`].
    pub fn forward(&self, streams: Streams, determinism: Determinism) -> Result<Tensor<2>> {
        Ok(mhc_head(streams, self.mixer.mixer(), &MhcOptions { determinism, ..self.options })?)
    }
}

impl StreamMixer {
    fn load(
        loader: &mut WeightLoader,
        name: &str,
        [rows, factors]: [usize; 2],
        config: &HyperConnectionConfig,
    ) -> Self {
        let width = config.hc_mult * config.hidden_size;
        Self {
            weight: loader.weight_f32(&format!("{name}_fn"), [rows, width], Cut::Whole),
            scale: param(loader.tensor_f32(&format!("{name}_scale"), [factors], Cut::Whole)),
            base: param(loader.tensor_f32(&format!("{name}_base"), [rows], Cut::Whole)),
        }
    }

    fn mixer(&self) -> Mixer {
        Mixer { weight: self.weight.clone(), scale: self.scale.val(), base: self.base.val() }
    }
}
