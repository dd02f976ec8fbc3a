//! The kernels of a model, compiled before its weights are there.

use burn::tensor::Device;
use mla_ops::Determinism;

use super::EngineOptions;
use super::choice;
use super::prefix_cache::PrefixCache;
use crate::Result;
use crate::cache::ModelCache;
use crate::model::DeepseekModel;
use crate::models::{Capture, ModelConfig};
use crate::step::Chunk;
use crate::weights::LoadAs;

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
/// A device that does not open, options that an [`Engine`](crate::Engine) refuses, too, or an operation that refuses its arguments.
pub fn compile_ahead(
    config: &ModelConfig,
    device: &Device,
    load_as: impl Into<LoadAs>,
    options: &EngineOptions,
    prompts: &[usize],
) -> Result<()> {
    let load_as = load_as.into();
    compile_rank_ahead(config, 1, device, load_as, options, prompts)
}

/// [`compile_ahead`] on every device that the model will be divided among: a rank of fewer heads and channels has other kernels.
///
/// # Errors
/// As [`compile_ahead`], and what does not divide among the devices.
pub fn compile_ranks_ahead(
    config: &ModelConfig,
    devices: &[Device],
    load_as: impl Into<LoadAs>,
    options: &EngineOptions,
    prompts: &[usize],
) -> Result<()> {
    let (load_as, ranks) = (load_as.into(), devices.len());
    devices.iter().try_for_each(|device| compile_rank_ahead(config, ranks, device, load_as, options, prompts))
}

fn compile_rank_ahead(
    config: &ModelConfig,
    ranks: usize,
    device: &Device,
    load_as: LoadAs,
    options: &EngineOptions,
    prompts: &[usize],
) -> Result<()> {
    let steps = || {
        let model = without_weights(config, ranks, device, load_as)?;
        let mut steps = Steps::new(&model, options)?;
        steps.prompts(prompts)?;
        steps.decode()
    };
    mla_ops::check_opens(device)?;
    mla_ops::compile_ahead(device, steps).unwrap_or(Ok(()))
}

/// The same for all requests that such an engine may get: when these are compiled, none is compiled later, but for what a program
/// does beside steps (weights, a repetition penalty's prompt), and on GPUs other than Hopper some of Burn's (products of many rows, copies of chunks).
/// These are several times as many, and most programs need few of them: call [`compile_ahead`] before for those that are needed
/// first.
///
/// # Errors
/// As [`compile_ahead`].
pub fn compile_all_ahead(
    config: &ModelConfig,
    device: &Device,
    load_as: impl Into<LoadAs>,
    options: &EngineOptions,
) -> Result<()> {
    let load_as = load_as.into();
    let steps = || {
        let model = without_weights(config, 1, device, load_as)?;
        Steps::new(&model, options)?.all()
    };
    mla_ops::check_opens(device)?;
    mla_ops::compile_all_ahead(device, steps).unwrap_or(Ok(()))
}

/// A model that launches what this one does, without its weights.
fn without_weights(config: &ModelConfig, ranks: usize, device: &Device, load_as: LoadAs) -> Result<DeepseekModel> {
    let config = config.with_layers(config.layers_of_every_kind(load_as.dtype))?;
    DeepseekModel::without_weights(config, ranks, device, load_as)
}

/// Pages of a request that are as good as more: the tables of a batch are large.
const MANY_PAGES: usize = 256;

/// Steps of a model that has no weights.
struct Steps<'a> {
    model: &'a DeepseekModel,
    options: &'a EngineOptions,
    /// That of an engine, whose sizes kernels depend on; between steps without requests.
    cache: ModelCache,
}

impl<'a> Steps<'a> {
    fn new(model: &'a DeepseekModel, options: &'a EngineOptions) -> Result<Self> {
        Ok(Self { model, options, cache: model.new_cache(options.cache_size(model))? })
    }

    /// Prompts of so many tokens: all of each that a step takes, and the rest; alone, and beside requests that generate.
    fn prompts(&mut self, prompts: &[usize]) -> Result<()> {
        let budget = self.options.token_budget.max(1);
        let mut sizes: Vec<usize> = prompts.iter().flat_map(|&len| [len.min(budget), len % budget]).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let mut others = vec![0, self.options.max_batch.saturating_sub(1)];
        others.dedup();
        for tokens in sizes.into_iter().filter(|&tokens| tokens > 0) {
            for others in others.clone() {
                let most = if others == 0 { budget } else { self.options.mixed_prompt_tokens };
                self.step(others, tokens.min(most), 0)?;
            }
        }
        self.snapshot()
    }

