//! A step of the engine: it is launched, then its tokens are sampled, and in between the next one is launched where that can be
//! done without knowing them.

use std::time::Instant;

use burn::tensor::{Int, Tensor};
use mla_ops::{SampleParams, log_probs, read_beside};

use super::choice::{Chosen, HostLogprobs};
use super::rank_engine::{Launched, RankEngine};
use super::reply::Limits;
use super::scheduler::Plan;
use super::stream::FinishReason;
use crate::Result;

impl<'a> RankEngine<'a> {
    /// The step that was launched beside the last one, if somebody still waits for its tokens.
    pub(super) fn launched_before(&mut self) -> Option<Launched> {
        if self.scheduler.running() == 0 {
            self.await_ahead();
        }
        self.ahead.take()
    }

    /// Waits for a step whose tokens are not used, on whichever thread: what it reads and writes may be freed afterwards.
    fn await_ahead(&mut self) {
        if let Some(Launched { chosen: Some(chosen), .. }) = self.ahead.take() {
            // A device that fails says so again to the next who asks.
            let _ = chosen.tokens.try_into_vec_as::<i32>();
        }
    }

    /// Plans a step and launches it; nothing if there is nothing to do.
    pub(super) fn launch(&mut self) -> Result<Option<Launched>> {
        let mut plan = self.scheduler.plan()?;
        for (job, error) in plan.ended.drain(..) {
            self.finish(job, FinishReason::OutOfCache(error));
        }
        if plan.chunks.is_empty() {
            return Ok(None);
        }
        self.note_cache_use();
        let (logits, is_replayed) = self.runner.step(&plan.chunks, &mut self.scheduler.cache)?;
        let complete = self.scheduler.completed_by(&plan);
        let chosen = match complete.is_empty() {
            true => None,
            false => Some(self.choose(logits, &plan, &complete, 0)?),
        };
        Ok(Some(Launched { plan, is_replayed, chosen }))
    }

    /// Launches the step after one whose tokens, i32 `[chunks]`, are still on the device, where that can be done: the step is
    /// captured, and no request is known to come or go.
    fn launch_after(&mut self, before: &Plan, ids: &Tensor<1, Int>) -> Result<Option<Launched>> {
        if !self.all_may_go_on(before) {
            return Ok(None);
        }
        let Some(pages) = self.scheduler.pages_after(before)? else {
            return Ok(None);
        };
        if !self.runner.can_follow(before.jobs.len(), pages, &self.scheduler.cache)? {
            return Ok(None);
        }
        let plan = self.scheduler.plan_after(before)?;
        let logits = self.runner.step_after(&plan.chunks, ids, &mut self.scheduler.cache)?;
        self.note_cache_use();
        let chosen = self.choose(logits, &plan, &plan.jobs, 1)?;
        Ok(Some(Launched { plan, is_replayed: true, chosen: Some(chosen) }))
    }

    /// Samples the tokens of a step, and launches the next one before if it can; returns how many were sampled.
    pub(super) fn sample_all(&mut self, launched: Launched) -> Result<usize> {
        let Launched { plan, chosen, .. } = launched;
        let (mut tokens, mut logprobs) = (Vec::new(), None);
        if let Some(Chosen { tokens: ids, logprobs: wanted }) = chosen {
            let (numbers, next) = read_beside(ids.clone(), || self.launch_after(&plan, &ids))?;
            (tokens, self.ahead) = (numbers, next?);
            logprobs = wanted.map(HostLogprobs::read).transpose()?;
        }
        self.scheduler.computed(&plan)?;
        let mut sampled = 0;
        for (row, (&token, &id)) in tokens.iter().zip(&plan.jobs).enumerate() {
            // A request whose prompt is not complete yet has no use for its token.
            if self.scheduler.is_complete(id) {
                sampled += usize::from(self.sample(id, token, logprobs.as_ref().map(|all| (all, row)))?);
            }
        }
        if sampled > 0 {
            self.stats.time_to_first_token.get_or_insert_with(|| self.start.elapsed());
        }
        Ok(sampled)
    }

    /// The next token of a request, and its end if that has come; whether there was a token.
    fn sample(&mut self, id: u64, token: i32, logprobs: Option<(&HostLogprobs, usize)>) -> Result<bool> {
        self.note_sampled(id, token);
        let limits = self.limits();
        let (Some(job), Some(reply)) = (self.scheduler.running_job_mut(id), self.replies.get_mut(&id)) else {
            return Ok(false);
        };
        let top = reply.sampling().logprobs;
        let logprobs = logprobs.zip(top).map(|((all, row), top)| all.of_row(row, top));
        let end = reply.push(token, logprobs, &mut job.tokens, job.prompt_len, &limits);
        let sampled = !matches!(end, Some(FinishReason::Failed(_)));
        if sampled {
            self.latency.token(id, Instant::now());
        }
        if let Some(reason) = end
            && let Some(job) = self.scheduler.remove(id)?
        {
            self.finish(job, reason);
        }
        Ok(sampled)
    }

    /// Whether none of these requests is known to end with its next token.
    fn all_may_go_on(&self, plan: &Plan) -> bool {
        let limits = self.limits();
        plan.jobs.iter().all(|&id| {
            let both = self.scheduler.running_job(id).zip(self.replies.get(&id));
            both.is_some_and(|(job, reply)| reply.may_go_on(job.tokens.len(), job.prompt_len, &limits))
        })
    }

    fn limits(&self) -> Limits<'a> {
        let model = self.runner.model();
        Limits {
            eos_token_ids: model.eos_token_ids(),
            max_positions: model.max_positions(),
            vocab_size: model.vocab_size(),
        }
    }

    fn note_cache_use(&mut self) {
        self.stats.cache_bytes_peak = self.stats.cache_bytes_peak.max(self.scheduler.cache.bytes_in_use());
    }
}

impl Drop for RankEngine<'_> {
    fn drop(&mut self) {
        self.await_ahead();
    }
}

impl RankEngine<'_> {
    /// The tokens that follow the logits `[chunks, vocab]` of a plan: i32 `[chunks]`, -1 where no logit is finite. Of requests
    /// which the plan does not complete it is any token. `ahead`: tokens of each request that are chosen, but not on the host.
    pub(super) fn choose(&mut self, logits: Tensor<2>, plan: &Plan, complete: &[u64], ahead: usize) -> Result<Chosen> {
        let (mut rows, mut top) = (Vec::with_capacity(plan.jobs.len()), None);
        for &id in &plan.jobs {
            let reply = self.replies.get(&id).filter(|_| complete.contains(&id));
            let (Some(reply), Some(job)) = (reply, self.scheduler.running_job(id)) else {
                rows.push(SampleParams::GREEDY);
                continue;
            };
            top = top.max(reply.sampling().logprobs);
            let mut params = reply.sampling().at(job.tokens.len() + ahead);
            if params.repetition_penalty != 1.0 {
                let is_running = |id| self.scheduler.running_job(id).is_some();
                let row = self.seen.row_of(job, is_running, &logits, self.max_batch)?;
                params.seen_row = Some(row);
            }
            rows.push(params);
        }
        let raw = top.map(|top| (top, logits.clone()));
        let tokens = self.seen.choose(logits, &rows)?;
        // At least one: that the operation has, and nobody asks for it.
        let logprobs = raw.map(|(top, logits)| log_probs(logits, tokens.clone(), top.max(1))).transpose()?;
        Ok(Chosen { tokens, logprobs })
    }
}
