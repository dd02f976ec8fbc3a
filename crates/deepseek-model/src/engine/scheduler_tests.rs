//! Random programs of arrivals, sampled tokens and cancellations: pages hold what a request alone would have written, and nobody
//! loses one.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use mla_ops::cache::{CacheConfig, PagedCache, PoolConfig};
use proptest::prelude::*;

use super::*;

#[path = "stateful_cache.rs"]
mod stateful_cache;

use self::stateful_cache::{FIRST_MARK, StatefulCache};

const PAGE: usize = 4;
const PAGES: usize = 10;
const MAX_BATCH: usize = 3;
const BUDGET: usize = 9;
/// Of prompts, where requests generate.
const MIXED: usize = 5;

/// Tokens between two snapshots.
const SPACING: usize = 2 * PAGE;

/// What requests share of their beginnings.
#[derive(Debug, Clone, Copy)]
enum Sharing {
    Nothing,
    Pages,
    /// Pages up to one of so many snapshots.
    Snapshots(usize),
}

fn sharings() -> impl Strategy<Value = Sharing> {
    prop_oneof![Just(Sharing::Nothing), Just(Sharing::Pages), (1..5usize).prop_map(Sharing::Snapshots)]
}

fn scheduler(sharing: Sharing) -> Scheduler {
    let mut cache = new_cache(PAGES, MAX_BATCH);
    let prefixes = match sharing {
        Sharing::Nothing => None,
        Sharing::Pages => Some(PrefixCache::of_pages(&cache)),
        Sharing::Snapshots(slots) => Some(PrefixCache::with_snapshots(&mut cache, SPACING, slots).unwrap()),
    };
    Scheduler::new(cache, prefixes, MAX_BATCH, [BUDGET, MIXED])
}

fn new_cache(num_pages: usize, max_requests: usize) -> ModelCache {
    let config = CacheConfig {
        pools: vec![PoolConfig::per_token(1)],
        num_pages,
        page_size: PAGE,
        max_requests,
        max_tokens: (num_pages + 1) * PAGE,
        dtype: FloatDType::F32,
    };
    ModelCache::new(StatefulCache::new(PagedCache::new(config, &Device::flex()).unwrap()))
}

/// What stands in for the row of the last of some tokens: it depends on all of them, and f32 holds it exactly.
fn row(tokens: &[u32]) -> f32 {
    tokens.iter().fold(7, |hash, &token| (hash * 31 + token + 1) % 16_777_213) as f32
}

fn cache(scheduler: &mut Scheduler) -> &mut StatefulCache {
    scheduler.cache.get_mut().expect("made so")
}

/// What a model would do: goes on from the state, and writes the rows of the new tokens.
fn compute(scheduler: &mut Scheduler, plan: &Plan) {
    for (chunk, id) in plan.chunks.iter().zip(&plan.jobs) {
        let job = scheduler.running_job(*id).expect("a job of the plan runs");
        let (tokens, cached) = (job.tokens.clone(), job.cached);
        let end = cached + chunk.tokens.len();
        assert_eq!(chunk.tokens, tokens[cached..end]);
        compute_tokens(scheduler, chunk, &tokens[..end]);
    }
}

/// What it would do with tokens that are sampled, but not known to the scheduler yet.
fn compute_after(scheduler: &mut Scheduler, plan: &Plan) {
    for (chunk, id) in plan.chunks.iter().zip(&plan.jobs) {
        let job = scheduler.running_job(*id).expect("a job of the plan runs");
        let tokens = [job.tokens.as_slice(), &[sampled(*id)]].concat();
        compute_tokens(scheduler, chunk, &tokens);
    }
}

