//! `generation_config.json`: how the publisher means the model to be sampled.

use std::path::Path;

use super::fields::Fields;
use crate::{ModelError, Result};

/// Sampling options that a checkpoint recommends.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationDefaults {
    /// Tokens that end a text; those of `config.json` if the file names none.
    pub eos_token_ids: Vec<u32>,
    /// Whether to sample; otherwise greedy.
    pub do_sample: bool,
    /// Divisor of the logits.
    pub temperature: Option<f32>,
    /// Probability mass of the tokens to keep.
    pub top_p: Option<f32>,
    /// Number of tokens to keep; `None` also where the file says 0, which keeps all.
    pub top_k: Option<usize>,
}

impl GenerationDefaults {
    /// Reads `generation_config.json` of the checkpoint folder `dir`; without the file, greedy with the end tokens of
    /// `config.json`.
    ///
    /// # Errors
    /// [`ModelError::Io`], [`ModelError::Json`], or [`ModelError::Config`] naming a field of another type or out of range.
    pub fn read(dir: &Path, config_eos_token_ids: &[u32]) -> Result<Self> {
        let fields = match Fields::read(&dir.join("generation_config.json"), "it is optional") {
            Ok(fields) => fields,
            Err(ModelError::MissingFile { .. }) => {
                let eos_token_ids = config_eos_token_ids.to_vec();
                return Ok(Self { eos_token_ids, do_sample: false, temperature: None, top_p: None, top_k: None });
            }
            Err(error) => return Err(error),
        };
        let mut eos_token_ids = fields.token_ids("eos_token_id")?;
        if eos_token_ids.is_empty() {
            eos_token_ids = config_eos_token_ids.to_vec();
        }
        Ok(Self {
            eos_token_ids,
            do_sample: fields.flag_or("do_sample", false)?,
            temperature: in_range(&fields, "temperature", "a finite number of at least 0", |value| {
                value.is_finite() && value >= 0.0
            })?,
            top_p: in_range(&fields, "top_p", "above 0 and at most 1", |value| value > 0.0 && value <= 1.0)?,
            top_k: fields.optional("top_k", "a whole number")?.filter(|&k| k > 0),
        })
    }
}

/// A number that may be absent.
fn in_range(fields: &Fields, name: &str, expected: &str, is_in_range: fn(f32) -> bool) -> Result<Option<f32>> {
    let value = fields.optional::<f32>(name, "a number")?;
    match value.filter(|&value| !is_in_range(value)) {
        None => Ok(value),
        Some(value) => Err(fields.error(name, value.to_string(), expected.to_string())),
    }
}
