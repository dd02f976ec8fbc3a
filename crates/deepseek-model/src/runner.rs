//! Where the steps of an engine run: a model, or one rank of it, and its captured steps.

use burn::tensor::{Int, Tensor};
use mla_ops::Determinism;

use crate::Result;
use crate::cache::{CacheSize, ModelCache};
use crate::decode_graph::{DecodeGraphs, GraphSupport};
use crate::model::DeepseekModel;
use crate::step::Chunk;

/// One rank, which may be alone.
#[derive(Debug)]
pub(crate) struct Runner<'a> {
    model: &'a DeepseekModel,
    determinism: Determinism,
    /// Why there are none otherwise.
    graphs: std::result::Result<DecodeGraphs<'a>, GraphSupport>,
}

impl<'a> Runner<'a> {
    /// # Errors
    /// `deterministic` where the device cannot be.
    pub(crate) fn new(model: &'a DeepseekModel, deterministic: bool, graphs: bool) -> Result<Self> {
        if deterministic {
            Determinism::BatchInvariant.check(model.device())?;
        }
        let determinism = if deterministic { Determinism::BatchInvariant } else { Determinism::Fast };
        let graphs = if graphs { model.decode_graphs(determinism) } else { Err(GraphSupport::NotRequested) };
        Ok(Self { model, determinism, graphs })
    }

    /// Its model.
    pub(crate) fn model(&self) -> &'a DeepseekModel {
        self.model
    }

    /// Whether decode steps are captured.
    pub(crate) fn graphs(&self) -> GraphSupport {
        self.graphs.as_ref().err().copied().unwrap_or(GraphSupport::Captured)
    }

    /// Sizes of steps that could not be captured.
    pub(crate) fn uncaptured_sizes(&self) -> usize {
        self.graphs.as_ref().map_or(0, DecodeGraphs::uncaptured_sizes)
    }

    /// An empty cache.
    ///
    /// # Errors
    /// As [`DeepseekModel::new_cache`].
    pub(crate) fn new_cache(&self, size: CacheSize) -> Result<ModelCache> {
        self.model.new_cache(size)
    }

    /// Logits `[chunks, vocab]` of the last new token of each request, and whether the step was replayed.
    ///
    /// # Errors
    /// As [`DeepseekModel::forward`].
    pub(crate) fn step(&mut self, chunks: &[Chunk], cache: &mut ModelCache) -> Result<(Tensor<2>, bool)> {
        let model = self.model;
        let one_token_each = chunks.iter().all(|chunk| chunk.tokens.len() == 1);
        if let Some(graphs) = self.graphs.as_mut().ok().filter(|_| one_token_each)
            && let Some(logits) = graphs.next_token_logits(chunks, cache, model.device())?
        {
            return Ok((logits, true));
        }
        Ok((model.next_token_logits(chunks, cache, self.determinism)?, false))
    }

    /// Whether [`Self::step_after`] can be asked for a step of so many requests with so many pages at most, on all ranks.
    ///
    /// # Errors
    /// Ranks that do not answer.
    pub(crate) fn can_follow(&self, requests: usize, pages: usize, cache: &ModelCache) -> Result<bool> {
        self.graphs.as_ref().map_or(Ok(false), |graphs| graphs.can_follow(requests, pages, cache))
    }

    /// [`Self::step`] of chunks whose tokens are still on the device: i32 `[chunks]`, negative where there is none.
    ///
    /// # Errors
    /// A step that is not captured, as [`Self::can_follow`] knows.
    pub(crate) fn step_after(
        &mut self,
        chunks: &[Chunk],
        ids: &Tensor<1, Int>,
        cache: &mut ModelCache,
    ) -> Result<Tensor<2>> {
        match &mut self.graphs {
            Ok(graphs) => graphs.logits_after(chunks, ids, cache),
            Err(reason) => Err(crate::ModelError::device(reason)),
        }
    }
}
