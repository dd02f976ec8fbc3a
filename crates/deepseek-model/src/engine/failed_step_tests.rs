//! What is left after a step that has failed: here for want of a pool that somebody has taken.

use std::path::Path;

use burn::tensor::{Device, FloatDType};
use rstest::rstest;

use super::*;
use crate::{SamplingParams, StreamEvent};

const OPTIONS: EngineOptions = EngineOptions {
    page_size: 16,
    cache_pages: 16,
    max_batch: 2,
    token_budget: 64,
    mixed_prompt_tokens: 64,
    prefix_caching: false,
    snapshot_spacing: 1024,
    deterministic: false,
    graphs: false,
};

/// The step appends a token to a full page. Its page is taken back, unless it may be in a state of DeepSeek-V4, too, and no other
/// step comes after it.
#[rstest]
#[case::v3("v3-tiny", 1)]
#[case::v4("v4-tiny", 2)]
fn a_failed_step_is_rolled_back_and_the_last(#[case] fixture: &str, #[case] pages: usize) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(fixture);
    let model = DeepseekModel::load(&dir, &Device::flex(), FloatDType::F32, &mut |_| {}).unwrap();
    let tokenizer = Tokenizer::load(&dir).unwrap();
    let mut engine = RankEngine::new(&model, &tokenizer, OPTIONS).unwrap();
    let prompt = (3..).take(engine.scheduler.cache.page_size()).collect();
    let request = GenerationRequest { prompt, sampling: SamplingParams::greedy(), max_new_tokens: 9, stop: Vec::new() };
    let mut stream = engine.submit(request.clone()).unwrap();
    assert!(engine.step().unwrap());
    let before = engine.stats();
    assert_eq!((before.pages_in_use, before.generated_tokens), (1, 1));
    let pool = engine.scheduler.cache.pages_mut().take_pool(0).unwrap();
    let error = engine.step().expect_err("a pool is away");
    assert!(matches!(error, ModelError::Cache(CacheError::PoolTaken { pool: 0 })), "{error}");
    engine.scheduler.cache.pages_mut().put_pool(0, pool).unwrap();
    let after = engine.stats();
    assert_eq!((after.pages_in_use, after.generated_tokens, after.steps), (pages, 1, before.steps));
    // The pool is there again, but what the step has written is not known.
    let again = engine.step().expect_err("it has failed");
    let refused = engine.submit(request).expect_err("it has failed");
    for later in [again, refused] {
        assert!(matches!(&later, ModelError::EngineFailed { reason } if *reason == error.to_string()), "{later}");
    }
    assert!(engine.cancel(stream.id()).unwrap());
    let events = std::iter::from_fn(|| stream.try_next());
    let Some(StreamEvent::Finished(completion)) = events.last() else { panic!("no end") };
    assert_eq!((completion.finish, completion.token_ids.len()), (FinishReason::Cancelled, 1));
    assert_eq!((engine.requests(), engine.stats().pages_in_use), (0, 0));
}
