//! Many requests on one model: continuous batching, chunked prefill, prefix caching, preemption and recomputation.

mod launch;
mod prefix_tree;
mod reply;
mod scheduler;
mod stream;
mod warm_up;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use mla_ops::cache::CacheError;
use mla_ops::largest_buffer;

use self::launch::Launched;
use self::reply::Reply;
use self::scheduler::{Job, Scheduler};
pub use self::stream::{Completion, FinishReason, RequestStream, StreamEvent};
pub use self::warm_up::{compile_ahead, compile_all_ahead};
use crate::cache::CacheSize;
use crate::decode_graph::GraphSupport;
use crate::model::DeepseekModel;
use crate::request::GenerationRequest;
use crate::runner::Runner;
use crate::tokenizer::Tokenizer;
use crate::{ModelError, Result};

/// Sizes and modes of an [`Engine`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineOptions {
    /// Tokens in a cache page, a power of two.
    pub page_size: usize,
    /// Pages of the cache: what all running requests share.
    pub cache_pages: usize,
    /// Requests that run at once at most.
    pub max_batch: usize,
    /// Tokens in a forward pass at most: one of each request that generates, the rest from prompts. At least `max_batch`,
    /// so that no request waits for ever.
    pub token_budget: usize,
    /// Prefix caching: whether requests that begin alike share pages. Not DeepSeek-V4's: the state that it keeps of a request
    /// beside its pages belongs to one position of one request.
    pub prefix_caching: bool,
    /// Whether a request's logits are the same, bit for bit, whatever else runs and however its prompt is divided. Costs
    /// speed; on GPUs other than Hopper mostly in the prompts.
    pub deterministic: bool,
    /// Whether steps with one token of each request are captured, and replayed for batches up to the next power of two, on
    /// devices that have graphs; [`EngineStats::graphs`] says why they are not. While CUDA captures a step, it refuses memory to all
    /// other threads of the program that ask for some on the device.
    pub graphs: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            page_size: 64,
            cache_pages: 512,
            max_batch: 64,
            token_budget: 512,
            prefix_caching: true,
            deterministic: false,
            graphs: false,
        }
    }
}

/// Buffers from which on a device takes steps of many tokens: V3's activations of as many fit into one.
const LARGE_BUFFER: u64 = 4 << 30;

impl EngineOptions {
    /// The default for a device: a `token_budget` of 8192 where a tensor may have 4 GiB (data-centre GPUs), else of 512. More tokens
    /// in a step make prefill faster, and take more memory.
    pub fn on(device: &Device) -> Self {
        let default = Self::default();
        let large = largest_buffer(device).is_some_and(|bytes| bytes >= LARGE_BUFFER);
        Self { token_budget: if large { 8192 } else { default.token_budget }, ..default }
    }

    /// The cache of an engine.
    fn cache_size(&self, model: &DeepseekModel) -> CacheSize {
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

/// Counts and times since an engine began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Forward passes.
    pub steps: usize,
    /// Whether decode steps are captured and replayed, and why not.
    pub graphs: GraphSupport,
    /// Those of the forward passes that were replayed from a captured graph.
    pub graph_steps: usize,
    /// Those that were launched before the tokens of the step before were on the host.
    pub ahead_steps: usize,
    /// Prompt tokens that were computed, without the hits of the prefix cache; each once.
    pub prompt_tokens: usize,
    /// Tokens that were recomputed after a preemption.
    pub recomputed_tokens: usize,
    /// Tokens with which requests began to run, or ran again: what was looked up in the prefix cache.
    pub prefix_queries: usize,
    /// Those of them whose rows were found there.
    pub prefix_hits: usize,
    /// Times that a request was preempted: it gave up its pages, and is recomputed later.
    pub preemptions: usize,
    /// Tokens generated.
    pub generated_tokens: usize,
    /// Those of them that were generated in steps with nothing but one token of each request.
    pub decode_tokens: usize,
    /// Time of those steps, until their tokens are on the host.
    pub decode_time: Duration,
    /// Time of all other steps, until their tokens are on the host. A step that completes no prompt gives none: on a GPU its time is
    /// that of its launches, and the step that completes the prompt, which counts here, too, waits for both.
    pub prefill_time: Duration,
    /// From the engine's beginning until the first token of any request.
    pub time_to_first_token: Option<Duration>,
    /// Cache memory of a token, all layers, in bytes.
    pub cache_bytes_per_token: usize,
    /// Cache memory in use, pages of former requests included, in bytes.
    pub cache_bytes: usize,
    /// The most that it has been.
    pub cache_bytes_peak: usize,
    /// Pages of the cache.
    pub pages: usize,
    /// Pages that requests hold.
    pub pages_in_use: usize,
    /// Pages that only the prefix cache holds; they are evicted when a request needs them.
    pub pages_idle: usize,
}

impl EngineStats {
    /// Tokens of prompts that were computed, and recomputed, per second of [`Self::prefill_time`]; 0 where there were none.
    pub fn prefill_rate(&self) -> f64 {
        rate(self.prompt_tokens + self.recomputed_tokens, self.prefill_time)
    }

