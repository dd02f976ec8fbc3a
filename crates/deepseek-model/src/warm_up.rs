//! The kernels of a model, compiled before its weights are there.

use burn::tensor::{Device, FloatDType};
use mla_ops::{Determinism, argmax};

use crate::Result;
use crate::cache::{CacheSize, ModelCache};
use crate::engine::EngineOptions;
use crate::model::DeepseekModel;
use crate::models::ModelConfig;
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
    let config = config.with_layers(config.layers_of_every_kind(dtype))?;
    let steps = || {
        let model = DeepseekModel::without_weights(config, device, dtype)?;
        let steps = Steps { model: &model, options };
        steps.prompts(prompts)?;
        steps.decode()
    };
    mla_ops::compile_ahead(device, steps).unwrap_or(Ok(()))
}

/// Steps of a model that has no weights.
struct Steps<'a> {
    model: &'a DeepseekModel,
    options: &'a EngineOptions,
}

impl Steps<'_> {
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
                let mut cache = self.cache(1 + others, tokens)?;
                let mut chunks = self.chunks(others, 1, &mut cache)?;
                chunks.extend(self.chunks(1, tokens, &mut cache)?);
                self.launch(&chunks, &mut cache)?;
            }
        }
        Ok(())
    }

    /// One token of each request, of batches of as many requests as captured steps have.
    fn decode(&self) -> Result<()> {
        let captures = self.options.graphs && !cfg!(feature = "fusion");
        let powers = (0..usize::BITS).map(|power| 1 << power);
        for batch in powers.take_while(|&batch| batch < 2 * self.options.max_batch) {
            let mut cache = self.cache(batch, 1)?;
            let chunks = self.chunks(batch, 1, &mut cache)?;
            match self.model.capture().ok().filter(|_| captures) {
                Some(model) => {
                    let mut step = model.buffered_step(batch, [1, cache.page_size()], self.determinism());
                    step.fill(&chunks, &cache)?;
                    argmax(step.logits(&mut cache)?)?;
                }
                None => self.launch(&chunks, &mut cache)?,
            }
        }
        Ok(())
    }

    /// A cache for so many requests, of one token each but for one of so many.
    fn cache(&self, requests: usize, tokens: usize) -> Result<ModelCache> {
        let page_size = self.options.page_size;
        let num_pages = requests + tokens.div_ceil(page_size.max(1));
        self.model.new_cache(CacheSize { num_pages, page_size, max_requests: requests, max_tokens: tokens })
    }

    /// The first tokens of so many requests.
    fn chunks(&self, requests: usize, tokens: usize, cache: &mut ModelCache) -> Result<Vec<Chunk>> {
        let chunk = |_| {
            let request = cache.admit()?;
            Ok(cache.append(request, &vec![0; tokens])?)
        };
        (0..requests).map(chunk).collect()
    }

    fn launch(&self, chunks: &[Chunk], cache: &mut ModelCache) -> Result<()> {
        argmax(self.model.next_token_logits(chunks, cache, self.determinism())?)?;
        Ok(())
    }

    fn determinism(&self) -> Determinism {
        if self.options.deterministic { Determinism::BatchInvariant } else { Determinism::Fast }
    }
}
