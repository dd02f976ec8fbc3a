//! The engine: whatever arrives when, shares pages or loses them, every request gets the tokens that it would get alone.

use burn::tensor::{Device, FloatDType};
use burn_mla::model::{
    Completion, DeepseekModel, Engine, EngineOptions, EngineStats, FinishReason, GenerationRequest, GraphSupport,
    RequestStream, SamplingParams, StreamEvent, Tokenizer,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rstest::rstest;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use tempfile::TempDir;

use crate::cli_faults::copy;
use crate::devices::{for_each_device, is_slow, skip};
use crate::model_parity::{Stored, folder, load};

pub const V3: &str = "assets/demo-v3";
pub const V4: &str = "assets/demo-v4";

pub struct Loaded {
    pub model: DeepseekModel,
    pub tokenizer: Tokenizer,
}

impl Loaded {
    pub fn new(name: &str) -> Self {
        Self::on(&Device::flex(), name)
    }

    pub fn on(device: &Device, name: &str) -> Self {
        let tokenizer = Tokenizer::load(&folder(name)).expect("the tokenizer loads");
        Self { model: load(name, device), tokenizer }
    }

    pub fn engine(&self, options: EngineOptions) -> Engine<'_> {
        Engine::new(&self.model, &self.tokenizer, options).expect("a small cache")
    }

    fn request(&self, prompt: &str, max_new_tokens: usize) -> GenerationRequest {
        greedy(self.tokenizer.encode(prompt, true).expect("the prompt is text"), max_new_tokens)
    }
}

pub fn greedy(prompt: Vec<u32>, max_new_tokens: usize) -> GenerationRequest {
    GenerationRequest { prompt, sampling: SamplingParams::greedy(), max_new_tokens, stop: Vec::new() }
}

/// The default has room for what the requests can be, and on the CPU for no more than 512 pages of 64 tokens.
#[test]
fn model_engine_cache_fits_the_requests() {
    let loaded = Loaded::new(V3);
    let pages = |options: EngineOptions| options.fit_cache(&loaded.model).map(|fitted| fitted.cache_pages);
    let of_model = EngineOptions::of_model(&loaded.model).expect("room for a small cache");
    assert_eq!(of_model, EngineOptions { cache_pages: 512, ..EngineOptions::on(loaded.model.device()) });
    let positions = loaded.model.max_positions();
    for (max_batch, page_size) in [(1, 64), (2, 64), (3, 128)] {
        let options = EngineOptions { max_batch, page_size, ..EngineOptions::default() };
        assert_eq!(pages(options).expect("room"), max_batch * positions / page_size);
    }
    for page_size in [0, 3, 1 << 63] {
        let error = pages(EngineOptions { page_size, ..EngineOptions::default() }).expect_err("no such pages");
        assert!(error.to_string().contains("page_size"), "{error}");
    }
}

pub fn is_captured(stats: &EngineStats) -> bool {
    stats.graphs == GraphSupport::Captured
}

/// What a stream has said so far, and its end if that has come; the pieces must add up.
pub fn drain(stream: &mut RequestStream, text: &mut String) -> Option<Completion> {
    while let Some(event) = stream.try_next() {
        match event {
            StreamEvent::Text(piece) => text.push_str(&piece),
            StreamEvent::Finished(completion) => {
                assert_eq!(*text, completion.text);
                return Some(completion);
            }
        }
    }
    None
}

/// Runs an engine until it has nothing to do.
fn finish(engine: &mut Engine, mut stream: RequestStream) -> Completion {
    while engine.step().expect("a step") {}
    drain(&mut stream, &mut String::new()).expect("the request has ended")
}

/// Stored prompts arrive at random, several times each, while the cache has room for two at most. Where devices have graphs,
/// steps with one token of each request are replayed.
#[rstest]
#[case("tests/fixtures/v2lite-tiny", 16)]
#[case("tests/fixtures/v3-tiny", 16)]
#[case("tests/fixtures/v32-tiny", 16)]
#[case("tests/fixtures/v4-tiny", 16)]
#[case(V3, 16)]
#[case(V4, 16)]
fn model_engine_gives_the_stored_tokens(
    #[case] name: &str,
    #[case] page_size: usize,
    #[values(false, true)] exact: bool,
) {
    for_each_device(|device| {
        let on_cpu = *device == Device::flex();
        let enough = !is_slow(device) || (!exact && name.ends_with("v3-tiny"));
        if on_cpu || enough {
            gives_the_stored_tokens(name, page_size, exact, device);
        } else {
            skip(device, "a model is enough where that takes long");
        }
    });
}

