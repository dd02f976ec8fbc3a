//! A model that is divided among several devices of this process, as programs use it: engines, text, comparison with stored
//! results, and ranks that fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::{Device, FloatDType, Tensor};
use burn_mla::model::{
    Communicator, Completion, DeepseekModel, Engine, EngineOptions, FinishReason, GenerationOptions, GenerationRequest,
    HostCommunicator, ModelConfig, ModelError, ModelRanks, Parallel, RequestStream, SamplingParams, StreamEvent,
    Tokenizer, VerifyOptions, generate, verify,
};
use burn_mla::ops::{Addend, DeviceName, is_cuda};
use rstest::rstest;

use crate::cli_faults::{program, refused};
use crate::devices::{alone, for_each_device, is_wgpu};
use crate::model_parity::folder;

/// So many devices like this one: different GPUs where there are as many, otherwise the same one several times.
fn devices(device: &Device, size: usize) -> Vec<Device> {
    let gpus = || (0..size).map(|index| DeviceName::Cuda(index).open().ok()).collect::<Option<Vec<_>>>();
    let others = if is_cuda(device) { gpus() } else { None };
    others.unwrap_or_else(|| vec![device.clone(); size])
}

fn load(name: &str, devices: &[Device]) -> ModelRanks {
    ModelRanks::load(&folder(name), devices, FloatDType::F32, &mut |_| {}).expect("the ranks load")
}

/// Stored greedy tokens, and logits within the tolerance of one device.
#[rstest]
#[case("tests/fixtures/v2lite-tiny", 2)]
#[case("tests/fixtures/v2lite-tiny", 4)]
#[case("tests/fixtures/v3-tiny", 2)]
#[case("tests/fixtures/v3-tiny", 4)]
#[case("tests/fixtures/v32-tiny", 2)]
#[case("tests/fixtures/v32-tiny", 4)]
#[case("tests/fixtures/v3-realdims", 2)]
#[case("tests/fixtures/v4-tiny", 2)]
#[case("tests/fixtures/v4-realdims", 2)]
#[case("assets/demo-v3", 2)]
#[case("assets/demo-v4", 2)]
fn model_ranks_equal_the_stored_results(#[case] name: &str, #[case] size: usize) {
    for_each_device(|device| {
        let _alone = alone(device);
        let model = load(name, &devices(device, size));
        let options = VerifyOptions { page_size: 64, prefill_chunks: vec![16] };
        let rows = verify(&model, &folder(name), &options).expect("the stored results are complete");
        assert!(rows.len() >= 4, "only {} comparisons", rows.len());
        for row in rows {
            assert!(row.passed(), "{name} on {size} ranks: {row:?}");
        }
    });
}

fn request(prompt: std::ops::Range<u32>, max_new_tokens: usize, sampling: SamplingParams) -> GenerationRequest {
    GenerationRequest { prompt: prompt.collect(), sampling, max_new_tokens, stop: Vec::new() }
}

fn sampled(seed: u64) -> SamplingParams {
    SamplingParams { seed, temperature: 0.8, repetition_penalty: 1.1, logprobs: Some(2), ..SamplingParams::greedy() }
}

