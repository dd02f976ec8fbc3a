//! Sampled texts: each request gets what it would get alone, whatever else is in the batch, and logits stay on the device.

use std::collections::HashSet;

use burn::tensor::Device;
use burn_mla::model::{
    CacheSize, Completion, Engine, EngineOptions, EngineStats, GenerationRequest, GraphSupport, SamplingParams,
    TokenLogprobs,
};
use burn_mla::ops::Determinism;

use crate::devices::for_each_device;
use crate::model_engine::{Loaded, drain, greedy};
use crate::model_parity::Stored;

const FIXTURE: &str = "tests/fixtures/v3-tiny";
const NEW_TOKENS: usize = 12;

fn sampled(prompt: &[u32], sampling: SamplingParams) -> GenerationRequest {
    GenerationRequest { sampling, ..greedy(prompt.to_vec(), NEW_TOKENS) }
}

/// Greedy and sampled ones, with each filter, with and without penalty.
fn mixed() -> Vec<GenerationRequest> {
    let base = SamplingParams::greedy();
    let warm = SamplingParams { temperature: 1.0, seed: 5, ..base.clone() };
    let samplings = [
        base.clone(),
        warm.clone(),
        SamplingParams { top_k: Some(20), top_p: 0.9, min_p: 0.01, ..warm.clone() },
        SamplingParams { repetition_penalty: 1.3, ..base },
        SamplingParams { repetition_penalty: 1.3, temperature: 1.5, seed: 1 << 40, ..warm },
    ];
    let prompts = Stored::greedy(FIXTURE).into_iter().map(|(prompt, _)| prompt).cycle();
    prompts.zip(samplings).map(|(prompt, sampling)| sampled(&prompt, sampling)).collect()
}

fn run(device: &Device, requests: &[GenerationRequest], options: EngineOptions) -> (Vec<Completion>, EngineStats) {
    let loaded = Loaded::on(device, FIXTURE);
    let mut engine = Engine::new(&loaded.model, &loaded.tokenizer, options).expect("a small cache");
    let streams: Vec<_> =
        requests.iter().map(|request| engine.submit(request.clone()).expect("a sound request")).collect();
    while engine.step().expect("a step") {}
    let end = |mut stream| drain(&mut stream, &mut String::new()).expect("it has ended");
    (streams.into_iter().map(end).collect(), engine.stats())
}

fn exact(max_batch: usize) -> EngineOptions {
    EngineOptions {
        page_size: 4,
        cache_pages: 256,
        max_batch,
        deterministic: true,
        graphs: true,
        ..EngineOptions::default()
    }
}

fn is_captured(stats: &EngineStats) -> bool {
    stats.graphs == GraphSupport::Captured
}

/// Together, one after the other, and while they take pages from one another.
#[test]
fn model_sampling_depends_on_no_neighbour() {
    let requests = mixed();
    for_each_device(|device| {
        if let Err(error) = Determinism::BatchInvariant.check(device) {
            eprintln!("skipped on {device:?}: {error}");
            return;
        }
        let (alone, _) = run(device, &requests, exact(1));
        let (together, stats) = run(device, &requests, exact(8));
        assert_eq!(together, alone, "together on {device:?}");
        assert_eq!(stats.ahead_steps > 0, is_captured(&stats), "steps ahead on {device:?}: {stats:?}");
        assert_eq!(stats.uncaptured_sizes, 0, "on {device:?}: {stats:?}");

        // Several begin together, and there are pages for one.
        let short = |request: &GenerationRequest| GenerationRequest {
            prompt: request.prompt[..request.prompt.len().min(4)].to_vec(),
            ..request.clone()
        };
        let short: Vec<_> = requests.iter().map(short).collect();
        let few = EngineOptions { page_size: 1, cache_pages: NEW_TOKENS + 5, token_budget: 24, ..exact(5) };
        let (alone, _) = run(device, &short, exact(1));
        let (crowded, stats) = run(device, &short, few);
        assert_eq!(crowded, alone, "with few pages on {device:?}");
        assert!(stats.preemptions > 0, "{stats:?}");
    });
}