fn gives_the_stored_tokens(name: &str, page_size: usize, exact: bool, device: &Device) {
    let loaded = Loaded::on(device, name);
    let cases = Stored::greedy(name);
    let rounds = if is_slow(device) { 1 } else { 3 };
    let longest = cases.iter().map(|(prompt, ids)| prompt.len() + ids.len()).max().expect("stored results");
    let mut engine = loaded.engine(EngineOptions {
        page_size,
        cache_pages: (longest * 5 / 3).div_ceil(page_size),
        max_batch: 5,
        token_budget: 24,
        snapshot_spacing: 2 * page_size,
        deterministic: exact,
        graphs: true,
        ..Default::default()
    });
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut waiting: Vec<usize> = (0..rounds * cases.len()).map(|i| i % cases.len()).collect();
    let (mut live, mut finished) = (Vec::new(), 0);
    while finished < rounds * cases.len() {
        if !waiting.is_empty() && rng.random_bool(0.3) {
            let case = waiting.swap_remove(rng.random_range(0..waiting.len()));
            let (prompt, ids) = &cases[case];
            let stream = engine.submit(greedy(prompt.clone(), ids.len())).expect("a sound request");
            live.push((case, stream, String::new()));
        }
        engine.step().expect("a step");
        live.retain_mut(|(case, stream, text)| {
            let Some(completion) = drain(stream, text) else {
                return true;
            };
            let ids = &cases[*case].1;
            assert_eq!(completion.token_ids, ids[..completion.token_ids.len()], "prompt {case} on {device:?}");
            assert!(completion.token_ids.len() == ids.len() || completion.finish == FinishReason::Eos);
            finished += 1;
            false
        });
    }
    let stats = engine.stats();
    eprintln!("{name} on {device:?}: {stats:?}");
    assert_eq!(stats.graph_steps > 0, is_captured(&stats), "{stats:?}");
    assert_eq!(stats.uncaptured_sizes, 0, "{stats:?}");
    assert!(stats.preemptions > 0 && stats.recomputed_tokens > 0, "nobody lost pages: {stats:?}");
    assert!(stats.prefix_hits > 0, "{stats:?}");
    assert!(stats.inter_token_p50.is_some() && stats.inter_token_p99 >= stats.inter_token_p50, "{stats:?}");
    engine.reset_prefix_cache().expect("pages are given back");
    engine.reset_latency().expect("a single rank");
    let stats = engine.stats();
    assert_eq!((stats.inter_token_p50, stats.inter_token_p99), (None, None));
    assert_eq!((stats.pages_in_use, stats.pages_idle, stats.snapshots, stats.cache_bytes), (0, 0, 0, 0));
}

#[rstest]
fn model_engine_cancels_and_keeps_the_rest(#[values(V3, V4)] name: &str) {
    let loaded = Loaded::new(name);
    let mut engine = loaded.engine(EngineOptions { cache_pages: 16, max_batch: 2, ..Default::default() });
    let submit = |engine: &mut Engine, prompt| engine.submit(loaded.request(prompt, 30)).expect("a sound request");
    let mut cancelled = submit(&mut engine, "hacker: n.");
    let mut whole = submit(&mut engine, "foo");
    let mut never = submit(&mut engine, "kluge: /klooj/");
    let dropped = submit(&mut engine, "The Tao of");
    for _ in 0..8 {
        engine.step().expect("a step");
    }
    assert_eq!((engine.running(), engine.waiting()), (2, 2));
    assert!(engine.cancel(cancelled.id()).expect("it is there"));
    assert!(engine.cancel(never.id()).expect("it is there"));
    assert!(!engine.cancel(never.id()).expect("no error"));
    drop(dropped);
    while engine.step().expect("a step") {}
    let end = |stream| drain(stream, &mut String::new()).expect("it has ended");
    let (cancelled, never, whole) = (end(&mut cancelled), end(&mut never), end(&mut whole));
    assert_eq!((cancelled.finish, cancelled.token_ids.len()), (FinishReason::Cancelled, 8));
    assert_eq!((never.finish, never.token_ids.len()), (FinishReason::Cancelled, 0));
    assert_eq!((whole.finish.name(), whole.token_ids.len()), ("max_new_tokens", 30));
    let steps = engine.stats().steps;
    assert!(steps < 40, "the dropped request ran for {steps} steps");
    let mut solo = loaded.engine(EngineOptions::default());
    let stream = submit(&mut solo, "foo");
    assert_eq!(finish(&mut solo, stream), whole);
    assert!(cancelled.text.trim_start().starts_with("[originally"), "{}", cancelled.text);
}