#[rstest]
#[case("tests/fixtures/v2lite-tiny", 4)]
#[case("tests/fixtures/v3-tiny", 2)]
#[case("tests/fixtures/v32-tiny", 2)]
#[case("tests/fixtures/v4-tiny", 2)]
fn model_ranks_generate_what_one_device_does(#[case] name: &str, #[case] size: usize) {
    let tokenizer = Tokenizer::load(&folder(name)).expect("the tokenizer loads");
    // Few, for simulated GPUs.
    let requests = [request(3..24, 5, SamplingParams::greedy()), request(100..107, 5, sampled(7))];
    for_each_device(|device| {
        let _alone = alone(device);
        let run = |ranks: usize, graphs: bool| {
            let options = GenerationOptions { token_budget: 16, graphs, ..GenerationOptions::default() };
            let devices = devices(device, ranks);
            let distinct = (1..ranks).all(|rank| !devices[..rank].contains(&devices[rank]));
            // Ranks that meet on the host launch their steps.
            let has_graphs = if ranks == 1 { is_cuda(device) || is_wgpu(device) } else { is_cuda(device) && distinct };
            let model = load(name, &devices);
            let (completions, stats) =
                generate(&model, &tokenizer, &requests, &options, &mut |_, _| {}).expect("the requests are sound");
            assert_eq!((stats.ranks, stats.generated_tokens), (ranks, 10));
            // Under Fusion none is captured.
            let captured = has_graphs && graphs && !cfg!(feature = "fusion");
            assert_eq!(stats.graph_steps > 0, captured, "{}", stats.graphs_in_words());
            let ids = |completion: Completion| {
                assert!(completion.logprobs.len() == completion.token_ids.len() || completion.logprobs.is_empty());
                (completion.token_ids, completion.text)
            };
            completions.into_iter().map(ids).collect::<Vec<_>>()
        };
        let one = run(1, true);
        assert_eq!(run(size, true), one, "{name} on {size} of {device:?}");
        if is_cuda(device) {
            assert_eq!(run(size, false), one, "{name} on {size} of {device:?}, launched");
        }
    });
}

/// Requests come and go, share prefixes and run out of pages: on ranks as on one device.
#[rstest]
fn model_ranks_have_the_traffic_of_one_device(
    #[values("tests/fixtures/v3-tiny", "tests/fixtures/v4-tiny")] name: &str,
) {
    let tokenizer = Tokenizer::load(&folder(name)).expect("the tokenizer loads");
    let options = EngineOptions {
        page_size: 16,
        cache_pages: 10,
        max_batch: 4,
        token_budget: 24,
        snapshot_spacing: 32,
        ..EngineOptions::default()
    };
    let run = |ranks: usize| {
        let model = load(name, &vec![Device::flex(); ranks]);
        let mut engine = Engine::new(&model, &tokenizer, options).expect("a small cache");
        let mut streams: Vec<RequestStream> = Vec::new();
        for (number, end) in [40, 70, 90, 45, 60].into_iter().enumerate() {
            let sampling = if number % 2 == 0 { SamplingParams::greedy() } else { sampled(number as u64) };
            streams.push(engine.submit(request(3..end, 12, sampling)).expect("a legal request"));
            engine.step().expect("a step");
        }
        // One is cancelled, another one dropped.
        assert!(engine.cancel(streams[1].id()).expect("a sound cache"));
        assert!(!engine.cancel(77).expect("a sound cache"), "there is no such request");
        drop(streams.remove(3));
        while engine.step().expect("a step") {}
        // And one that begins like the first.
        streams.push(engine.submit(request(3..42, 3, SamplingParams::greedy())).expect("a legal request"));
        while engine.step().expect("a step") {}
        let stats = engine.stats();
        assert_eq!((engine.running(), engine.waiting(), stats.pages_in_use), (0, 0, 0));
        assert!(stats.prefix_hits > 0, "{stats:?}");
        engine.reset_prefix_cache().expect("a sound cache");
        assert_eq!(engine.stats().pages_idle, 0);
        let counts = (stats.steps, stats.preemptions, stats.prefix_hits, stats.generated_tokens, stats.prompt_tokens);
        let completions = streams.into_iter().map(|stream| finished(stream).expect("every request has ended"));
        (counts, completions.map(|completion| (completion.token_ids, completion.finish)).collect::<Vec<_>>())
    };
    let alone = run(1);
    assert!(alone.1.iter().any(|(_, finish)| *finish == FinishReason::Cancelled), "{alone:?}");
    assert_eq!(run(2), alone);
}

fn finished(mut stream: RequestStream) -> Option<Completion> {
    std::iter::from_fn(|| stream.try_next()).find_map(|event| match event {
        StreamEvent::Finished(completion) => Some(completion),
        StreamEvent::Text(_) => None,
    })
}

/// How a rank goes wrong.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    Error,
    Panic,
    /// It never comes back, as a device does that waits for another one.
    Silence,
}

/// A rank that goes wrong with its so manieth sum.
#[derive(Debug)]
struct Faulty {
    inner: HostCommunicator,
    fault: Fault,
    sums_left: AtomicUsize,
}

