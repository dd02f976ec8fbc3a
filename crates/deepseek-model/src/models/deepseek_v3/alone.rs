//! Layers without a model, with random weights.

use burn::tensor::{Device, FloatDType};

use super::indexer::Indexer;
use super::mla::MultiHeadLatentAttention;
use super::mla_config::MlaConfig;
use super::names::PUBLISHED;
use crate::Result;
use crate::layers::initialised;
use crate::weights::{RandomInit, WeightLoader};

impl MlaConfig {
    /// A layer with random weights: norms are 1, matrices drawn by a seed, or as [`RandomInit`] says. Another layer of the model gets
    /// another seed. Its pools are those of [`Self::pools`], the first of the cache;
    /// [`with_pools`](MultiHeadLatentAttention::with_pools) gives it others. The generator of the device is seeded for it, so that the numbers are others
    /// only if another thread draws meanwhile.
    ///
    /// # Errors
    /// [`ModelError::Config`](crate::ModelError::Config) naming the first field that is out of range or contradicts another one; a
    /// device that does not open, or a dtype that it does not have; [`ModelError::OutOfMemory`](crate::ModelError::OutOfMemory).
    pub fn init(
        &self,
        init: impl Into<RandomInit>,
        device: &Device,
        dtype: FloatDType,
    ) -> Result<MultiHeadLatentAttention> {
        let load = |loader: &mut WeightLoader| MultiHeadLatentAttention::load(loader, "model.layers.0.self_attn", self);
        initialised(self.wrong(), init, (device, dtype), (self.quantization, PUBLISHED), load)
    }

    /// The indexer alone, `None` where there is none; its pool is the first one.
    ///
    /// # Errors
    /// As [`Self::init`].
    pub fn init_indexer(
        &self,
        init: impl Into<RandomInit>,
        device: &Device,
        dtype: FloatDType,
    ) -> Result<Option<Indexer>> {
        let load = |loader: &mut WeightLoader| Indexer::load(loader, "model.layers.0.self_attn.indexer", self);
        let indexer = initialised(self.wrong(), init, (device, dtype), (self.quantization, PUBLISHED), load)?;
        Ok(indexer.map(|indexer| indexer.with_pool(0)))
    }
}
