//! A step of the engine: it is launched, then its tokens are sampled, and in between the next one is launched where that can be
//! done without knowing them.

use burn::tensor::{FloatDType, Int, Tensor};
use mla_ops::{argmax, read_beside};

use super::Engine;
use super::reply::{Limits, Next, Reply};
use super::scheduler::Plan;
use super::stream::FinishReason;
use crate::{ModelError, Result};

/// A step that the device works on, or has done.
#[derive(Debug)]
pub(super) struct Launched {
    pub(super) plan: Plan,
    /// Whether it was replayed from a graph.
    pub(super) is_replayed: bool,
    choice: Choice,
}

/// What the next tokens are sampled from, on the device.
#[derive(Debug)]
enum Choice {
    /// No request is complete.
    Nothing,
    /// The greedy tokens, i32 `[chunks]`: the logits of a large batch would take longer to the host than a step takes.
    Greedy(Tensor<1, Int>),
    /// Logits `[chunks, vocab]`.
    Logits(Tensor<2>),
}

impl<'a> Engine<'a> {
    /// The step that was launched beside the last one, if somebody still waits for its tokens.
    pub(super) fn launched_before(&mut self) -> Option<Launched> {
        if self.scheduler.running() == 0 {
            self.await_ahead();
        }
        self.ahead.take()
    }

    /// Waits for a step whose tokens are not used, on whichever thread: what it reads and writes may be freed afterwards.
    fn await_ahead(&mut self) {
        if let Some(Launched { choice: Choice::Greedy(ids), .. }) = self.ahead.take() {
            // A device that fails says so again to the next who asks.
            let _ = ids.try_into_vec_as::<i32>();
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
        let is_greedy = |id: &u64| self.replies.get(id).is_none_or(Reply::is_greedy);
        let choice = match () {
            _ if complete.is_empty() => Choice::Nothing,
            _ if complete.iter().all(is_greedy) => Choice::Greedy(argmax(logits)?),
            _ => Choice::Logits(logits),
        };
        Ok(Some(Launched { plan, is_replayed, choice }))
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
        if !self.runner.can_follow(before.jobs.len(), pages, &self.scheduler.cache) {
            return Ok(None);
        }
        let plan = self.scheduler.plan_after(before)?;
        let logits = self.runner.step_after(&plan.chunks, ids, &mut self.scheduler.cache)?;
        self.note_cache_use();
        Ok(Some(Launched { plan, is_replayed: true, choice: Choice::Greedy(argmax(logits)?) }))
    }

    /// Samples the tokens of a step, and launches the next one before if it can; returns how many were sampled.
    pub(super) fn sample_all(&mut self, launched: Launched) -> Result<usize> {
        let Launched { plan, choice, .. } = launched;
        let (mut greedy, mut logits) = (Vec::new(), Vec::new());
        match choice {
            Choice::Nothing => {}
            Choice::Greedy(ids) => {
                let (numbers, next) = read_beside(ids.clone(), || self.launch_after(&plan, &ids))?;
                (greedy, self.ahead) = (numbers, next?);
            }
            Choice::Logits(rows) => logits = to_host(rows)?,
        }
        self.scheduler.computed(&plan)?;
        let (mut sampled, vocab) = (0, self.runner.model().vocab_size());
        for (row, &id) in plan.jobs.iter().enumerate() {
            // A request whose prompt is not complete yet has no use for the logits.
            if self.scheduler.is_complete(id) {
                let next = match greedy.get(row) {
                    Some(&id) => Next::Greedy { id, vocab },
                    None => Next::Logits(&mut logits[row * vocab..(row + 1) * vocab]),
                };
                sampled += usize::from(self.sample(id, next)?);
            }
        }
        if sampled > 0 {
            self.stats.time_to_first_token.get_or_insert_with(|| self.start.elapsed());
        }
        Ok(sampled)
    }

    /// The next token of a request, and its end if that has come; whether there was a token.
    fn sample(&mut self, id: u64, next: Next) -> Result<bool> {
        let limits = self.limits();
        let (Some(job), Some(reply)) = (self.scheduler.running_job_mut(id), self.replies.get_mut(&id)) else {
            return Ok(false);
        };
        let end = reply.sample(next, &mut job.tokens, job.prompt_len, &limits);
        let sampled = !matches!(end, Some(FinishReason::Failed(_)));
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
        Limits { eos_token_ids: model.eos_token_ids(), max_positions: model.max_positions() }
    }

    fn note_cache_use(&mut self) {
        self.stats.cache_bytes_peak = self.stats.cache_bytes_peak.max(self.scheduler.cache.bytes_in_use());
    }
}

impl Drop for Engine<'_> {
    fn drop(&mut self) {
        self.await_ahead();
    }
}

/// Logits as f32, on the host.
fn to_host(logits: Tensor<2>) -> Result<Vec<f32>> {
    logits.cast(FloatDType::F32).try_into_vec_as::<f32>().map_err(ModelError::device)
}
