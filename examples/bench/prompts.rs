//! Prompts that begin like a former one (prefix caching), and long ones with the tokens behind them: whole models, by the engine, random
//! weights.

use std::time::Instant;

use burn_mla::model::{Engine, EngineOptions, GenerationRequest, ModelRanks, SamplingParams, Tokenizer};
use serde_json::json;

use crate::cases::{Bench, Size};
use crate::data;
use crate::models::{ModelCase, show};
use crate::report::rounded;

/// Pairs of prompts; the first compiles and tunes, and is not counted.
const PAIRS: usize = 4;
const PAGE: usize = 64;

/// Time to first token of a prompt, and of another one with the same beginning.
pub fn run_prefix(bench: &mut Bench, cases: Vec<ModelCase>) {
    for case in cases {
        bench.case(&format!("prefix {}", case.name), |bench| {
            let model = case.load(bench)?;
            let (common, owns) = if bench.size == Size::Smoke { (24, &[8][..]) } else { (8192, &[1, 16, 64][..]) };
            for &own in owns {
                let [first, second, hits] = prefix(&model, [common, own], bench.deterministic)?;
                let shape = [
                    ("model", json!(case.name)),
                    ("layers", json!(model.first().config().num_layers())),
                    ("common", json!(common)),
                    ("own", json!(own)),
                ];
                let numbers = [
                    ("first_ms", rounded(first, 2)),
                    ("second_ms", rounded(second, 2)),
                    ("of_first", rounded(second / first, 3)),
                    ("hits", rounded(hits, 0)),
                ];
                bench.report.rate("e2e_prefix", &shape, &numbers);
            }
            Ok(())
        });
    }
}

/// Means over pairs of prompts: milliseconds until the first token of either, and tokens of the second that were found.
fn prefix(model: &ModelRanks, [common, own]: [usize; 2], deterministic: bool) -> Result<[f64; 3], String> {
    let tokenizer = Tokenizer::bytes().map_err(show)?;
    let options = EngineOptions {
        page_size: PAGE,
        cache_pages: PAIRS * 2 * (common + own + PAGE).div_ceil(PAGE),
        max_batch: 1,
        deterministic,
        graphs: true,
        ..EngineOptions::on(model.first().device())
    };
    let mut engine = Engine::new(model, &tokenizer, options).map_err(show)?;
    let (vocab, mut rng) = (model.first().vocab_size(), data::rng(common as u64));
    let mut ms = [0.0; 2];
    let mut hits_before = 0;
    for pair in 0..PAIRS {
        let beginning = data::token_ids(common, vocab, &mut rng);
        for ms in &mut ms {
            let prompt = [beginning.clone(), data::token_ids(own, vocab, &mut rng)].concat();
            let request =
                GenerationRequest { prompt, sampling: SamplingParams::greedy(), max_new_tokens: 1, stop: vec![] };
            let start = Instant::now();
            let _stream = engine.submit(request).map_err(show)?;
            while engine.step().map_err(show)? {}
            if pair > 0 {
                *ms += start.elapsed().as_secs_f64() * 1e3 / (PAIRS - 1) as f64;
            }
        }
        if pair == 0 {
            hits_before = engine.stats().prefix_hits;
        }
    }
    let hits = (engine.stats().prefix_hits - hits_before) as f64 / (PAIRS - 1) as f64;
    Ok([ms[0], ms[1], hits])
}

/// Prompts to their end, and steps of one token behind them.
pub fn run_long(bench: &mut Bench, cases: Vec<ModelCase>) {
    let lengths: &[usize] = match bench.size {
        Size::Full => &[4096, 100_000, 500_000],
        Size::Quick => &[4096, 100_000],
        Size::Smoke => &[40],
    };
    for case in cases {
        bench.case(&format!("long {}", case.name), |bench| {
            let model = case.load(bench)?;
            for &len in lengths {
                bench.case(&format!("long {} {len}", case.name), |bench| {
                    let [prompt, step, bytes] = long(&model, len, bench.deterministic)?;
                    let shape = [
                        ("model", json!(case.name)),
                        ("layers", json!(model.first().config().num_layers())),
                        ("context", json!(len)),
                    ];
                    let numbers = [
                        ("prompt_s", rounded(prompt, 3)),
                        ("prompt_tokens_per_s", rounded(len as f64 / prompt, 0)),
                        ("ms_per_step", rounded(step, 3)),
                        ("cache_mb", rounded(bytes / 1e6, 1)),
                    ];
                    bench.report.rate("e2e_long", &shape, &numbers);
                    Ok(())
                });
            }
            Ok(())
        });
    }
}

/// Seconds of a prompt, milliseconds of a decode step behind it, and bytes of the cache.
fn long(model: &ModelRanks, len: usize, deterministic: bool) -> Result<[f64; 3], String> {
    /// Tokens for a warm-up, and tokens that are timed.
    const TOKENS: [usize; 2] = [24, 64];
    let tokenizer = Tokenizer::bytes().map_err(show)?;
    let max_new_tokens = 1 + TOKENS.iter().sum::<usize>();
    let options = EngineOptions {
        page_size: PAGE,
        cache_pages: (len + max_new_tokens).div_ceil(PAGE) + 1,
        max_batch: 1,
        prefix_caching: false,
        deterministic,
        graphs: true,
        ..EngineOptions::on(model.first().device())
    };
    let mut engine = Engine::new(model, &tokenizer, options).map_err(show)?;
    let prompt = data::token_ids(len, model.first().vocab_size(), &mut data::rng(len as u64));
    let request = GenerationRequest { prompt, sampling: SamplingParams::greedy(), max_new_tokens, stop: vec![] };
    let start = Instant::now();
    let _stream = engine.submit(request).map_err(show)?;
    let mut generated_by = |count: usize| -> Result<f64, String> {
        while engine.stats().generated_tokens < count && engine.step().map_err(show)? {}
        Ok(start.elapsed().as_secs_f64())
    };
    let prompt = generated_by(1)?;
    let warm = generated_by(1 + TOKENS[0])?;
    let end = generated_by(max_new_tokens)?;
    Ok([prompt, (end - warm) * 1e3 / TOKENS[1] as f64, engine.stats().cache_bytes_peak as f64])
}
