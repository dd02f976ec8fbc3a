//! Several ranks, each with its part of a model, compute what one does that has all of it.

use std::sync::Arc;

use burn::tensor::{Device, FloatDType, Tensor};
use burn_mla::model::{
    CacheSize, Communicator, DeepseekModel, Engine, EngineOptions, GenerationOptions, GenerationRequest, ModelConfig,
    ModelError, Parallel, SamplingParams, Tokenizer, generate,
};
use burn_mla::ops::{Addend, Determinism};
use rstest::rstest;

use crate::devices::for_each_device;
use crate::model_parity::{Stored, folder};
use crate::ranks::on_ranks;

/// The largest difference of a logit, by the largest logit. What differs is the order of sums, of which a handful of layers have
/// two each, of hundreds of numbers: 2^-24 for each addition that rounds otherwise is some 1e-6 in the end.
const TOLERANCE: f32 = 1e-5;
/// Greedy tokens behind the prompt.
const NEW_TOKENS: usize = 6;

fn load(name: &str, parallel: Parallel, device: &Device) -> DeepseekModel {
    let dir = folder("tests/fixtures").join(name);
    DeepseekModel::load_rank(&dir, parallel, device, FloatDType::F32, &mut |_| {}).expect("the rank loads")
}

/// Logits of all tokens of the prompt, in two chunks, and of greedy tokens behind it, of which the last is not fed; and these.
fn prompt_and_decode(model: &DeepseekModel, prompt: &[u32]) -> (Vec<f32>, Vec<u32>) {
    let max_tokens = prompt.len() + NEW_TOKENS;
    let size = CacheSize { num_pages: max_tokens.div_ceil(16), page_size: 16, max_requests: 1, max_tokens };
    let mut cache = model.new_cache(size).expect("a small cache");
    let request = cache.admit().expect("room for a request");
    let (mut all, mut ids) = (Vec::new(), Vec::new());
    let mut step = |tokens: &[u32]| {
        let chunk = cache.append(request, tokens).expect("room for the tokens");
        let logits = model.forward(&[chunk], &mut cache, Determinism::Fast, &mut |_, _| {}).expect("a forward pass");
        assert_eq!(logits.dims(), [tokens.len(), model.vocab_size()]);
        let logits: Vec<f32> = logits.try_into_vec_as().expect("reads back");
        let last = &logits[(tokens.len() - 1) * model.vocab_size()..];
        let best = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b])).expect("a vocabulary") as u32;
        all.extend(logits);
        best
    };
    let (first, second) = prompt.split_at(prompt.len() / 3);
    step(first);
    let mut next = step(second);
    for _ in 1..NEW_TOKENS {
        ids.push(next);
        next = step(&[next]);
    }
    ids.push(next);
    (all, ids)
}

/// The ranks agree on every bit, and with the one that has everything as far as the order of sums allows.
fn assert_same(ranks: &[(Vec<f32>, Vec<u32>)], (logits, ids): &(Vec<f32>, Vec<u32>), what: &str) {
    let bits = |logits: &[f32]| logits.iter().map(|logit| logit.to_bits()).collect::<Vec<_>>();
    let most = logits.iter().fold(0.0f32, |most, logit| most.max(logit.abs()));
    for (rank, (own, own_ids)) in ranks.iter().enumerate() {
        assert!(bits(own) == bits(&ranks[0].0), "{what}: the logits of rank {rank} are not those of the first");
        assert_eq!(own_ids, ids, "{what}: the greedy tokens of rank {rank}");
        assert_eq!(own.len(), logits.len(), "{what}");
        let off = own.iter().zip(logits).fold(0.0f32, |off, (own, logit)| off.max((own - logit).abs())) / most;
        eprintln!("{what}: rank {rank} is off by {off:.1e} of the largest logit");
        assert!(off <= TOLERANCE, "{what}: rank {rank} is off by {off:e}");
    }
}