/// A penalty so large that no token comes twice, nor one of the prompt.
#[test]
fn model_sampling_penalises_every_token_seen() {
    let penalty = SamplingParams { repetition_penalty: 1e6, ..SamplingParams::greedy() };
    let mut prompts: Vec<Vec<u32>> = Stored::greedy(FIXTURE).into_iter().map(|(prompt, _)| prompt).collect();
    // A quarter of the vocabulary: without a penalty some of the next tokens would be among these.
    prompts.push((2..130).collect());
    let requests: Vec<_> = prompts.iter().map(|prompt| sampled(prompt, penalty.clone())).collect();
    for_each_device(|device| {
        for max_batch in [1, 3] {
            let options = EngineOptions { deterministic: false, ..exact(max_batch) };
            let (completions, _) = run(device, &requests, options);
            for (prompt, Completion { token_ids, .. }) in prompts.iter().zip(&completions) {
                let seen: HashSet<u32> = prompt.iter().chain(token_ids).copied().collect();
                let distinct = prompt.iter().collect::<HashSet<_>>().len() + token_ids.len();
                assert_eq!(seen.len(), distinct, "{prompt:?} then {token_ids:?} on {device:?}");
            }
        }
    });
}

/// The logarithms of the model's own probabilities, whatever is made of them.
#[test]
fn model_sampling_tells_log_probabilities() {
    let prompt = &Stored::greedy(FIXTURE)[0].0;
    let base = SamplingParams { logprobs: Some(3), ..SamplingParams::greedy() };
    let hot = SamplingParams { temperature: 2.0, top_k: Some(9), logprobs: Some(0), seed: 3, ..base.clone() };
    let requests = [base, hot, SamplingParams::greedy()].map(|sampling| sampled(prompt, sampling));
    for_each_device(|device| {
        let (completions, _) = run(device, &requests, EngineOptions { deterministic: false, ..exact(4) });
        for Completion { token_ids, logprobs, .. } in &completions[..2] {
            assert_eq!(logprobs.len(), token_ids.len(), "on {device:?}");
            assert!(logprobs.iter().all(|token| token.logprob < 0.0), "{logprobs:?} on {device:?}");
        }
        for (id, TokenLogprobs { logprob, top }) in completions[0].token_ids.iter().zip(&completions[0].logprobs) {
            assert_eq!((top.len(), top[0]), (3, (*id, *logprob)), "the greedy token is the first, on {device:?}");
            assert!(top.is_sorted_by(|a, b| a.1 >= b.1), "{top:?} on {device:?}");
        }
        assert!(completions[1].logprobs.iter().all(|token| token.top.is_empty()));
        assert!(completions[2].logprobs.is_empty());

        // The first tokens, of logits on the host.
        let loaded = Loaded::on(device, FIXTURE);
        let size = CacheSize { num_pages: 8, page_size: 16, max_requests: 1, max_tokens: 128 };
        let mut cache = loaded.model.new_cache(size).expect("a small cache");
        let request = cache.admit().expect("room");
        let chunk = cache.append(request, prompt).expect("room");
        let logits = loaded.model.next_token_logits(&[chunk], &mut cache, Determinism::Fast).expect("a step");
        let logits: Vec<f32> = logits.try_into_vec_as().expect("it reads back");
        let lse = logits.iter().map(|&logit| f64::from(logit).exp()).sum::<f64>().ln();
        for Completion { token_ids, logprobs, .. } in &completions[..2] {
            let expected = f64::from(logits[token_ids[0] as usize]) - lse;
            let actual = f64::from(logprobs[0].logprob);
            assert!((actual - expected).abs() < 1e-3, "{actual}, expected {expected}, on {device:?}");
        }
    });
}
