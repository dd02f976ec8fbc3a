//! The kernels of a model, compiled before its weights are there.

use burn::tensor::{Device, FloatDType};
use mla_ops::{Determinism, argmax};

use crate::Result;
use crate::cache::{CacheSize, ModelCache};
use crate::engine::EngineOptions;
use crate::model::DeepseekModel;
use crate::models::ModelConfig;
use crate::step::Chunk;

/// Has the kernels compiled that an engine of these options launches for prompts of so many tokens and what follows them, before
/// there is a model: on CUDA in the background, on all cores, while the weights are loaded; from the disk where they have been
/// compiled before. On the CPU there is nothing to do.
///
/// Nothing that other threads launch meanwhile reaches a device, see [`mla_ops::compile_ahead`]; the call takes less than a
/// second.
///
/// # Errors
/// Options that an [`Engine`](crate::Engine) refuses, too, or an operation that refuses its arguments.
pub fn compile_ahead(
    config: &ModelConfig,
    device: &Device,
    dtype: FloatDType,
    options: &EngineOptions,
    prompts: &[usize],
) -> Result<()> {
    let config = config.with_layers(config.layers_of_every_kind(dtype))?;
    let steps = || {
        let model = DeepseekModel::without_weights(config, device, dtype)?;
        let steps = Steps { model: &model, options };
        steps.prompts(prompts)?;
        steps.decode(prompts.iter().copied().max().unwrap_or(1))
    };
    mla_ops::compile_ahead(device, steps).unwrap_or(Ok(()))
}

/// Steps of a model that has no weights.
struct Steps<'a> {
    model: &'a DeepseekModel,
    options: &'a EngineOptions,
}

impl Steps<'_> {
    /// Prompts of so many tokens, alone: all of each that a step takes, and the rest.
    fn prompts(&self, prompts: &[usize]) -> Result<()> {
        let budget = self.options.token_budget.max(1);
        let mut sizes: Vec<usize> = prompts.iter().flat_map(|&len| [len.min(budget), len % budget]).collect();
        sizes.sort_unstable();
        sizes.dedup();
        for tokens in sizes.into_iter().filter(|&tokens| tokens > 0) {
            let (mut cache, chunks) = self.requests(1, 0, tokens)?;
            self.launch(&chunks, &mut cache)?;
        }
        Ok(())
    }

    /// One token of each request of a batch, which all have so many already.
    fn decode(&self, past: usize) -> Result<()> {
        for batch in [1, self.options.max_batch] {
            let (mut cache, chunks) = self.requests(batch, past, 1)?;
            match self.model.capture().ok().filter(|_| self.options.graphs) {
                Some(model) => {
                    let (batch, pages) = (batch.next_power_of_two(), (past + 1).div_ceil(self.options.page_size));
                    let mut step = model.buffered_step(batch, pages.next_power_of_two(), cache.page_size());
                    step.fill(&chunks, &cache)?;
                    argmax(step.logits(&mut cache)?)?;
                }
                None => self.launch(&chunks, &mut cache)?,
            }
        }
        Ok(())
    }

    /// So many requests, each with new tokens after others.
    fn requests(&self, count: usize, past: usize, tokens: usize) -> Result<(ModelCache, Vec<Chunk>)> {
        let (page_size, max_tokens) = (self.options.page_size, past + tokens);
        let num_pages = count * max_tokens.div_ceil(page_size.max(1));
        let mut cache = self.model.new_cache(CacheSize { num_pages, page_size, max_requests: count, max_tokens })?;
        let mut chunks = Vec::new();
        for _ in 0..count {
            let request = cache.admit()?;
            if past > 0 {
                cache.append(request, &vec![0; past])?;
            }
            chunks.push(cache.append(request, &vec![0; tokens])?);
        }
        Ok((cache, chunks))
    }

    fn launch(&self, chunks: &[Chunk], cache: &mut ModelCache) -> Result<()> {
        let deterministic = self.options.deterministic;
        let determinism = if deterministic { Determinism::BatchInvariant } else { Determinism::Fast };
        argmax(self.model.next_token_logits(chunks, cache, determinism)?)?;
        Ok(())
    }
}
