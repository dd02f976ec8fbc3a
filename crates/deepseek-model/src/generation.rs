//! Text generation: prompts in, text out, several at once.

use std::time::Duration;

use crate::engine::{Completion, Engine, EngineOptions, EngineStats, StreamEvent};
use crate::model::DeepseekModel;
use crate::sampling::SamplingParams;
use crate::tokenizer::Tokenizer;
use crate::{ModelError, Result};

/// A prompt and how to continue it.
#[derive(Debug, Clone)]
pub struct GenerationRequest {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Tokens to generate at most.
    pub max_new_tokens: usize,
    /// Texts that end the generation; they are not part of the result.
    pub stop: Vec<String>,
}

/// Sizes that change speed and memory, but for rounding never the text: sums in another order differ in their last bits,
/// which may decide between two tokens that are equally likely.
#[derive(Debug, Clone, Copy)]
pub struct GenerationOptions {
    /// Tokens in a cache page, a power of two.
    pub page_size: usize,
    /// Prompt tokens in a forward pass at most, beside a token of each request.
    pub prefill_chunk: usize,
    /// Pages of the cache at most; never more than the requests can need.
    pub cache_pages: Option<usize>,
    /// Whether decode steps are captured and replayed, as [`EngineOptions::graphs`] says: faster, but for programs whose other
    /// threads leave the device alone.
    pub graphs: bool,
}

impl Default for GenerationOptions {
    fn default() -> Self {
        Self { page_size: 64, prefill_chunk: 512, cache_pages: None, graphs: false }
    }
}

/// Counts and times of a [`generate`] call.
#[derive(Debug, Clone, Default)]
pub struct GenerationStats {
    /// Prompt tokens computed.
    pub prompt_tokens: usize,
    /// Tokens generated.
    pub generated_tokens: usize,
    /// Duration of the steps that computed prompts, as in [`EngineStats::prefill_time`].
    pub prefill_time: Duration,
    /// From the start until the first token of any request.
    pub time_to_first_token: Option<Duration>,
    /// Tokens generated in decode steps, those with one token of each request.
    pub decode_tokens: usize,
    /// Duration of the decode steps.
    pub decode_time: Duration,
    /// Decode steps that were replayed from a captured graph.
    pub graph_steps: usize,
    /// Cache memory of a token, all layers, in bytes.
    pub cache_bytes_per_token: usize,
    /// The most cache memory that was in use, in bytes.
    pub cache_bytes_peak: usize,
}

/// Continues all requests; `on_text(request, text)` sees every piece of text as soon as it is certain.
///
/// All of them run together on an [`Engine`]; prompts are computed in chunks beside the tokens of those that generate already.
/// But for rounding, requests do not influence one another's text. The pieces of a request are valid UTF-8 and add up to
/// [`Completion::text`].
///
/// # Errors
/// A request or option that cannot be carried out, before anything is computed; or a failure of the device. A cache that is
/// too small for a request, or logits without a finite number, are no error of the call: they end the request, see
/// [`FinishReason`](crate::FinishReason).
pub fn generate(
    model: &DeepseekModel,
    tokenizer: &Tokenizer,
    requests: &[GenerationRequest],
    options: &GenerationOptions,
    on_text: &mut dyn FnMut(usize, &str),
) -> Result<(Vec<Completion>, GenerationStats)> {
    if options.prefill_chunk == 0 {
        return Err(ModelError::request("prefill_chunk", 0, "at least 1 token"));
    }
    for request in requests {
        check_request(model, request)?;
    }
    let mut engine = Engine::new(model, tokenizer, engine_options(model, requests, options))?;
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
    Ok((completions, engine.stats().into()))
}

impl From<EngineStats> for GenerationStats {
    fn from(stats: EngineStats) -> Self {
        Self {
            prompt_tokens: stats.prompt_tokens,
            generated_tokens: stats.generated_tokens,
            prefill_time: stats.prefill_time,
            time_to_first_token: stats.time_to_first_token,
            decode_tokens: stats.decode_tokens,
            decode_time: stats.decode_time,
            graph_steps: stats.graph_steps,
            cache_bytes_per_token: stats.cache_bytes_per_token,
            cache_bytes_peak: stats.cache_bytes_peak,
        }
    }
}

/// A request that the model can carry out.
pub(crate) fn check_request(model: &DeepseekModel, request: &GenerationRequest) -> Result<()> {
    let (positions, vocab) = (model.max_positions(), model.vocab_size());
    request.sampling.validate()?;
    if request.prompt.is_empty() {
        return Err(ModelError::request("prompt", "empty", "at least one token"));
    }
    if request.prompt.len() > positions {
        let expected = format!("at most {positions}, the model's positions; shorten the prompt");
        return Err(ModelError::request("prompt", format!("{} tokens long", request.prompt.len()), expected));
    }
    if let Some(id) = request.prompt.iter().find(|&&id| id as usize >= vocab) {
        let expected = format!("token ids below {vocab}, the model's vocabulary: is this the model's tokenizer?");
        return Err(ModelError::request("prompt", format!("with token id {id}"), expected));
    }
    Ok(())
}

/// An engine for all requests at once, whose cache has room for what they can need, or the size that was asked for.
fn engine_options(model: &DeepseekModel, requests: &[GenerationRequest], options: &GenerationOptions) -> EngineOptions {
    // The last generated token is never computed, so that it needs no room.
    let tokens = |request: &GenerationRequest| {
        let all = request.prompt.len().saturating_add(request.max_new_tokens.saturating_sub(1));
        all.min(model.max_positions())
    };
    let page_size = options.page_size.max(1);
    let needed = requests.iter().map(|request| tokens(request).div_ceil(page_size)).sum::<usize>().max(1);
    let max_batch = requests.len().max(1);
    EngineOptions {
        page_size: options.page_size,
        cache_pages: options.cache_pages.map_or(needed, |pages| pages.min(needed)),
        max_batch,
        token_budget: options.prefill_chunk.saturating_add(max_batch),
        prefix_sharing: false,
        deterministic: false,
        graphs: options.graphs,
    }
}
