//! Rotary embedding and YaRN (arXiv 2309.00071): frequencies, tables and the factors on cos, sin and the softmax scale.

use std::f64::consts::PI;

use super::fields::Fields;
use crate::Result;

/// The rotary embedding of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Base `b` of the frequencies `b^(-2i/d)`.
    pub rope_theta: f64,
    /// How the frequencies are stretched for longer contexts; `None` is `rope_type` "default".
    pub yarn: Option<YarnConfig>,
}

/// YaRN: slow channels are interpolated by `factor`, fast ones are kept. It holds at every length.
#[derive(Debug, Clone, PartialEq)]
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
    /// Frequencies `θ_i` in radians per token, `width / 2` of them.
    pub fn inv_freq(&self, width: usize) -> Vec<f64> {
        let plain = (0..width / 2).map(|i| self.rope_theta.powf(-2.0 * i as f64 / width as f64));
        let Some(yarn) = &self.yarn else {
            return plain.collect();
        };
        let (low, high) = yarn.correction_range(width, self.rope_theta);
        let interpolate = |(i, theta): (usize, f64)| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            theta * (1.0 - ramp) + theta / yarn.factor * ramp
        };
        plain.enumerate().map(interpolate).collect()
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
    pub fn cos_sin(&self, width: usize, positions: &[usize]) -> (Vec<f32>, Vec<f32>) {
        let inv_freq: Vec<f32> = self.inv_freq(width).into_iter().map(|theta| theta as f32).collect();
        let factor = self.attention_factor() as f32;
        let entries = positions.len() * inv_freq.len();
        let (mut cos, mut sin) = (Vec::with_capacity(entries), Vec::with_capacity(entries));
        for &position in positions {
            for theta in &inv_freq {
                let (s, c) = f64::from(position as f32 * theta).sin_cos();
                cos.push(c as f32 * factor);
                sin.push(s as f32 * factor);
            }
        }
        (cos, sin)
    }

    /// Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (published files).
    pub(crate) fn read(config: &Fields) -> Result<Self> {
        let section = match config.object("rope_parameters")? {
            Some(parameters) => Some(("rope_parameters", parameters)),
            None => config.object("rope_scaling")?.map(|scaling| ("rope_scaling", scaling)),
        };
        let outer = config.number_or("rope_theta", 10_000.0)?;
        match section {
            Some((name, section)) => Self::read_section(&section, name, outer),
            None => Ok(Self { rope_theta: outer, yarn: None }),
        }
    }

    /// Reads one section of the name `name`; `outer` is the base if the section has none.
    pub(crate) fn read_section(section: &Fields, name: &str, outer: f64) -> Result<Self> {
        let rope_theta = section.number_or("rope_theta", outer)?;
        let rope_type = section.word_or("rope_type", &section.word_or("type", "default")?)?;
        let yarn = match rope_type.as_str() {
            "default" => None,
            "yarn" => Some(YarnConfig::read(section)?),
            _ => {
                let expected = "\"default\" or \"yarn\"".to_string();
                return Err(section.error(&format!("{name}.rope_type"), format!("\"{rope_type}\""), expected));
            }
        };
        Ok(Self { rope_theta, yarn })
    }

    /// The first field out of range: its name, value and the values it may have.
    pub(crate) fn contradiction(&self) -> Option<(&'static str, String, String)> {
        let found = |field, actual: String, expected: &str| Some((field, actual, expected.to_string()));
        if !(self.rope_theta.is_finite() && self.rope_theta > 1.0) {
            return found("rope_theta", self.rope_theta.to_string(), "a finite number above 1");
        }
        let yarn = self.yarn.as_ref()?;
        if !(yarn.factor.is_finite() && yarn.factor >= 1.0) {
            return found("factor", yarn.factor.to_string(), "a finite number of at least 1 (of the yarn rope)");
        }
        if yarn.original_max_position_embeddings == 0 {
            return found("original_max_position_embeddings", "0".into(), "at least 1");
        }
        if !(yarn.beta_slow > 0.0 && yarn.beta_fast >= yarn.beta_slow && yarn.beta_fast.is_finite()) {
            let betas = format!("{}, with `beta_slow` = {}", yarn.beta_fast, yarn.beta_slow);
            return found("beta_fast", betas, "at least `beta_slow`, and both above 0");
        }
        None
    }
}

impl YarnConfig {
    fn read(section: &Fields) -> Result<Self> {
        section.only("truncate", section.flag_or("truncate", true)?, true)?;
        Ok(Self {
            factor: section.required("factor", "a number (the yarn rope needs it)")?,
            original_max_position_embeddings: section
                .required("original_max_position_embeddings", "a whole number (the yarn rope needs it)")?,
            beta_fast: section.number_or("beta_fast", 32.0)?,
            beta_slow: section.number_or("beta_slow", 1.0)?,
            mscale: section.optional("mscale", "a number")?,
            mscale_all_dim: section.optional("mscale_all_dim", "a number")?,
            attention_factor: section.optional("attention_factor", "a number")?,
        })
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