/// The last of these tokens are those of the chunk.
fn compute_tokens(scheduler: &mut Scheduler, chunk: &Chunk, tokens: &[u32]) {
    let before = tokens.len() - chunk.tokens.len();
    let rows: Vec<f32> = (before..tokens.len()).map(|position| row(&tokens[..=position])).collect();
    let keeps_pages_alone = scheduler.prefixes.is_some() && scheduler.snapshots() == [0; 2];
    let StatefulCache { states, marks, computed, .. } = cache(scheduler);
    computed.insert(chunk.request, tokens.len());
    for ((request, len), mark) in marks.iter_mut() {
        if *request == chunk.request && (before + FIRST_MARK..=tokens.len()).contains(len) {
            *mark = Some(rows[len - before - 1]);
        }
    }
    // Where pages are all that is kept, there is no state to go on from.
    let state = states.insert(chunk.request, rows[rows.len() - 1]);
    if before > 0 && !keeps_pages_alone {
        assert_eq!(state, Some(row(&tokens[..before])), "the state of {} after {before} tokens", chunk.request);
    }
    write(scheduler, &chunk.slots, &rows);
}

/// The tokens of a request are all the same.
fn sampled(id: u64) -> u32 {
    id as u32 % 3
}

fn write(scheduler: &mut Scheduler, slots: &[i32], rows: &[f32]) {
    let cache = &mut cache(scheduler).pages;
    let mut pool = cache.take_pool(0).unwrap().dense();
    for (&slot, &value) in slots.iter().zip(rows) {
        let (page, offset) = (slot as usize / PAGE, slot as usize % PAGE);
        let value = Tensor::from_data(TensorData::new(vec![value], [1, 1, 1]), (&Device::flex(), DType::F32));
        pool = pool.slice_assign([page..page + 1, offset..offset + 1, 0..1], value);
    }
    cache.put_pool(0, pool.into()).unwrap();
}

/// Every running request finds its own rows in its pages, pages have the holders that they should have, and snapshots are known.
fn check(scheduler: &Scheduler) {
    let StatefulCache { pages: cache, kept, marks, .. } = scheduler.cache.get().expect("made so");
    assert_eq!(scheduler.snapshots(), [kept.iter().flatten().count(), kept.len()]);
    assert!(marks.is_empty(), "nothing is left of the last step: {marks:?}");
    let rows: Vec<f32> = cache.pool(0).unwrap().dense().into_data().try_into_vec().unwrap();
    let mut holders = HashMap::<u32, u32>::new();
    for job in &scheduler.running {
        let pages = cache.pages(job.place.expect("it runs")).unwrap();
        for position in 0..job.cached {
            let slot = pages[position / PAGE] as usize * PAGE + position % PAGE;
            assert_eq!(rows[slot], row(&job.tokens[..=position]), "position {position} of job {}", job.id);
        }
        pages.iter().for_each(|&page| *holders.entry(page).or_default() += 1);
    }
    let held_by_tree = (0..PAGES as u32).filter(|page| cache.holders(*page) > holders.get(page).copied().unwrap_or(0));
    assert_eq!(held_by_tree.count(), scheduler.prefixes.as_ref().map_or(0, PrefixCache::pages));
    let evictable = |prefixes: &PrefixCache| prefixes.evictable_pages(cache);
    assert_eq!(scheduler.idle_pages(), scheduler.prefixes.as_ref().map_or(0, evictable));
    let ids = || scheduler.running.iter().map(|job| job.id).chain(scheduler.waiting.keys().copied());
    assert!(ids().is_sorted(), "{:?}", ids().collect::<Vec<_>>());
    assert!(scheduler.running.len() <= MAX_BATCH);
    assert!(scheduler.waiting.values().all(|job| job.place.is_none()));
}

fn check_plan(plan: &Plan) {
    let lens: Vec<usize> = plan.chunks.iter().map(|chunk| chunk.tokens.len()).collect();
    assert!(lens.iter().sum::<usize>() <= BUDGET && !lens.contains(&0), "{lens:?}");
    assert_eq!(plan.jobs.iter().collect::<HashSet<_>>().len(), plan.jobs.len());
}

#[derive(Debug, Clone)]
enum Action {
    /// A prompt (one of a few that begin alike, to this length), and how many tokens to generate.
    Submit(usize, usize, usize),
    Cancel(usize),
    Step,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let action = prop_oneof![
        3 => (0..3usize, 1..30usize, 1..14usize).prop_map(|(kind, len, n)| Action::Submit(kind, len, n)),
        1 => (0..8usize).prop_map(Action::Cancel),
        8 => Just(Action::Step),
    ];
    prop::collection::vec(action, 1..80)
}