#[rstest]
#[case("v2lite-tiny", 2)]
#[case("v2lite-tiny", 4)]
#[case("v3-tiny", 2)]
#[case("v3-tiny", 8)]
#[case("v32-tiny", 2)]
#[case("v4-tiny", 2)]
fn model_ranks_compute_what_one_does(#[case] name: &str, #[case] size: usize) {
    let prompt = Stored::read(&format!("tests/fixtures/{name}")).input_ids;
    for_each_device(|device| {
        let alone = prompt_and_decode(&load(name, Parallel::single(), device), &prompt);
        let ranks = on_ranks(size, |parallel| prompt_and_decode(&load(name, parallel, device), &prompt));
        assert_same(&ranks, &alone, &format!("{name} on {size} of {device:?}"));
    });
}

/// Random weights of ranks are parts of one model's, and a vocabulary need not divide.
#[test]
fn model_ranks_of_random_weights() {
    let config = std::fs::read_to_string(folder("tests/fixtures/v3-tiny/config.json")).expect("a configuration");
    let mut config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
    config["vocab_size"] = 509.into();
    let dir = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("a configuration");
    let config = ModelConfig::read(dir.path()).expect("a configuration");
    let prompt: Vec<u32> = (0..24).map(|i| i * 7 % 509).collect();
    for_each_device(|device| {
        let run = |parallel| {
            let model = DeepseekModel::random_rank(config.clone(), 3, parallel, device, FloatDType::F32, &mut |_| {});
            prompt_and_decode(&model.expect("a model without a checkpoint"), &prompt)
        };
        let alone = run(Parallel::single());
        // One after the other, for a device has one generator of random numbers.
        let ranks = on_ranks(2, run);
        assert_same(&ranks, &alone, &format!("random weights on 2 of {device:?}"));
    });
}

/// Each rank has an engine, and all engines take the same steps.
#[rstest]
fn model_ranks_generate_the_same_text(#[values("v3-tiny", "v4-tiny")] name: &str) {
    let tokenizer = Tokenizer::load(&folder("tests/fixtures").join(name)).expect("the tokenizer loads");
    let request = |prompt: std::ops::Range<u32>, sampling: SamplingParams| GenerationRequest {
        prompt: prompt.collect(),
        sampling,
        max_new_tokens: 8,
        stop: Vec::new(),
    };
    let sampled = SamplingParams { seed: 7, temperature: 0.8, ..SamplingParams::greedy() };
    let requests = [request(3..40, SamplingParams::greedy()), request(100..111, sampled)];
    let options = GenerationOptions { token_budget: 16, graphs: true, ..GenerationOptions::default() };
    let run = |parallel: Parallel| {
        let is_alone = parallel.size() == 1;
        let model = load(name, parallel, &Device::flex());
        let (completions, stats) =
            generate(&model, &tokenizer, &requests, &options, &mut |_, _| {}).expect("the requests are sound");
        let graphs = stats.graphs.to_string();
        assert!(is_alone || name == "v4-tiny" || graphs.contains("ranks"), "{graphs}");
        completions.into_iter().map(|completion| completion.text).collect::<Vec<_>>()
    };
    let alone = run(Parallel::single());
    assert_eq!(alone.len(), 2);
    for (rank, texts) in on_ranks(2, run).into_iter().enumerate() {
        assert_eq!(texts, alone, "rank {rank}");
    }
}

