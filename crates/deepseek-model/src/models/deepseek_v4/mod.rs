//! DeepSeek-V4.

mod alone;
mod architecture;
mod attention;
mod batch;
mod buffers;
mod cache;
mod compressor;
mod config;
#[cfg(test)]
mod config_tests;
mod hyper_connection;
mod indexer;
mod layer_configs;
mod layout;
mod model;
mod moe;
mod names;
mod partial_rotary;
mod schedule;
mod sizes;
#[cfg(all(test, feature = "flex"))]
mod snapshot_tests;
mod snapshots;
mod states;
mod step;

#[cfg(all(test, feature = "flex"))]
pub(crate) use self::cache::V4Cache;
pub use self::compressor::{Compressor, CompressorState};
pub use self::config::DeepseekV4Config;
pub(crate) use self::config::MODEL_TYPES;
pub use self::hyper_connection::{HyperConnection, HyperConnectionConfig, HyperHead};
pub use self::indexer::EntryIndexer;
pub use self::layer_configs::{CompressorConfig, EntryIndexerConfig};
#[cfg(test)]
pub(crate) use self::names::expect;
pub use self::schedule::{AttentionSpec, LayerSpec, MlpSpec};
pub use self::step::{CompressorStep, EntryIndexerStep};
