//! Tokens per second of whole models, by the engine: published sizes, random weights.

use std::collections::HashSet;

use burn_mla::model::{
    CacheSize, DeepseekModel, Engine, EngineOptions, GenerationRequest, LoadAs, ModelConfig, ModelError, ModelRanks,
    SamplingParams, Tokenizer, weight_sizes,
};
use burn_mla::ops::{Determinism, argmax};
use serde_json::json;

use crate::cases::{Bench, Size};
use crate::models::{ModelCase, load_as, show};
use crate::report::rounded;

/// Tokens of each request before the clock starts: shapes are compiled and the step is captured by then.
const WARM_UP: usize = 8;
/// Tokens of a step of prompts, at most: four long ones.
const STEP: usize = 2048;
const LONG_STEP: usize = 16384;
const PAGE: usize = 64;

/// The section.
pub fn run(bench: &mut Bench, cases: Vec<ModelCase>) {
    for model in cases {
        bench.case(&format!("e2e {}", model.name), |bench| case(bench, &model));
    }
}

fn case(bench: &mut Bench, case: &ModelCase) -> Result<(), String> {
    let model = case.load(bench)?;
    let config = model.first().config();
    let (layers, weights) = (config.num_layers(), Weights::of(config, load_as(bench)));
    let tokenizer = Tokenizer::bytes().map_err(show)?;
    let new_tokens = if bench.size == Size::Smoke { 4 } else { 128 };
    let batches = if bench.batches.is_empty() { bench.pick(&[1, 8, 64], 1, &[1, 3]) } else { bench.batches.clone() };
    for batch in batches {
        let chosen = model.on_each(|rank| chosen_experts(rank, [batch, bench.context])).map_err(show)?;
        let ways: &[bool] = if bench.captured { &[true] } else { &[true, false] };
        for &graphs in ways {
            let how = How { graphs, deterministic: bench.deterministic, sampling: bench.sampling.clone() };
            let decode = decode(&model, &tokenizer, [batch, bench.context, new_tokens], &how)?;
            let shape = [
                ("model", json!(case.name)),
                ("layers", json!(layers)),
                ("ranks", json!(model.size())),
                ("b", json!(batch)),
                ("context", json!(bench.context)),
                ("deterministic", json!(bench.deterministic)),
                ("temperature", json!(bench.sampling.temperature)),
                ("top_k", json!(bench.sampling.top_k)),
                ("top_p", json!(bench.sampling.top_p)),
            ];
            let (bytes, seconds) = (weights.read_by(batch), decode.seconds / decode.steps as f64);
            let gbps = bytes / seconds / 1e9;
            let mut numbers = vec![
                ("tokens_per_s", rounded(decode.tokens as f64 / decode.seconds, 1)),
                ("ms_per_step", rounded(1e3 * seconds, 3)),
                ("graph_steps", json!(decode.graph_steps)),
                ("steps", json!(decode.steps)),
                ("weights_gb", rounded(bytes / 1e9, 3)),
                ("gbps", rounded(gbps, 1)),
            ];
            if let Some(chosen) = chosen {
                numbers.push(("experts_chosen", rounded(chosen, 1)));
            }
            numbers.extend(bench.copy_gbps.map(|copy| ("of_copy", rounded(gbps / copy, 3))));
            bench.report.rate("e2e_decode", &shape, &numbers);
        }
    }
    Ok(())
}

/// The prompt of request number `number`.
fn prompt(number: usize, len: usize) -> Vec<u32> {
    (0..len).map(|token| ((number * 31 + token * 7) % 256) as u32).collect()
}

/// Different experts that the first decode step of so many requests chooses, the mean over the layers that have some.
fn chosen_experts(model: &DeepseekModel, [batch, context]: [usize; 2]) -> Result<Option<f64>, ModelError> {
    let failed = |reason: &str| ModelError::Device { reason: reason.into() };
    let num_pages = batch * (context + 1).div_ceil(PAGE);
    let size = CacheSize { num_pages, page_size: PAGE, max_requests: batch, max_tokens: context + 1 };
    let mut cache = model.new_cache(size)?;
    let mut chunks = Vec::with_capacity(batch);
    for number in 0..batch {
        let request = cache.admit()?;
        let chunk = cache.append(request, &prompt(number, context))?;
        let logits = model.next_token_logits(&[chunk], &mut cache, Determinism::Fast)?;
        let next = argmax(logits)?.into_scalar::<i32>();
        let next = u32::try_from(next).map_err(|_| failed("logits of which none is finite"))?;
        chunks.push(cache.append(request, &[next])?);
    }
    let layers = model.chosen_experts(&chunks, &mut cache, Determinism::Fast)?;
    let mut different = 0;
    for indices in &layers {
        let chosen = indices.clone().try_into_vec_as::<i32>().map_err(|error| failed(&error.to_string()))?;
        different += chosen.into_iter().collect::<HashSet<_>>().len();
    }
    Ok((!layers.is_empty()).then(|| different as f64 / layers.len() as f64))
}

