//! Layers of DeepSeek's models as Burn modules, each usable alone: created from a config with random weights, saved and loaded as
//! Burn's records, run without an engine or a checkpoint. Names are those of the papers and checkpoints.
//!
//! | config | module | what |
//! |---|---|---|
//! | [`MlaConfig`] | [`MultiHeadLatentAttention`] | V2, V3 and V3.2: attention over a paged cache of latents |
//! | [`MlaConfig::init_indexer`] | [`Indexer`] | V3.2: picks the keys of each token |
//! | [`MoeConfig`] | [`Moe`] | all: mixture of experts |
//! | [`MoeConfig::init_hash`] | [`Moe`] | V4: the same, chosen by token ids |
//! | [`HyperConnectionConfig`] | [`HyperConnection`], [`HyperHead`] | V4: several residual streams |
//! | [`CompressorConfig`] | [`Compressor`] | V4: windows of tokens become single entries of the cache |
//! | [`EntryIndexerConfig`] | [`EntryIndexer`] | V4: picks the entries of each token |
//!
//! They are for inference: the operations have no backward pass, and refuse tensors of an autodiff device. `num_params` does not count
//! the codes of quantised weights.

mod experts;
mod linear;
mod mlp;
mod moe;
mod rms_norm;
mod rope_table;
#[cfg(all(test, feature = "flex"))]
mod tests;

use burn::module::{Param, ParamId, ParameterValue};
use burn::tensor::{Device, FloatDType};

pub(crate) use experts::Experts;
pub(crate) use linear::Linear;
pub(crate) use mlp::{Mlp, MlpNames};
pub use moe::{Moe, MoeConfig};
pub(crate) use moe::{MoeTokens, Router};
pub(crate) use rms_norm::RmsNorm;
pub(crate) use rope_table::RopeTable;

use crate::Result;
use crate::config::{Contradiction, Quantization, refuse};
use crate::model::{check_device, check_memory};
pub use crate::models::deepseek_v3::{Indexer, MlaConfig, MlaStep, MultiHeadLatentAttention};
pub use crate::models::deepseek_v4::{
    Compressor, CompressorConfig, CompressorState, CompressorStep, EntryIndexer, EntryIndexerConfig, EntryIndexerStep,
    HyperConnection, HyperConnectionConfig, HyperHead,
};
use crate::parallel::Parallel;
use crate::weights::{Published, RandomInit, WeightLoader};

/// A parameter without gradients.
pub(crate) fn param<T: ParameterValue>(tensor: T) -> Param<T> {
    Param::initialized(ParamId::new(), tensor)
}

/// A layer whose weights are drawn, unless something is wrong with its config; quantised where they are published so. `load` takes
/// them out of a loader.
pub(crate) fn initialised<T>(
    wrong: Option<Contradiction>,
    init: impl Into<RandomInit>,
    (device, dtype): (&Device, FloatDType),
    (quantization, published): (Option<Quantization>, Published),
    load: impl Fn(&mut WeightLoader) -> T,
) -> Result<T> {
    refuse(wrong)?;
    check_device(device, dtype)?;
    let format = |loader: WeightLoader<'static>| loader.with_quantization(quantization).with_published(published);
    let mut listing = format(WeightLoader::listing(None, device));
    load(&mut listing);
    let (listed, _) = listing.finish_listing();
    check_memory(&listed, dtype.into(), &Parallel::single(), device)?;
    let mut loader = format(WeightLoader::random(init.into(), device, dtype, 0, None));
    let layer = load(&mut loader);
    loader.finish()?;
    Ok(layer)
}
