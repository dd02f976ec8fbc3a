//! The engine of one rank, or of a model that is whole: requests, steps, and what they are answered.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use mla_ops::cache::CacheError;

use super::choice::{Chosen, Seen};
use super::latency::InterTokenLatency;
use super::prefix_cache::PrefixCache;
use super::reply::Reply;
use super::scheduler::{Job, Plan, Scheduler};
use super::{EngineOptions, EngineStats, FinishReason, RequestStream};
use crate::model::DeepseekModel;
use crate::request::GenerationRequest;
use crate::runner::Runner;
use crate::tokenizer::Tokenizer;
use crate::{ModelError, Result, memory};

/// A step that the device works on, or has done.
#[derive(Debug)]
pub(super) struct Launched {
    pub(super) plan: Plan,
    /// Whether it was replayed from a graph.
    pub(super) is_replayed: bool,
    /// The next tokens. Absent where no request is complete.
    pub(super) chosen: Option<Chosen>,
}

/// What an [`Engine`](super::Engine) is on one device. Ranks have one each, with the same requests and the same steps: what they do
/// depends on nothing else, and every one has all logits, so that all sample the same tokens.
#[derive(Debug)]
pub(super) struct RankEngine<'a> {
    pub(super) runner: Runner<'a>,
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) scheduler: Scheduler,
    pub(super) replies: HashMap<u64, Reply>,
    pub(super) seen: Seen,
    pub(super) max_batch: usize,
    /// The ids of streams that were dropped.
    dropped: (Sender<u64>, Receiver<u64>),
    /// The next step, where it could be launched before the tokens of the last one were known.
    pub(super) ahead: Option<Launched>,
    /// The error of the step that failed, if one has.
    failed: Option<String>,
    next_id: u64,
    pub(super) latency: InterTokenLatency,
    pub(super) stats: EngineStats,
    pub(super) start: Instant,
    /// All tokens that were sampled, as one number (FNV-1a): ranks can tell whether they have the same.
    sampled: u64,
}

impl<'a> RankEngine<'a> {
    /// An engine without requests; its cache is allocated.
    ///
    /// # Errors
    /// A size that is zero or too large, a page size that is no power of two, a budget below `max_batch` or of no prompts, snapshots
    /// that are not at ends of pages; `deterministic` where the device cannot be.
    pub(super) fn new(model: &'a DeepseekModel, tokenizer: &'a Tokenizer, options: EngineOptions) -> Result<Self> {
        let EngineOptions { max_batch, token_budget, mixed_prompt_tokens, .. } = options;
        if token_budget < max_batch {
            let expected = format!("at least `max_batch` = {max_batch}, a token for each request that runs");
            return Err(ModelError::request("token_budget", token_budget, expected));
        }
        if mixed_prompt_tokens == 0 {
            return Err(ModelError::request("mixed_prompt_tokens", 0, "at least 1 token"));
        }
        let runner = Runner::new(model, options.deterministic, options.graphs)?;
        let mut cache = runner.new_cache(options.cache_size(model))?;
        let prefixes = PrefixCache::of_engine(&options, model.prefix_support(), &mut cache)?;
        let cache_bytes_per_token = cache.bytes_per_token();
        let stats = EngineStats {
            ranks: model.parallel().size(),
            graphs: runner.graphs(),
            cache_bytes_per_token,
            ..Default::default()
        };
        Ok(Self {
            runner,
            tokenizer,
            scheduler: Scheduler::new(cache, prefixes, max_batch, [token_budget, mixed_prompt_tokens]),
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
            sampled: 0xcbf2_9ce4_8422_2325,
        })
    }

    /// Takes a request, which starts with one of the next steps.
    ///
    /// # Errors
    /// [`ModelError::Request`] naming what is wrong with it; the others go on. [`ModelError::EngineFailed`] after a step that failed.
    pub(super) fn submit(&mut self, request: GenerationRequest) -> Result<RequestStream> {
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
    pub(super) fn cancel(&mut self, id: u64) -> Result<bool> {
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
    pub(super) fn step(&mut self) -> Result<bool> {
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
    pub(super) fn requests(&self) -> usize {
        self.running() + self.waiting()
    }

    /// Requests that run.
    pub(super) fn running(&self) -> usize {
        self.scheduler.running()
    }

    /// Requests that wait for a place in the batch or for pages.
    pub(super) fn waiting(&self) -> usize {
        self.scheduler.waiting()
    }

    /// Counts and times so far.
    pub(super) fn stats(&self) -> EngineStats {
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
    pub(super) fn reset_prefix_cache(&mut self) -> Result<()> {
        self.scheduler.reset_prefix_cache()
    }

    /// Forgets the times between tokens so far.
    pub(super) fn reset_latency(&mut self) {
        self.latency = InterTokenLatency::default();
    }

    /// Has the other ranks know that this one takes no more steps.
    pub(super) fn leave(&self, reason: &str) {
        self.runner.model().parallel().leave(reason);
    }

    /// All tokens that were sampled, as one number.
    pub(super) fn sampled(&self) -> u64 {
        self.sampled
    }

    /// Notes that a request's next token is this one.
    pub(super) fn note_sampled(&mut self, id: u64, token: i32) {
        for word in [id, u64::from(token.cast_unsigned())] {
            self.sampled = (self.sampled ^ word).wrapping_mul(0x100_0000_01b3);
        }
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

    pub(super) fn finish(&mut self, job: Job, reason: FinishReason) {
        self.latency.ended(job.id);
        if let Some(reply) = self.replies.remove(&job.id) {
            reply.finish(job.tokens[job.prompt_len..].to_vec(), reason);
        }
    }
}

#[cfg(all(test, feature = "flex"))]
#[path = "failed_step_tests.rs"]
mod tests;
