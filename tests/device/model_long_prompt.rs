//! Prompts that are much longer than a forward pass: attention over the cached pages and over the new chunk, merged.
//!
//! `cargo test --test device -- --ignored --nocapture --test-threads 1 model_long_prompt_of_100k` reports time and memory.

use std::time::Instant;

use burn::tensor::{Device, FloatDType};
use burn_mla::model::{CacheSize, DeepseekModel, Engine, EngineOptions, EngineStats, ModelConfig, Tokenizer};
use burn_mla::ops::Determinism;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use safetensors::SafeTensors;

use crate::model_engine::{drain, greedy};
use crate::model_parity::folder;

const FIXTURE: &str = "tests/fixtures/v2lite-tiny";

/// The first layer of the fixture, with positions for long prompts: its attention is what is tested.
fn one_layer() -> DeepseekModel {
    let copy = tempfile::tempdir().expect("a temporary folder");
    let config = std::fs::read_to_string(folder(FIXTURE).join("config.json")).expect("a config");
    let changed = config
        .replace("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 1")
        .replace("\"max_position_embeddings\": 1024", "\"max_position_embeddings\": 131072")
        .replace("\"factor\": 4.0", "\"factor\": 512.0");
    std::fs::write(copy.path().join("config.json"), changed).expect("written");
    let bytes = std::fs::read(folder(FIXTURE).join("model.safetensors")).expect("the weights");
    let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let kept = |name: &str| !name.starts_with("model.layers.") || name.starts_with("model.layers.0.");
    let kept = tensors.iter().filter(|(name, _)| kept(name));
    safetensors::serialize_to_file(kept, None, &copy.path().join("model.safetensors")).expect("written");
    DeepseekModel::load(copy.path(), &Device::flex(), FloatDType::F32, &mut |_| {}).expect("it loads")
}

/// A layer of each kind of DeepSeek-V4, with the published rates and positions for long prompts; random weights.
fn v4_layers() -> DeepseekModel {
    let copy = tempfile::tempdir().expect("a temporary folder");
    let config = std::fs::read_to_string(folder("tests/fixtures/v4-tiny").join("config.json")).expect("a config");
    let mut config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
    config["num_hidden_layers"] = 3.into();
    for field in ["layer_types", "mlp_layer_types"] {
        config[field].as_array_mut().expect("a list").truncate(3);
    }
    config["compress_rates"]["heavily_compressed_attention"] = 128.into();
    config["max_position_embeddings"] = 131_072.into();
    config["rope_parameters"]["compress"]["factor"] = 512.into();
    config["index_topk"] = 64.into();
    config["index_n_heads"] = 2.into();
    let path = copy.path().join("config.json");
    std::fs::write(&path, config.to_string()).expect("written");
    let config = ModelConfig::read_file(&path).expect("a sound configuration");
    DeepseekModel::random(config, 1, &Device::flex(), FloatDType::F32, &mut |_| {}).expect("a small model")
}

fn prompt(len: usize) -> Vec<u32> {
    let mut rng = ChaCha8Rng::seed_from_u64(len as u64);
    (0..len).map(|_| rng.random_range(3..512)).collect()
}

/// Logits of the last token, computed in chunks of a size.
fn last_logits(model: &DeepseekModel, prompt: &[u32], chunk: usize, determinism: Determinism) -> Vec<f32> {
    let size =
        CacheSize { num_pages: prompt.len().div_ceil(64), page_size: 64, max_requests: 1, max_tokens: prompt.len() };
    let mut cache = model.new_cache(size).expect("a cache");
    let request = cache.admit().expect("room");
    let mut logits = Vec::new();
    for tokens in prompt.chunks(chunk) {
        let chunk = cache.append(request, tokens).expect("room");
        let last = model.next_token_logits(&[chunk], &mut cache, determinism).expect("a forward pass");
        logits = last.try_into_vec_as::<f32>().expect("reads back");
    }
    logits
}