/// A stream is dropped before anything is computed: nothing is.
#[test]
fn model_engine_does_no_work_for_a_stream_that_is_dropped() {
    let loaded = Loaded::new(V3);
    let mut engine = loaded.engine(EngineOptions::default());
    drop(engine.submit(loaded.request("hacker: n.", 20)).expect("a sound request"));
    assert_eq!(engine.requests(), 1);
    assert!(!engine.step().expect("a step"), "the request is still there");
    let stats = engine.stats();
    assert_eq!((stats.steps, stats.prompt_tokens, stats.pages_in_use + stats.pages_idle), (0, 0, 0), "{stats:?}");
}

/// A prompt that is longer than the whole cache ends before anything is computed; one that just fits does not.
#[test]
fn model_engine_computes_no_prompt_that_never_fits() {
    let loaded = Loaded::new(V3);
    let mut engine = loaded.engine(EngineOptions { page_size: 16, cache_pages: 2, ..Default::default() });
    let mut stream = engine.submit(greedy(vec![5; 33], 4)).expect("a sound request");
    let completion = drain(&mut stream, &mut String::new()).expect("an end without a step");
    assert_eq!((completion.finish.name(), completion.token_ids.len()), ("out_of_cache", 0));
    assert!(!engine.step().expect("a step"));
    assert_eq!(engine.stats().steps, 0);
    let stream = engine.submit(greedy(vec![5; 32], 1)).expect("a sound request");
    assert_eq!(finish(&mut engine, stream).finish.name(), "max_new_tokens");
}

/// A copy of a fixture whose embedding of a token is NaN: what follows the token has no finite logit.
pub fn with_a_token_that_is_nan(name: &str, id: u32) -> TempDir {
    const EMBEDDING: &str = "model.embed_tokens.weight";
    let copy = copy(name);
    let path = copy.path().join("model.safetensors");
    let bytes = std::fs::read(&path).expect("the weights");
    let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let view = tensors.tensor(EMBEDDING).expect("every model has one");
    let mut embedding = view.data().to_vec();
    let row = embedding.len() / view.shape()[0];
    // In f32 and in bf16.
    embedding[id as usize * row..][..row].fill(0xff);
    let changed = tensors.iter().map(|(name, view)| match name {
        EMBEDDING => (name, TensorView::new(view.dtype(), view.shape().to_vec(), &embedding).expect("the same size")),
        _ => (name, view),
    });
    safetensors::serialize_to_file(changed, None, &path).expect("written");
    copy
}

/// Logits that are no numbers end their request alone.
#[test]
fn model_engine_goes_on_without_a_request_that_fails() {
    const FIXTURE: &str = "tests/fixtures/v3-tiny";
    let cases = Stored::greedy(FIXTURE);
    let (prompt, ids) = &cases[0];
    let bad = (3..512).find(|id| !prompt.contains(id) && !ids.contains(id)).expect("many tokens");
    let folder = with_a_token_that_is_nan(FIXTURE, bad);
    let model = DeepseekModel::load(folder.path(), &Device::flex(), FloatDType::F32, &mut |_| {}).expect("it loads");
    let loaded = Loaded { model, tokenizer: Tokenizer::load(folder.path()).expect("the tokenizer loads") };
    let mut engine = loaded.engine(EngineOptions { page_size: 16, cache_pages: 16, ..Default::default() });
    let mut sound = engine.submit(greedy(prompt.clone(), ids.len())).expect("a sound request");
    let mut failing = engine.submit(greedy(vec![prompt[0], bad, prompt[0]], 5)).expect("a sound request");
    while engine.step().expect("a step") {}
    let end = |stream| drain(stream, &mut String::new()).expect("it has ended");
    let failed = end(&mut failing);
    assert!(matches!(&failed.finish, FinishReason::Failed(reason) if reason.contains("`logits`")), "{failed:?}");
    assert!(failed.token_ids.is_empty(), "{failed:?}");
    assert_eq!(end(&mut sound).token_ids, *ids);
    assert_eq!(engine.stats().generated_tokens, ids.len());
    // Its pages are free for others, who do not see what it wrote.
    engine.reset_prefix_cache().expect("pages are given back");
    for _ in 0..3 {
        let stream = engine.submit(greedy(prompt.clone(), ids.len())).expect("a sound request");
        assert_eq!(finish(&mut engine, stream).token_ids, *ids);
    }
}