impl Communicator for Faulty {
    fn all_reduce(&self, x: Addend) -> Result<Addend, ModelError> {
        if self.sums_left.fetch_sub(1, Ordering::Relaxed) > 1 {
            return self.inner.all_reduce(x);
        }
        match self.fault {
            Fault::Error => Err(ModelError::Communicator { reason: "the cable is out".into() }),
            Fault::Panic => panic!("the cable is out"),
            Fault::Silence => {
                self.inner.leave("the cable is out");
                loop {
                    thread::park();
                }
            }
        }
    }

    fn all_gather(&self, x: Tensor<2>, columns: usize) -> Result<Tensor<2>, ModelError> {
        self.inner.all_gather(x, columns)
    }

    fn agree(&self, yes: bool) -> Result<bool, ModelError> {
        self.inner.agree(yes)
    }

    fn leave(&self, reason: &str) {
        self.inner.leave(reason);
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }
}

/// Two ranks, of which the second one goes wrong.
fn faulty(fault: Fault, sums_left: usize) -> ModelRanks {
    let ranks = HostCommunicator::group(2).into_iter().enumerate().map(|(rank, inner)| {
        let communicator: Arc<dyn Communicator> = match rank {
            0 => Arc::new(inner),
            _ => Arc::new(Faulty { inner, fault, sums_left: AtomicUsize::new(sums_left) }),
        };
        let parallel = Parallel::new(rank, 2, communicator).expect("a rank among them");
        let (dir, dtype) = (folder("tests/fixtures/v3-tiny"), FloatDType::F32);
        DeepseekModel::load_rank(&dir, parallel, &Device::flex(), dtype, &mut |_| {}).expect("the rank loads")
    });
    ModelRanks::of(ranks.collect()).expect("two ranks")
}

/// The error comes in time, says which rank it was and why, and what was complete before stays.
#[rstest]
fn model_ranks_end_with_the_one_that_fails(#[values(Fault::Error, Fault::Panic, Fault::Silence)] fault: Fault) {
    // Each step has two sums per layer: the first request is complete by then.
    let model = faulty(fault, 8 * 4 * 2);
    let tokenizer = Tokenizer::load(&folder("tests/fixtures/v3-tiny")).expect("the tokenizer loads");
    let options = EngineOptions { cache_pages: 8, max_batch: 2, ..EngineOptions::default() };
    let mut engine = Engine::new(&model, &tokenizer, options).expect("a small cache");
    let short = engine.submit(request(1..4, 2, SamplingParams::greedy())).expect("a legal request");
    let long = engine.submit(request(1..4, 100, SamplingParams::greedy())).expect("a legal request");
    let mut steps = 0;
    let start = Instant::now();
    let failed = loop {
        match engine.step() {
            Ok(more) => assert!(more, "it fails before it is done"),
            Err(error) => break error,
        }
        steps += 1;
    };
    assert!(start.elapsed() < Duration::from_secs(25), "{:?}", start.elapsed());
    assert!((2..20).contains(&steps), "{steps} steps");
    let reason = failed.to_string();
    assert!(reason.contains("the cable is out"), "{reason}");
    assert_eq!(finished(short).map(|completion| completion.token_ids.len()), Some(2), "what is complete stays");
    for refused in [engine.step().map(|_| ()), engine.submit(request(1..4, 2, SamplingParams::greedy())).map(|_| ())] {
        let refused = refused.expect_err("the engine has failed");
        assert!(matches!(&refused, ModelError::EngineFailed { reason } if reason.contains("cable")), "{refused}");
    }
    // One that is silent cannot be told.
    let cancelled = engine.cancel(long.id());
    assert_eq!(cancelled.ok(), (fault != Fault::Silence).then_some(true));
    if fault != Fault::Silence {
        assert_eq!(finished(long).map(|completion| completion.finish), Some(FinishReason::Cancelled));
    }
    drop(engine);
    // Nothing but a new group helps: the ranks know of the failure.
    if fault != Fault::Silence {
        let mut engine = Engine::new(&model, &tokenizer, options).expect("a small cache");
        // A stream that is dropped would cancel its request.
        let _stream = engine.submit(request(1..4, 2, SamplingParams::greedy())).expect("a legal request");
        assert!(engine.step().is_err());
    }
}

