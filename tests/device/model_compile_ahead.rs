//! Kernels that are compiled before the weights are there: afterwards requests find them, and compute what they would have.
//!
//! While kernels are named no launch of the program reaches a device: each test is a process of its own, which runs one that is
//! ignored here.

use std::process::Command;

use burn::tensor::{Device, FloatDType};
use burn_mla::model::{EngineOptions, ModelConfig, Tokenizer, compile_ahead};
use burn_mla::ops::{compiled_kernels, wait_for_kernels};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rstest::rstest;

use crate::devices::{for_each_device, is_cuda};
use crate::model_engine::{drain, greedy};
use crate::model_parity::{folder, load};

/// The model of the process, by its folder.
const MODEL: &str = "MLA_TEST_COMPILE_AHEAD";
const OPTIONS: EngineOptions = EngineOptions {
    page_size: 16,
    cache_pages: 32,
    max_batch: 2,
    token_budget: 64,
    prefix_caching: false,
    deterministic: false,
    graphs: false,
};

#[rstest]
fn model_kernels_are_compiled_ahead(#[values("v2lite-tiny", "v32-tiny", "v4-tiny")] fixture: &str) {
    let program = std::env::current_exe().expect("this program");
    let mut command = Command::new(program);
    command.args(["--exact", "model_compile_ahead::in_a_process", "--ignored", "--nocapture"]).env(MODEL, fixture);
    let output = command.output().expect("this program runs once more");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}\n{errors}");
}

#[test]
#[ignore = "a process of its own: see model_kernels_are_compiled_ahead"]
fn in_a_process() {
    let Ok(fixture) = std::env::var(MODEL) else { return };
    let fixture = format!("tests/fixtures/{fixture}");
    for_each_device(|device| {
        let config = ModelConfig::read(&folder(&fixture)).expect("a configuration");
        // All that most prompts have in common, and then what is left.
        for prompts in [vec![48], (1..48).collect()] {
            compile_ahead(&config, device, FloatDType::F32, &OPTIONS, &prompts).expect("legal options");
            wait_for_kernels();
        }
        let tokens = generate(&fixture, device, &mut ChaCha8Rng::seed_from_u64(1));
        assert_eq!(tokens, generate(&fixture, &Device::flex(), &mut ChaCha8Rng::seed_from_u64(1)), "{device:?}");
        if is_cuda(device) {
            let before = compiled_kernels();
            let mut rng = ChaCha8Rng::seed_from_u64(2);
            (0..10).for_each(|_| drop(generate(&fixture, device, &mut rng)));
            assert_eq!(compiled_kernels(), before, "kernels compiled for other lengths");
        }
    });
}

/// The tokens that follow two random prompts of random lengths.
fn generate(fixture: &str, device: &Device, rng: &mut ChaCha8Rng) -> Vec<Vec<u32>> {
    let (model, tokenizer) = (load(fixture, device), Tokenizer::bytes().expect("a tokenizer"));
    let mut engine = burn_mla::model::Engine::new(&model, &tokenizer, OPTIONS).expect("legal options");
    let mut prompt = || {
        let len = rng.random_range(1..=48);
        (0..len).map(|_| rng.random_range(0..256)).collect()
    };
    let streams = [prompt(), prompt()].map(|prompt| engine.submit(greedy(prompt, 4)).expect("a legal request"));
    while engine.step().expect("the device works") {}
    let tokens = streams.map(|mut stream| {
        let completion = drain(&mut stream, &mut String::new()).expect("all requests have ended");
        completion.token_ids
    });
    tokens.into()
}
