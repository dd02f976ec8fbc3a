//! Rotary embedding and YaRN (arXiv 2309.00071): frequencies, tables and the factors on cos, sin and the softmax scale.

#[cfg(test)]
mod tests;

use std::f64::consts::PI;

use burn::tensor::{DType, Device, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use crate::MlaError;
use crate::check::Check;

const OP: &str = "rope";

/// Channels of a head at most.
const MOST_CHANNELS: usize = 1 << 16;

/// The rotary embedding of a model.
///
/// ```
/// use burn::tensor::Device;
/// use mla_ops::RopeConfig;
///
/// let rope = RopeConfig { rope_theta: 10_000.0, yarn: None };
/// // Tokens at the positions 0, 1 and 2 of a sequence; RoPE applies to 8 channels of a head.
/// let [cos, sin] = rope.tables(8, &[0, 1, 2], &Device::flex())?;
/// assert_eq!((cos.dims(), sin.dims()), ([3, 4], [3, 4]));
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RopeConfig {
    /// Base `b` of the frequencies `b^(-2i/d)`.
    pub rope_theta: f64,
    /// How the frequencies are stretched for longer contexts; `None` is `rope_type` "default".
    pub yarn: Option<YarnConfig>,
}

/// YaRN: slow channels are interpolated by `factor`, fast ones are kept. It holds at every length.
///
/// ```
/// use mla_ops::{RopeConfig, YarnConfig};
///
/// // DeepSeek-V3: 4,096 trained positions, stretched to 163,840.
/// let yarn = YarnConfig { mscale: Some(1.0), mscale_all_dim: Some(1.0), ..YarnConfig::new(40.0, 4096) };
/// let rope = RopeConfig { rope_theta: 10_000.0, yarn: Some(yarn) };
/// let softmax_scale = rope.softmax_factor() / 192f64.sqrt();
/// assert!((softmax_scale - 0.1352).abs() < 1e-4);
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct YarnConfig {
    /// Ratio of the stretched context to the trained one.
    pub factor: f64,
    /// Trained context length in tokens.
    pub original_max_position_embeddings: usize,
    /// Channels with more rotations than this over the trained context keep their frequency.
    pub beta_fast: f64,
    /// Channels with fewer rotations than this over the trained context are divided by `factor`.
    pub beta_slow: f64,
    /// Numerator of the factor on cos and sin.
    pub mscale: Option<f64>,
    /// Its denominator, and the correction of the softmax scale.
    pub mscale_all_dim: Option<f64>,
    /// The factor on cos and sin, where it is given outright.
    pub attention_factor: Option<f64>,
}

impl RopeConfig {
    /// Whether all numbers are in their ranges.
    ///
    /// # Errors
    /// [`MlaError::Value`] naming the first field that is not.
    pub fn validate(&self) -> Result<(), MlaError> {
        let wrong = |argument, actual: String, expected: &str| {
            Err(MlaError::Value { op: OP, argument, actual, expected: expected.to_string() })
        };
        if !(self.rope_theta.is_finite() && self.rope_theta > 1.0) {
            return wrong("rope_theta", self.rope_theta.to_string(), "a finite number above 1");
        }
        let Some(yarn) = &self.yarn else { return Ok(()) };
        if !(yarn.factor.is_finite() && yarn.factor >= 1.0) {
            return wrong("factor", yarn.factor.to_string(), "a finite number of at least 1 (of the yarn rope)");
        }
        if yarn.original_max_position_embeddings == 0 {
            return wrong("original_max_position_embeddings", "0".into(), "at least 1");
        }
        if !(yarn.beta_slow > 0.0 && yarn.beta_fast >= yarn.beta_slow && yarn.beta_fast.is_finite()) {
            let betas = format!("{}, with `beta_slow` = {}", yarn.beta_fast, yarn.beta_slow);
            return wrong("beta_fast", betas, "at least `beta_slow`, and both above 0");
        }
        let factors = [
            ("mscale", yarn.mscale),
            ("mscale_all_dim", yarn.mscale_all_dim),
            ("attention_factor", yarn.attention_factor),
        ];
        match factors.into_iter().find(|(_, factor)| factor.is_some_and(|factor| !factor.is_finite())) {
            Some((argument, factor)) => wrong(argument, format!("{factor:?}"), "a finite number"),
            None => Ok(()),
        }
    }

    /// Frequencies `θ_i` in radians per token, `width / 2` of them, where RoPE applies to `width` channels of a head.
    ///
    /// # Errors
    /// Those of [`Self::validate`]; [`MlaError::Value`] for a width that is odd, or that no head has.
    pub fn inv_freq(&self, width: usize) -> Result<Vec<f64>, MlaError> {
        self.validate()?;
        if !(width.is_multiple_of(2) && width <= MOST_CHANNELS) {
            let expected = format!("an even number up to {MOST_CHANNELS}: channels are turned in pairs");
            return Err(MlaError::Value { op: OP, argument: "width", actual: width.to_string(), expected });
        }
        let plain = (0..width / 2).map(|i| self.rope_theta.powf(-2.0 * i as f64 / width as f64));
        let Some(yarn) = &self.yarn else {
            return Ok(plain.collect());
        };
        let (low, high) = yarn.correction_range(width, self.rope_theta);
        let interpolate = |(i, theta): (usize, f64)| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            theta * (1.0 - ramp) + theta / yarn.factor * ramp
        };
        Ok(plain.enumerate().map(interpolate).collect())
    }

    /// The factor on cos and sin: 1 for plain rotary embeddings and for the released DeepSeek models.
    pub fn attention_factor(&self) -> f64 {
        self.yarn.as_ref().map_or(1.0, YarnConfig::attention_factor)
    }

    /// The factor on the softmax scale, `m(factor, mscale_all_dim)²`; 1 for plain rotary embeddings.
    pub fn softmax_factor(&self) -> f64 {
        let mscale_all_dim = |yarn: &YarnConfig| given(yarn.mscale_all_dim).map(|a| mscale(yarn.factor, a));
        self.yarn.as_ref().and_then(mscale_all_dim).map_or(1.0, |m| m * m)
    }

    /// Tables of cos and sin with the factor in them, row-major `[positions, width / 2]`, for the angles `t·θ_i`.
    ///
    /// Frequencies and angles are rounded to f32 as in transformers: at long contexts the rounded angle is what the models
    /// were trained with.
    ///
    /// # Errors
    /// Those of [`Self::inv_freq`]; [`MlaError::Value`] for tables that the host has no memory for.
    pub fn cos_sin(&self, width: usize, positions: &[usize]) -> Result<(Vec<f32>, Vec<f32>), MlaError> {
        let inv_freq: Vec<f32> = self.inv_freq(width)?.into_iter().map(|theta| theta as f32).collect();
        let factor = self.attention_factor() as f32;
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        let reserved = positions
            .len()
            .checked_mul(inv_freq.len())
            .is_some_and(|entries| cos.try_reserve_exact(entries).is_ok() && sin.try_reserve_exact(entries).is_ok());
        if !reserved {
            let (actual, expected) = (format!("{} positions", positions.len()), "fewer: memory is short".to_string());
            return Err(MlaError::Value { op: OP, argument: "positions", actual, expected });
        }
        for &position in positions {
            for theta in &inv_freq {
                let (s, c) = f64::from(position as f32 * theta).sin_cos();
                cos.push(c as f32 * factor);
                sin.push(s as f32 * factor);
            }
        }
        Ok((cos, sin))
    }

    /// [`Self::cos_sin`] on a device, f32 `[positions, width / 2]` each: the arguments `cos` and `sin` of
    /// [`rope_write`](crate::rope_write) and [`norm_rope`](crate::norm_rope()).
    ///
    /// A model makes them once for all positions that a request may have, `0..max_tokens`, and takes the rows of a step with
    /// `cos.select(0, positions)`.
    ///
    /// # Errors
    /// Those of [`Self::cos_sin`]; [`MlaError::UnsupportedDevice`], [`MlaError::DeviceLimit`]: nothing is computed then.
    pub fn tables(&self, width: usize, positions: &[usize], device: &Device) -> Result<[Tensor<2>; 2], MlaError> {
        let shape = [positions.len(), width / 2];
        Check::on(OP, device)?.allocation("positions", DType::F32, shape)?;
        let (cos, sin) = self.cos_sin(width, positions)?;
        Ok([cos, sin].map(|values| Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))))
    }
}