    /// Tokens per second of [`Self::decode_time`]; 0 where there were none.
    pub fn decode_rate(&self) -> f64 {
        rate(self.decode_tokens, self.decode_time)
    }

    /// The hit rate of the prefix cache, 0 to 1.
    pub fn prefix_hit_rate(&self) -> f64 {
        self.prefix_hits as f64 / self.prefix_queries.max(1) as f64
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() }
}

/// Runs requests together, a step at a time (continuous batching; Yu et al., Orca, OSDI 2022).
///
/// A step takes one token of each request that generates, and fills up `token_budget` with chunks of prompts: those of running
/// requests first, then of waiting ones, in the order of their arrival. When the pages run out, the youngest request is
/// preempted: it gives up its own and waits; its tokens are kept and recomputed later, so that nothing of its text is lost. A text ends with
/// [`FinishReason::OutOfCache`] only if the whole cache is too small for it.
///
/// Where steps are captured ([`EngineOptions::graphs`]) and all requests are greedy, the next step is launched
/// before the tokens of the last one are on the host: the device does not wait for it. A request that ends with a token that
/// was not foreseen has then computed one too many, which is discarded; a new one begins a step later.
///
/// ```no_run
/// # fn main() -> deepseek_model::Result<()> {
/// # let device = burn::tensor::Device::flex();
/// # let dir = std::path::Path::new("assets/demo-v3");
/// # let dtype = burn::tensor::FloatDType::F32;
/// use deepseek_model::{DeepseekModel, Engine, EngineOptions, GenerationRequest, SamplingParams, StreamEvent, Tokenizer};
///
/// let model = DeepseekModel::load(dir, &device, dtype, &mut |_| {})?;
/// let tokenizer = Tokenizer::load(dir)?;
/// let mut engine = Engine::new(&model, &tokenizer, EngineOptions::default())?;
/// let prompt = tokenizer.encode("hacker: n.", true)?;
/// let sampling = SamplingParams::greedy();
/// let mut stream = engine.submit(GenerationRequest { prompt, sampling, max_new_tokens: 60, stop: vec![] })?;
/// while engine.step()? {
///     while let Some(StreamEvent::Text(text)) = stream.try_next() {
///         print!("{text}");
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Engine<'a> {
    runner: Runner<'a>,
    tokenizer: &'a Tokenizer,
    scheduler: Scheduler,
    replies: HashMap<u64, Reply>,
    /// The next step, where it could be launched before the tokens of the last one were known.
    ahead: Option<Launched>,
    /// The error of the step that failed, if one has.
    failed: Option<String>,
    next_id: u64,
    stats: EngineStats,
    start: Instant,
}

impl<'a> Engine<'a> {
    /// An engine without requests; its cache is allocated.
    ///
    /// # Errors
    /// A size that is zero or too large, a page size that is no power of two, a budget below `max_batch`;
    /// `deterministic` where the device cannot be.
    pub fn new(model: &'a DeepseekModel, tokenizer: &'a Tokenizer, options: EngineOptions) -> Result<Self> {
        let EngineOptions { max_batch, token_budget, .. } = options;
        if token_budget < max_batch {
            let expected = format!("at least `max_batch` = {max_batch}, a token for each request that runs");
            return Err(ModelError::request("token_budget", token_budget, expected));
        }
        let runner = Runner::new(model, options.deterministic, options.graphs)?;
        let cache = runner.new_cache(options.cache_size(model))?;
        let cache_bytes_per_token = cache.bytes_per_token();
        let stats = EngineStats { graphs: runner.graphs(), cache_bytes_per_token, ..Default::default() };
        Ok(Self {
            runner,
            tokenizer,
            scheduler: Scheduler::new(cache, options.prefix_caching, max_batch, token_budget),
            replies: HashMap::new(),
            ahead: None,
            failed: None,
            next_id: 0,
            stats,
            start: Instant::now(),
        })
    }

    /// Takes a request, which starts with one of the next steps.
    ///
    /// # Errors
    /// [`ModelError::Request`] naming what is wrong with it; the others go on. [`ModelError::EngineFailed`] after a step that failed.
    pub fn submit(&mut self, request: GenerationRequest) -> Result<RequestStream> {
        self.check_works()?;
        let model = self.runner.model();
        request.check(model.max_positions(), model.vocab_size())?;
        let id = self.next_id;
        let (reply, stream) = Reply::new(id, &request, self.tokenizer)?;
        self.next_id += 1;
        if request.max_new_tokens == 0 {
            reply.finish(Vec::new(), FinishReason::MaxNewTokens);
        } else if let Some(error) = self.never_fits(&request.prompt) {
            reply.finish(Vec::new(), FinishReason::OutOfCache(error));
        } else {
            self.scheduler.push(Job::new(id, request.prompt));
            self.replies.insert(id, reply);
        }
        Ok(stream)
    }

