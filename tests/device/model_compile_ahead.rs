//! Kernels that are compiled before the weights are there: afterwards a request finds them, and gets the tokens that it would have
//! got.
//!
//! While kernels are named no launch of the program reaches a device: so the test is a process of its own, which runs one that is
//! ignored here.

use std::process::Command;

use burn::tensor::{Device, FloatDType};
use burn_mla::model::{Engine, EngineOptions, ModelConfig, Tokenizer, compile_ahead};
use burn_mla::ops::{CompiledKernels, compiled_kernels, wait_for_kernels};

use crate::devices::{for_each_device, is_cuda};
use crate::model_engine::{drain, greedy};
use crate::model_parity::{folder, load};

const MODEL: &str = "tests/fixtures/v2lite-tiny";
const PROMPT: [u32; 5] = [3, 1, 4, 1, 5];
const OPTIONS: EngineOptions = EngineOptions {
    page_size: 16,
    cache_pages: 1,
    max_batch: 1,
    token_budget: 8,
    mixed_prompt_tokens: 8,
    prefix_caching: false,
    snapshot_spacing: 1024,
    deterministic: false,
    graphs: false,
};

#[test]
fn model_kernels_are_compiled_ahead() {
    let program = std::env::current_exe().expect("this program");
    let mut command = Command::new(program);
    command.args(["--exact", "model_compile_ahead::in_a_process", "--ignored", "--nocapture"]);
    let output = command.output().expect("this program runs once more");
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("1 passed"), "{text}\n{errors}");
}

#[test]
#[ignore = "a process of its own: see model_kernels_are_compiled_ahead"]
fn in_a_process() {
    let expected = generate(&Device::flex());
    for_each_device(|device| {
        let config = ModelConfig::read(&folder(MODEL)).expect("a configuration");
        let before = compiled_kernels();
        compile_ahead(&config, device, FloatDType::F32, &OPTIONS, &[PROMPT.len()]).expect("legal options");
        wait_for_kernels();
        let ahead = compiled_kernels();
        assert_eq!(generate(device), expected, "{device:?}");
        if is_cuda(device) {
            let count = |kernels: CompiledKernels| kernels.compiled + kernels.from_disk;
            assert!(count(ahead) - count(before) > 20, "few kernels were named: {before:?}, {ahead:?}");
            // Weights that are cut and joined, and logits that are read: what no step launches.
            let later = count(compiled_kernels()) - count(ahead);
            assert!(later <= 8, "{later} kernels had not been named");
        }
    });
}

/// The tokens that follow a prompt.
fn generate(device: &Device) -> Vec<u32> {
    let (model, tokenizer) = (load(MODEL, device), Tokenizer::bytes().expect("a tokenizer"));
    let mut engine = Engine::new(&model, &tokenizer, OPTIONS).expect("legal options");
    let mut stream = engine.submit(greedy(PROMPT.into(), 3)).expect("a legal request");
    while engine.step().expect("the device works") {}
    drain(&mut stream, &mut String::new()).expect("the request has ended").token_ids
}
