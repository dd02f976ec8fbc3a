//! Which requests compute how many tokens in the next step, and who gives up pages for it.

use std::collections::BTreeMap;

use mla_ops::cache::{CacheError, RequestId};

use super::prefix_cache::{Prefix, PrefixCache};
use super::prefix_tree::Found;
use crate::Result;
use crate::cache::ModelCache;
use crate::step::Chunk;

/// A request as the scheduler sees it: tokens, and how many of them are in the cache.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) id: u64,
    /// Prompt and generated tokens.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_len: usize,
    /// Tokens whose rows are in the cache.
    cached: usize,
    /// The most that `cached` has been: what is computed below it is computed again.
    most_cached: usize,
    /// Its place in the cache, while it runs.
    place: Option<RequestId>,
    /// How far its tokens were found among those of others.
    found: Found,
}

impl Job {
    pub(crate) fn new(id: u64, prompt: Vec<u32>) -> Self {
        let (cached, most_cached, place, found) = Default::default();
        Self { id, prompt_len: prompt.len(), tokens: prompt, cached, most_cached, place, found }
    }

    fn missing(&self) -> usize {
        self.tokens.len() - self.cached
    }
}

/// The work of a step.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// What the model computes.
    pub(crate) chunks: Vec<Chunk>,
    /// The job of each chunk.
    pub(crate) jobs: Vec<u64>,
    /// Tokens of all chunks.
    tokens: usize,
    /// Those of requests that generate.
    generated: usize,
    /// Jobs that can have no page for their next token, though they have the cache for themselves.
    pub(crate) ended: Vec<(Job, CacheError)>,
}

impl Plan {
    pub(crate) fn has_one_token_each(&self) -> bool {
        self.chunks.iter().all(|chunk| chunk.tokens.len() == 1)
    }
}

/// What the scheduler has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Tokens of prompts that were computed, each once.
    pub(crate) prompt_tokens: usize,
    /// Tokens that were computed before, and lost to other requests.
    pub(crate) recomputed_tokens: usize,
    /// Tokens of requests that began to run, or ran again after a preemption.
    pub(crate) prefix_queries: usize,
    /// Those of them that were found in the prefix cache.
    pub(crate) prefix_hits: usize,
    /// Times that a request gave up its pages.
    pub(crate) preemptions: usize,
}

/// Requests that wait and run.
///
/// First come, first served: a request that runs gives up its pages only to older ones, and is then the first to run again.
/// Its tokens are kept, their rows are computed again.
#[derive(Debug)]
pub(crate) struct Scheduler {
    pub(crate) cache: ModelCache,
    /// Where requests that begin alike share what they begin with.
    prefixes: Option<PrefixCache>,
    /// By their ids: the oldest first. All are younger than those that run.
    waiting: BTreeMap<u64, Job>,
    /// The oldest first, that is by their ids.
    running: Vec<Job>,
    max_batch: usize,
    token_budget: usize,
    /// Of the budget, where requests generate.
    mixed_prompt_tokens: usize,
    pub(crate) counts: Counts,
}

impl Scheduler {
    /// A request holds a row of the cache while it runs: the cache has `max_batch` of them. Budgets are those of a step, and of prompts in
    /// one in which requests generate.
    pub(crate) fn new(
        cache: ModelCache,
        prefixes: Option<PrefixCache>,
        max_batch: usize,
        [token_budget, mixed_prompt_tokens]: [usize; 2],
    ) -> Self {
        let (waiting, running, counts) = Default::default();
        Self { cache, prefixes, waiting, running, max_batch, token_budget, mixed_prompt_tokens, counts }
    }

    /// Takes a job that is younger than all others: its id is larger.
    pub(crate) fn push(&mut self, job: Job) {
        self.waiting.insert(job.id, job);
    }