/// Requests with the tokens that they want to have in the end.
#[derive(Default)]
struct World {
    wanted: HashMap<u64, usize>,
    next_id: u64,
    finished: usize,
    /// Whether steps are launched before the tokens of the last one are known, where that can be done.
    looks_ahead: bool,
    ahead: Option<Plan>,
    /// How often that was so.
    steps_ahead: usize,
}

impl World {
    /// The work of the next step, which the device has done.
    fn plan(&mut self, scheduler: &mut Scheduler) -> Plan {
        if let Some(ahead) = self.ahead.take().filter(|_| scheduler.running() > 0) {
            return ahead;
        }
        let oldest = scheduler.running.first().map(|job| job.id);
        let plan = scheduler.plan().unwrap();
        check_plan(&plan);
        assert!(!plan.chunks.is_empty() || !plan.ended.is_empty() || self.wanted.is_empty(), "nothing moves");
        compute(scheduler, &plan);
        for (job, error) in &plan.ended {
            let capacity = PAGES * PAGE;
            assert!(matches!(error, CacheError::OutOfPages { .. }) && self.wanted[&job.id] > capacity, "{error}");
            self.wanted.remove(&job.id);
        }
        if let Some(oldest) = oldest.filter(|id| self.wanted.contains_key(id)) {
            assert!(plan.jobs.contains(&oldest), "the oldest request has to move");
        }
        plan
    }

    fn act(&mut self, scheduler: &mut Scheduler, action: &Action) {
        match *action {
            Action::Submit(kind, len, n) => {
                // Prompts of a kind begin alike, kinds 0 and 1 for two pages.
                let token = |position: usize| (position * (1 + kind * usize::from(position >= 8 || kind == 2))) as u32;
                scheduler.push(Job::new(self.next_id, (0..len).map(token).collect()));
                self.wanted.insert(self.next_id, len + n);
                self.next_id += 1;
            }
            Action::Cancel(which) => {
                let mut live: Vec<u64> = self.wanted.keys().copied().collect();
                live.sort_unstable();
                if let Some(id) = live.get(which) {
                    assert_eq!(scheduler.remove(*id).unwrap().map(|job| job.id), Some(*id));
                    self.wanted.remove(id);
                }
            }
            Action::Step => self.step(scheduler),
        }
    }

    fn step(&mut self, scheduler: &mut Scheduler) {
        let plan = self.plan(scheduler);
        if self.looks_ahead && scheduler.pages_after(&plan).unwrap().is_some() {
            let next = scheduler.plan_after(&plan).unwrap();
            check_plan(&next);
            compute_after(scheduler, &next);
            self.ahead = Some(next);
            self.steps_ahead += 1;
        }
        scheduler.computed(&plan).unwrap();
        check(scheduler);
        for &id in plan.jobs.iter().filter(|&&id| scheduler.is_complete(id)).collect::<Vec<_>>() {
            let job = scheduler.running_job_mut(id).expect("it runs");
            job.tokens.push(sampled(id));
            if job.tokens.len() >= self.wanted[&id] {
                scheduler.remove(id).unwrap();
                self.wanted.remove(&id);
                self.finished += 1;
            }
        }
    }
}

proptest! {
    #[test]
    fn random_programs_keep_rows_and_pages(actions in actions(), sharing in sharings(), looks_ahead: bool) {
        let mut scheduler = scheduler(sharing);
        let mut world = World { looks_ahead, ..World::default() };
        for action in &actions {
            world.act(&mut scheduler, action);
            check(&scheduler);
        }
        let mut steps = 0;
        while !world.wanted.is_empty() {
            world.step(&mut scheduler);
            steps += 1;
            prop_assert!(steps < 10_000, "requests do not end");
        }
        scheduler.reset_prefix_cache().unwrap();
        prop_assert_eq!(scheduler.cache.free_pages(), PAGES);
        prop_assert_eq!((scheduler.running(), scheduler.waiting(), scheduler.idle_pages()), (0, 0, 0));
        let StatefulCache { states, kept, .. } = cache(&mut scheduler);
        prop_assert!(states.is_empty() && kept.iter().all(Option::is_none), "{states:?} {kept:?}");
    }
}

