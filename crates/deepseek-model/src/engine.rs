//! Many requests on one model: continuous batching, chunked prefill, prefix caching, preemption and recomputation.

mod cache_pages;
mod choice;
mod latency;
mod launch;
mod options;
mod prefix_cache;
mod prefix_tree;
mod reply;
mod scheduler;
mod stats;
mod stream;
mod warm_up;

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use mla_ops::cache::CacheError;

use self::choice::Seen;
use self::latency::InterTokenLatency;
use self::launch::Launched;
pub use self::options::EngineOptions;
use self::prefix_cache::PrefixCache;
use self::reply::Reply;
use self::scheduler::{Job, Scheduler};
pub use self::stats::EngineStats;
pub use self::stream::{Completion, FinishReason, RequestStream, StreamEvent, TokenLogprobs};
pub use self::warm_up::{compile_ahead, compile_all_ahead};
use crate::model::DeepseekModel;
use crate::request::GenerationRequest;
use crate::runner::Runner;
use crate::tokenizer::Tokenizer;
use crate::{ModelError, Result, memory};

/// Runs requests together, a step at a time (continuous batching; Yu et al., Orca, OSDI 2022).
///
/// A step takes one token of each request that generates, and fills up `token_budget` with chunks of prompts: those of running
/// requests first, then of waiting ones, in the order of their arrival. When the pages run out, the youngest request is
/// preempted: it gives up its own and waits; its tokens are kept and recomputed later, so that nothing of its text is lost. A text ends with
/// [`FinishReason::OutOfCache`] only if the whole cache is too small for it.
///
/// Tokens are chosen on the device, where logits stay. Where steps are captured ([`EngineOptions::graphs`]), the next step is launched
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
    seen: Seen,
    max_batch: usize,
    /// The ids of streams that were dropped.
    dropped: (Sender<u64>, Receiver<u64>),
    /// The next step, where it could be launched before the tokens of the last one were known.
    ahead: Option<Launched>,
    /// The error of the step that failed, if one has.
    failed: Option<String>,
    next_id: u64,
    latency: InterTokenLatency,
    stats: EngineStats,
    start: Instant,
}

impl<'a> Engine<'a> {
    /// An engine without requests; its cache is allocated.
    ///
    /// # Errors
    /// A size that is zero or too large, a page size that is no power of two, a budget below `max_batch`, snapshots that are not at
    /// ends of pages; `deterministic` where the device cannot be.
    pub fn new(model: &'a DeepseekModel, tokenizer: &'a Tokenizer, options: EngineOptions) -> Result<Self> {
        let EngineOptions { max_batch, token_budget, .. } = options;
        if token_budget < max_batch {
            let expected = format!("at least `max_batch` = {max_batch}, a token for each request that runs");
            return Err(ModelError::request("token_budget", token_budget, expected));
        }
        let runner = Runner::new(model, options.deterministic, options.graphs)?;
        let mut cache = runner.new_cache(options.cache_size(model))?;
        let prefixes = PrefixCache::of_engine(&options, model.prefix_support(), &mut cache)?;
        let cache_bytes_per_token = cache.bytes_per_token();
        let stats = EngineStats { graphs: runner.graphs(), cache_bytes_per_token, ..Default::default() };
        Ok(Self {
            runner,
            tokenizer,
            scheduler: Scheduler::new(cache, prefixes, max_batch, token_budget),
            replies: HashMap::new(),
            seen: Seen::default(),
            max_batch,
            dropped: channel(),
            ahead: None,
            failed: None,
            next_id: 0,
            latency: InterTokenLatency::default(),
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
        let (reply, stream) = Reply::new(id, &request, self.tokenizer, self.dropped.0.clone())?;
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
    /// [`ModelError::OutOfMemory`] and other failures of the device, or of a communicator. The tokens of the step are no longer in
    /// the cache, but in DeepSeek-V4's states they may be, and on a GPU the pools are then without numbers: every later call is
    /// [`ModelError::EngineFailed`]. A new engine on the same model can be used. What streams hold can be read, and requests can be cancelled.
    pub fn step(&mut self) -> Result<bool> {
        self.check_works()?;
        let device = self.runner.model().device();
        let outcome = self.try_step().map_err(|error| memory::of_failure("a buffer of a step", error, device));
        if let Err(error) = &outcome {
            self.failed = Some(error.to_string());
            // The step's own error says more than one of these pages would.
            let _ = self.scheduler.roll_back();
        }
        outcome
    }

    fn check_works(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), |reason| Err(ModelError::EngineFailed { reason }))
    }

    fn try_step(&mut self) -> Result<bool> {
        let start = Instant::now();
        self.cancel_dropped()?;
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
        let [snapshots, snapshot_slots] = self.scheduler.snapshots();
        EngineStats {
            uncaptured_sizes: self.runner.uncaptured_sizes(),
            prompt_tokens: counts.prompt_tokens,
            recomputed_tokens: counts.recomputed_tokens,
            prefix_queries: counts.prefix_queries,
            prefix_hits: counts.prefix_hits,
            preemptions: counts.preemptions,
            inter_token_p50: self.latency.percentile(50),
            inter_token_p99: self.latency.percentile(99),
            cache_bytes: cache.bytes_in_use(),
            pages: cache.num_pages(),
            pages_in_use: cache.num_pages() - cache.free_pages() - pages_idle,
            pages_idle,
            snapshot_slots,
            snapshots,
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
    fn cancel_dropped(&mut self) -> Result<()> {
        let mut ids: Vec<u64> = self.dropped.1.try_iter().collect();
        ids.sort_unstable();
        for id in ids {
            self.cancel(id)?;
        }
        Ok(())
    }

    fn finish(&mut self, job: Job, reason: FinishReason) {
        self.latency.ended(job.id);
        if let Some(reply) = self.replies.remove(&job.id) {
            reply.finish(job.tokens[job.prompt_len..].to_vec(), reason);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server may build its engine on one thread and run it on another.
    #[test]
    fn an_engine_may_move_to_another_thread() {
        fn is_send<T: Send>() {}
        is_send::<Engine>();
    }
}
