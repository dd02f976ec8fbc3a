//! Decode steps that are recorded once and played again: hundreds of launches become one.
//!
//! A recorded step reads and writes the buffers that it was recorded with. So its inputs are refreshed in place
//! ([`StepBuffers`]), and its sizes are those of a bucket: the batch and the pages of the longest request, rounded up to powers
//! of two. Rows that no request has are padding of length 0: they read no key, write no latent and use no expert.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use burn::tensor::{Device, Graph, Tensor, capture};
use mla_ops::cache::{CacheConfig, PagedCache};

use crate::Result;
use crate::models::DeepseekV3;
use crate::step::{Chunk, StepBuffers};

/// The recorded steps of a model with latents, one for each bucket.
///
/// DeepSeek-V4 has none: its steps advance a state, and recording runs a step several times.
pub(crate) struct DecodeGraphs<'a> {
    model: &'a DeepseekV3,
    recorded: HashMap<Bucket, Recorded<'a>>,
    /// Recorded steps belong to the queue of the thread that recorded them.
    thread: ThreadId,
}

/// Requests, and pages of each.
type Bucket = (usize, usize);
type Closure<'a> = Box<dyn FnMut() -> Option<Tensor<2>> + 'a>;

struct Recorded<'a> {
    lent: Arc<Mutex<Lent>>,
    graph: Graph<Option<Tensor<2>>, Closure<'a>>,
}

/// What a step works on. The closure of a graph owns what it uses, hence the loan.
struct Lent {
    buffers: StepBuffers,
    /// The engine's while a step runs, otherwise one without rows in its place.
    cache: PagedCache,
    error: Option<crate::ModelError>,
}

impl<'a> DecodeGraphs<'a> {
    /// None where the device has no graphs.
    pub(crate) fn new(model: &'a DeepseekV3, device: &Device) -> Option<Self> {
        // A fusing backend may put the result of a write elsewhere, where a recorded step would not find it.
        let has_graphs = !cfg!(feature = "fusion") && records(device);
        has_graphs.then(|| Self { model, recorded: HashMap::new(), thread: thread::current().id() })
    }

    /// Logits `[chunks, vocab]` of chunks of one token. The buffer belongs to the graph: the next step overwrites it.
    /// `None` if the step cannot be recorded; then nothing but the latents of the chunks' own tokens has changed.
    pub(crate) fn next_token_logits(
        &mut self,
        chunks: &[Chunk],
        cache: &mut PagedCache,
        device: &Device,
    ) -> Result<Option<Tensor<2>>> {
        if self.thread != thread::current().id() {
            self.recorded.clear();
            self.thread = thread::current().id();
        }
        let requests: Vec<_> = chunks.iter().map(|chunk| chunk.request).collect();
        let most = cache.config().max_tokens.div_ceil(cache.config().page_size);
        let bucket = (chunks.len().next_power_of_two(), cache.max_pages(&requests)?.next_power_of_two().min(most));
        let logits = match self.recorded.get_mut(&bucket) {
            Some(recorded) => recorded.play(self.model, chunks, cache)?,
            None => match Recorded::record(self.model, bucket, chunks, cache, device)? {
                Some(recorded) => {
                    self.recorded.entry(bucket).insert_entry(recorded).get_mut().play(self.model, chunks, cache)?
                }
                None => return Ok(None),
            },
        };
        Ok(Some(logits.narrow(0, 0, chunks.len())))
    }
}

impl<'a> Recorded<'a> {
    /// Records the step of a bucket, with these chunks as its first inputs. `None` if the device cannot record it.
    fn record(
        model: &'a DeepseekV3,
        (batch, max_pages): Bucket,
        chunks: &[Chunk],
        cache: &mut PagedCache,
        device: &Device,
    ) -> Result<Option<Self>> {
        let buffers = model.step_buffers(batch, max_pages);
        let stand_in = PagedCache::new(
            CacheConfig { num_pages: 1, max_requests: 1, max_tokens: 1, ..cache.config().clone() },
            device,
        )?;
        let lent = Arc::new(Mutex::new(Lent { buffers, cache: stand_in, error: None }));
        let inside = lent.clone();
        // It writes the same latents into the same slots however often it runs.
        let step: Closure = Box::new(move || {
            let lent = &mut *lock(&inside);
            let logits = model.buffered_logits(&lent.buffers, &mut lent.cache);
            logits.map_err(|error| lent.error = Some(error)).ok()
        });
        lock(&lent).fill(model, chunks, cache)?;
        let loan = Loan::new(&lent, cache);
        let graph = capture(device, step);
        drop(loan);
        if let Some(error) = lock(&lent).error.take() {
            return Err(error);
        }
        Ok(graph.is_hardware().then_some(Self { lent, graph }))
    }