#[test]
fn model_long_prompt_in_chunks_equals_one_pass() {
    let (model, prompt) = (one_layer(), prompt(2500));
    let whole = last_logits(&model, &prompt, prompt.len(), Determinism::Fast);
    for chunk in [64, 500, 1111] {
        let chunked = last_logits(&model, &prompt, chunk, Determinism::Fast);
        let worst = whole.iter().zip(&chunked).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 2e-4, "chunks of {chunk}: off by {worst}");
        assert!(chunked.iter().all(|value| value.is_finite()));
    }
}

/// Bit for bit, in the deterministic mode: which entries are picked may hang on the last bit of a score.
#[test]
fn model_long_prompt_of_compressed_layers_in_chunks_is_one_pass() {
    let (model, prompt) = (v4_layers(), prompt(2500));
    let logits = |chunk| last_logits(&model, &prompt, chunk, Determinism::BatchInvariant);
    let whole = logits(prompt.len());
    assert!(whole.iter().all(|value| value.is_finite()));
    for chunk in [127, 500, 1111] {
        assert_eq!(logits(chunk), whole, "chunks of {chunk}");
    }
}

#[cfg(target_os = "linux")]
#[test]
#[ignore = "13 minutes of CPU time unoptimised, and it measures the memory of the whole process; 2,500 tokens run always"]
fn model_long_prompt_of_100k_tokens_takes_little_memory() {
    takes_little_memory(&one_layer());
}

#[cfg(target_os = "linux")]
#[test]
#[ignore = "minutes of CPU time unoptimised, and it measures the memory of the whole process; 2,500 tokens run always"]
fn model_long_prompt_of_100k_tokens_in_compressed_layers_takes_little_memory() {
    let model = v4_layers();
    let short = generate(&model, 4000);
    let long = takes_little_memory(&model);
    let ms = |stats: &EngineStats| stats.decode_time.as_secs_f64() * 1e3 / stats.decode_tokens as f64;
    let (short, long) = (ms(&short), ms(&long));
    eprintln!("a decode step takes {short:.2} ms behind 4,000 tokens, {long:.2} ms behind 100,000");
}

/// Reads a prompt of so many tokens, and generates some.
fn generate(model: &DeepseekModel, len: usize) -> EngineStats {
    const NEW: usize = 16;
    let tokenizer = Tokenizer::load(&folder(FIXTURE)).expect("the tokenizer loads");
    let options = EngineOptions { cache_pages: len.div_ceil(64) + 1, token_budget: 2048, ..Default::default() };
    let mut engine = Engine::new(model, &tokenizer, options).expect("a cache");
    let mut stream = engine.submit(greedy(prompt(len), NEW)).expect("a sound request");
    while engine.step().expect("a step") {}
    let completion = drain(&mut stream, &mut String::new()).expect("an end");
    assert_eq!(completion.token_ids.len(), NEW, "{completion:?}");
    engine.stats()
}

#[cfg(target_os = "linux")]
fn takes_little_memory(model: &DeepseekModel) -> EngineStats {
    const LEN: usize = 100_000;
    // What other tests of this process have needed does not count.
    std::fs::write("/proc/self/clear_refs", "5").expect("Linux forgets the maximum");
    let before = most_memory();
    let start = Instant::now();
    let stats = generate(model, LEN);
    let grown = most_memory() - before;
    let cache = stats.cache_bytes_peak;
    eprintln!(
        "{LEN} tokens in {:.0} s, {} steps; {} MB more memory, of which the cache has {} MB",
        start.elapsed().as_secs_f64(),
        stats.steps,
        grown >> 20,
        cache >> 20,
    );
    // A pass over the whole prompt would have 100,000 hidden states of each kind, and keys and values of all heads. Each thread has
    // a piece of work of its own: 115 MB beside the cache were seen with 4 threads, 408 MB with 16.
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    assert!(grown < cache + ((64 + 32 * threads) << 20), "{} MB", grown >> 20);
    stats
}

/// The most memory of this process since the maximum was forgotten, in bytes.
#[cfg(target_os = "linux")]
fn most_memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("Linux says so");
    line.trim().trim_end_matches(" kB").parse::<usize>().expect("a number") << 10
}
