//! Text generation: prompts in, text out, several at once, on top of the [`Engine`].

use burn::tensor::Device;

use crate::engine::{Completion, Engine, EngineOptions, EngineStats, StreamEvent};
use crate::ranks::ModelRef;
use crate::request::GenerationRequest;
use crate::tokenizer::Tokenizer;
use crate::{ModelError, Result};

/// Sizes of a [`generate`] call, named as in [`EngineOptions`]. They change speed and memory, but for rounding never the text:
/// sums in another order differ in their last bits, which may decide between two tokens that are equally likely.
#[derive(Debug, Clone, Copy)]
pub struct GenerationOptions {
    /// Tokens in a cache page, a power of two.
    pub page_size: usize,
    /// Pages of the cache at most; never more than the requests can need. `None`: as many as they can need, on GPUs that say what
    /// is free no more than [`EngineOptions::fit_cache`] finds, unless others run the model's other ranks, which must have as many.
    pub cache_pages: Option<usize>,
    /// Tokens in a forward pass at most: one of each request that generates, the rest from prompts (chunked prefill). At least
    /// 1; no more requests than that run at once.
    pub token_budget: usize,
    /// Whether decode steps are captured and replayed, as [`EngineOptions::graphs`] says: faster, but for programs whose other
    /// threads leave the device alone.
    pub graphs: bool,
}

impl Default for GenerationOptions {
    fn default() -> Self {
        Self::of(EngineOptions::default())
    }
}

/// Continues all requests, on one device or on [several](crate::ModelRanks); `on_text(request, text)` sees every piece of text as soon as it is certain.
///
/// All of them run together on an [`Engine`]; prompts are computed in chunks beside the tokens of those that generate already.
/// But for rounding, requests do not influence one another's text. The chunks of a request's text are valid UTF-8 and add up to
/// [`Completion::text`].
///
/// # Errors
/// A request or option that cannot be carried out, before anything is computed: [`ModelError::OutOfMemory`] for one that the free
/// memory of a GPU has no room for. Or a failure of the device. `cache_pages` that are too few for a request, or logits without a
/// finite number, are no error of the call: they end the request, see [`FinishReason`](crate::FinishReason).
pub fn generate<'a>(
    model: impl Into<ModelRef<'a>>,
    tokenizer: &'a Tokenizer,
    requests: &[GenerationRequest],
    options: &GenerationOptions,
    on_text: &mut dyn FnMut(usize, &str),
) -> Result<(Vec<Completion>, EngineStats)> {
    if options.token_budget == 0 {
        return Err(ModelError::request("token_budget", 0, "at least 1 token"));
    }
    let model = model.into();
    let (max_positions, vocab_size) = (model.first().max_positions(), model.first().vocab_size());
    for request in requests {
        request.check(max_positions, vocab_size)?;
    }
    let mut engine = Engine::new(model, tokenizer, options.engine(model, requests)?)?;
    let streams = requests.iter().map(|request| engine.submit(request.clone()));
    let mut streams = streams.collect::<Result<Vec<_>>>()?;
    let mut completions = vec![None; requests.len()];
    loop {
        let more = engine.step()?;
        for (index, stream) in streams.iter_mut().enumerate() {
            while let Some(event) = stream.try_next() {
                match event {
                    StreamEvent::Text(text) => on_text(index, &text),
                    StreamEvent::Finished(completion) => completions[index] = Some(completion),
                }
            }
        }
        if !more {
            break;
        }
    }
    // An engine without requests has finished all of them.
    let completions = completions.into_iter().flatten().collect();
    Ok((completions, engine.stats()))
}

impl GenerationOptions {
    /// The default for a device: the `token_budget` of [`EngineOptions::on`].
    pub fn on(device: &Device) -> Self {
        Self::of(EngineOptions::on(device))
    }

    fn of(EngineOptions { page_size, token_budget, graphs, .. }: EngineOptions) -> Self {
        Self { page_size, cache_pages: None, token_budget, graphs }
    }

    /// An engine for all requests at once, whose cache has room for what they can need, or the size that was asked for, or that there
    /// is memory for.
    fn engine(&self, model: ModelRef<'_>, requests: &[GenerationRequest]) -> Result<EngineOptions> {
        let (page_size, max_positions) = (self.page_size.max(1), model.first().max_positions());
        let tokens = requests.iter().map(|request| request.cached_tokens(max_positions));
        let pages = tokens.clone().map(|tokens| tokens.div_ceil(page_size));
        let needed = pages.clone().sum::<usize>().max(1);
        let options = EngineOptions {
            page_size: self.page_size,
            cache_pages: self.cache_pages.map_or(needed, |pages| pages.min(needed)),
            max_batch: requests.len().clamp(1, self.token_budget),
            token_budget: self.token_budget,
            // Nobody reads the texts before all have ended.
            mixed_prompt_tokens: self.token_budget,
            prefix_caching: false,
            graphs: self.graphs,
            ..EngineOptions::default()
        };
        let is_whole = model.each().len() == model.first().parallel().size();
        match self.cache_pages.is_none() && is_whole {
            true => options.limit_cache(model, pages.max().unwrap_or(1), tokens.sum()),
            false => Ok(options),
        }
    }
}
