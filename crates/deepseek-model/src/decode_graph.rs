//! Decode steps that are captured once and replayed: hundreds of launches become one.
//!
//! A captured step reads and writes the buffers that it was captured with. So its inputs are refreshed in place
//! ([`StepBuffers`]), and its sizes are those of a bucket: the batch and the pages of the longest request, rounded up to powers
//! of two. Rows that no request has are padding of length 0: they read no key, write no latent and use no routed expert. What
//! is left for them are the other products, which read the same weights for one row or for several.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use burn::tensor::{Device, Graph, Int, Tensor, capture};
use mla_ops::cache::{CacheConfig, PagedCache};

use crate::models::DeepseekV3;
use crate::step::{Chunk, StepBuffers};
use crate::{ModelError, Result};

/// The captured steps of a model with latents.
///
/// DeepSeek-V4 has none: its steps advance a state, and a capture runs a step several times.
pub(crate) struct DecodeGraphs<'a> {
    model: &'a DeepseekV3,
    /// `None` for a bucket whose step cannot be captured: another try would not do better.
    buckets: HashMap<Bucket, Option<StepGraph<'a>>>,
    /// Graphs belong to the queue of the thread that captured them.
    thread: ThreadId,
}

/// Requests, and pages of each.
type Bucket = (usize, usize);
type Closure<'a> = Box<dyn FnMut() -> Option<Tensor<2>> + Send + 'a>;

struct StepGraph<'a> {
    lent: Arc<Mutex<Lent>>,
    graph: Graph<Option<Tensor<2>>, Closure<'a>>,
    /// Names the cache whose pools the graph reads and writes.
    cache_id: u64,
}

/// What a step works on. The closure of a graph owns what it uses, hence the loan.
struct Lent {
    buffers: StepBuffers,
    /// The engine's while a step runs, otherwise one without rows in its place.
    cache: PagedCache,
}

impl<'a> DecodeGraphs<'a> {
    /// None where the device has no graphs.
    pub(crate) fn new(model: &'a DeepseekV3, device: &Device) -> Option<Self> {
        // A fusing backend may put the result of a write elsewhere, where a captured step would not find it.
        let has_graphs = !cfg!(feature = "fusion") && captures(device);
        has_graphs.then(|| Self { model, buckets: HashMap::new(), thread: thread::current().id() })
    }

    /// Logits `[chunks, vocab]` of chunks of one token. The buffer belongs to the graph: the next step overwrites it.
    /// `None` if the step has no graph; then nothing but the latents of the chunks' own tokens has changed.
    pub(crate) fn next_token_logits(
        &mut self,
        chunks: &[Chunk],
        cache: &mut PagedCache,
        device: &Device,
    ) -> Result<Option<Tensor<2>>> {
        if self.thread != thread::current().id() {
            self.buckets.clear();
            self.thread = thread::current().id();
        }
        let requests: Vec<_> = chunks.iter().map(|chunk| chunk.request).collect();
        let bucket = bucket(chunks.len(), cache.max_pages(&requests)?, cache);
        // The pools of another cache lie elsewhere.
        let cache_id = cache.id();
        self.buckets.retain(|_, step| step.as_ref().is_none_or(|step| step.cache_id == cache_id));
        let model = self.model;
        let step = self.buckets.entry(bucket);
        let step = step.or_insert_with(|| StepGraph::capture(model, bucket, chunks, cache, device));
        let Some(graph) = step else {
            return Ok(None);
        };
        let logits = graph.replay(model, chunks, None, cache)?;
        if logits.is_none() {
            *step = None;
        }
        Ok(logits.map(|logits| logits.narrow(0, 0, chunks.len())))
    }

    /// Whether [`Self::logits_after`] can be asked for a step of so many requests with so many pages at most.
    pub(crate) fn can_follow(&self, requests: usize, pages: usize, cache: &PagedCache) -> bool {
        let step = self.buckets.get(&bucket(requests, pages, cache)).and_then(Option::as_ref);
        let is_ready = |step: &StepGraph| step.cache_id == cache.id() && lock(&step.lent).buffers.has_only_handles();
        // `StepBuffers::feed` needs a second token.
        let has_tokens = self.model.config().vocab_size > 1;
        has_tokens && self.thread == thread::current().id() && step.is_some_and(is_ready)
    }