/// Bytes of the weights that a decode step reads.
struct Weights {
    /// By every step.
    always: f64,
    /// Of all routed experts.
    experts: f64,
    /// The part of the experts that a token goes to.
    chosen: f64,
}

impl Weights {
    fn of(config: &ModelConfig, load_as: LoadAs) -> Self {
        let (all, chosen) = (config.n_routed_experts(), config.num_experts_per_tok());
        let mut weights = Self { always: 0.0, experts: 0.0, chosen: chosen as f64 / all.max(1) as f64 };
        for (spec, bytes) in weight_sizes(config, load_as) {
            let bytes = bytes as f64;
            // Of the embedding a token reads a row.
            let is_embedding = spec.name.starts_with("model.embed_tokens.") || spec.name.starts_with("embed.");
            if spec.name.contains(".experts.") {
                weights.experts += bytes;
            } else if !is_embedding {
                weights.always += bytes;
            }
        }
        weights
    }

    /// By a step of so many tokens, where each expert is as likely as the others: exact for one token.
    fn read_by(&self, tokens: usize) -> f64 {
        self.always + self.experts * (1.0 - (1.0 - self.chosen).powf(tokens as f64))
    }
}

/// What the engine did while the clock ran.
struct Decode {
    tokens: usize,
    steps: usize,
    graph_steps: usize,
    seconds: f64,
}

/// How an engine runs.
struct How {
    graphs: bool,
    deterministic: bool,
    sampling: SamplingParams,
}

/// Tokens of so many requests at once, by the wall clock: the forward pass, the choice, and its way to the host. With graphs
/// the next step does not wait for that.
fn decode(
    model: &ModelRanks,
    tokenizer: &Tokenizer,
    [batch, context, new_tokens]: [usize; 3],
    how: &How,
) -> Result<Decode, String> {
    let token_budget = if context > STEP { LONG_STEP } else { STEP };
    // Requests whose prompts were computed first are ahead, and shall not end before the clock stops.
    let ahead = 2 + (batch * context).div_ceil(token_budget - batch);
    let max_new_tokens = WARM_UP + new_tokens + ahead;
    let options = EngineOptions {
        page_size: PAGE,
        cache_pages: batch * (context + max_new_tokens).div_ceil(PAGE),
        max_batch: batch,
        token_budget,
        mixed_prompt_tokens: token_budget,
        prefix_caching: false,
        snapshot_spacing: 1024,
        deterministic: how.deterministic,
        graphs: how.graphs,
    };
    let mut engine = Engine::new(model, tokenizer, options).map_err(show)?;
    let request = |number: usize| GenerationRequest {
        prompt: prompt(number, context),
        sampling: SamplingParams { seed: number as u64, ..how.sampling.clone() },
        max_new_tokens,
        stop: Vec::new(),
    };
    let streams = (0..batch).map(|number| engine.submit(request(number)));
    // A stream that is dropped cancels its request.
    let _streams = streams.collect::<Result<Vec<_>, _>>().map_err(show)?;
    // A prompt's last chunk gives the first token; after that each request has one in each step.
    while engine.stats().prompt_tokens < batch * context {
        engine.step().map_err(show)?;
    }
    for _ in 1..WARM_UP {
        engine.step().map_err(show)?;
    }
    let before = engine.stats();
    for _ in 0..new_tokens {
        engine.step().map_err(show)?;
    }
    let after = engine.stats();
    let tokens = after.decode_tokens - before.decode_tokens;
    if tokens != batch * new_tokens {
        return Err(format!("{tokens} tokens were generated while the clock ran, expected {batch} * {new_tokens}"));
    }
    Ok(Decode {
        tokens,
        steps: after.steps - before.steps,
        graph_steps: after.graph_steps - before.graph_steps,
        seconds: (after.decode_time - before.decode_time).as_secs_f64(),
    })
}
