//! Text generation: prompts in, text out, several at once.

use std::time::{Duration, Instant};

use burn::tensor::{FloatDType, Tensor};
use mla_ops::cache::{CacheError, RequestId};

use crate::cache::{CacheSize, ModelCache};
use crate::model::DeepseekModel;
use crate::sampling::{Sampler, SamplingParams};
use crate::step::Chunk;
use crate::tokenizer::{StopStrings, TextStream, Tokenizer};
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

/// Sizes that change speed and memory, never the text.
#[derive(Debug, Clone, Copy)]
pub struct GenerationOptions {
    /// Tokens in a cache page, a power of two.
    pub page_size: usize,
    /// Prompt tokens in a forward pass at most.
    pub prefill_chunk: usize,
    /// Pages of the cache at most; never more than the requests can need.
    pub cache_pages: Option<usize>,
}

impl Default for GenerationOptions {
    fn default() -> Self {
        Self { page_size: 64, prefill_chunk: 512, cache_pages: None }
    }
}

/// Why a generation ended.
#[derive(Debug, Clone, PartialEq)]
pub enum FinishReason {
    /// The model ended the text.
    Eos,
    /// A stop string occurred.
    StopString,
    /// `max_new_tokens` is reached.
    MaxNewTokens,
    /// The model has no position for another token.
    MaxPositions,
    /// The cache had no page for another token; the text up to there is kept.
    OutOfCache(CacheError),
}

/// What became of a request.
#[derive(Debug, Clone)]
pub struct Completion {
    /// The generated tokens, an ending token included.
    pub token_ids: Vec<u32>,
    /// Their text, without an ending token or stop string.
    pub text: String,
    /// Why it ended.
    pub finish: FinishReason,
}

/// Counts and times of a [`generate`] call.
#[derive(Debug, Clone, Default)]
pub struct GenerationStats {
    /// Prompt tokens computed.
    pub prompt_tokens: usize,
    /// Tokens generated.
    pub generated_tokens: usize,
    /// From the start until the prompts were computed.
    pub prefill_time: Duration,
    /// From the start until the first token of any request.
    pub time_to_first_token: Option<Duration>,
    /// Tokens generated in decode steps: all but the first of each request.
    pub decode_tokens: usize,
    /// Duration of the decode steps.
    pub decode_time: Duration,
    /// Cache memory of a token, all layers, in bytes.
    pub cache_bytes_per_token: usize,
    /// The most cache memory that was in use, in bytes.
    pub cache_bytes_peak: usize,
}

/// Continues all requests; `on_text(request, text)` sees every piece of text as soon as it is certain.
///
/// Prompts are computed in chunks, then all requests go on together, a token of each per step. Requests do not influence
/// one another's text. The pieces of a request are valid UTF-8 and add up to [`Completion::text`].
///
/// # Errors
/// A request or option that cannot be carried out, before anything is computed; or a failure of the device. A cache that
/// runs out of pages is no error of the call: it ends the request, see [`FinishReason::OutOfCache`].
pub fn generate(
    model: &DeepseekModel,
    tokenizer: &Tokenizer,
    requests: &[GenerationRequest],
    options: &GenerationOptions,
    on_text: &mut dyn FnMut(usize, &str),
) -> Result<(Vec<Completion>, GenerationStats)> {
    check(model, requests, options)?;
    let mut batch = Batch::new(model, tokenizer, requests, options, on_text)?;
    batch.prefill(options.prefill_chunk)?;
    batch.decode()?;
    Ok(batch.finish())
}

fn check(model: &DeepseekModel, requests: &[GenerationRequest], options: &GenerationOptions) -> Result<()> {
    let (positions, vocab) = (model.max_positions(), model.vocab_size());
    if options.prefill_chunk == 0 {
        return Err(ModelError::request("prefill_chunk", 0, "at least 1 token"));
    }
    for request in requests {
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
    }
    Ok(())
}

/// The requests of one call, on their way.
struct Batch<'a> {
    model: &'a DeepseekModel,
    cache: ModelCache,
    sequences: Vec<Sequence>,
    on_text: &'a mut dyn FnMut(usize, &str),
    stats: GenerationStats,
    start: Instant,
}