    /// [`Self::next_token_logits`] of chunks whose tokens are still on the device: i32 `[chunks]`, negative where there is none.
    pub(crate) fn logits_after(
        &mut self,
        chunks: &[Chunk],
        ids: &Tensor<1, Int>,
        cache: &mut PagedCache,
    ) -> Result<Tensor<2>> {
        let requests: Vec<_> = chunks.iter().map(|chunk| chunk.request).collect();
        let bucket = bucket(chunks.len(), cache.max_pages(&requests)?, cache);
        let step = self.buckets.get_mut(&bucket).and_then(Option::as_mut);
        let step =
            step.ok_or_else(|| ModelError::device("a decode step that is not captured cannot follow another"))?;
        let logits = step.replay(self.model, chunks, Some(ids), cache)?;
        let logits = logits.ok_or_else(|| ModelError::device("a captured step has lost its buffers"))?;
        Ok(logits.narrow(0, 0, chunks.len()))
    }
}

fn bucket(requests: usize, pages: usize, cache: &PagedCache) -> Bucket {
    let most = cache.config().max_tokens.div_ceil(cache.config().page_size);
    (requests.next_power_of_two(), pages.next_power_of_two().min(most))
}

impl<'a> StepGraph<'a> {
    /// Captures the step of a bucket, with these chunks as its first inputs. `None` if that fails, for whatever reason: an
    /// error of the step itself comes again when it is launched kernel by kernel.
    fn capture(
        model: &'a DeepseekV3,
        (batch, max_pages): Bucket,
        chunks: &[Chunk],
        cache: &mut PagedCache,
        device: &Device,
    ) -> Option<Self> {
        let cache_id = cache.id();
        let stand_in = CacheConfig { num_pages: 1, max_requests: 1, max_tokens: 1, ..cache.config().clone() };
        let stand_in = PagedCache::new(stand_in, device).ok()?;
        let buffers = model.step_buffers(batch, [max_pages, cache.config().page_size]);
        // While the device's own thread makes the buffers it has handles of them, too.
        device.sync().ok()?;
        let lent = Arc::new(Mutex::new(Lent { buffers, cache: stand_in }));
        let inside = lent.clone();
        // It writes the same latents into the same slots however often it runs.
        let step: Closure = Box::new(move || {
            let lent = &mut *lock(&inside);
            model.buffered_logits(&lent.buffers, &mut lent.cache).ok()
        });
        if !lock(&lent).fill(model, chunks, cache).ok()? {
            return None;
        }
        let loan = Loan::new(&lent, cache);
        let graph = capture(device, step);
        drop(loan);
        (graph.is_hardware() && graph.output().is_some()).then_some(Self { lent, graph, cache_id })
    }

    /// Logits `[B, vocab]` of the step with these chunks as its inputs, or with `ids` in the place of their tokens. `None` if
    /// they cannot be put where the graph reads them; then nothing has changed.
    fn replay(
        &mut self,
        model: &DeepseekV3,
        chunks: &[Chunk],
        ids: Option<&Tensor<1, Int>>,
        cache: &mut PagedCache,
    ) -> Result<Option<Tensor<2>>> {
        if !lock(&self.lent).fill(model, chunks, cache)? {
            return Ok(None);
        }
        if let Some(ids) = ids {
            lock(&self.lent).buffers.feed(ids.clone());
        }
        let loan = Loan::new(&self.lent, cache);
        // SAFETY: what a captured step touches lives, and nobody else uses it meanwhile:
        // - weights: the model is borrowed for as long as the graph exists;
        // - inputs and output: `self` owns them, and `fill` has found the only handles, so that the inputs stayed in place;
        // - pools: they are those of the cache that the graph was captured with (`cache_id`), which are written in place and
        //   never replaced (`write_latent` refuses, slice assignments own the only handle);
        // - intermediate tensors: the runtime keeps their memory for the graph;
        // - order: captures, refreshes, steps without a graph and reads of the output are on the queue of one thread
        //   (`DecodeGraphs::thread`); the engine waits for a step that still runs before it gives anything back.
        let logits = unsafe { self.graph.replay() }.clone();
        drop(loan);
        Ok(logits)
    }
}

