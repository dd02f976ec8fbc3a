//! How many pages the cache of an engine gets where nobody says.

use mla_ops::{DeviceMemory, device_memory, is_cuda, largest_buffer};

use super::EngineOptions;
use crate::cache::CacheSize;
use crate::model::DeepseekModel;
use crate::models::PrefixSupport;
use crate::ranks::ModelRef;
use crate::{ModelError, Result};

/// Tokens of a cache in the memory of the host, which other programs need, too; and of devices that do not say what is free.
const TOKENS: usize = 512 * 64;
/// The part of the free memory of the host that a cache takes at most: one in so many bytes.
const PART_OF_HOST: u128 = 8;
/// Bytes of the largest scratch that weights in blocks are dequantised to.
const SCRATCH: u128 = 1 << 30;
/// Bytes of an activation at most.
const ACTIVATION: u128 = size_of::<f32>() as u128;

impl EngineOptions {
    /// The default for a model that is loaded: [`Self::on`] its device, with [`Self::fit_cache`].
    ///
    /// # Errors
    /// As [`Self::fit_cache`].
    pub fn of_model<'a>(model: impl Into<ModelRef<'a>>) -> Result<Self> {
        let model = model.into();
        Self::on(model.first().device()).fit_cache(model)
    }

    /// These options with as many `cache_pages` as the free memory has room for beside the weights, which are there:
    ///
    /// - no more than `max_batch` requests of all the model's positions fill;
    /// - CUDA: 90 % of what is free without the reserve of [`Self::reserved_bytes`], beside what index keys in FP8 are dequantised to;
    /// - the CPU: an eighth of what is free, and 32,768 tokens at most;
    /// - devices that do not say what is free (wgpu): 32,768 tokens.
    ///
    /// DeepSeek-V4's states and snapshots count. Of several ranks each has that many pages: as many as the one with the least room.
    ///
    /// # Errors
    /// [`ModelError::OutOfMemory`] if there is no room for one page; a size that is zero or too large, a page size that is no power
    /// of two.
    pub fn fit_cache<'a>(self, model: impl Into<ModelRef<'a>>) -> Result<Self> {
        let fit = |rank| self.fit_rank(rank, 1, "a page of the KV cache beside a step");
        let fits = model.into().each().into_iter().map(fit).collect::<Result<Vec<_>>>()?;
        // All have as many: of devices with different memory the least.
        Ok(fits.into_iter().min_by_key(|options| options.cache_pages).unwrap_or(self))
    }

    /// These options with no more `cache_pages` than [`Self::fit_cache`] finds on GPUs, for requests of so many `tokens` together, the
    /// longest of which takes `longest` pages.
    ///
    /// # Errors
    /// As [`Self::fit_cache`], and if there is no room for the longest.
    pub(crate) fn limit_cache(self, model: ModelRef<'_>, longest: usize, tokens: usize) -> Result<Self> {
        // No step has more.
        let step = Self { token_budget: self.token_budget.min(tokens), ..self };
        let mut cache_pages = self.cache_pages;
        for rank in model.each().into_iter().filter(|rank| is_cuda(rank.device())) {
            let fits = step.fit_rank(rank, longest, "the KV cache of the longest request beside a step")?;
            cache_pages = cache_pages.min(fits.cache_pages);
        }
        Ok(Self { cache_pages, ..self })
    }

    /// The most pages that fit; an error unless `least` do, which are `what`.
    fn fit_rank(self, model: &DeepseekModel, least: usize, what: &'static str) -> Result<Self> {
        let page_size = self.page_size.max(1);
        let longest = model.max_positions().div_ceil(page_size).max(1);
        let mut most = self.max_batch.max(1).saturating_mul(longest).max(least);
        let memory = device_memory(model.device());
        if !is_cuda(model.device()) {
            most = most.min(TOKENS.div_ceil(page_size));
        }
        let needed = |cache_pages| Self { cache_pages, ..self }.bytes_with_scratch(model);
        // What cannot be with so few pages is an error with its name; with more pages it is too many.
        let least = needed(least)?;
        let room = memory.map(|memory| self.room(memory, model)).unwrap_or(u128::MAX);
        if least > room {
            let device = format!("{:?}", model.device());
            let free_bytes = memory.map_or(0, |memory| memory.free);
            // So many would have to be free.
            let needed_bytes = match is_cuda(model.device()) {
                true => least.div_ceil(9).saturating_mul(10).saturating_add(self.reserved_bytes(model)),
                false => least,
            };
            return Err(ModelError::OutOfMemory { what, device, needed_bytes, free_bytes });
        }
        let fits = |pages| needed(pages).is_ok_and(|bytes| bytes <= room);
        Ok(Self { cache_pages: largest(most, fits), ..self })
    }

    /// Bytes of a GPU's memory that [`Self::fit_cache`] leaves to everything but weights and cache: the activations of a step of
    /// `token_budget` tokens, as if all of a layer's were there at once, in f32; logits of `max_batch` requests, twice; the tokens'
    /// places; captured steps, if there are any; 1 GiB of scratch for models with weights in blocks of codes.
    pub fn reserved_bytes(&self, model: &DeepseekModel) -> u128 {
        let (config, product) = (model.config(), |a: usize, b: usize| (a as u128).saturating_mul(b as u128));
        let activations = product(self.token_budget, config.activations_per_token());
        let logits = product(self.max_batch, config.vocab_size()).saturating_mul(2);
        let places = product(self.max_batch, model.max_positions());
        let numbers = activations.saturating_add(logits).saturating_add(places).saturating_mul(ACTIVATION);
        let size = CacheSize { max_tokens: model.max_positions(), ..self.cache_size(model) };
        let captured = if self.graphs { config.captured_bytes(size) } else { 0 };
        let scratch = if config.quantization().is_some() { SCRATCH } else { 0 };
        numbers.saturating_add(captured).saturating_add(scratch)
    }

    /// Bytes that a cache may take.
    fn room(&self, memory: DeviceMemory, model: &DeepseekModel) -> u128 {
        let free = u128::from(memory.free);
        match is_cuda(model.device()) {
            true => free.saturating_sub(self.reserved_bytes(model)) / 10 * 9,
            false => free / PART_OF_HOST,
        }
    }

    /// Bytes of the cache, and on CUDA of what index keys in FP8 are dequantised to: more with more pages, until there are too many for that.
    fn bytes_with_scratch(&self, model: &DeepseekModel) -> Result<u128> {
        let bytes = self.bytes_of_cache(model)?;
        let scratch = match is_cuda(model.device()) {
            true => model.config().index_scratch_bytes(self.cache_size(model), model.load_as())?,
            false => 0,
        };
        Ok(bytes.saturating_add(scratch))
    }

    /// Bytes of the cache of an engine with these options; too many for any memory if a buffer is larger than the device can have.
    fn bytes_of_cache(&self, model: &DeepseekModel) -> Result<u128> {
        let (config, size) = (model.config(), self.cache_size(model));
        let bytes = config.cache_bytes(size, model.load_as())?;
        let tokens = (size.num_pages as u128).saturating_mul(size.page_size as u128);
        let slots = tokens.div_ceil(self.snapshot_spacing.max(1) as u128);
        let snapshots = match model.prefix_support() {
            PrefixSupport::Snapshots { bytes } if self.prefix_caching => slots.saturating_mul(bytes as u128),
            _ => 0,
        };
        let buffer = largest_buffer(model.device()).map_or(u128::MAX, u128::from);
        let is_too_large = config.layers(model.load_as()).iter().any(|layer| {
            let rows = slots.max(size.max_requests as u128).saturating_mul(layer.bytes_per_request as u128);
            tokens.saturating_mul(layer.bytes_per_token as u128) > buffer || rows > buffer
        });
        Ok(if is_too_large { u128::MAX } else { bytes.saturating_add(snapshots) })
    }

    /// The cache of an engine.
    pub(super) fn cache_size(&self, model: &DeepseekModel) -> CacheSize {
        let &Self { page_size, cache_pages, max_batch, .. } = self;
        CacheSize {
            num_pages: cache_pages,
            page_size,
            max_requests: max_batch,
            // More than the pages hold, so that it is the pages that run out.
            max_tokens: cache_pages.saturating_add(1).saturating_mul(page_size).min(model.max_positions()),
        }
    }
}

/// The largest number of pages up to `most` that fits; 1 does, and what is smaller than one that does. Otherwise one that fits.
fn largest(most: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut least, mut above) = (1, most.saturating_add(1));
    while above - least > 1 {
        let middle = least + (above - least) / 2;
        match fits(middle) {
            true => least = middle,
            false => above = middle,
        }
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_number_that_fits_is_found() {
        for (most, room) in [(1, 0), (1, 1), (100, 0), (100, 1), (100, 57), (100, 99), (100, 100), (100, 1000)] {
            assert_eq!(largest(most, |pages| pages <= room), room.clamp(1, most), "{most} {room}");
        }
        assert_eq!(largest(usize::MAX, |pages| pages <= 12345), 12345);
    }
}
