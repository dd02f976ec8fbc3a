//! Captured steps have the bits of launched ones, for each cache and as long as nobody else has their buffers.

use std::path::Path;

use burn::tensor::FloatDType;
use mla_ops::Determinism::{self, BatchInvariant, Fast};
use mla_ops::DeviceName;
use mla_ops::cache::RequestId;
use rstest::rstest;

use super::*;
use crate::{CacheSize, DeepseekModel};

fn bits(logits: Tensor<2>) -> Vec<u32> {
    logits.try_into_vec_as::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

/// A request with a prompt that is computed.
fn admit(model: &DeepseekModel, cache: &mut ModelCache, prompt: &[u32]) -> RequestId {
    let request = cache.admit().unwrap();
    let chunk = cache.append(request, prompt).unwrap();
    model.next_token_logits(&[chunk], cache, Fast).unwrap();
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
fn launched(graphs: &DecodeGraphs, chunks: &[Chunk], cache: &mut ModelCache) -> Vec<u32> {
    let requests: Vec<RequestId> = chunks.iter().map(|chunk| chunk.request).collect();
    let pages = cache.pages().max_pages(&requests).unwrap().next_power_of_two();
    let sizes = [pages, cache.page_size()];
    let mut step = graphs.model.buffered_step(chunks.len().next_power_of_two(), sizes, graphs.determinism).unwrap();
    step.fill(chunks, cache).unwrap();
    bits(step.logits(cache).unwrap().narrow(0, 0, chunks.len()))
}

const SIZE: CacheSize = CacheSize { num_pages: 32, page_size: 8, max_requests: 4, max_tokens: 64 };

/// Requests come and go, and grow out of their buckets. In V3.2 the larger bucket has an indexer. A batch-invariant step has the
/// bits of one without padding, too.
#[rstest]
fn a_replayed_step_has_the_bits_of_a_launched_one(
    #[values("v2lite-tiny", "v3-tiny", "v32-tiny")] fixture: &str,
    #[values(1, 3)] requests: usize,
    #[values(Fast, BatchInvariant)] determinism: Determinism,
) {
    for device in gpus() {
        replay_as_launched(fixture, requests, determinism, &device);
    }
}

/// States advance by a token each, however often the step that computes it runs; some complete entries, and others do not.
#[rstest]
fn a_replayed_step_of_v4_has_the_bits_of_a_launched_one(
    #[values(1, 3)] requests: usize,
    #[values(Fast, BatchInvariant)] determinism: Determinism,
) {
    for device in gpus() {
        replay_as_launched("v4-tiny", requests, determinism, &device);
    }
}

fn replay_as_launched(fixture: &str, requests: usize, determinism: Determinism, device: &Device) {
    let model = model(fixture, device);
    let mut cache = model.new_cache(SIZE).unwrap();
    let mut graphs = model.decode_graphs(determinism).expect("GPUs have graphs");
    let prompts = [vec![7; 14], vec![5, 6, 9], vec![3; 9]];
    let mut live: Vec<_> = prompts[..requests].iter().map(|prompt| admit(&model, &mut cache, prompt)).collect();
    for step in 0..5u32 {
        let chunks: Vec<Chunk> =
            live.iter().zip(11..).map(|(&request, id)| cache.append(request, &[id + step]).unwrap()).collect();
        let replayed = graphs.next_token_logits(&chunks, &mut cache, device).unwrap().expect("no read-back, no wait");
        let replayed = bits(replayed);
        assert_eq!(replayed, launched(&graphs, &chunks, &mut cache), "step {step}");
        let exact = bits(model.next_token_logits(&chunks, &mut cache, determinism).unwrap());
        assert!(replayed == exact || determinism == Fast, "step {step}");
        for (replayed, exact) in replayed.into_iter().zip(exact) {
            let [replayed, exact] = [replayed, exact].map(f32::from_bits);
            assert!((replayed - exact).abs() < 2e-4, "{replayed} is not {exact}");
        }
        if step == 2 {
            cache.free(live.remove(0)).unwrap();
            live.push(admit(&model, &mut cache, &[8; 20]));
        }
    }
    assert!(graphs.buckets.captured() > 1, "{graphs:?}");
}

/// A graph writes into the pools of the cache that it was captured with, so another cache gets one of its own.
#[test]
fn another_cache_is_captured_anew() {
    gpus().iter().for_each(capture_for_each_cache);
}

fn capture_for_each_cache(device: &Device) {
    let model = model("v3-tiny", device);
    let mut graphs = model.decode_graphs(Fast).expect("GPUs have graphs");
    let mut caches = Vec::new();
    for prompt in [[7, 8, 9], [3, 4, 5]] {
        let mut cache = model.new_cache(SIZE).unwrap();
        let request = admit(&model, &mut cache, &prompt);
        for id in 3..6 {
            let chunks = [cache.append(request, &[id]).unwrap()];
            let replayed = graphs.next_token_logits(&chunks, &mut cache, device).unwrap().expect("it was captured");
            let replayed = bits(replayed);
            assert_eq!(replayed, launched(&graphs, &chunks, &mut cache), "{prompt:?}");
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
    let mut graphs = model.decode_graphs(Fast).expect("GPUs have graphs");
    let mut cache = model.new_cache(SIZE).unwrap();
    let requests = [0, 1].map(|_| admit(&model, &mut cache, &[7, 8, 9]));
    let mut has_graph = |graphs: &mut DecodeGraphs, requests: &[RequestId]| {
        let chunks: Vec<Chunk> = requests.iter().map(|&request| cache.append(request, &[5]).unwrap()).collect();
        graphs.next_token_logits(&chunks, &mut cache, device).unwrap().is_some()
    };
    assert!(has_graph(&mut graphs, &requests[..1]) && has_graph(&mut graphs, &requests));
    let step = graphs.buckets.get((1, 1)).expect("it was captured");
    let handles = lock(&step.lent).step.handles();
    assert!(!has_graph(&mut graphs, &requests[..1]));
    drop(handles);
    assert!(!has_graph(&mut graphs, &requests[..1]) && has_graph(&mut graphs, &requests));
}

/// Where there is room for one graph, a step of another size takes it; the first size is captured anew.
#[test]
fn a_graph_that_made_room_is_captured_anew() {
    gpus().iter().for_each(capture_in_turns);
}

fn capture_in_turns(device: &Device) {
    let model = model("v3-tiny", device);
    let mut graphs = model.decode_graphs(Fast).expect("GPUs have graphs");
    graphs.buckets = Buckets::new(1);
    let mut cache = model.new_cache(SIZE).unwrap();
    let requests = [0, 1].map(|_| admit(&model, &mut cache, &[7, 8, 9]));
    for (step, batch) in [1, 2, 1, 1, 2].into_iter().enumerate() {
        let id = 5 + step as u32;
        let chunks: Vec<Chunk> =
            requests[..batch].iter().map(|&request| cache.append(request, &[id]).unwrap()).collect();
        let replayed = graphs.next_token_logits(&chunks, &mut cache, device).unwrap().expect("it was captured");
        let replayed = bits(replayed);
        assert_eq!(replayed, launched(&graphs, &chunks, &mut cache), "step {step}");
        assert_eq!(graphs.buckets.captured(), 1, "{graphs:?}");
    }
}