/// Heads, experts or channels that do not divide are named, in a checkpoint and without one.
#[rstest]
#[case("v2lite-tiny", 3, "mlp.experts.0.gate_proj.weight has 16 experts for 3 ranks")]
#[case("v3-tiny", 3, "self_attn.q_b_proj.weight has 8 heads for 3 ranks")]
#[case("v32-tiny", 16, "self_attn.kv_b_proj.weight has 8 heads for 16 ranks")]
#[case("v2lite-tiny", 32, "mlp.experts.0.gate_proj.weight has 16 experts for 32 ranks")]
#[case("v4-tiny", 4, "attn.wo_a.weight has 2 heads for 4 ranks")]
#[case("v4-tiny", 1000, "ffn.experts.0.w2.weight has 8 experts for 1000 ranks")]
fn model_ranks_that_do_not_divide_are_refused(#[case] name: &str, #[case] size: usize, #[case] expected: &str) {
    let dir = folder("tests/fixtures").join(name);
    let config = ModelConfig::read(&dir).expect("a configuration");
    for rank in [0, size - 1] {
        let parallel = Parallel::new(rank, size, Arc::new(Failing)).expect("a rank among them");
        let (device, dtype) = (Device::flex(), FloatDType::F32);
        let progress = &mut |_: burn_mla::model::LoadProgress<'_>| panic!("nothing is loaded");
        let loaded = DeepseekModel::load_rank(&dir, parallel.clone(), &device, dtype, progress);
        let drawn = DeepseekModel::random_rank(config.clone(), 1, parallel, &device, dtype, progress);
        for refused in [loaded, drawn] {
            match refused {
                Err(ModelError::Weights(report)) => {
                    let wrong = report.wrong_cut.iter().map(|cut| format!("{} {}", cut.name, cut.actual));
                    assert!(wrong.clone().any(|wrong| wrong.contains(expected)), "{:?}", wrong.collect::<Vec<_>>());
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

/// The others cannot be heard.
#[derive(Debug)]
struct Failing;

impl Communicator for Failing {
    fn all_reduce(&self, _x: Addend) -> Result<Addend, ModelError> {
        Err(ModelError::Communicator { reason: "the cable is out".into() })
    }

    fn all_gather(&self, x: Tensor<2>, _columns: usize) -> Result<Tensor<2>, ModelError> {
        Ok(x)
    }

    fn agree(&self, yes: bool) -> Result<bool, ModelError> {
        Ok(yes)
    }

    fn leave(&self, _reason: &str) {}

    fn describe(&self) -> String {
        "nobody answers".into()
    }
}

/// An engine whose step has failed would compute the same tokens behind themselves.
#[rstest]
fn model_engine_takes_no_step_after_a_failed_one(#[values("v3-tiny", "v4-tiny")] name: &str) {
    let parallel = Parallel::new(1, 2, Arc::new(Failing)).expect("a rank among them");
    let model = load(name, parallel, &Device::flex());
    let tokenizer = Tokenizer::load(&folder("tests/fixtures").join("v3-tiny")).expect("the tokenizer loads");
    let options = EngineOptions { cache_pages: 4, max_batch: 2, ..EngineOptions::default() };
    let mut engine = Engine::new(&model, &tokenizer, options).expect("a small cache");
    let request = || GenerationRequest {
        prompt: vec![1, 2, 3],
        sampling: SamplingParams::greedy(),
        max_new_tokens: 2,
        stop: Vec::new(),
    };
    let mut stream = engine.submit(request()).expect("a legal request");
    let failed = engine.step().expect_err("nobody answers");
    assert!(matches!(&failed, ModelError::Communicator { .. }), "{failed}");
    let held = engine.stats().cache_bytes;
    // Of DeepSeek-V4 the state has moved on, and its tokens stay.
    assert_eq!(engine.stats().pages_in_use, usize::from(name == "v4-tiny"), "the step is rolled back");
    for refused in [engine.step().map(|_| ()), engine.submit(request()).map(|_| ()), engine.step().map(|_| ())] {
        let refused = refused.expect_err("the engine has failed");
        assert!(matches!(&refused, ModelError::EngineFailed { reason } if reason.contains("cable")), "{refused}");
    }
    assert_eq!((engine.stats().cache_bytes, engine.stats().steps), (held, 0), "nothing is appended again");
    assert!(engine.cancel(stream.id()).expect("a sound cache"));
    assert!(stream.try_next().is_some(), "the request has ended");
}

/// What a communicator says is the error of the step.
#[rstest]
fn model_ranks_hand_on_what_the_communicator_says(#[values("v3-tiny", "v4-tiny")] name: &str) {
    let parallel = Parallel::new(1, 2, Arc::new(Failing)).expect("a rank among them");
    let model = load(name, parallel, &Device::flex());
    let size = CacheSize { num_pages: 1, page_size: 16, max_requests: 1, max_tokens: 16 };
    let mut cache = model.new_cache(size).expect("a small cache");
    let request = cache.admit().expect("room for a request");
    let chunk = cache.append(request, &[1, 2, 3]).expect("room for the tokens");
    let refused = model.next_token_logits(&[chunk], &mut cache, Determinism::Fast).expect_err("nobody answers");
    assert!(matches!(&refused, ModelError::Communicator { reason } if reason.contains("cable")), "{refused}");
    assert!(refused.to_string().contains("the ranks cannot exchange values: the cable is out"), "{refused}");
    cache.free(request).expect("a request that lives");
}
