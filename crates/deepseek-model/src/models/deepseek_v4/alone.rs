//! Layers without a model, with random weights.

use burn::tensor::{Device, FloatDType};

use super::compressor::Compressor;
use super::indexer::EntryIndexer;
use super::layer_configs::{CompressorConfig, EntryIndexerConfig};
use super::names::PUBLISHED;
use crate::Result;
use crate::layers::initialised;
use crate::weights::{RandomInit, WeightLoader};

impl CompressorConfig {
    /// A compressor with random weights, whose pool is the first one; otherwise as
    /// [`MlaConfig::init`](crate::layers::MlaConfig::init).
    ///
    /// # Errors
    /// As there.
    pub fn init(&self, init: impl Into<RandomInit>, device: &Device, dtype: FloatDType) -> Result<Compressor> {
        let load = |loader: &mut WeightLoader| Compressor::load(loader, "layers.0.attn.compressor", 0, self);
        initialised(self.wrong(), init, (device, dtype), (None, PUBLISHED), load)
    }
}

impl EntryIndexerConfig {
    /// An indexer with random weights, whose keys are in the first pool; otherwise as
    /// [`MlaConfig::init`](crate::layers::MlaConfig::init).
    ///
    /// # Errors
    /// As there.
    pub fn init(&self, init: impl Into<RandomInit>, device: &Device, dtype: FloatDType) -> Result<EntryIndexer> {
        let load = |loader: &mut WeightLoader| EntryIndexer::load(loader, "layers.0.attn.indexer", 0, self);
        initialised(self.wrong(), init, (device, dtype), (None, PUBLISHED), load)
    }
}