    /// Logits `[B, vocab]` of a recorded step with these chunks as its inputs.
    fn play(&mut self, model: &DeepseekV3, chunks: &[Chunk], cache: &mut PagedCache) -> Result<Tensor<2>> {
        lock(&self.lent).fill(model, chunks, cache)?;
        let loan = Loan::new(&self.lent, cache);
        // SAFETY: what a recorded step touches lives, and nobody else uses it meanwhile:
        // - weights: the model is borrowed for as long as the graph exists;
        // - inputs and output: `self` owns them;
        // - pools: they are those of the cache that the graph was recorded with, for an engine has one cache, whose pools are
        //   written in place and never replaced (`write_latent` refuses, slice assignments own the only handle);
        // - intermediate tensors: the runtime keeps their memory for the graph;
        // - order: recording, refreshes, steps without a graph and reads of the output are on the queue of one thread
        //   (`DecodeGraphs::thread`).
        let logits = unsafe { self.graph.replay() }.clone();
        drop(loan);
        Ok(logits.expect("a step that was recorded has an output"))
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
    fn fill(&mut self, model: &DeepseekV3, chunks: &[Chunk], cache: &PagedCache) -> Result<()> {
        model.fill(&mut self.buffers, chunks, cache)
    }
}

impl fmt::Debug for DecodeGraphs<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DecodeGraphs").field("buckets", &self.recorded.keys()).finish_non_exhaustive()
    }
}

fn lock(lent: &Mutex<Lent>) -> MutexGuard<'_, Lent> {
    lent.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the device records graphs: one addition shows it.
fn records(device: &Device) -> bool {
    let one = Tensor::<1>::ones([1], device);
    capture(device, move || one.clone() + 1.0).is_hardware()
}

#[cfg(all(test, feature = "wgpu", not(feature = "fusion")))]
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

    /// Requests come and go, and grow out of their buckets. In V3.2 the larger bucket has an indexer.
    #[rstest]
    fn a_played_step_has_the_bits_of_a_launched_one(
        #[values("v2lite-tiny", "v3-tiny", "v32-tiny")] fixture: &str,
        #[values(1, 2, 3)] requests: usize,
    ) {
        let Ok(device) = DeviceName::Wgpu.open() else {
            assert!(std::env::var("MLA_REQUIRE").is_err(), "MLA_REQUIRE: no wgpu adapter");
            eprintln!("skipped: no wgpu adapter");
            return;
        };
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(fixture);
        let model = DeepseekModel::load(&dir, &device, FloatDType::F32, &mut |_| {}).unwrap();
        let size = CacheSize { num_pages: 32, page_size: 8, max_requests: 4, max_tokens: 64 };
        let mut cache = model.new_cache(size).unwrap();
        let mut graphs = model.decode_graphs().expect("wgpu records");
        let prompts = [vec![7; 14], vec![5, 6, 9], vec![3; 9]];
        let mut live: Vec<_> = prompts[..requests].iter().map(|prompt| admit(&model, &mut cache, prompt)).collect();
        for step in 0..5u32 {
            let chunks: Vec<Chunk> =
                live.iter().zip(11..).map(|(&request, id)| cache.append(request, &[id + step]).unwrap()).collect();
            let latents = cache.latent().unwrap();
            let played = graphs.next_token_logits(&chunks, latents, &device).unwrap().expect("no read-back, no wait");
            let played = bits(played);
            let pages = latents.max_pages(&live).unwrap().next_power_of_two();
            let mut buffers = graphs.model.step_buffers(chunks.len().next_power_of_two(), pages);
            graphs.model.fill(&mut buffers, &chunks, latents).unwrap();
            let launched = graphs.model.buffered_logits(&buffers, latents).unwrap();
            assert_eq!(played, bits(launched.narrow(0, 0, chunks.len())), "step {step}");
            let exact = model.next_token_logits(&chunks, &mut cache).unwrap().try_into_vec_as::<f32>().unwrap();
            for (played, exact) in played.iter().zip(exact) {
                assert!((f32::from_bits(*played) - exact).abs() < 2e-4, "{} is not {exact}", f32::from_bits(*played));
            }
            if step == 2 {
                cache.free(live.remove(0)).unwrap();
                live.push(admit(&model, &mut cache, &[8; 20]));
            }
        }
        assert!(graphs.recorded.len() > 1, "{graphs:?}");
    }
}
