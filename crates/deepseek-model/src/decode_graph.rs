//! Decode steps that are captured once and replayed: hundreds of launches become one.
//!
//! A captured step reads and writes the buffers that it was captured with. So its inputs are refreshed in place
//! ([`BufferedStep`]), and its sizes are those of a bucket: the batch and the pages of the longest request, rounded up to powers
//! of two. Rows that no request has are padding of length 0: they read no key, write no latent and use no routed expert. What
//! is left for them are the other products, which read the same weights for one row or for several.

mod buckets;
pub(crate) mod memory;

use std::any::Any;
use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use burn::tensor::{Device, Graph, Int, Tensor};
use mla_ops::Determinism;

use self::buckets::Buckets;
pub(crate) use self::buckets::{Bucket, MAX_GRAPHS};
use crate::cache::ModelCache;
use crate::models::{BufferedStep, Capture, Model};
use crate::parallel::{Parallel, Step};
use crate::step::Chunk;
use crate::{ModelError, Result};

/// Whether decode steps are captured and replayed, and why not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum GraphSupport {
    /// They are: a step of each batch size and number of pages, both rounded up to powers of two.
    Captured,
    /// It is off ([`EngineOptions::graphs`](crate::EngineOptions::graphs)).
    #[default]
    NotRequested,
    /// The program is built with the feature `fusion`. Burn's fusion queues operations, and decides when it runs the queue
    /// which buffers their results have: what a captured step writes in place, the KV cache and its own inputs, could be
    /// elsewhere than where the graph reads it.
    Fusion,
    /// The device captures no graphs.
    Device,
    /// `MLA_VALIDATE=1` is set: every call reads its index tensors back, which a captured step cannot do.
    Validation,
    /// The model's steps cannot be captured, for this reason.
    Model(&'static str),
}

impl fmt::Display for GraphSupport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Captured => "decode steps are captured and replayed",
            Self::NotRequested => "graphs are switched off",
            Self::Fusion => {
                "the feature `fusion` chooses buffers when it runs its queue, not where a captured step has them"
            }
            Self::Device => "the device captures no graphs",
            Self::Validation => "MLA_VALIDATE=1 reads the index tensors of every call, which a captured step cannot do",
            Self::Model(reason) => reason,
        })
    }
}

/// The captured steps of a model.
pub(crate) struct DecodeGraphs<'a> {
    model: &'a dyn Capture,
    vocab_size: usize,
    /// All ranks capture a step, or none.
    parallel: Parallel,
    /// Of the steps. Where rows are independent, those that are padding change nothing either.
    determinism: Determinism,
    buckets: Buckets<StepGraph<'a>>,
    /// Graphs belong to the queue of the thread that captured them.
    thread: ThreadId,
}

type Closure<'a> = Step<'a, Option<Tensor<2>>>;

struct StepGraph<'a> {
    lent: Arc<Mutex<Lent<'a>>>,
    graph: Graph<Option<Tensor<2>>, Closure<'a>>,
    /// Names the cache whose pools the graph reads and writes.
    cache_id: u64,
}

/// What a step works on. The closure of a graph owns what it uses, hence the loan.
struct Lent<'a> {
    step: Box<dyn BufferedStep + 'a>,
    /// The engine's while a step runs, otherwise one without rows in its place.
    cache: ModelCache,
}

impl<'a> DecodeGraphs<'a> {
    /// Those of a model with so many token ids.
    ///
    /// # Errors
    /// Why model, device or program have none.
    pub(crate) fn new(
        model: &'a dyn Model,
        vocab_size: usize,
        device: &Device,
        parallel: &Parallel,
        determinism: Determinism,
    ) -> std::result::Result<Self, GraphSupport> {
        let model = model.capture().map_err(GraphSupport::Model)?;
        if cfg!(feature = "fusion") {
            return Err(GraphSupport::Fusion);
        }
        if !captures(device, parallel) {
            return Err(GraphSupport::Device);
        }
        if mla_ops::validate_always() {
            return Err(GraphSupport::Validation);
        }
        let (buckets, thread) = (Buckets::new(MAX_GRAPHS), thread::current().id());
        Ok(Self { model, vocab_size, parallel: parallel.clone(), determinism, buckets, thread })
    }