/// The cache is with the closure as long as this lives.
struct Loan<'l> {
    lent: &'l Mutex<Lent>,
    cache: &'l mut PagedCache,
}

impl<'l> Loan<'l> {
    fn new(lent: &'l Mutex<Lent>, cache: &'l mut PagedCache) -> Self {
        std::mem::swap(&mut lock(lent).cache, cache);
        Self { lent, cache }
    }
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        std::mem::swap(&mut lock(self.lent).cache, self.cache);
    }
}

impl Lent {
    /// Puts the inputs of a step into the buffers; whether they can be where they were.
    fn fill(&mut self, model: &DeepseekV3, chunks: &[Chunk], cache: &PagedCache) -> Result<bool> {
        let in_place = self.buffers.has_only_handles();
        if in_place {
            model.fill(&mut self.buffers, chunks, cache)?;
        }
        Ok(in_place)
    }
}

impl fmt::Debug for DecodeGraphs<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DecodeGraphs").field("buckets", &self.buckets.keys()).finish_non_exhaustive()
    }
}

fn lock(lent: &Mutex<Lent>) -> MutexGuard<'_, Lent> {
    lent.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the device captures graphs: one addition shows it.
fn captures(device: &Device) -> bool {
    let one = Tensor::<1>::ones([1], device);
    capture(device, move || one.clone() + 1.0).is_hardware()
}

#[cfg(all(test, feature = "_gpu", not(feature = "fusion")))]
mod tests {
    use std::path::Path;

    use burn::tensor::FloatDType;
    use mla_ops::DeviceName;
    use mla_ops::cache::RequestId;
    use rstest::rstest;

    use super::*;
    use crate::{CacheSize, DeepseekModel, ModelCache};

    fn bits(logits: Tensor<2>) -> Vec<u32> {
        logits.try_into_vec_as::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
    }

    /// A request with a prompt that is computed.
    fn admit(model: &DeepseekModel, cache: &mut ModelCache, prompt: &[u32]) -> RequestId {
        let request = cache.admit().unwrap();
        let chunk = cache.append(request, prompt).unwrap();
        model.next_token_logits(&[chunk], cache).unwrap();
        request
    }

    fn model(fixture: &str, device: &Device) -> DeepseekModel {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(fixture);
        DeepseekModel::load(&dir, device, FloatDType::F32, &mut |_| {}).unwrap()
    }

    /// The GPUs that are there, but for those that the variable `MLA_SKIP` names; those that `MLA_REQUIRE` names have to be.
    fn gpus() -> Vec<Device> {
        let listed = |variable: &str, name: &str| {
            std::env::var(variable).is_ok_and(|names| names.split(',').any(|listed| listed == name))
        };
        let names =
            [(cfg!(feature = "wgpu"), "wgpu", DeviceName::Wgpu), (cfg!(feature = "cuda"), "cuda", DeviceName::Cuda(0))];
        let mut gpus = Vec::new();
        for (_, name, device) in names.into_iter().filter(|(built, name, _)| *built && !listed("MLA_SKIP", name)) {
            match device.open() {
                Ok(device) => gpus.push(device),
                Err(error) => {
                    assert!(!listed("MLA_REQUIRE", name), "MLA_REQUIRE: {error}");
                    eprintln!("skipped: {error}");
                }
            }
        }
        gpus
    }

    /// The logits of a step in buffers of the same sizes, kernel by kernel.
    fn launched(graphs: &DecodeGraphs, chunks: &[Chunk], cache: &mut PagedCache) -> Vec<u32> {
        let requests: Vec<RequestId> = chunks.iter().map(|chunk| chunk.request).collect();
        let pages = cache.max_pages(&requests).unwrap().next_power_of_two();
        let mut buffers =
            graphs.model.step_buffers(chunks.len().next_power_of_two(), [pages, cache.config().page_size]);
        graphs.model.fill(&mut buffers, chunks, cache).unwrap();
        bits(graphs.model.buffered_logits(&buffers, cache).unwrap().narrow(0, 0, chunks.len()))
    }

    const SIZE: CacheSize = CacheSize { num_pages: 32, page_size: 8, max_requests: 4, max_tokens: 64 };