/// A request that is refused is refused everywhere, and harms nothing.
#[test]
fn model_ranks_refuse_what_one_device_refuses() {
    let model = load("tests/fixtures/v3-tiny", &[Device::flex(), Device::flex()]);
    let tokenizer = Tokenizer::load(&folder("tests/fixtures/v3-tiny")).expect("the tokenizer loads");
    let zero = EngineOptions { cache_pages: 0, ..EngineOptions::default() };
    let refused = Engine::new(&model, &tokenizer, zero).expect_err("no pages").to_string();
    assert!(refused.contains("num_pages"), "{refused}");
    let mut engine = Engine::new(&model, &tokenizer, EngineOptions::default()).expect("a cache");
    let refused = engine.submit(request(0..0, 2, SamplingParams::greedy())).expect_err("no prompt").to_string();
    assert!(refused.contains("prompt"), "{refused}");
    let hot = SamplingParams { temperature: f32::NAN, ..SamplingParams::greedy() };
    assert!(engine.submit(request(1..3, 2, hot)).is_err());
    let stream = engine.submit(request(1..3, 2, SamplingParams::greedy())).expect("a legal request");
    while engine.step().expect("a step") {}
    assert_eq!(finished(stream).map(|completion| completion.token_ids.len()), Some(2));
}

#[test]
fn model_ranks_have_to_be_complete() {
    let one = || DeepseekModel::load(&folder("tests/fixtures/v3-tiny"), &Device::flex(), FloatDType::F32, &mut |_| {});
    for ranks in [vec![], vec![one().expect("it loads"), one().expect("it loads")]] {
        let refused = ModelRanks::of(ranks).expect_err("no group").to_string();
        assert!(refused.contains("`ranks` is [") && refused.contains("all ranks of a group"), "{refused}");
    }
    let refused = ModelRanks::load(&folder("tests/fixtures/v3-tiny"), &[], FloatDType::F32, &mut |_| {});
    assert!(refused.expect_err("no device").to_string().contains("`devices` is empty"));
    let (dir, four) = (folder("tests/fixtures/v4-tiny"), vec![Device::flex(); 4]);
    let refused = ModelRanks::load(&dir, &four, FloatDType::F32, &mut |_| {}).expect_err("two groups").to_string();
    assert!(refused.contains("attn.wo_a.weight has 2 heads for 4 ranks"), "{refused}");
    let config = ModelConfig::read(&dir).expect("a configuration");
    let random = ModelRanks::random(&config, 1, &four[..2], FloatDType::F32, &mut |_| {}).expect("two ranks");
    assert_eq!((random.size(), random.first().parallel().rank()), (2, 0));
}

#[test]
fn cli_takes_several_devices() {
    let args = ["--prompt", "hacker: n.", "--max-new-tokens", "12", "--json"];
    let run = |device: &str| {
        let output = program("generate", &[&args[..], &["--device", device]].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).expect("JSON")
    };
    let (one, two) = (run("flex"), run("flex,flex"));
    assert_eq!(one["completions"], two["completions"]);
    assert_eq!((&one["ranks"], &two["ranks"]), (&1.into(), &2.into()));

    let fixture = folder("tests/fixtures/v3-tiny");
    let fixture = fixture.to_str().expect("a UTF-8 path");
    let verified = program("verify", &[fixture, "--device", "flex,flex"]);
    assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stdout));
    let dry = program("generate", &["--model", fixture, "--dry-run", "--device", "flex,flex"]);
    let table = String::from_utf8_lossy(&dry.stdout);
    assert!(table.contains("bytes per rank") && table.contains("on each of 2 devices"), "{table}");
    refused(&program("generate", &["--model", fixture, "--device", "flex,flex,flex"]), &["8 heads for 3 ranks"]);
    let dry = program("generate", &["--model", fixture, "--dry-run", "--device", "flex,flex,flex"]);
    let stderr = String::from_utf8_lossy(&dry.stderr);
    assert!(!dry.status.success() && stderr.contains("8 heads for 3 ranks"), "{stderr}");
    refused(&program("generate", &["--device", "flex,gpu"]), &["expected flex (the CPU), wgpu, cuda or cuda:N"]);
}