    /// Steps that stand for all.
    fn all(&mut self) -> Result<()> {
        let &EngineOptions { page_size, cache_pages, max_batch, token_budget, .. } = self.options;
        let most = self.options.cache_size(self.model).max_tokens.min(cache_pages * page_size);
        // Beside requests of a page each.
        let longest = most.saturating_sub(max_batch * page_size);
        let largest = token_budget.min(most);
        for tokens in sizes(largest) {
            for others in [0, max_batch.saturating_sub(1)] {
                for past in [0, longest] {
                    self.step(others, tokens, past)?;
                }
            }
        }
        for tokens in [1, 3, 64, largest] {
            for past in powers_below(longest) {
                self.step(0, tokens, past)?;
            }
            for others in [1, 2, 3] {
                self.step(others, tokens, page_size)?;
            }
        }
        // Tokens that fill windows: what compressors do with them shares a launch.
        for past in powers_below(longest) {
            self.step(0, 1, past - 1)?;
        }
        // An indexer works on groups of tokens: requests with few, and each that has more. Where the weights of a group do not
        // begin at a multiple of 512 bytes, Burn copies them, by a kernel that depends on how many there are.
        for others in powers_below(max_batch) {
            self.step(others, 65, longest)?;
        }
        self.snapshot()?;
        self.decode()?;
        let Some(model) = self.captures() else { return Ok(()) };
        let pages = most.div_ceil(page_size);
        // Of Burn's kernels, which copy inputs, the form depends on how many numbers there are, and on what divides them: 4 at most.
        for batch in powers_below(2 * max_batch).take(3) {
            for pages in powers_below(pages).chain([pages]) {
                self.captured(model, batch, pages)?;
            }
        }
        for batch in powers_below(2 * max_batch) {
            self.captured(model, batch, pages.min(MANY_PAGES))?;
        }
        Ok(())
    }

    /// So many tokens of a prompt behind so many others, as far as there are pages, beside other requests that generate.
    fn step(&mut self, others: usize, tokens: usize, past: usize) -> Result<()> {
        let pages = self.cache.num_pages().saturating_sub(others);
        let room = (pages * self.cache.page_size()).min(self.options.cache_size(self.model).max_tokens);
        let (tokens, past) = (tokens.min(room), past.min(room.saturating_sub(tokens)));
        if tokens == 0 {
            return Ok(());
        }
        let mut chunks = (0..others).map(|_| self.chunk(0, 1)).collect::<Result<Vec<Chunk>>>()?;
        chunks.push(self.chunk(past, tokens)?);
        let determinism = self.determinism();
        choice::warm_up(self.model.next_token_logits(&chunks, &mut self.cache, determinism)?)?;
        self.free(&chunks)
    }

    /// The copies of snapshots, where there are some: a pass writes one, a request's state is another, and a request goes on from there.
    fn snapshot(&mut self) -> Result<()> {
        let page = self.cache.page_size();
        if page > self.options.cache_size(self.model).max_tokens {
            return Ok(());
        }
        PrefixCache::of_engine(self.options, self.model.prefix_support(), &mut self.cache)?;
        if self.cache.snapshots().is_none() {
            return Ok(());
        }
        let chunk = self.chunk(0, page)?;
        let request = chunk.request;
        self.cache.snapshots().map(|snapshots| snapshots.mark(request, page)).transpose()?;
        let determinism = self.determinism();
        self.model.next_token_logits(&[chunk], &mut self.cache, determinism)?;
        let pages = self.cache.pages().pages(request)?.to_vec();
        let mut snapshot = None;
        for _ in 0..2 {
            let kept = self.cache.snapshots().map(|snapshots| snapshots.keep(request, page)).transpose()?;
            snapshot = kept.flatten().or(snapshot);
        }
        self.cache.pages_mut().retain(&pages)?;
        self.cache.free(request)?;
        if let Some(snapshot) = snapshot {
            let request = self.cache.admit_with(&pages, Some(snapshot))?;
            self.cache.free(request)?;
        }
        Ok(self.cache.pages_mut().release(&pages)?)
    }

    /// So many tokens of a new request, behind others.
    fn chunk(&mut self, past: usize, tokens: usize) -> Result<Chunk> {
        let request = self.cache.admit()?;
        if past > 0 {
            self.cache.skip(request, past)?;
        }
        Ok(self.cache.append(request, &vec![0; tokens])?)
    }

    fn free(&mut self, chunks: &[Chunk]) -> Result<()> {
        chunks.iter().try_for_each(|chunk| Ok(self.cache.free(chunk.request)?))
    }

    /// One token of each request, of batches of as many requests as captured steps have.
    fn decode(&mut self) -> Result<()> {
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
    fn captured(&mut self, model: &dyn Capture, batch: usize, pages: usize) -> Result<()> {
        let chunks = [self.chunk(0, 1)?];
        let mut step = model.buffered_step(batch, [pages, self.cache.page_size()], self.determinism())?;
        step.fill(&chunks, &mut self.cache)?;
        choice::warm_up(step.logits(&mut self.cache)?)?;
        self.free(&chunks)
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