    /// Requests come and go, and grow out of their buckets. In V3.2 the larger bucket has an indexer.
    #[rstest]
    fn a_replayed_step_has_the_bits_of_a_launched_one(
        #[values("v2lite-tiny", "v3-tiny", "v32-tiny")] fixture: &str,
        #[values(1, 3)] requests: usize,
    ) {
        for device in gpus() {
            replay_as_launched(fixture, requests, &device);
        }
    }

    fn replay_as_launched(fixture: &str, requests: usize, device: &Device) {
        let model = model(fixture, device);
        let mut cache = model.new_cache(SIZE).unwrap();
        let mut graphs = model.decode_graphs().expect("GPUs have graphs");
        let prompts = [vec![7; 14], vec![5, 6, 9], vec![3; 9]];
        let mut live: Vec<_> = prompts[..requests].iter().map(|prompt| admit(&model, &mut cache, prompt)).collect();
        for step in 0..5u32 {
            let chunks: Vec<Chunk> =
                live.iter().zip(11..).map(|(&request, id)| cache.append(request, &[id + step]).unwrap()).collect();
            let latents = cache.latent().unwrap();
            let replayed = graphs.next_token_logits(&chunks, latents, device).unwrap().expect("no read-back, no wait");
            let replayed = bits(replayed);
            assert_eq!(replayed, launched(&graphs, &chunks, latents), "step {step}");
            let exact = model.next_token_logits(&chunks, &mut cache).unwrap().try_into_vec_as::<f32>().unwrap();
            for (replayed, exact) in replayed.iter().zip(exact) {
                let replayed = f32::from_bits(*replayed);
                assert!((replayed - exact).abs() < 2e-4, "{replayed} is not {exact}");
            }
            if step == 2 {
                cache.free(live.remove(0)).unwrap();
                live.push(admit(&model, &mut cache, &[8; 20]));
            }
        }
        assert!(graphs.buckets.len() > 1, "{graphs:?}");
    }

    /// A graph writes into the pools of the cache that it was captured with, so another cache gets one of its own.
    #[test]
    fn another_cache_is_captured_anew() {
        gpus().iter().for_each(capture_for_each_cache);
    }

    fn capture_for_each_cache(device: &Device) {
        let model = model("v3-tiny", device);
        let mut graphs = model.decode_graphs().expect("GPUs have graphs");
        let mut caches = Vec::new();
        for prompt in [[7, 8, 9], [3, 4, 5]] {
            let mut cache = model.new_cache(SIZE).unwrap();
            let request = admit(&model, &mut cache, &prompt);
            for id in 3..6 {
                let chunks = [cache.append(request, &[id]).unwrap()];
                let latents = cache.latent().unwrap();
                let replayed = graphs.next_token_logits(&chunks, latents, device).unwrap().expect("it was captured");
                let replayed = bits(replayed);
                assert_eq!(replayed, launched(&graphs, &chunks, latents), "{prompt:?}");
            }
            // It lives on, so that its pools stay where they are.
            caches.push(cache);
        }
    }

    /// Inputs that would go elsewhere are not replayed: the bucket has no graph from then on, others keep theirs.
    #[test]
    fn a_step_whose_buffers_somebody_else_has_is_not_replayed() {
        gpus().iter().for_each(refuse_shared_buffers);
    }

    fn refuse_shared_buffers(device: &Device) {
        let model = model("v3-tiny", device);
        let mut graphs = model.decode_graphs().expect("GPUs have graphs");
        let mut cache = model.new_cache(SIZE).unwrap();
        let requests = [0, 1].map(|_| admit(&model, &mut cache, &[7, 8, 9]));
        let mut has_graph = |graphs: &mut DecodeGraphs, requests: &[RequestId]| {
            let chunks: Vec<Chunk> = requests.iter().map(|&request| cache.append(request, &[5]).unwrap()).collect();
            graphs.next_token_logits(&chunks, cache.latent().unwrap(), device).unwrap().is_some()
        };
        assert!(has_graph(&mut graphs, &requests[..1]) && has_graph(&mut graphs, &requests));
        let step = graphs.buckets.get(&(1, 1)).and_then(Option::as_ref).expect("it was captured");
        let handles = lock(&step.lent).buffers.clone();
        assert!(!has_graph(&mut graphs, &requests[..1]));
        drop(handles);
        assert!(!has_graph(&mut graphs, &requests[..1]) && has_graph(&mut graphs, &requests));
    }
}