/// Both compute their first page at the same time. That of the first stays in the tree, where pages of the second must not
/// keep it: alone, the second needs the whole cache.
#[test]
fn a_copy_of_a_page_keeps_no_other_one_from_being_evicted() {
    let (mut scheduler, mut world) = (scheduler(Sharing::Pages), World::default());
    for (len, n) in [(PAGE, 1), (25, 13)] {
        world.act(&mut scheduler, &Action::Submit(0, len, n));
    }
    while !world.wanted.is_empty() {
        world.step(&mut scheduler);
    }
    assert_eq!(world.finished, 2);
}

#[test]
fn requests_that_begin_alike_share_pages_and_compute_them_once() {
    let mut scheduler = scheduler(Sharing::Pages);
    let prompt: Vec<u32> = (0..9).collect();
    for id in 0..2 {
        scheduler.push(Job::new(id, prompt.clone()));
        let plan = scheduler.plan().unwrap();
        compute(&mut scheduler, &plan);
        scheduler.computed(&plan).unwrap();
        scheduler.running_job_mut(id).unwrap().tokens.push(1);
    }
    assert_eq!((scheduler.counts.prefix_queries, scheduler.counts.prefix_hits), (18, 8));
    assert_eq!(scheduler.counts.prompt_tokens, 9 + 1);
    // Two pages of both, and one each.
    assert_eq!(scheduler.cache.free_pages(), PAGES - 4);
    check(&scheduler);
}

#[test]
fn the_youngest_gives_up_its_pages_and_is_the_next_to_run() {
    let mut scheduler = scheduler(Sharing::Nothing);
    for id in 0..3 {
        scheduler.push(Job::new(id, vec![id as u32; 2 * PAGE]));
    }
    let mut preempted = Vec::new();
    while scheduler.counts.preemptions == 0 {
        let plan = scheduler.plan().unwrap();
        compute(&mut scheduler, &plan);
        scheduler.computed(&plan).unwrap();
        preempted = scheduler.waiting.values().map(|job| (job.id, job.cached)).collect();
        for id in plan.jobs {
            if scheduler.is_complete(id) {
                scheduler.running_job_mut(id).unwrap().tokens.push(5);
            }
        }
    }
    assert_eq!(preempted, [(2, 0)]);
    scheduler.remove(0).unwrap();
    let plan = scheduler.plan().unwrap();
    assert!(plan.jobs.contains(&2));
    compute(&mut scheduler, &plan);
    scheduler.computed(&plan).unwrap();
    assert!(scheduler.counts.recomputed_tokens > 0);
}

/// Alone, a request is always one step ahead: over the ends of pages, and where pages of a former request have to go for it.
#[test]
fn a_request_alone_is_always_a_step_ahead() {
    let (mut scheduler, mut world) = (scheduler(Sharing::Pages), World { looks_ahead: true, ..World::default() });
    let mut steps = 0;
    for (kind, len, n) in [(2, 2 * PAGE, PAGE), (0, 5, PAGES * PAGE - 5)] {
        world.act(&mut scheduler, &Action::Submit(kind, len, n));
        while !world.wanted.is_empty() {
            world.step(&mut scheduler);
            steps += 1;
        }
    }
    // Beside a last step, too: only the sampler knows that it is the last.
    assert_eq!((world.steps_ahead, world.finished), (steps, 2));
}

/// A place costs writes on the device: a request for which there are no pages takes none, in however many steps.
#[test]
fn a_request_that_waits_for_pages_takes_no_place() {
    let mut scheduler = scheduler(Sharing::Pages);
    scheduler.push(Job::new(0, vec![1; 7 * PAGE]));
    // Shares 6 pages and takes one; then 2 are free, and the third request, which shares them too, needs 4.
    scheduler.push(Job::new(1, vec![1; 6 * PAGE + 1]));
    scheduler.push(Job::new(2, [vec![1; 6 * PAGE], vec![2; 3 * PAGE]].concat()));
    for _ in 0..12 {
        let plan = scheduler.plan().unwrap();
        compute(&mut scheduler, &plan);
        scheduler.computed(&plan).unwrap();
        check(&scheduler);
    }
    assert_eq!((scheduler.running(), scheduler.waiting(), scheduler.cache.free_pages()), (2, 1, 2));
    scheduler.remove(0).unwrap();
    scheduler.remove(1).unwrap();
    scheduler.plan().unwrap();
    let place = scheduler.running_job_mut(2).and_then(|job| job.place).expect("it runs");
    assert_eq!(place.to_string(), "request 2");
}