    /// Logits `[chunks, vocab]` of chunks of one token. The buffer belongs to the graph: the next step overwrites it.
    /// `None` if the step has no graph; then nothing but the cache rows of the chunks' own tokens has changed.
    pub(crate) fn next_token_logits(
        &mut self,
        chunks: &[Chunk],
        cache: &mut ModelCache,
        device: &Device,
    ) -> Result<Option<Tensor<2>>> {
        if self.thread != thread::current().id() {
            self.buckets.clear();
            self.thread = thread::current().id();
        }
        let requests: Vec<_> = chunks.iter().map(|chunk| chunk.request).collect();
        let bucket = bucket(chunks.len(), cache.pages().max_pages(&requests)?, cache);
        // The pools of another cache lie elsewhere.
        let cache_id = cache.pages().id();
        self.buckets.retain(|step| step.cache_id == cache_id);
        if !self.buckets.is_known(bucket) {
            self.buckets.make_room();
            let (model, determinism) = (self.model, self.determinism);
            let new_step = |page_size| model.buffered_step(bucket.0, [bucket.1, page_size], determinism);
            let graph = StepGraph::capture((model, &self.parallel), new_step, chunks, cache, device)?;
            self.buckets.insert(bucket, graph);
        }
        let Some(graph) = self.buckets.use_mut(bucket) else {
            return Ok(None);
        };
        // One rank cannot launch what another one replays: their sums would not meet.
        let all_in_place = self.parallel.agree(lock(&graph.lent).step.is_in_place())?;
        let logits = if all_in_place { graph.replay(chunks, None, cache)? } else { None };
        if logits.is_none() {
            self.buckets.insert(bucket, None);
        }
        Ok(logits.map(|logits| logits.narrow(0, 0, chunks.len())))
    }

    /// Sizes of steps that could not be captured.
    pub(crate) fn uncaptured_sizes(&self) -> usize {
        self.buckets.uncaptured()
    }

    /// Whether [`Self::logits_after`] can be asked for a step of so many requests with so many pages at most, on all ranks.
    ///
    /// # Errors
    /// Ranks that do not answer.
    pub(crate) fn can_follow(&self, requests: usize, pages: usize, cache: &ModelCache) -> Result<bool> {
        let step = self.buckets.get(bucket(requests, pages, cache));
        let is_ready = |step: &StepGraph| step.cache_id == cache.pages().id() && lock(&step.lent).step.is_in_place();
        // `BufferedStep::feed` needs a second token.
        let has_tokens = self.vocab_size > 1;
        self.parallel.agree(has_tokens && self.thread == thread::current().id() && step.is_some_and(is_ready))
    }

    /// [`Self::next_token_logits`] of chunks whose tokens are still on the device: i32 `[chunks]`, negative where there is none.
    pub(crate) fn logits_after(
        &mut self,
        chunks: &[Chunk],
        ids: &Tensor<1, Int>,
        cache: &mut ModelCache,
    ) -> Result<Tensor<2>> {
        let requests: Vec<_> = chunks.iter().map(|chunk| chunk.request).collect();
        let bucket = bucket(chunks.len(), cache.pages().max_pages(&requests)?, cache);
        let step = self.buckets.use_mut(bucket);
        let step =
            step.ok_or_else(|| ModelError::device("a decode step that is not captured cannot follow another"))?;
        let logits = step.replay(chunks, Some(ids), cache)?;
        let logits = logits.ok_or_else(|| ModelError::device("a captured step has lost its buffers"))?;
        Ok(logits.narrow(0, 0, chunks.len()))
    }
}

/// The sizes that the step of so many requests with so many pages at most is captured for.
pub(crate) fn bucket(requests: usize, pages: usize, cache: &ModelCache) -> Bucket {
    let config = cache.pages().config();
    let most = config.max_tokens.div_ceil(config.page_size);
    (requests.next_power_of_two(), pages.next_power_of_two().min(most))
}

impl<'a> StepGraph<'a> {
    /// Captures a new step for pages of a size, with these chunks as its first inputs. `None` if that fails on any rank, for
    /// whatever reason: an error of the step itself comes again when it is launched kernel by kernel.
    ///
    /// # Errors
    /// Ranks that do not answer.
    fn capture(
        (model, parallel): (&'a dyn Capture, &Parallel),
        new_step: impl FnOnce(usize) -> Result<Box<dyn BufferedStep + 'a>>,
        chunks: &[Chunk],
        cache: &mut ModelCache,
        device: &Device,
    ) -> Result<Option<Self>> {
        let lent = Self::prepare(model, new_step, chunks, cache, device);
        let all_are = parallel.agree(lent.is_some())?;
        let Some(lent) = lent.filter(|_| all_are) else {
            return Ok(None);
        };
        let loan = Loan::new(&lent, cache);
        let graph = parallel.capture(device, closure(&lent));
        drop(loan);
        let graph = graph?.filter(|graph| graph.is_hardware() && graph.output().is_some());
        let all_are = parallel.agree(graph.is_some())?;
        Ok(graph.filter(|_| all_are).map(|graph| Self { lent, graph, cache_id: cache.pages().id() }))
    }

    /// A step with its inputs.
    fn prepare(
        model: &'a dyn Capture,
        new_step: impl FnOnce(usize) -> Result<Box<dyn BufferedStep + 'a>>,
        chunks: &[Chunk],
        cache: &mut ModelCache,
        device: &Device,
    ) -> Option<Arc<Mutex<Lent<'a>>>> {
        let stand_in = model.stand_in(cache).ok()?;
        // An error comes again where the step is launched instead.
        let step = new_step(cache.page_size()).ok()?;
        // While the device's own thread makes the buffers it has handles of them, too.
        device.sync().ok()?;
        let lent = Arc::new(Mutex::new(Lent { step, cache: stand_in }));
        let filled = lock(&lent).fill(chunks, cache).ok()?;
        filled.then_some(lent)
    }

