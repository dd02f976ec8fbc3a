//! What the configurations of all models share: the fields of `config.json`, in the published form and in that of
//! transformers 5, and `generation_config.json`.

mod fields;
mod generation;
mod quantization;
mod rope;
pub(crate) mod sizes;

pub(crate) use self::fields::Fields;
pub use self::generation::GenerationDefaults;
pub use self::quantization::Quantization;
pub(crate) use self::rope::{read_rope, read_rope_section, rope_contradiction};
use crate::{ModelError, Result};

/// Where a configuration comes from, when there is none.
pub(crate) const CONFIG_HINT: &str =
    "a checkpoint folder holds its configuration there; download it along with the weights";

/// A field, its value, and the values it may have.
pub(crate) type Contradiction = (&'static str, String, String);

/// Refuses a configuration made in code for a field.
pub(crate) fn refuse(contradiction: Option<Contradiction>) -> Result<()> {
    let error = |(field, actual, expected): Contradiction| ModelError::Config {
        path: None,
        field: field.into(),
        actual,
        expected,
    };
    contradiction.map_or(Ok(()), |contradiction| Err(error(contradiction)))
}

/// A layer in words, and its cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerSummary {
    /// Its attention.
    pub attention: String,
    /// Its feed-forward part.
    pub mlp: String,
    /// Bytes of the cache that a token adds, on average, rounded up.
    pub bytes_per_token: usize,
    /// Bytes of the state that a request has whatever its length.
    pub bytes_per_request: usize,
}

/// Refuses switches that would change the numbers and are not implemented.
pub(crate) fn refuse_unimplemented(fields: &Fields) -> Result<()> {
    fields.only("hidden_act", fields.word_or("hidden_act", "silu")?, "silu".to_string())?;
    for flag in ["attention_bias", "mlp_bias", "tie_word_embeddings"] {
        fields.only(flag, fields.flag_or(flag, false)?, false)?;
    }
    fields.only("moe_layer_freq", fields.count_or("moe_layer_freq", 1)?, 1)
}