#[test]
fn model_engine_streams_to_another_thread() {
    let loaded = Loaded::new(V3);
    let mut engine = loaded.engine(EngineOptions::default());
    let stream = engine.submit(loaded.request("hacker: n.", 20)).expect("a sound request");
    let reader = std::thread::spawn(move || stream.collect::<Vec<StreamEvent>>());
    while engine.step().expect("a step") {}
    let events = reader.join().expect("no panic");
    assert!(events.len() > 5 && matches!(events.last(), Some(StreamEvent::Finished(_))), "{events:?}");
}

#[test]
fn model_engine_draws_by_the_seed_of_each_request() {
    let loaded = Loaded::new(V3);
    let drawn = |seed| {
        let sampling = SamplingParams { temperature: 1.5, seed, ..SamplingParams::greedy() };
        GenerationRequest { sampling, ..loaded.request("foo", 20) }
    };
    let exact = EngineOptions { deterministic: true, ..Default::default() };
    let mut engine = loaded.engine(exact);
    let streams: Vec<_> = (0..4).map(|seed| engine.submit(drawn(seed)).expect("a sound request")).collect();
    while engine.step().expect("a step") {}
    let texts: Vec<Completion> =
        streams.into_iter().map(|mut stream| drain(&mut stream, &mut String::new()).expect("an end")).collect();
    assert!(texts.iter().any(|other| other.text != texts[0].text), "{texts:?}");
    for (seed, text) in texts.iter().enumerate() {
        let mut alone = loaded.engine(exact);
        let stream = alone.submit(drawn(seed as u64)).expect("a sound request");
        assert_eq!(finish(&mut alone, stream), *text);
    }
}

#[test]
fn model_engine_refuses_what_it_cannot_do_by_name() {
    let loaded = Loaded::new(V3);
    for (name, options) in [
        ("token_budget", EngineOptions { token_budget: 3, max_batch: 4, ..Default::default() }),
        ("page_size", EngineOptions { page_size: 3, ..Default::default() }),
        ("num_pages", EngineOptions { cache_pages: 0, ..Default::default() }),
        ("max_requests", EngineOptions { max_batch: 0, ..Default::default() }),
    ] {
        let error = Engine::new(&loaded.model, &loaded.tokenizer, options).expect_err("a wrong size").to_string();
        assert!(error.contains(&format!("`{name}`")), "{error}");
    }
    let mut engine = loaded.engine(EngineOptions::default());
    let sound = || loaded.request("foo", 4);
    let hot = SamplingParams { temperature: -1.0, ..SamplingParams::greedy() };
    for (name, request) in [
        ("prompt", GenerationRequest { prompt: vec![], ..sound() }),
        ("prompt", GenerationRequest { prompt: vec![9_999], ..sound() }),
        ("prompt", GenerationRequest { prompt: vec![5; 4097], ..sound() }),
        ("temperature", GenerationRequest { sampling: hot, ..sound() }),
        ("stop", GenerationRequest { stop: vec![String::new()], ..sound() }),
    ] {
        let error = engine.submit(request).expect_err("a wrong request").to_string();
        assert!(error.contains(&format!("`{name}`")), "{error}");
    }
    let stream = engine.submit(sound()).expect("the engine goes on");
    assert_eq!(finish(&mut engine, stream).token_ids.len(), 4);
}
