//! How the token of each row is chosen.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::OP;
use crate::MlaError;
use crate::check::Check;

/// How the token of a row is chosen; [`Self::GREEDY`] by default.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampleParams {
    /// Divides the logits; 0 is greedy. Finite, at least 0. Below 1e-37 it counts as 0, and above 1e37 as that.
    pub temperature: f32,
    /// Keeps this many of the most probable tokens, and those that are as probable as the last of them; 0 keeps all.
    pub top_k: u32,
    /// Keeps the fewest most probable tokens whose probabilities reach this sum, and those that are as probable as the last of them;
    /// 1 keeps all. In (0, 1].
    pub top_p: f32,
    /// Keeps tokens whose probability is at least this fraction of the largest one; 0 keeps all. In [0, 1].
    pub min_p: f32,
    /// Divides logits that are not negative, and multiplies negative ones, of the tokens seen; 1 is off. Finite, above 0.
    pub repetition_penalty: f32,
    /// The key of the random numbers.
    pub seed: u64,
    /// Their counter: the number of the token in its text. Rows with the same seed, position and logits get the same token.
    pub position: u32,
    /// The row of [`SampleArgs::seen`](super::SampleArgs::seen) with the tokens that the penalty is for, to which the token chosen
    /// is added.
    pub seen_row: Option<u32>,
}

impl Default for SampleParams {
    fn default() -> Self {
        Self::GREEDY
    }
}

impl SampleParams {
    /// The most probable token, no penalty.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        seed: 0,
        position: 0,
        seen_row: None,
    };

    /// Whether all numbers are in their ranges.
    ///
    /// # Errors
    /// [`MlaError::Value`] naming the first that is not.
    pub fn validate(&self) -> Result<(), MlaError> {
        let check = |holds: bool, argument, actual: f32, expected: &str| match holds {
            true => Ok(()),
            false => Err(MlaError::Value { op: OP, argument, actual: actual.to_string(), expected: expected.into() }),
        };
        let &Self { temperature, top_p, min_p, repetition_penalty, .. } = self;
        let holds = temperature.is_finite() && temperature >= 0.0;
        check(holds, "temperature", temperature, "a finite number of at least 0 (0 is greedy)")?;
        check(top_p > 0.0 && top_p <= 1.0, "top_p", top_p, "a number above 0 and up to 1 (1 keeps every token)")?;
        check((0.0..=1.0).contains(&min_p), "min_p", min_p, "a number from 0 (keeps every token) to 1")?;
        let holds = repetition_penalty.is_finite() && repetition_penalty > 0.0;
        check(holds, "repetition_penalty", repetition_penalty, "a finite number above 0 (1 is off)")
    }

    /// As the kernel reads them: bits of f32, and whole numbers.
    pub(super) fn words(&self) -> [u32; WORDS] {
        let Self { temperature, top_k, top_p, min_p, repetition_penalty, seed, position, seen_row } = *self;
        // Up to 2^-32 too small: then 0 would be off.
        let top_p_part = if top_p < 1.0 { ((f64::from(top_p) * 2f64.powi(32)) as u32).max(1) } else { 0 };
        [
            temperature.to_bits(),
            top_k,
            top_p_part,
            min_p_logarithm(min_p).to_bits(),
            repetition_penalty.to_bits(),
            seed as u32,
            (seed >> 32) as u32,
            position,
            seen_row.unwrap_or(u32::MAX),
        ]
    }
}

/// Numbers of a row.
pub(super) const WORDS: usize = 9;

/// The logarithm of `min_p`; one below all of them where it keeps every token.
pub(super) fn min_p_logarithm(min_p: f32) -> f32 {
    if min_p > 0.0 { f64::from(min_p).ln() as f32 } else { -1000.0 }
}

/// The parameters of all rows of a batch, on the device.
#[derive(Debug, Clone)]
pub struct SampleRows {
    /// i32 `[B, WORDS]`, the bits of [`SampleParams::words`].
    pub(super) words: Tensor<2, Int>,
    /// Whether a row names tokens seen.
    pub(super) names_seen: bool,
}

impl SampleRows {
    /// One copy to the device.
    ///
    /// # Errors
    /// A parameter out of range ([`SampleParams::validate`]); two rows with the same `seen_row`; a device without this operation.
    pub fn new(rows: &[SampleParams], device: &Device) -> Result<Self, MlaError> {
        Check::on(OP, device)?;
        let mut seen = std::collections::HashSet::new();
        for row in rows {
            row.validate()?;
            if let Some(number) = row.seen_row
                && (number > i32::MAX as u32 || !seen.insert(number))
            {
                let expected = "another row for each row of logits, numbered by i32".into();
                return Err(MlaError::Value { op: OP, argument: "seen_row", actual: number.to_string(), expected });
            }
        }
        let words: Vec<i32> = rows.iter().flat_map(SampleParams::words).map(u32::cast_signed).collect();
        let words = Tensor::from_data(TensorData::new(words, [rows.len(), WORDS]), (device, DType::I32));
        Ok(Self { words, names_seen: !seen.is_empty() })
    }

    /// Rows.
    pub fn len(&self) -> usize {
        self.words.dims()[0]
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
