//! DeepSeek-V2, V2-Lite, V3 and V3.2.

mod alone;
mod architecture;
mod attention_form;
mod buffers;
mod config;
#[cfg(test)]
mod config_tests;
mod indexer;
mod indexer_config;
mod keys;
mod layer_norm;
mod mla;
mod mla_config;
mod model;
mod moe;
mod names;
mod rotary;
mod sizes;
mod step;

pub(crate) use self::config::MODEL_TYPES;
pub use self::config::{DeepseekV3Config, ModelType, Scoring};
pub use self::indexer::Indexer;
pub use self::indexer_config::IndexerConfig;
pub use self::mla::MultiHeadLatentAttention;
pub use self::mla_config::MlaConfig;
pub(crate) use self::moe::{load_moe, load_moe_with};
pub(crate) use self::names::PUBLISHED;
#[cfg(test)]
pub(crate) use self::names::skip_unused;
pub use self::step::MlaStep;