impl YarnConfig {
    /// A context stretched by `factor`, with the defaults of the paper and of transformers: `beta_fast` 32, `beta_slow` 1, and a
    /// factor on cos and sin that follows from `factor`.
    pub fn new(factor: f64, original_max_position_embeddings: usize) -> Self {
        Self {
            factor,
            original_max_position_embeddings,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: None,
            mscale_all_dim: None,
            attention_factor: None,
        }
    }

    /// Channel indices between which the frequencies go from kept to divided.
    fn correction_range(&self, width: usize, base: f64) -> (f64, f64) {
        let channel_of = |rotations: f64| {
            let trained = self.original_max_position_embeddings as f64;
            width as f64 * (trained / (2.0 * PI * rotations)).ln() / (2.0 * base.ln())
        };
        let low = channel_of(self.beta_fast).floor().max(0.0);
        let high = channel_of(self.beta_slow).ceil().min(width as f64 - 1.0);
        // Equal ends would divide by zero; this width of the step is transformers'.
        if high == low { (low, low + 0.001) } else { (low, high) }
    }

    fn attention_factor(&self) -> f64 {
        let of_mscales = || {
            let (mscale_, all_dim) = (given(self.mscale)?, given(self.mscale_all_dim)?);
            Some(mscale(self.factor, mscale_) / mscale(self.factor, all_dim))
        };
        self.attention_factor.or_else(of_mscales).unwrap_or_else(|| mscale(self.factor, 1.0))
    }
}

/// `m(s, a)`: how much YaRN sharpens attention at the context ratio `factor`.
fn mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

/// An mscale of 0 means the same as none.
fn given(mscale: Option<f64>) -> Option<f64> {
    mscale.filter(|&value| value != 0.0)
}