/// A request on its way.
struct Sequence {
    /// Prompt and generated tokens.
    tokens: Vec<u32>,
    prompt_len: usize,
    /// How many of the tokens the cache has.
    cached: usize,
    max_new_tokens: usize,
    sampler: Sampler,
    /// What turns its tokens into text, until it ends.
    output: Option<(TextStream, StopStrings)>,
    text: String,
    /// Its place in the cache, until it ends.
    request: Option<RequestId>,
    finish: Option<FinishReason>,
}

impl<'a> Batch<'a> {
    fn new(
        model: &'a DeepseekModel,
        tokenizer: &Tokenizer,
        requests: &[GenerationRequest],
        options: &GenerationOptions,
        on_text: &'a mut dyn FnMut(usize, &str),
    ) -> Result<Self> {
        let start = Instant::now();
        let mut cache = new_cache(model, requests, options)?;
        let sequences = requests.iter().map(|request| Sequence::new(request, tokenizer, &mut cache));
        let sequences = sequences.collect::<Result<Vec<_>>>()?;
        let stats = GenerationStats { cache_bytes_per_token: cache.bytes_per_token(), ..Default::default() };
        Ok(Self { model, cache, sequences, on_text, stats, start })
    }

    /// Computes the prompts, up to `budget` tokens at a time, and draws the first token of each.
    fn prefill(&mut self, budget: usize) -> Result<()> {
        loop {
            let mut left = budget;
            let mut work = Vec::new();
            for (index, sequence) in self.sequences.iter().enumerate() {
                let missing = sequence.prompt_len.saturating_sub(sequence.cached);
                let n = missing.min(left);
                if sequence.finish.is_none() && n > 0 {
                    work.push((index, n));
                    left -= n;
                }
            }
            if work.is_empty() {
                break;
            }
            self.step(work)?;
        }
        self.stats.prefill_time = self.start.elapsed();
        Ok(())
    }

    /// A token of each request per step, until all have ended.
    fn decode(&mut self) -> Result<()> {
        let start = Instant::now();
        loop {
            let running = self.sequences.iter().enumerate().filter(|(_, sequence)| sequence.finish.is_none());
            let work: Vec<_> = running.map(|(index, _)| (index, 1)).collect();
            if work.is_empty() {
                break;
            }
            self.stats.decode_tokens += self.step(work)?;
        }
        self.stats.decode_time = start.elapsed();
        Ok(())
    }

    /// One forward pass over the next `n` tokens of each `(sequence, n)`; returns how many tokens were drawn.
    fn step(&mut self, work: Vec<(usize, usize)>) -> Result<usize> {
        let mut members = Vec::new();
        let mut chunks = Vec::new();
        for (index, n) in work {
            if let Some(chunk) = self.reserve(index, n)? {
                members.push(index);
                chunks.push(chunk);
            }
        }
        self.stats.cache_bytes_peak = self.stats.cache_bytes_peak.max(self.cache.bytes_in_use());
        if chunks.is_empty() {
            return Ok(0);
        }
        let logits = self.model.next_token_logits(&chunks, &mut self.cache)?;
        // A sequence whose prompt is not complete yet has no use for the logits.
        let complete = |&(_, &index): &(usize, &usize)| {
            let sequence = &self.sequences[index];
            sequence.cached == sequence.tokens.len()
        };
        let rows: Vec<(usize, usize)> =
            members.iter().enumerate().filter(complete).map(|(row, &index)| (row, index)).collect();
        if rows.is_empty() {
            return Ok(0);
        }
        let [_, vocab] = logits.dims();
        let mut logits = to_host(logits)?;
        for &(row, index) in &rows {
            self.draw(index, &mut logits[row * vocab..(row + 1) * vocab])?;
        }
        self.stats.time_to_first_token.get_or_insert_with(|| self.start.elapsed());
        Ok(rows.len())
    }

