//! The sections of `config.json` that describe the rotary embedding.

use mla_ops::{MlaError, RopeConfig, YarnConfig};

use super::Contradiction;
use super::fields::Fields;
use crate::Result;

/// Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (published files).
pub(crate) fn read_rope(config: &Fields) -> Result<RopeConfig> {
    let section = match config.object("rope_parameters")? {
        Some(parameters) => Some(("rope_parameters", parameters)),
        None => config.object("rope_scaling")?.map(|scaling| ("rope_scaling", scaling)),
    };
    let outer = config.number_or("rope_theta", 10_000.0)?;
    match section {
        Some((name, section)) => read_rope_section(&section, name, outer),
        None => Ok(RopeConfig { rope_theta: outer, yarn: None }),
    }
}

/// Reads one section of the name `name`; `outer` is the base if the section has none.
pub(crate) fn read_rope_section(section: &Fields, name: &str, outer: f64) -> Result<RopeConfig> {
    let rope_theta = section.number_or("rope_theta", outer)?;
    let rope_type = section.word_or("rope_type", &section.word_or("type", "default")?)?;
    let yarn = match rope_type.as_str() {
        "default" => None,
        "yarn" => Some(read_yarn(section)?),
        _ => {
            let expected = "\"default\" or \"yarn\"".to_string();
            return Err(section.error(&format!("{name}.rope_type"), format!("\"{rope_type}\""), expected));
        }
    };
    Ok(RopeConfig { rope_theta, yarn })
}

fn read_yarn(section: &Fields) -> Result<YarnConfig> {
    section.only("truncate", section.flag_or("truncate", true)?, true)?;
    Ok(YarnConfig {
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

/// The first field out of range.
pub(crate) fn rope_contradiction(rope: &RopeConfig) -> Option<Contradiction> {
    match rope.validate() {
        Ok(()) => None,
        Err(MlaError::Value { argument, actual, expected, .. }) => Some((argument, actual, expected)),
        Err(error) => Some(("rope_parameters", error.to_string(), "a rope".into())),
    }
}
