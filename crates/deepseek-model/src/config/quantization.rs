//! `quantization_config`: how the files of a published checkpoint store weights in 8 bits or fewer.

use std::ops::RangeInclusive;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::fields::Fields;
use crate::{ModelError, Result};

/// Weights as E4M3 numbers with a scale for every block of them, as DeepSeek publishes V3, V3.2 and V4.
///
/// A weight `[out, in]` has a companion `[ceil(out / block[0]), ceil(in / block[1])]`, by whose numbers the blocks are
/// multiplied: `X.weight_scale_inv` in f32 (V3, V3.2: `inference/fp8_cast_bf16.py` and `kernel.py` of DeepSeek-V3), or
/// `X.scale` in f32 or E8M0 (V4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quantization {
    /// Rows and columns of a block (`weight_block_size`).
    pub block: [usize; 2],
    /// Whether routed experts are E2M1 numbers, two in a byte, with a scale for every 32 of a row (`expert_dtype`, V4).
    pub fp4_experts: bool,
}

/// Rows or columns of a block.
const SIDES: RangeInclusive<usize> = 1..=1 << 16;

/// The section that this file is about.
const SECTION: &str = "quantization_config";

impl Quantization {
    /// The section of a `config.json`, or `None` where weights are plain numbers.
    pub(crate) fn read(fields: &Fields) -> Result<Option<Self>> {
        let Some(section) = fields.object(SECTION)? else { return Ok(None) };
        let refuse = |field: &str, actual: String, expected: &str| {
            let what = format!("`{field}` is {actual}, expected {expected}");
            Err(ModelError::UnsupportedQuantization { path: fields.path.clone(), what })
        };
        let words = [
            ("quant_method", None, "fp8"),
            ("fmt", Some("e4m3"), "e4m3"),
            ("activation_scheme", Some("dynamic"), "dynamic"),
            // The scales are powers of two then; they are read as any others.
            ("scale_fmt", Some("ue8m0"), "ue8m0"),
        ];
        for (field, default, implemented) in words {
            let found = in_section::<String>(&section, field, "a string")?;
            match found.as_deref().or(default) {
                Some(found) if found == implemented => {}
                Some(found) => {
                    return refuse(&dotted(field), format!("\"{found}\""), &format!("\"{implemented}\""));
                }
                None => return refuse(&dotted(field), "missing".into(), &format!("\"{implemented}\"")),
            }
        }
        let block = in_section::<Vec<usize>>(&section, "weight_block_size", "a list of whole numbers")?;
        let block = match block.as_deref() {
            Some(&[rows, columns]) if SIDES.contains(&rows) && SIDES.contains(&columns) => [rows, columns],
            other => {
                let actual = other.map_or("missing".to_string(), |found| format!("{found:?}"));
                return refuse(
                    &dotted("weight_block_size"),
                    actual,
                    "rows and columns of a block, as [128, 128], at most 65536",
                );
            }
        };
        let fp4_experts = match fields.word_or("expert_dtype", "fp8")?.as_str() {
            "fp8" => false,
            "fp4" => true,
            other => return refuse("expert_dtype", format!("\"{other}\""), "\"fp8\" or \"fp4\""),
        };
        Ok(Some(Self { block, fp4_experts }))
    }
}

fn dotted(field: &str) -> String {
    format!("{SECTION}.{field}")
}

/// A field of the section, whose errors name the section too.
fn in_section<T: DeserializeOwned>(section: &Fields, field: &str, expected: &str) -> Result<Option<T>> {
    section.optional(field, expected).map_err(|error| match error {
        ModelError::Config { actual, expected, .. } => section.error(&dotted(field), actual, expected),
        other => other,
    })
}
