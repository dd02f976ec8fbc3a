//! However sequences are divided into steps, batched and forked, the logits are those of one forward pass over each: for
//! every kind of layer, since a decode step is a chunk of one token.

use burn::tensor::FloatDType;
use burn_mla::model::{CacheSize, Chunk, DeepseekModel, ModelCache};
use burn_mla::ops::{Determinism, cache::RequestId};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use rstest::rstest;

use crate::devices::{for_each_device, is_wgpu, skip};
use crate::model_parity::{Stored, load};

/// What the fixtures allow for logits of another order of sums.
const TOLERANCE: f32 = 2e-4;

/// Two sequences in chunks, and after which step a fork takes the place of the first.
#[derive(Debug, Clone)]
struct Program {
    chunks: [Vec<usize>; 2],
    fork: usize,
}

fn programs() -> impl Strategy<Value = Program> {
    let chunks = || prop::collection::vec(prop_oneof![3 => Just(1usize), 2 => 2..9usize, 1 => 9..40usize], 60);
    (chunks(), chunks(), 0..12usize).prop_map(|(a, b, fork)| Program { chunks: [a, b], fork })
}

#[rstest]
#[case("tests/fixtures/v2lite-tiny")]
#[case("tests/fixtures/v3-tiny")]
#[case("tests/fixtures/v32-tiny")]
#[case("tests/fixtures/v4-tiny")]
fn model_in_any_steps_equals_one_forward_pass(#[case] name: &str) {
    let first = Stored::read(name).input_ids;
    let second: Vec<u32> = first.iter().rev().skip(3).copied().collect();
    let prompts = [first, second];
    for_each_device(|device| {
        let model = load(name, device);
        let whole = prompts.clone().map(|prompt| {
            let (mut cache, request) = new_cache(&model, &prompts);
            let chunk = cache.append(request, &prompt).expect("room for the tokens");
            logits(&model, &[chunk], &mut cache)
        });
        // Where wgpu is the CPU, a step takes a tenth of a second.
        let cases = if is_wgpu(device) { 1 } else { 24 };
        if is_wgpu(device) {
            skip(device, "23 of 24 programs");
        }
        let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
        let result = runner.run(&programs(), |program| {
            let run = run(&model, &prompts, &program);
            for (sequence, (run, whole)) in run.iter().zip(&whole).enumerate() {
                prop_assert_eq!(run.len(), whole.len());
                let worst = run.iter().zip(whole).map(|(a, e)| (a - e).abs()).fold(0.0, f32::max);
                prop_assert!(worst < TOLERANCE, "sequence {} is off by {}", sequence, worst);
                prop_assert!(run.iter().all(|value| value.is_finite()));
            }
            Ok(())
        });
        result.unwrap_or_else(|error| panic!("{name}: {error}"));
    });
}

/// Logits of all tokens of both sequences.
fn run(model: &DeepseekModel, prompts: &[Vec<u32>; 2], program: &Program) -> [Vec<f32>; 2] {
    let (mut cache, first) = new_cache(model, prompts);
    let mut requests = [first, cache.admit().expect("room for a request")];
    let (mut done, mut results) = ([0; 2], [Vec::new(), Vec::new()]);
    let mut step = 0;
    while (0..2).any(|s| done[s] < prompts[s].len()) {
        let (mut batch, mut owners) = (Vec::new(), Vec::new());
        for s in 0..2 {
            let size = program.chunks[s].get(step).copied().unwrap_or(usize::MAX).min(prompts[s].len() - done[s]);
            if size > 0 {
                let tokens = &prompts[s][done[s]..done[s] + size];
                batch.push(cache.append(requests[s], tokens).expect("room for the tokens"));
                owners.extend(vec![s; size]);
                done[s] += size;
            }
        }
        let rows = logits(model, &batch, &mut cache);
        for (row, owner) in rows.chunks_exact(model.vocab_size()).zip(owners) {
            results[owner].extend_from_slice(row);
        }
        if step == program.fork {
            let fork = cache.fork(requests[0]).expect("room for a fork");
            spoil(model, &mut cache, requests[0], done[0], prompts[0].len());
            requests[0] = fork;
        }
        step += 1;
    }
    results
}

/// Goes on with other tokens in the request that was forked, and ends it: the fork must see nothing of that.
fn spoil(model: &DeepseekModel, cache: &mut ModelCache, request: RequestId, len: usize, most: usize) {
    let others = vec![1; (most - len).min(5)];
    if !others.is_empty() {
        let chunk = cache.append(request, &others).expect("room for the tokens");
        logits(model, &[chunk], cache);
    }
    cache.free(request).expect("a request that lives");
}

/// A cache with room for all, and its first request.
fn new_cache(model: &DeepseekModel, prompts: &[Vec<u32>; 2]) -> (ModelCache, RequestId) {
    let longest = prompts.iter().map(Vec::len).max().expect("two prompts");
    let size = CacheSize { num_pages: 3 * longest.div_ceil(4) + 3, page_size: 4, max_requests: 3, max_tokens: longest };
    let mut cache = model.new_cache(size).expect("a small cache");
    let request = cache.admit().expect("room for a request");
    (cache, request)
}

fn logits(model: &DeepseekModel, chunks: &[Chunk], cache: &mut ModelCache) -> Vec<f32> {
    let logits = model.forward(chunks, cache, Determinism::Fast, &mut |_, _| {}).expect("a forward pass");
    logits.cast(FloatDType::F32).try_into_vec_as::<f32>().expect("reads back")
}