    /// Logits `[B, vocab]` of the step with these chunks as its inputs, or with `ids` in the place of their tokens. `None` if
    /// they cannot be put where the graph reads them; then nothing has changed.
    fn replay(
        &mut self,
        chunks: &[Chunk],
        ids: Option<&Tensor<1, Int>>,
        cache: &mut ModelCache,
    ) -> Result<Option<Tensor<2>>> {
        if !lock(&self.lent).fill(chunks, cache)? {
            return Ok(None);
        }
        if let Some(ids) = ids {
            lock(&self.lent).step.feed(ids.clone());
        }
        let loan = Loan::new(&self.lent, cache);
        // SAFETY: what a captured step touches lives, and nothing else uses it meanwhile:
        // - weights: the model is borrowed for as long as the graph exists;
        // - inputs and output: `self` owns them, and `fill` has found the only handles, so that the inputs stayed in place;
        // - pools: they are those of the cache that the graph was captured with (`cache_id`), which are written in place and
        //   never replaced (`write_latent` refuses, slice assignments own the only handle);
        // - intermediate tensors: the runtime keeps their memory for the graph;
        // - order: captures, refreshes, steps without a graph and reads of the output are on the queue of one thread
        //   (`DecodeGraphs::thread`); the engine waits for a step that still runs before it gives anything back.
        let replay = || unsafe { self.graph.replay() }.clone();
        // Burn panics where the device takes no graph, for instance for want of memory: that is an error of the step.
        let logits = panic::catch_unwind(AssertUnwindSafe(replay));
        drop(loan);
        logits.map_err(|payload| ModelError::device(panic_message(&*payload)))
    }
}

/// What is captured. It writes the same latents into the same slots however often it runs.
fn closure<'a>(lent: &Arc<Mutex<Lent<'a>>>) -> Closure<'a> {
    let inside = lent.clone();
    Box::new(move || {
        let lent = &mut *lock(&inside);
        lent.step.logits(&mut lent.cache).ok()
    })
}

/// What a panic said.
pub(crate) fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message").to_string()
}

/// The cache is with the closure as long as this lives.
struct Loan<'l, 'a> {
    lent: &'l Mutex<Lent<'a>>,
    cache: &'l mut ModelCache,
}

impl<'l, 'a> Loan<'l, 'a> {
    fn new(lent: &'l Mutex<Lent<'a>>, cache: &'l mut ModelCache) -> Self {
        std::mem::swap(&mut lock(lent).cache, cache);
        Self { lent, cache }
    }
}

impl Drop for Loan<'_, '_> {
    fn drop(&mut self) {
        std::mem::swap(&mut lock(self.lent).cache, self.cache);
    }
}

impl Lent<'_> {
    /// Puts the inputs of a step into the buffers; whether they can be where they were.
    fn fill(&mut self, chunks: &[Chunk], cache: &mut ModelCache) -> Result<bool> {
        let in_place = self.step.is_in_place();
        if in_place {
            self.step.fill(chunks, cache)?;
        }
        Ok(in_place)
    }
}

impl fmt::Debug for DecodeGraphs<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DecodeGraphs").field("buckets", &self.buckets).finish_non_exhaustive()
    }
}

fn lock<'l, 'a>(lent: &'l Mutex<Lent<'a>>) -> MutexGuard<'l, Lent<'a>> {
    lent.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the devices of all ranks capture graphs: one addition shows it.
fn captures(device: &Device, parallel: &Parallel) -> bool {
    let one = Tensor::<1>::ones([1], device);
    let graph = parallel.capture(device, Box::new(move || one.clone() + 1.0));
    let captures = graph.is_ok_and(|graph| graph.is_some_and(|graph| graph.is_hardware()));
    parallel.agree(captures).unwrap_or(false)
}

#[cfg(all(test, feature = "_gpu", not(feature = "fusion")))]
#[path = "decode_graph_tests.rs"]
mod tests;
