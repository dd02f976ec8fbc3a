//! Prefix caching where a request has a state beside its pages (DeepSeek-V4): a request that begins like a former one goes on from
//! a snapshot, and gets the tokens that it would get alone.

use burn::tensor::Device;
use burn_mla::model::{Completion, Engine, EngineOptions, EngineStats, FinishReason};
use rstest::rstest;

use crate::devices::{for_each_device, is_slow};
use crate::model_engine::{Loaded, V4, drain, greedy};
use crate::model_parity::Stored;

const FIXTURE: &str = "tests/fixtures/v4-tiny";
const OPTIONS: EngineOptions = EngineOptions {
    page_size: 16,
    cache_pages: 40,
    max_batch: 4,
    token_budget: 64,
    mixed_prompt_tokens: 64,
    prefix_caching: true,
    snapshot_spacing: 32,
    deterministic: false,
    graphs: true,
};

/// The completion of a request, and the tokens of its prompt that were found.
fn run(engine: &mut Engine, prompt: &[u32], new: usize) -> (Completion, usize) {
    let before = engine.stats().prefix_hits;
    let mut stream = engine.submit(greedy(prompt.to_vec(), new)).expect("a sound request");
    while engine.step().expect("a step") {}
    let completion = drain(&mut stream, &mut String::new()).expect("it has ended");
    (completion, engine.stats().prefix_hits - before)
}

/// A prompt again, its text continued, and other texts that begin like it; one by one, and then together.
#[rstest]
fn model_engine_goes_on_from_snapshots(#[values(FIXTURE, V4)] name: &str, #[values(false, true)] deterministic: bool) {
    for_each_device(|device| {
        if is_slow(device) && (name == V4 || deterministic) {
            return;
        }
        let loaded = Loaded::on(device, name);
        let (prompt, ids) = Stored::greedy(name).remove(0);
        let prompt = prompt[..70.min(prompt.len())].to_vec();
        let text = [prompt.clone(), ids].concat();
        let other = |shared: usize| [&text[..shared], &[5, 6, 7, 8, 9]].concat();
        // Snapshots of the first prompt are behind 32 and 64 tokens; that of its text behind 80, the last whole page.
        let cases = [
            (prompt.clone(), 0),
            (prompt.clone(), 64),
            (text[..90].to_vec(), 64),
            (text[..95].to_vec(), 80),
            (other(80), 80),
            (other(79), 64),
            (other(63), 32),
            (other(31), 0),
            (text[..16].to_vec(), 0),
        ];
        let solo = cases.each_ref().map(|(prompt, _)| {
            let mut alone =
                loaded.engine(EngineOptions { prefix_caching: false, graphs: false, deterministic, ..OPTIONS });
            run(&mut alone, prompt, 12).0
        });
        let mut engine = loaded.engine(EngineOptions { deterministic, ..OPTIONS });
        for ((prompt, expected), solo) in cases.iter().zip(&solo) {
            let (completion, hits) = run(&mut engine, prompt, 12);
            let len = prompt.len();
            assert_eq!((&completion, hits), (solo, *expected), "{len} tokens on {device:?}");
        }
        let streams = cases.each_ref().map(|(prompt, _)| engine.submit(greedy(prompt.clone(), 12)).expect("sound"));
        while engine.step().expect("a step") {}
        for (mut stream, solo) in streams.into_iter().zip(&solo) {
            assert_eq!(drain(&mut stream, &mut String::new()).as_ref(), Some(solo), "together on {device:?}");
        }
        check_counts(&mut engine);
    });
}

/// What is kept is counted, and given back.
fn check_counts(engine: &mut Engine) {
    let EngineStats { snapshots, snapshot_slots, pages_in_use, pages_idle, cache_bytes, .. } = engine.stats();
    assert_eq!((snapshot_slots, pages_in_use), (40 * 16 / 32, 0));
    assert!(snapshots > 4 && snapshots <= snapshot_slots && pages_idle >= snapshots, "{snapshots} of {pages_idle}");
    assert!(cache_bytes > pages_idle * 16 * engine.stats().cache_bytes_per_token, "{cache_bytes}");
    engine.reset_prefix_cache().expect("a sound cache");
    let EngineStats { snapshots, pages_idle, cache_bytes, .. } = engine.stats();
    assert_eq!((snapshots, pages_idle, cache_bytes), (0, 0, 0));
}

/// With a cache for little more than one of them, requests preempt each other, and what they recompute begins at a snapshot.
#[test]
fn model_engine_recomputes_from_snapshots() {
    let loaded = Loaded::new(FIXTURE);
    let cases = Stored::greedy(FIXTURE);
    let options = EngineOptions { cache_pages: 12, token_budget: 24, snapshot_spacing: 16, ..OPTIONS };
    let mut engine = loaded.engine(options);
    let streams: Vec<_> = [0, 3, 0, 3]
        .map(|case| (case, engine.submit(greedy(cases[case].0.clone(), cases[case].1.len())).expect("sound")))
        .into();
    while engine.step().expect("a step") {}
    for (case, mut stream) in streams {
        let completion = drain(&mut stream, &mut String::new()).expect("it has ended");
        assert_eq!((&completion.token_ids, completion.finish), (&cases[case].1, FinishReason::MaxNewTokens));
    }
    let stats = engine.stats();
    eprintln!("{stats:?}");
    assert!(stats.preemptions > 0 && stats.prefix_hits > 0 && stats.recomputed_tokens > 0, "{stats:?}");
    engine.reset_prefix_cache().expect("a sound cache");
    let stats = engine.stats();
    assert_eq!((stats.pages_in_use, stats.pages_idle, stats.snapshots, stats.cache_bytes), (0, 0, 0, 0));
}

/// Snapshots are at the ends of pages, which have whole compressed entries. Only a model that has them cares.
#[test]
fn model_engine_refuses_a_spacing_between_pages() {
    let (v4, v3) = (Loaded::new(V4), Loaded::on(&Device::flex(), crate::model_engine::V3));
    for snapshot_spacing in [0, 8, 24, 1000] {
        let options = EngineOptions { snapshot_spacing, ..OPTIONS };
        let error = Engine::new(&v4.model, &v4.tokenizer, options).expect_err("a wrong spacing").to_string();
        assert!(error.contains("`snapshot_spacing`") && error.contains("a multiple of 16"), "{error}");
        v3.engine(options);
        v4.engine(EngineOptions { prefix_caching: false, ..options });
    }
}