    pub(crate) fn running(&self) -> usize {
        self.running.len()
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Pages that only wait for a request that begins with them.
    pub(crate) fn idle_pages(&self) -> usize {
        // Pages before one that is in use are in use, too (`PrefixTree::insert`): so all of these could leave the tree.
        self.cache.pages().idle_pages()
    }

    /// Snapshots that are kept, and slots for them.
    pub(crate) fn snapshots(&self) -> [usize; 2] {
        self.prefixes.as_ref().map_or([0; 2], PrefixCache::snapshots)
    }

    /// Makes room for the tokens of the next step: one of each request that generates, then chunks of prompts as far as the
    /// budgets go, of the running requests and then of waiting ones.
    pub(crate) fn plan(&mut self) -> Result<Plan> {
        let mut plan = Plan::default();
        for generating in [true, false] {
            let ids: Vec<u64> = self.running.iter().map(|job| job.id).collect();
            for id in ids {
                // Those before it may have taken its pages, or have ended it.
                let Some(index) = self.index_of(id) else {
                    continue;
                };
                let n = self.running[index].missing();
                if (n == 1) == generating {
                    self.give(index, n, &mut plan)?;
                }
            }
            plan.generated = if generating { plan.tokens } else { plan.generated };
        }
        // Whoever has just given up pages must not take them back.
        let preempted = self.counts.preemptions;
        while self.running.len() < self.max_batch && self.budget_left(&plan) > 0 && self.counts.preemptions == preempted
        {
            if !self.admit()? {
                break;
            }
            let index = self.running.len() - 1;
            let n = self.running[index].missing();
            self.give(index, n, &mut plan)?;
        }
        Ok(plan)
    }

    /// Pages of the longest request in the step after this plan, if that has the next token of each of its requests, whatever it
    /// will be: all are complete, no other request may begin, none has to be preempted.
    pub(crate) fn pages_after(&self, plan: &Plan) -> Result<Option<usize>> {
        let nobody_joins = self.waiting.is_empty() || self.running.len() >= self.max_batch;
        if !nobody_joins || !self.running.iter().map(|job| job.id).eq(plan.jobs.iter().copied()) {
            return Ok(None);
        }
        let mut chunks = plan.chunks.iter().zip(&self.running);
        if chunks.any(|(chunk, job)| job.missing() != chunk.tokens.len()) {
            return Ok(None);
        }
        let [most, new] = self.sizes_after(plan)?;
        let free = self.cache.free_pages();
        Ok((new <= free || new <= free + self.idle_pages()).then_some(most))
    }

    /// That step. Its tokens are 0 as long as they are not known.
    ///
    /// # Errors
    /// A cache that is damaged: [`Self::pages_after`] has found room.
    pub(crate) fn plan_after(&mut self, plan: &Plan) -> Result<Plan> {
        let [_, new] = self.sizes_after(plan)?;
        self.evict(new.saturating_sub(self.cache.free_pages()))?;
        let chunks = plan.chunks.iter().map(|chunk| self.cache.append(chunk.request, &[0]));
        let chunks = chunks.collect::<std::result::Result<Vec<Chunk>, CacheError>>()?;
        let tokens = chunks.len();
        Ok(Plan { tokens, generated: tokens, chunks, jobs: plan.jobs.clone(), ended: Vec::new() })
    }

    /// Pages of the longest request with one more token, and how many of all these requests' pages would be new.
    fn sizes_after(&self, plan: &Plan) -> Result<[usize; 2]> {
        let page_size = self.cache.page_size();
        let (mut most, mut new) = (0, 0);
        for chunk in &plan.chunks {
            let len = self.cache.len(chunk.request)?;
            most = most.max((len + 1).div_ceil(page_size));
            new += usize::from(len.is_multiple_of(page_size));
        }
        Ok([most, new])
    }

    /// The tokens of the plan are in the cache.
    pub(crate) fn computed(&mut self, plan: &Plan) -> Result<()> {
        for (chunk, &id) in plan.chunks.iter().zip(&plan.jobs) {
            let Some(index) = self.index_of(id) else {
                continue;
            };
            let job = &mut self.running[index];
            let (before, after) = (job.cached, job.cached + chunk.tokens.len());
            let new = after.saturating_sub(job.most_cached.max(before));
            let new_of_prompt = after.min(job.prompt_len).saturating_sub(job.most_cached.max(before));
            self.counts.prompt_tokens += new_of_prompt;
            self.counts.recomputed_tokens += chunk.tokens.len() - new;
            job.most_cached = job.most_cached.max(after);
            job.cached = after;
            if let (Some(prefixes), Some(place)) = (&mut self.prefixes, job.place) {
                let parts = job.tokens.split_at(job.cached);
                prefixes.computed(&mut self.cache, place, parts, &mut job.found, chunk.tokens.len())?;
            }
        }
        Ok(())
    }

    /// Takes back what was planned and not computed, in a step that has failed: the cache has as many tokens of each request as the
    /// request knows of, where that is possible.
    ///
    /// # Errors
    /// A cache that is damaged.
    pub(crate) fn roll_back(&mut self) -> Result<()> {
        for job in &self.running {
            if let Some(place) = job.place {
                self.cache.truncate(place, job.cached)?;
            }
        }
        Ok(())
    }

    /// Whether all tokens of a running request are computed, so that the next one can be sampled.
    pub(crate) fn is_complete(&self, id: u64) -> bool {
        self.running_job(id).is_some_and(|job| job.missing() == 0)
    }

    /// The requests of a plan for which it computes all that is missing.
    pub(crate) fn completed_by(&self, plan: &Plan) -> Vec<u64> {
        let chunks = plan.chunks.iter().zip(&plan.jobs);
        let complete =
            chunks.filter(|(chunk, id)| self.running_job(**id).is_some_and(|job| job.missing() == chunk.tokens.len()));
        complete.map(|(_, &id)| id).collect()
    }

    pub(crate) fn running_job(&self, id: u64) -> Option<&Job> {
        self.index_of(id).map(|index| &self.running[index])
    }

    pub(crate) fn running_job_mut(&mut self, id: u64) -> Option<&mut Job> {
        self.index_of(id).map(|index| &mut self.running[index])
    }

    fn index_of(&self, id: u64) -> Option<usize> {
        self.running.binary_search_by_key(&id, |job| job.id).ok()
    }

    /// Takes a request out, whether it runs or waits.
    pub(crate) fn remove(&mut self, id: u64) -> Result<Option<Job>> {
        if let Some(index) = self.index_of(id) {
            let mut job = self.running.remove(index);
            self.leave(&mut job)?;
            return Ok(Some(job));
        }
        Ok(self.waiting.remove(&id))
    }

    /// Frees the pages that no request uses.
    pub(crate) fn reset_prefix_cache(&mut self) -> Result<()> {
        self.evict(usize::MAX)?;
        Ok(())
    }

    fn budget_left(&self, plan: &Plan) -> usize {
        let most = match plan.generated {
            0 => self.token_budget,
            generated => generated.saturating_add(self.mixed_prompt_tokens).min(self.token_budget),
        };
        most.saturating_sub(plan.tokens)
    }

    /// Room for up to `n` more tokens of a running request; where there is none, the youngest give up theirs.
    fn give(&mut self, index: usize, n: usize, plan: &mut Plan) -> Result<()> {
        let Job { tokens, cached, place, .. } = &self.running[index];
        let mut n = n.min(self.budget_left(plan));
        if n == 0 {
            return Ok(());
        }
        if let (Some(prefixes), Some(place)) = (&mut self.prefixes, *place) {
            n = prefixes.chunk_len(&mut self.cache, place, [*cached, n, tokens.len()])?;
        }
        loop {
            let job = &self.running[index];
            let Some(place) = job.place else {
                return Ok(());
            };
            let error = match self.cache.append(place, &job.tokens[job.cached..job.cached + n]) {
                Ok(chunk) => {
                    plan.jobs.push(job.id);
                    plan.tokens += n;
                    plan.chunks.push(chunk);
                    return Ok(());
                }
                Err(error) => error,
            };
            let youngest = self.running.len() - 1;
            match error {
                CacheError::OutOfPages { needed, free, .. } if self.evict(needed - free)? > 0 => continue,
                CacheError::OutOfPages { .. } if youngest > 0 => {}
                CacheError::OutOfPages { .. } | CacheError::RequestTooLong { .. } => {
                    let mut job = self.running.remove(index);
                    self.leave(&mut job)?;
                    plan.ended.push((job, error));
                    return Ok(());
                }
                error => return Err(error.into()),
            }
            self.preempt(youngest, plan)?;
            if youngest == index {
                return Ok(());
            }
        }
    }

    /// The request waits again, before all others.
    fn preempt(&mut self, index: usize, plan: &mut Plan) -> Result<()> {
        let mut job = self.running.remove(index);
        if let Some(planned) = plan.jobs.iter().rposition(|&id| id == job.id) {
            plan.jobs.remove(planned);
            plan.tokens -= plan.chunks.remove(planned).tokens.len();
        }
        self.leave(&mut job)?;
        self.counts.preemptions += 1;
        self.waiting.insert(job.id, job);
        Ok(())
    }

    /// Starts the first waiting request, if there are pages for all of its tokens and one more; if none runs, in any case.
    fn admit(&mut self) -> Result<bool> {
        let Some(mut first) = self.waiting.first_entry() else {
            return Ok(false);
        };
        let (job, page_size) = (first.get_mut(), self.cache.page_size());
        // The last token is computed in any case: its logits are wanted.
        let sharable = &job.tokens[..job.tokens.len() - 1];
        let longest = |prefixes: &mut PrefixCache| prefixes.longest(sharable, &mut job.found);
        let shared = self.prefixes.as_mut().map_or_else(Prefix::default, longest);
        let needed = (job.tokens.len() + 1).div_ceil(page_size) - shared.pages.len();
        // Asked first: a place is written on the device, and a request may wait for many steps.
        if !self.running.is_empty() && !self.has_room_beside(&shared.pages, needed) {
            return Ok(false);
        }
        let place = self.cache.admit_with(&shared.pages, shared.snapshot)?;
        if let Some((_, mut job)) = self.waiting.pop_first() {
            job.place = Some(place);
            job.found.truncate(shared.pages.len());
            job.cached = shared.pages.len() * page_size;
            self.counts.prefix_queries += job.tokens.len();
            self.counts.prefix_hits += job.cached;
            self.running.push(job);
        }
        Ok(true)
    }

    /// Whether `needed` pages are free, or could be, while `shared` stay where they are.
    fn has_room_beside(&self, shared: &[u32], needed: usize) -> bool {
        let free = self.cache.free_pages();
        let kept = || shared.iter().filter(|&&page| self.cache.pages().holders(page) == 1).count();
        needed <= free || needed <= free + self.idle_pages() - kept()
    }

    /// Preempts the request; its whole pages stay as long as they are not needed.
    fn leave(&mut self, job: &mut Job) -> Result<()> {
        if let Some(place) = job.place.take() {
            if let Some(prefixes) = &mut self.prefixes {
                prefixes.left(&mut self.cache, place, &job.tokens[..job.cached], &mut job.found)?;
            }
            self.cache.free(place)?;
        }
        job.cached = 0;
        Ok(())
    }

    /// Frees up to `n` unused pages, the longest unused first; returns how many.
    fn evict(&mut self, n: usize) -> Result<usize> {
        match &mut self.prefixes {
            Some(prefixes) => prefixes.evict(&mut self.cache, n),
            None => Ok(0),
        }
    }
}

#[cfg(test)]
#[path = "scheduler_tests.rs"]
mod tests;