    /// Makes room in the cache for the next `n` tokens of a sequence. A cache without room ends the sequence.
    fn reserve(&mut self, index: usize, n: usize) -> Result<Option<Chunk>> {
        let sequence = &mut self.sequences[index];
        let Some(request) = sequence.request else {
            return Ok(None);
        };
        match self.cache.append(request, &sequence.tokens[sequence.cached..sequence.cached + n]) {
            Ok(chunk) => {
                let in_prompt = sequence.prompt_len.saturating_sub(sequence.cached).min(n);
                self.stats.prompt_tokens += in_prompt;
                sequence.cached += n;
                Ok(Some(chunk))
            }
            Err(error @ CacheError::OutOfPages { .. }) => {
                self.end(index, FinishReason::OutOfCache(error))?;
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Draws the next token of a sequence and emits what text is certain.
    fn draw(&mut self, index: usize, logits: &mut [f32]) -> Result<()> {
        let (eos, positions) = (self.model.eos_token_ids(), self.model.max_positions());
        let sequence = &mut self.sequences[index];
        let id = sequence.sampler.sample(logits, &sequence.tokens)?;
        sequence.tokens.push(id);
        self.stats.generated_tokens += 1;
        if eos.contains(&id) {
            return self.end(index, FinishReason::Eos);
        }
        let mut stopped = false;
        if let Some((stream, stop)) = &mut sequence.output
            && let Some(text) = stream.push(id)
        {
            let outcome = stop.push(&text);
            stopped = outcome.stopped;
            self.emit(index, &outcome.emit);
        }
        let sequence = &self.sequences[index];
        if stopped {
            self.end(index, FinishReason::StopString)
        } else if sequence.tokens.len() - sequence.prompt_len >= sequence.max_new_tokens {
            self.end(index, FinishReason::MaxNewTokens)
        } else if sequence.tokens.len() > positions {
            self.end(index, FinishReason::MaxPositions)
        } else {
            Ok(())
        }
    }

    fn emit(&mut self, index: usize, text: &str) {
        if !text.is_empty() {
            self.sequences[index].text.push_str(text);
            (self.on_text)(index, text);
        }
    }

    /// Ends a sequence: its held-back text is certain now, and its pages are free.
    fn end(&mut self, index: usize, finish: FinishReason) -> Result<()> {
        if let Some((stream, mut stop)) = self.sequences[index].output.take()
            && finish != FinishReason::StopString
        {
            let outcome = stop.push(&stream.finish().unwrap_or_default());
            let held_back = if outcome.stopped { String::new() } else { stop.finish() };
            self.emit(index, &(outcome.emit + &held_back));
        }
        let sequence = &mut self.sequences[index];
        sequence.finish = Some(finish);
        if let Some(request) = sequence.request.take() {
            self.cache.free(request)?;
        }
        Ok(())
    }

    fn finish(self) -> (Vec<Completion>, GenerationStats) {
        let completion = |sequence: Sequence| Completion {
            token_ids: sequence.tokens[sequence.prompt_len..].to_vec(),
            text: sequence.text,
            // A sequence ends with a reason; one that was asked for no token has reached its maximum.
            finish: sequence.finish.unwrap_or(FinishReason::MaxNewTokens),
        };
        (self.sequences.into_iter().map(completion).collect(), self.stats)
    }
}

impl Sequence {
    fn new(request: &GenerationRequest, tokenizer: &Tokenizer, cache: &mut ModelCache) -> Result<Self> {
        // Without a token to generate there is nothing to compute.
        let finish = (request.max_new_tokens == 0).then_some(FinishReason::MaxNewTokens);
        Ok(Self {
            tokens: request.prompt.clone(),
            prompt_len: request.prompt.len(),
            cached: 0,
            max_new_tokens: request.max_new_tokens,
            sampler: Sampler::new(request.sampling.clone())?,
            output: Some((TextStream::new(tokenizer, true), StopStrings::new(request.stop.clone())?)),
            text: String::new(),
            request: Some(cache.admit()?),
            finish,
        })
    }
}

/// A cache with room for what the requests can need, or of the size that was asked for.
fn new_cache(model: &DeepseekModel, requests: &[GenerationRequest], options: &GenerationOptions) -> Result<ModelCache> {
    // The last generated token is never computed, so that it needs no room.
    let tokens = |request: &GenerationRequest| {
        let all = request.prompt.len() + request.max_new_tokens.saturating_sub(1);
        all.min(model.max_positions())
    };
    let page_size = options.page_size.max(1);
    let needed = requests.iter().map(|request| tokens(request).div_ceil(page_size)).sum::<usize>();
    model.new_cache(CacheSize {
        num_pages: options.cache_pages.map_or(needed.max(1), |pages| pages.min(needed)),
        page_size: options.page_size,
        max_requests: requests.len().max(1),
        max_tokens: requests.iter().map(tokens).max().unwrap_or(0).max(1),
    })
}

/// Logits as f32, on the host.
fn to_host(logits: Tensor<2>) -> Result<Vec<f32>> {
    logits.cast(FloatDType::F32).try_into_vec_as::<f32>().map_err(ModelError::device)
}