    /// Ends a request at once; its stream finishes with [`FinishReason::Cancelled`]. Whether it was there.
    ///
    /// # Errors
    /// A cache that is damaged.
    pub fn cancel(&mut self, id: u64) -> Result<bool> {
        let job = self.scheduler.remove(id)?;
        let found = job.is_some();
        if let Some(job) = job {
            self.finish(job, FinishReason::Cancelled);
        }
        Ok(found)
    }

    /// One forward pass, and a token of each request whose prompt is complete. Whether requests are left.
    ///
    /// Logits of which none is finite end their request alone, with [`FinishReason::Failed`].
    ///
    /// # Errors
    /// A failure of the device, or of a communicator. The tokens of the step may be in the cache or not: every later call
    /// is [`ModelError::EngineFailed`]. What streams hold can be read, and requests can be cancelled.
    pub fn step(&mut self) -> Result<bool> {
        self.check_works()?;
        let outcome = self.try_step();
        self.failed = outcome.as_ref().err().map(ToString::to_string);
        outcome
    }

    fn check_works(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), |reason| Err(ModelError::EngineFailed { reason }))
    }

    fn try_step(&mut self) -> Result<bool> {
        let start = Instant::now();
        self.cancel_unheard()?;
        let ahead = self.launched_before();
        let is_ahead = ahead.is_some();
        if let Some(launched) = ahead.map_or_else(|| self.launch(), |ahead| Ok(Some(ahead)))? {
            let (decodes, is_replayed) = (launched.plan.has_one_token_each(), launched.is_replayed);
            let sampled = self.sample_all(launched)?;
            self.stats.steps += 1;
            self.stats.graph_steps += usize::from(is_replayed);
            self.stats.ahead_steps += usize::from(is_ahead);
            self.stats.generated_tokens += sampled;
            match decodes {
                true => {
                    self.stats.decode_tokens += sampled;
                    self.stats.decode_time += start.elapsed();
                }
                false => self.stats.prefill_time += start.elapsed(),
            }
        }
        Ok(self.requests() > 0)
    }

    /// Requests that run or wait.
    pub fn requests(&self) -> usize {
        self.running() + self.waiting()
    }

    /// Requests that run.
    pub fn running(&self) -> usize {
        self.scheduler.running()
    }

    /// Requests that wait for a place in the batch or for pages.
    pub fn waiting(&self) -> usize {
        self.scheduler.waiting()
    }

    /// Counts and times so far.
    pub fn stats(&self) -> EngineStats {
        let (counts, cache) = (self.scheduler.counts, &self.scheduler.cache);
        let pages_idle = self.scheduler.idle_pages();
        EngineStats {
            prompt_tokens: counts.prompt_tokens,
            recomputed_tokens: counts.recomputed_tokens,
            prefix_queries: counts.prefix_queries,
            prefix_hits: counts.prefix_hits,
            preemptions: counts.preemptions,
            cache_bytes: cache.bytes_in_use(),
            pages: cache.num_pages(),
            pages_in_use: cache.num_pages() - cache.free_pages() - pages_idle,
            pages_idle,
            ..self.stats
        }
    }

    /// Frees the pages that only the prefix cache holds.
    ///
    /// # Errors
    /// A cache that is damaged.
    pub fn reset_prefix_cache(&mut self) -> Result<()> {
        self.scheduler.reset_prefix_cache()
    }

    /// Why the whole cache is too small for a prompt, if it is.
    fn never_fits(&self, prompt: &[u32]) -> Option<CacheError> {
        let cache = &self.scheduler.cache;
        let (needed, total) = (prompt.len().div_ceil(cache.page_size()), cache.num_pages());
        (needed > total).then_some(CacheError::OutOfPages { needed, free: total, total })
    }

    /// Ends the requests whose streams were dropped.
    fn cancel_unheard(&mut self) -> Result<()> {
        let unheard = self.replies.iter().filter(|(_, reply)| !reply.is_heard());
        let mut ids: Vec<u64> = unheard.map(|(&id, _)| id).collect();
        ids.sort_unstable();
        for id in ids {
            self.cancel(id)?;
        }
        Ok(())
    }

    fn finish(&mut self, job: Job, reason: FinishReason) {
        if let Some(reply) = self.replies.remove(&job.id) {
            reply.finish(job.tokens[job.prompt_len..].to_vec(), reason);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_the_tokens_that_were_computed() {
        let (prefill_time, decode_time) = (Duration::from_millis(500), Duration::from_secs(2));
        let stats = EngineStats {
            prompt_tokens: 90,
            recomputed_tokens: 10,
            decode_tokens: 30,
            prefill_time,
            decode_time,
            ..Default::default()
        };
        assert_eq!((stats.prefill_rate(), stats.decode_rate()), (200.0, 15.0));
        assert_eq!(EngineStats::default().prefill_rate(), 0.0);
    }

    /// A server may build its engine on one thread and run it on another.
    #[test]
    fn an_engine_may_move_to_another_thread() {
        fn is_send<T: Send>() {}
        is_send::<Engine>();
    }
}
