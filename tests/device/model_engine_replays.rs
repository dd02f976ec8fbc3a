//! Steps that are captured and replayed, and launched ahead: the tokens are those of launched ones.

use burn::tensor::FloatDType;
use burn_mla::model::{DeepseekModel, Engine, EngineOptions, FinishReason, RequestStream, Tokenizer};
use rstest::rstest;

use crate::devices::{for_each_device, is_wgpu};
use crate::model_engine::{drain, greedy, is_captured, with_a_token_that_is_nan};
use crate::model_parity::{Stored, folder, load};

/// On devices that have graphs, decode steps are captured and replayed, and the tokens are the stored ones.
#[rstest]
fn model_engine_replays_captured_steps(
    #[values("tests/fixtures/v3-tiny", "tests/fixtures/v32-tiny", "tests/fixtures/v4-tiny")] name: &str,
) {
    let tokenizer = Tokenizer::load(&folder(name)).expect("the tokenizer loads");
    let mut cases = Stored::greedy(name);
    cases.iter_mut().for_each(|(_, ids)| ids.truncate(10));
    for_each_device(|device| {
        let model = load(name, device);
        let options =
            EngineOptions { page_size: 16, cache_pages: 64, max_batch: 3, graphs: true, ..Default::default() };
        let mut engine = Engine::new(&model, &tokenizer, options).expect("a small cache");
        let submit = |(prompt, ids): &(Vec<u32>, Vec<u32>)| {
            engine.submit(greedy(prompt.clone(), ids.len())).expect("a sound request")
        };
        let streams: Vec<RequestStream> = cases.iter().map(submit).collect();
        while engine.step().expect("a step") {}
        for (mut stream, (_, ids)) in streams.into_iter().zip(&cases) {
            let completion = drain(&mut stream, &mut String::new()).expect("an end");
            assert_eq!(completion.token_ids, *ids, "on {device:?}");
        }
        let stats = engine.stats();
        eprintln!("{} of {} steps replayed, {}", stats.graph_steps, stats.steps, stats.graphs);
        assert_eq!(stats.uncaptured_sizes, 0, "on {device:?}: {stats:?}");
        assert_eq!(stats.graph_steps > 0, is_captured(&stats), "on {device:?}: {stats:?}");
        assert!(is_captured(&stats) || !is_wgpu(device) || cfg!(feature = "fusion"), "no graphs on {device:?}");
    });
}

/// A step is launched before the tokens of the one before are known: with them a request fails, another one is cancelled, one
/// arrives. The tokens of the rest are the stored ones.
#[test]
fn model_engine_replays_ahead_of_requests_that_come_and_go() {
    const FIXTURE: &str = "tests/fixtures/v3-tiny";
    let cases = Stored::greedy(FIXTURE);
    let [(whole, whole_ids), (failing, failing_ids)] = [0, 1].map(|case: usize| &cases[case]);
    let (whole_ids, n) = (&whole_ids[..10], 4);
    let is_free = |id: &u32| ![whole, failing].iter().any(|prompt| prompt.contains(id)) && !whole_ids.contains(id);
    let bad = failing_ids.iter().position(is_free).expect("a token that nobody else has");
    let folder = with_a_token_that_is_nan(FIXTURE, failing_ids[bad]);
    let tokenizer = Tokenizer::load(folder.path()).expect("the tokenizer loads");
    for_each_device(|device| {
        let model = DeepseekModel::load(folder.path(), device, FloatDType::F32, &mut |_| {}).expect("it loads");
        let options =
            EngineOptions { page_size: 4, cache_pages: 128, max_batch: 3, graphs: true, ..Default::default() };
        let mut engine = Engine::new(&model, &tokenizer, options).expect("a small cache");
        let submit = |engine: &mut Engine, prompt: &[u32], n| engine.submit(greedy(prompt.to_vec(), n)).expect("sound");
        let mut first = submit(&mut engine, whole, whole_ids.len());
        let mut failing = submit(&mut engine, failing, failing_ids.len());
        let mut cancelled = submit(&mut engine, whole, whole_ids.len());
        for _ in 0..n {
            engine.step().expect("a step");
        }
        engine.cancel(cancelled.id()).expect("it is there");
        let mut last = submit(&mut engine, whole, whole_ids.len());
        while engine.step().expect("a step") {}
        let end = |stream: &mut RequestStream| drain(stream, &mut String::new()).expect("it has ended");
        let (failed, cancelled) = (end(&mut failing), end(&mut cancelled));
        assert!(matches!(failed.finish, FinishReason::Failed(_)), "{failed:?} on {device:?}");
        assert_eq!(failed.token_ids, failing_ids[..=bad], "on {device:?}");
        assert_eq!(
            (cancelled.finish, &*cancelled.token_ids),
            (FinishReason::Cancelled, &whole_ids[..n]),
            "on {device:?}"
        );
        for stream in [&mut first, &mut last] {
            assert_eq!(end(stream).token_ids, *whole_ids, "on {device:?}");
        }
        let stats = engine.stats();
        eprintln!("{stats:?}");
        assert_eq!(stats.uncaptured_sizes, 0, "on {device:?}: {stats:?}");
        assert_eq!(stats.ahead_steps > 0, is_captured(&stats), "on {device:?}: {stats:?}");
        engine.reset_prefix_cache().expect("pages are given back");
        let stats = engine.stats();
        assert_eq!((stats.pages_in_use, stats.pages_idle), (0, 0), "on {device:?}");
    });
}
