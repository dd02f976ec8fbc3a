//! Tokens per second of whole models, by the engine: published sizes, weights that are drawn on the device.

use burn::tensor::FloatDType;
use burn_mla::model::{
    DeepseekModel, Engine, EngineOptions, GenerationRequest, ModelConfig, SamplingParams, Tokenizer,
};
use serde_json::{Value, json};

use crate::report::rounded;
use crate::{Bench, Size};

/// Tokens of a prompt: 5 pages, and not more than 8 at the end, so that all steps of a batch are one captured step.
const PROMPT: usize = 264;
/// Tokens of each request before the clock starts: shapes are compiled and the step is captured by then.
const WARM_UP: usize = 8;
/// Tokens that are left when the clock stops: requests whose prompts were computed first are so much ahead.
const AHEAD: usize = 16;
const PAGE: usize = 64;

/// A published configuration, and layers of it.
struct Published {
    name: &'static str,
    config: &'static str,
    layers: usize,
}

const V2_LITE: &str = include_str!("models/deepseek-v2-lite.json");
const V3: &str = include_str!("models/deepseek-v3.json");

/// The section: V2-Lite whole, and as many layers of V3 as fit, 3 of them dense.
pub fn run(bench: &mut Bench) {
    let models = match bench.size {
        Size::Full => vec![
            Published { name: "v2-lite", config: V2_LITE, layers: 27 },
            Published { name: "v3", config: V3, layers: 6 },
        ],
        Size::Quick => vec![
            Published { name: "v2-lite", config: V2_LITE, layers: 27 },
            Published { name: "v3", config: V3, layers: 4 },
        ],
        Size::Smoke => vec![Published { name: "v2-lite", config: V2_LITE, layers: 2 }],
    };
    for model in models {
        bench.case(&format!("e2e {}", model.name), |bench| case(bench, &model));
    }
}

fn case(bench: &mut Bench, published: &Published) -> Result<(), String> {
    let show = |error: burn_mla::model::ModelError| error.to_string();
    let config = config(published, bench.size == Size::Smoke)?;
    let dtype = FloatDType::from(bench.dtype);
    let model = DeepseekModel::random(config, 1, &bench.device, dtype, &mut |_| {}).map_err(show)?;
    let tokenizer = Tokenizer::bytes().map_err(show)?;
    let new_tokens = if bench.size == Size::Smoke { 4 } else { 128 };
    for batch in bench.pick(&[1, 8, 64], 1, &[1, 3]) {
        for graphs in [true, false] {
            let decode = decode(&model, &tokenizer, batch, new_tokens, graphs)?;
            let shape = [
                ("model", json!(published.name)),
                ("layers", json!(published.layers)),
                ("b", json!(batch)),
                ("context", json!(PROMPT)),
            ];
            let numbers = [
                ("tokens_per_s", rounded(decode.tokens as f64 / decode.seconds, 1)),
                ("ms_per_step", rounded(1e3 * decode.seconds / decode.steps as f64, 3)),
                ("graph_steps", json!(decode.graph_steps)),
                ("steps", json!(decode.steps)),
            ];
            bench.report.rate("e2e_decode", &shape, &numbers);
        }
    }
    Ok(())
}

/// The configuration with fewer layers and without an end token; `tiny`, with fewer channels, too.
fn config(published: &Published, tiny: bool) -> Result<ModelConfig, String> {
    let mut config: Value = serde_json::from_str(published.config).map_err(|error| error.to_string())?;
    if tiny {
        for (field, value) in [
            ("vocab_size", 256),
            ("hidden_size", 64),
            ("intermediate_size", 96),
            ("moe_intermediate_size", 32),
            ("num_attention_heads", 2),
            ("bos_token_id", 0),
        ] {
            config[field] = json!(value);
        }
    }
    // Weights that are drawn would draw one, sooner or later.
    config["eos_token_id"] = Value::Null;
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let path = folder.path().join("config.json");
    std::fs::write(&path, config.to_string()).map_err(|error| error.to_string())?;
    let config = ModelConfig::read_file(&path).and_then(|config| config.with_layers(published.layers));
    config.map_err(|error| error.to_string())
}

/// What the engine did while the clock ran.
struct Decode {
    tokens: usize,
    steps: usize,
    graph_steps: usize,
    seconds: f64,
}

/// Greedy tokens of so many requests at once, by the wall clock: the forward pass, its logits on the host, and the choice.
fn decode(
    model: &DeepseekModel,
    tokenizer: &Tokenizer,
    batch: usize,
    new_tokens: usize,
    graphs: bool,
) -> Result<Decode, String> {
    let show = |error: burn_mla::model::ModelError| error.to_string();
    let max_new_tokens = WARM_UP + new_tokens + AHEAD;
    let options = EngineOptions {
        page_size: PAGE,
        cache_pages: batch * (PROMPT + max_new_tokens).div_ceil(PAGE),
        max_batch: batch,
        token_budget: 2048,
        prefix_sharing: false,
        deterministic: false,
        graphs,
    };
    let mut engine = Engine::new(model, tokenizer, options).map_err(show)?;
    let request = |number: usize| GenerationRequest {
        prompt: (0..PROMPT).map(|token| ((number * 31 + token * 7) % 256) as u32).collect(),
        sampling: SamplingParams::greedy(),
        max_new_tokens,
        stop: Vec::new(),
    };
    let streams = (0..batch).map(|number| engine.submit(request(number)));
    // A stream that is dropped cancels its request.
    let _streams = streams.collect::<Result<Vec<_>, _>>().map_err(show)?;
    // A prompt's last chunk gives the first token; after that each request has one in each step.
    while engine.stats().prompt_tokens < batch * PROMPT {
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
        return Err(format!("{tokens} tokens were drawn while the clock ran, expected {batch} * {new_tokens}"));
    }
    Ok(Decode {
        tokens,
        steps: after.steps - before.steps,
        graph_steps: after.graph_steps - before.graph_steps,
        seconds: (after.decode_time - before.decode_time).as_secs_f64(),
    })
}
