//! Mixed load: prompts arrive while others generate, and the chunks of the ones are computed in the steps of the others. How long a
//! reader waits for the next token, by how many tokens of prompts such a step has at most.

use std::time::Instant;

use burn_mla::model::{Engine, EngineOptions, EngineStats, GenerationRequest, ModelRanks, SamplingParams, Tokenizer};
use rand::RngExt;
use serde_json::json;

use crate::cases::{Bench, Size};
use crate::data;
use crate::models::{ModelCase, show};
use crate::report::rounded;

/// Requests of a load.
struct Load {
    /// That run at a time: where one ends, the next one arrives.
    running: usize,
    /// That end while the clock runs.
    measured: usize,
    /// Tokens of prompts, from the shortest to the longest.
    prompts: [usize; 2],
    /// Tokens that they generate. Of different numbers, so that they neither end nor arrive together.
    new_tokens: [usize; 2],
    /// Of prompts in a step in which others generate.
    budgets: &'static [usize],
}

/// The section.
pub fn run(bench: &mut Bench, cases: Vec<ModelCase>) {
    for model in cases {
        bench.case(&format!("mixed {}", model.name), |bench| case(bench, &model));
    }
}

fn case(bench: &mut Bench, case: &ModelCase) -> Result<(), String> {
    let model = case.load(bench)?;
    let tokenizer = Tokenizer::bytes().map_err(show)?;
    let full = Load {
        running: 32,
        measured: 96,
        prompts: [256, 4096],
        new_tokens: [64, 192],
        budgets: &[256, 512, 1024, 2048, 8192],
    };
    let load = match bench.size {
        Size::Full => full,
        Size::Quick => Load { measured: 32, ..full },
        Size::Smoke => Load { running: 2, measured: 3, prompts: [5, 30], new_tokens: [2, 5], budgets: &[8] },
    };
    for &mixed_prompt_tokens in load.budgets {
        bench.case(&format!("mixed {} {mixed_prompt_tokens}", case.name), |bench| {
            let shape = [
                ("model", json!(case.name)),
                ("layers", json!(model.first().config().num_layers())),
                ("b", json!(load.running)),
                ("mixed_prompt_tokens", json!(mixed_prompt_tokens)),
                ("deterministic", json!(bench.deterministic)),
            ];
            let numbers = mixed(&model, &tokenizer, &load, mixed_prompt_tokens, bench.deterministic)?;
            bench.report.rate("e2e_mixed", &shape, &numbers);
            Ok(())
        });
    }
    Ok(())
}

/// Runs the load once as a warm-up, for kernels and captured steps, and once by the clock.
fn mixed(
    model: &ModelRanks,
    tokenizer: &Tokenizer,
    load: &Load,
    mixed_prompt_tokens: usize,
    deterministic: bool,
) -> Result<Vec<(&'static str, serde_json::Value)>, String> {
    let longest = load.prompts[1] + load.new_tokens[1];
    let default = EngineOptions::on(model.first().device());
    let options = EngineOptions {
        cache_pages: load.running * longest.div_ceil(default.page_size),
        max_batch: load.running,
        mixed_prompt_tokens,
        prefix_caching: false,
        deterministic,
        graphs: true,
        ..default
    };
    let mut engine = Engine::new(model, tokenizer, options).map_err(show)?;
    run_load(&mut engine, load, model.first().vocab_size())?;
    engine.reset_latency().map_err(show)?;
    let (before, start) = (engine.stats(), Instant::now());
    run_load(&mut engine, load, model.first().vocab_size())?;
    let (stats, seconds) = (engine.stats(), start.elapsed().as_secs_f64());
    let ms = |time: Option<std::time::Duration>| time.map_or(0.0, |time| time.as_secs_f64() * 1e3);
    let [p50, p99] = [stats.inter_token_p50, stats.inter_token_p99].map(ms);
    let count = |of: fn(&EngineStats) -> usize| of(&stats) - of(&before);
    Ok(vec![
        ("inter_token_p50_ms", rounded(p50, 3)),
        ("inter_token_p99_ms", rounded(p99, 3)),
        ("p99_of_p50", rounded(p99 / p50.max(1e-9), 2)),
        ("tokens_per_s", rounded(count(|stats| stats.generated_tokens) as f64 / seconds, 1)),
        ("prompt_tokens_per_s", rounded(count(|stats| stats.prompt_tokens) as f64 / seconds, 1)),
        ("steps", json!(count(|stats| stats.steps))),
        ("graph_steps", json!(count(|stats| stats.graph_steps))),
        ("preemptions", json!(count(|stats| stats.preemptions))),
    ])
}

/// Random requests, the same for the same load: as many as are measured, of which so many run at a time.
fn run_load(engine: &mut Engine<'_>, load: &Load, vocab: usize) -> Result<(), String> {
    let mut rng = data::rng(load.measured as u64);
    let (mut streams, mut arrived) = (Vec::new(), 0);
    loop {
        while arrived < load.measured && engine.requests() < load.running {
            let [len, max_new_tokens] = [load.prompts, load.new_tokens].map(|[low, high]| rng.random_range(low..=high));
            let prompt = data::token_ids(len, vocab, &mut rng);
            let sampling = SamplingParams::greedy();
            let request = GenerationRequest { prompt, sampling, max_new_tokens, stop: Vec::new() };
            // A stream that is dropped cancels its request.
            streams.push(engine.submit(request).map_err(show)?);
            arrived += 1;
        }
        if !engine.step().map_err(show)? && arrived == load.measured {
            return Ok(());
        }
    }
}
