//! Kernels that are compiled for requests of new sizes, in a process that has been warmed up: there should be none.

use burn::tensor::FloatDType;
use burn_mla::model::{DeepseekModel, Engine, EngineOptions, Tokenizer, compile_ahead, compile_all_ahead};
use burn_mla::ops::{compiled_kernels, wait_for_kernels};
use rand::RngExt;
use serde_json::json;

use crate::cases::Bench;
use crate::models::{ModelCase, init, show};
use crate::{data, prefill};

/// Steps of the engine in which requests of random lengths run.
const STEPS: usize = 200;
const PAGE: usize = 64;
const LONGEST: usize = 4096;
const OPTIONS: EngineOptions = EngineOptions {
    page_size: PAGE,
    cache_pages: 512,
    max_batch: 16,
    token_budget: 2048,
    mixed_prompt_tokens: 2048,
    prefix_caching: false,
    snapshot_spacing: 1024,
    deterministic: false,
    graphs: false,
};

/// The section: a fresh process has compiled nothing else, so it is to run alone.
pub fn run(bench: &mut Bench, case: &ModelCase) {
    bench.case(&format!("shapes {}", case.name), |bench| {
        let config = case.config(false)?;
        let dtype = FloatDType::from(bench.dtype);
        let (device, seed) = (bench.device.clone(), bench.weights_seed);
        let before = compiled_kernels();
        // All that most prompts have in common, and then what is left.
        compile_ahead(&config, &device, dtype, &OPTIONS, &[OPTIONS.token_budget]).map_err(show)?;
        compile_all_ahead(&config, &device, dtype, &OPTIONS).map_err(show)?;
        wait_for_kernels();
        let model = DeepseekModel::random(config, init(seed), &device, dtype, &mut |_| {}).map_err(show)?;
        let tokenizer = Tokenizer::bytes().map_err(show)?;
        let mut engine = Engine::new(&model, &tokenizer, OPTIONS).map_err(show)?;
        let mut rng = data::rng(1);
        let mut warm = None;
        let mut streams = Vec::new();
        for step in 0..STEPS {
            // The first requests compile what a pass without a device cannot know of, such as reading logits back.
            if step == 4 {
                warm = Some(compiled_kernels());
            }
            while engine.requests() < OPTIONS.max_batch && rng.random_bool(0.3) {
                let len = (LONGEST as f64).powf(rng.random_range(0.0..1.0)) as usize;
                let mut request = prefill::request(len.max(1), model.vocab_size(), &mut rng);
                request.max_new_tokens = rng.random_range(1..8);
                streams.push(engine.submit(request).map_err(show)?);
            }
            engine.step().map_err(show)?;
        }
        let (warm, after) = (warm.unwrap_or_default(), compiled_kernels());
        let numbers = [
            ("warm_up", json!(warm.compiled + warm.from_disk - before.compiled - before.from_disk)),
            ("requests", json!(streams.len())),
            ("compiled", json!(after.compiled + after.from_disk - warm.compiled - warm.from_disk)),
        ];
        bench.report.rate("e2e_shapes", &[("model", json!(case.name)), ("steps", json!(STEPS))], &numbers);
        Ok(())
    });
}
