//! The kernels of a model, compiled before its weights are there.

use burn::tensor::{Device, FloatDType};
use mla_ops::{Determinism, argmax};

use super::EngineOptions;
use crate::Result;
use crate::cache::ModelCache;
use crate::model::DeepseekModel;
use crate::models::{Capture, ModelConfig};
use crate::step::Chunk;

/// Has the kernels compiled that an engine of these options launches for prompts of so many tokens, and for batches that generate, before
/// there is a model: on CUDA in the background, on all cores, while the weights are loaded; from the disk where they have been
/// compiled before. On the CPU there is nothing to do.
///
/// Nothing that other threads launch meanwhile reaches a device, see [`mla_ops::compile_ahead`]. The call itself takes about a
/// second on a machine that has compiled these kernels before, otherwise one to three. Kernels depend on what divides the
/// tokens of a step, and on their order of magnitude: where none may be compiled later, name powers of two and their
/// neighbours.
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
    let steps = || {
        let model = without_weights(config, device, dtype)?;
        let steps = Steps { model: &model, options };
        steps.prompts(prompts)?;
        steps.decode()
    };
    mla_ops::compile_ahead(device, steps).unwrap_or(Ok(()))
}

/// The same for all requests that such an engine may get: when these are compiled, none is compiled later, but for what a program
/// does beside steps (weights, sampling). These are several times as many, and most programs need few of them: call [`compile_ahead`]
/// before for those that are needed first.
///
/// # Errors
/// As [`compile_ahead`].
pub fn compile_all_ahead(
    config: &ModelConfig,
    device: &Device,
    dtype: FloatDType,
    options: &EngineOptions,
) -> Result<()> {
    let mut model = None;
    let steps = || {
        // Both times the same: making it launches something, too.
        let model = match &mut model {
            Some(model) => &*model,
            model => &*model.insert(without_weights(config, device, dtype)?),
        };
        Steps { model, options }.all()
    };
    mla_ops::compile_all_ahead(device, steps).unwrap_or(Ok(()))
}

/// A model that launches what this one does, without its weights.
fn without_weights(config: &ModelConfig, device: &Device, dtype: FloatDType) -> Result<DeepseekModel> {
    let config = config.with_layers(config.layers_of_every_kind(dtype))?;
    DeepseekModel::without_weights(config, device, dtype)
}

/// Pages of a request that are as good as more: the tables of a batch are large.
const MANY_PAGES: usize = 256;

/// Steps of a model that has no weights.
struct Steps<'a> {
    model: &'a DeepseekModel,
    options: &'a EngineOptions,
}

impl<'a> Steps<'a> {
    /// Prompts of so many tokens: all of each that a step takes, and the rest; alone, and beside requests that generate.
    fn prompts(&self, prompts: &[usize]) -> Result<()> {
        let budget = self.options.token_budget.max(1);
        let mut sizes: Vec<usize> = prompts.iter().flat_map(|&len| [len.min(budget), len % budget]).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let mut others = vec![0, self.options.max_batch.saturating_sub(1)];
        others.dedup();
        for tokens in sizes.into_iter().filter(|&tokens| tokens > 0) {
            for others in others.clone() {
                self.step(others, tokens, 0)?;
            }
        }
        Ok(())
    }

    /// Steps that stand for all.
    fn all(&self) -> Result<()> {
        let &EngineOptions { page_size, cache_pages, max_batch, token_budget, .. } = self.options;
        let most = self.options.cache_size(self.model).max_tokens.min(cache_pages * page_size);
        let longest = most.saturating_sub(max_batch * page_size);
        let contexts = [0].into_iter().chain(powers_below(longest.max(1))).chain([longest]);
        let others = [0, 1, max_batch.saturating_sub(1)];
        for tokens in sizes(token_budget.min(most)) {
            let left = longest.saturating_sub(tokens);
            for past in [0, page_size, left] {
                for &others in others.iter().filter(|&&others| others < token_budget) {
                    self.step(others, tokens, past.min(left))?;
                }
            }
        }
        for past in contexts {
            for tokens in [1, 3, 64] {
                self.step(0, tokens, past.min(longest.saturating_sub(tokens)))?;
            }
        }
        self.decode()?;
        let Some(model) = self.captures() else { return Ok(()) };
        let pages = most.div_ceil(page_size);
        for pages in powers_below(pages).chain([pages]) {
            self.captured(model, 1, pages)?;
        }
        for batch in powers_below(2 * max_batch) {
            self.captured(model, batch, pages.min(MANY_PAGES))?;
        }
        Ok(())
    }

    /// A prompt's tokens behind so many, beside other requests that generate.
    fn step(&self, others: usize, tokens: usize, past: usize) -> Result<()> {
        let mut cache = self.cache()?;
        let mut chunks = Vec::new();
        for _ in 0..others {
            let request = cache.admit()?;
            chunks.push(cache.append(request, &[0])?);
        }
        let request = cache.admit()?;
        if past > 0 {
            cache.skip(request, past)?;
        }
        chunks.push(cache.append(request, &vec![0; tokens])?);
        self.launch(&chunks, &mut cache)
    }

    /// One token of each request, of batches of as many requests as captured steps have.
    fn decode(&self) -> Result<()> {
        for batch in powers_below(2 * self.options.max_batch) {
            match self.captures() {
                Some(model) => self.captured(model, batch, 1)?,
                None => self.step(batch.min(self.options.max_batch) - 1, 1, 0)?,
            }
        }
        Ok(())
    }

    fn determinism(&self) -> Determinism {
        if self.options.deterministic { Determinism::BatchInvariant } else { Determinism::Fast }
    }

    /// What captures steps, if they are.
    fn captures(&self) -> Option<&'a dyn Capture> {
        let captures = self.options.graphs && !cfg!(feature = "fusion");
        self.model.capture().ok().filter(|_| captures)
    }

    /// A step that would be captured, of a batch with so many pages each.
    fn captured(&self, model: &dyn Capture, batch: usize, pages: usize) -> Result<()> {
        let mut cache = self.cache()?;
        let request = cache.admit()?;
        let chunk = cache.append(request, &[0])?;
        let mut step = model.buffered_step(batch, pages, cache.page_size());
        step.fill(&[chunk], &cache)?;
        argmax(step.logits(&mut cache)?)?;
        Ok(())
    }

    /// That of an engine, whose sizes kernels depend on.
    fn cache(&self) -> Result<ModelCache> {
        self.model.new_cache(self.options.cache_size(self.model))
    }

    fn launch(&self, chunks: &[Chunk], cache: &mut ModelCache) -> Result<()> {
        let deterministic = self.options.deterministic;
        let determinism = if deterministic { Determinism::BatchInvariant } else { Determinism::Fast };
        argmax(self.model.next_token_logits(chunks, cache, determinism)?)?;
        Ok(())
    }
}

/// Powers of two, from 1.
fn powers_below(end: usize) -> impl Iterator<Item = usize> {
    (0..usize::BITS).map(|power| 1 << power).take_while(move |&power| power < end)
}

/// Numbers of tokens that stand for all up to `most`. Kernels depend on their order of magnitude, and on what divides them: of each
/// power of two one that has it as the greatest divisor, and others with 4, 2 and 1.
fn sizes(most: usize) -> Vec<usize> {
    let around = |power| [power, power + 1, power + 2, power + 4, power + power / 2];
    let mut sizes: Vec<usize> = powers_below(most).flat_map(around).chain([most]).collect();
    sizes.retain(|&size| (1..=most).contains(&size));
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

#[cfg(all(test, feature = "_gpu"))]
#[path = "warm_up_tests.rs"]
mod tests;