/// A prompt beside a request that generates has a budget of its own, and all of the step's without one.
#[test]
fn prompts_beside_requests_that_generate_have_their_own_budget() {
    let mut scheduler = scheduler(Sharing::Nothing);
    let lens = |scheduler: &mut Scheduler| -> Vec<usize> {
        let plan = scheduler.plan().unwrap();
        compute(scheduler, &plan);
        scheduler.computed(&plan).unwrap();
        plan.chunks.iter().map(|chunk| chunk.tokens.len()).collect()
    };
    scheduler.push(Job::new(0, vec![1; 2 * BUDGET]));
    assert_eq!(lens(&mut scheduler), [BUDGET]);
    assert_eq!(lens(&mut scheduler), [BUDGET]);
    scheduler.running_job_mut(0).expect("it runs").tokens.push(sampled(0));
    scheduler.push(Job::new(1, vec![2; BUDGET]));
    assert_eq!(lens(&mut scheduler), [1, MIXED]);
    scheduler.running_job_mut(0).expect("it runs").tokens.push(sampled(0));
    assert_eq!(lens(&mut scheduler), [1, BUDGET - MIXED]);
}

/// How many pages of prompts 100 steps compare, and how long a step takes at least, beside so many requests that wait for pages, the
/// first of them with a long prompt that begins like another one, and beside a prefix cache of many pages.
fn step_beside(waiting: usize) -> (usize, Duration) {
    const LONG: usize = 1000;
    let cache = new_cache(2 * LONG + 2, 2);
    let prefixes = PrefixCache::of_pages(&cache);
    let mut scheduler = Scheduler::new(cache, Some(prefixes), 2, [4 * LONG * PAGE; 2]);
    let alike: Vec<u32> = (0..(LONG * PAGE) as u32).collect();
    let step = |scheduler: &mut Scheduler| {
        let plan = scheduler.plan().unwrap();
        let _ = scheduler.pages_after(&plan).unwrap();
        scheduler.computed(&plan).unwrap();
        for &id in plan.jobs.iter().filter(|&&id| scheduler.is_complete(id)).collect::<Vec<_>>() {
            scheduler.running_job_mut(id).expect("it runs").tokens.push(sampled(id));
        }
    };
    for (id, prompt) in [(0, alike.clone()), (1, vec![1; PAGE])] {
        scheduler.push(Job::new(id, prompt));
        step(&mut scheduler);
    }
    // Nobody needs the long one any more; the other one goes on.
    scheduler.remove(0).unwrap();
    // It shares the long one, and there are not as many pages more as it needs.
    let prompt = [alike, vec![7; 2 * LONG * PAGE]].concat();
    scheduler.push(Job::new(2, prompt));
    (1..waiting as u64).for_each(|id| scheduler.push(Job::new(2 + id, vec![9; 30])));
    step(&mut scheduler);
    let compared = |scheduler: &Scheduler| scheduler.prefixes.as_ref().expect("it shares pages").compared();
    let before = compared(&scheduler);
    let mut least = Duration::MAX;
    for _ in 0..STEPS {
        let start = Instant::now();
        step(&mut scheduler);
        assert_eq!((scheduler.running(), scheduler.waiting()), (1, waiting));
        assert!(scheduler.idle_pages() >= LONG - 1);
        least = least.min(start.elapsed());
    }
    (compared(&scheduler) - before, least)
}

const STEPS: usize = 100;

/// A step compares no prompt that waits a second time, and goes through no list of what waits.
#[test]
fn a_step_costs_the_same_whatever_waits() {
    let [(few, short), (many, long)] = [10, 10_000].map(step_beside);
    eprintln!("a step without a model: {short:?} beside 10 requests that wait, {long:?} beside 10,000");
    // The page that might follow.
    assert_eq!((few, many), (STEPS, STEPS));
    assert!(long <= short + Duration::from_micros(50), "{short:?} and {long:?}");
}
#[path = "prefix_cache_tests.rs"]
mod snapshots;
