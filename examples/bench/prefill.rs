//! Prompt tokens per second of whole models, by the engine: published sizes, random weights.

use std::time::Instant;

use burn_mla::model::{Engine, EngineOptions, GenerationRequest, ModelRanks, SamplingParams, Tokenizer};
use serde_json::json;

use crate::cases::{Bench, Size};
use crate::data;
use crate::models::{ModelCase, flops_per_token, show};
use crate::report::rounded;

/// Batches of prompts, one after the other; the first compiles and tunes, and is not counted. Fewer of long prompts.
const BATCHES: usize = 9;
const LONG_BATCHES: usize = 3;
/// Tokens of a step, at most: longer prompts take several.
const STEP: usize = 16384;
const PAGE: usize = 64;

/// The section.
pub fn run(bench: &mut Bench, cases: Vec<ModelCase>) {
    for model in cases {
        bench.case(&format!("prefill {}", model.name), |bench| case(bench, &model));
    }
}

fn case(bench: &mut Bench, case: &ModelCase) -> Result<(), String> {
    let model = case.load(bench)?;
    let tokenizer = Tokenizer::bytes().map_err(show)?;
    let shapes = match bench.size {
        Size::Full => vec![(1, 2048), (1, 8192), (8, 2048), (1, 65536)],
        Size::Quick => vec![(1, 2048), (8, 2048)],
        Size::Smoke => vec![(2, 24)],
    };
    for (batch, len) in shapes {
        bench.case(&format!("prefill {} {batch} x {len}", case.name), |bench| {
            let ms = prefill(&model, &tokenizer, [batch, len], bench.deterministic)?;
            let (first, others) = (ms[0], ms[1..].iter().sum::<f64>() / (ms.len() - 1) as f64);
            let shape = [
                ("model", json!(case.name)),
                ("layers", json!(model.first().config().num_layers())),
                ("b", json!(batch)),
                ("context", json!(len)),
                ("deterministic", json!(bench.deterministic)),
            ];
            let tokens = batch * len;
            let least = ms[1..].iter().copied().fold(f64::INFINITY, f64::min);
            let numbers = [
                ("tokens", json!(tokens)),
                ("ms", rounded(others, 2)),
                ("ms_min", rounded(least, 2)),
                ("ms_first", rounded(first, 2)),
                ("tokens_per_s", rounded(1e3 * tokens as f64 / others, 1)),
                ("weight_gflop_per_token", rounded(flops_per_token(model.first().config()) / 1e9, 3)),
            ];
            bench.report.rate("e2e_prefill", &shape, &numbers);
            Ok(())
        });
    }
    Ok(())
}

/// Milliseconds of each of some batches of prompts of random ids, all different, from their submission until their first tokens
/// are on the host. A batch is one step, or several of a long prompt, whose kernels are launched.
fn prefill(
    model: &ModelRanks,
    tokenizer: &Tokenizer,
    [batch, len]: [usize; 2],
    deterministic: bool,
) -> Result<Vec<f64>, String> {
    let steps = (batch * len).div_ceil(STEP);
    let batches = if steps > 1 { LONG_BATCHES } else { BATCHES };
    let options = EngineOptions {
        page_size: PAGE,
        cache_pages: batch * (len + 1).div_ceil(PAGE),
        max_batch: batch,
        token_budget: STEP.min(batch * len),
        mixed_prompt_tokens: STEP,
        prefix_caching: false,
        snapshot_spacing: 1024,
        deterministic,
        graphs: false,
    };
    let mut engine = Engine::new(model, tokenizer, options).map_err(show)?;
    let mut rng = data::rng(len as u64);
    let mut ms = Vec::with_capacity(batches);
    for _ in 0..batches {
        let requests: Vec<_> = (0..batch).map(|_| request(len, model.first().vocab_size(), &mut rng)).collect();
        let start = Instant::now();
        let streams = requests.into_iter().map(|request| engine.submit(request));
        // A stream that is dropped cancels its request.
        let _streams = streams.collect::<Result<Vec<_>, _>>().map_err(show)?;
        while engine.step().map_err(show)? {}
        ms.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let stats = engine.stats();
    if stats.steps != batches * steps || stats.generated_tokens != batches * batch {
        let (steps, tokens) = (stats.steps, stats.generated_tokens);
        return Err(format!("{batches} batches of {batch} prompts took {steps} steps and gave {tokens} tokens"));
    }
    Ok(ms)
}

/// A prompt that ends with its first token.
pub fn request(len: usize, vocab: usize, rng: &mut rand_chacha::ChaCha8Rng) -> GenerationRequest {
    let prompt = data::token_ids(len, vocab, rng);
    GenerationRequest { prompt, sampling: SamplingParams::greedy(), max_new_tokens: 1, stop: Vec::new() }
}
