//! Models with a KV cache in FP8: half of the memory, and what that does to logits and texts.

use std::path::Path;

use burn::tensor::{Device, FloatDType};
use burn_mla::model::{
    CacheSize, DeepseekModel, GenerationOptions, GenerationRequest, KvCacheFormat, LoadAs, ModelConfig, ModelError,
    SamplingParams, Tokenizer, generate,
};
use mla_ops::Determinism;
use rstest::rstest;

use crate::cli_faults::program;
use crate::devices::{for_each_device, is_slow};
use crate::model_parity::{Stored, folder, logits_in_steps};

const F32: FloatDType = FloatDType::F32;

fn load_as(kv_cache: KvCacheFormat) -> LoadAs {
    LoadAs { kv_cache, ..LoadAs::from(F32) }
}

fn load(name: &str, kv_cache: KvCacheFormat, device: &Device) -> Result<DeepseekModel, ModelError> {
    DeepseekModel::load(&folder(name), device, load_as(kv_cache), &mut |_| {})
}

/// How far the logits of a token are from those with a cache in f32, relative to the largest, for half of the tokens at most; a part of
/// it at least, or nothing was rounded. A code has 3 bits behind the first: up to 6 % of each channel, of which much cancels out. (Where
/// that gives a token other experts, its logits are others altogether.)
#[rstest]
#[case("v3-tiny", 0.05)]
#[case("v32-tiny", 0.05)]
#[case("v2lite-tiny", 0.05)]
#[case("v3-realdims", 0.05)]
#[case("v4-tiny", 0.05)]
#[case("v4-realdims", 0.05)]
fn model_fp8_cache_is_close(#[case] fixture: &str, #[case] most: f32) {
    let name = format!("tests/fixtures/{fixture}");
    let mut ids = Stored::read(&name).input_ids;
    ids.truncate(24);
    for_each_device(|device| {
        let [expected, actual] = [KvCacheFormat::Auto, KvCacheFormat::Fp8].map(|kv_cache| {
            let model = load(&name, kv_cache, device).expect("the checkpoint loads");
            logits_in_steps(&model, &ids, 8)
        });
        let largest = expected.iter().fold(0f32, |most, logit| most.max(logit.abs()));
        let (vocab, tokens) = (expected.len() / ids.len(), actual.chunks(expected.len() / ids.len()));
        let off = |(actual, expected): (&[f32], &[f32])| {
            actual.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / largest
        };
        let mut off: Vec<f32> = tokens.zip(expected.chunks(vocab)).map(off).collect();
        off.sort_by(f32::total_cmp);
        let [median, worst] = [off[ids.len() / 2], off[ids.len() - 1]];
        eprintln!("{fixture} on {device:?}: half of the tokens off by {median} at most, all by {worst}");
        assert!(median <= most && median >= 1e-4, "{fixture} on {device:?}: off by {off:?}");
    });
}

/// Batch-invariant, a token's logits are the same bits however its prompt is divided: tokens see rows of the cache alone.
#[rstest]
fn model_fp8_cache_is_batch_invariant(#[values("v3-tiny", "v32-tiny", "v4-tiny")] fixture: &str) {
    let name = format!("tests/fixtures/{fixture}");
    let mut ids = Stored::read(&name).input_ids;
    ids.truncate(24);
    for_each_device(|device| {
        let model = load(&name, KvCacheFormat::Fp8, device).expect("the checkpoint loads");
        let last = |pieces: &[usize], determinism| {
            let size = CacheSize { num_pages: 4, page_size: 16, max_requests: 1, max_tokens: ids.len() };
            let mut cache = model.new_cache(size).expect("a small cache");
            let request = cache.admit().expect("room");
            let (mut rest, mut bits) = (&ids[..], Vec::new());
            for &piece in pieces {
                let (tokens, others) = rest.split_at(piece);
                let chunk = cache.append(request, tokens).expect("room");
                let logits = model.next_token_logits(&[chunk], &mut cache, determinism).expect("a pass");
                bits = logits.cast(F32).try_into_vec_as::<f32>().expect("reads back");
                rest = others;
            }
            bits.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let invariant = |pieces: &[usize]| last(pieces, Determinism::BatchInvariant);
        let whole = invariant(&[24]);
        assert!(whole == invariant(&[9, 15]) && whole == invariant(&[23, 1]), "{fixture} on {device:?}");
        // Otherwise the new tokens of a prompt see one another before they are rounded.
        if fixture == "v3-tiny" {
            assert_ne!(last(&[24], Determinism::Fast), last(&[9, 15], Determinism::Fast), "on {device:?}");
        }
    });
}

/// Requests together in a cache of few pages, some of which are preempted: the text that the checkpoint has learnt by heart.
#[rstest]
fn model_fp8_cache_recites(#[values("assets/demo-v3", "assets/demo-v4")] name: &str) {
    for_each_device(|device| {
        let model = load(name, KvCacheFormat::Fp8, device).expect("the checkpoint loads");
        let tokenizer = Tokenizer::load(&folder(name)).expect("the tokenizer loads");
        let request = |prompt: &str, max_new_tokens| {
            let prompt = tokenizer.encode(prompt, true).expect("text");
            GenerationRequest { prompt, sampling: SamplingParams::greedy(), max_new_tokens, stop: Vec::new() }
        };
        let tokens = if is_slow(device) { 24 } else { 60 };
        let requests: Vec<_> = (0..4).map(|i| request("hacker: n.", tokens - i)).collect();
        let options = GenerationOptions { page_size: 16, cache_pages: Some(9), ..GenerationOptions::default() };
        let (completions, stats) =
            generate(&model, &tokenizer, &requests, &options, &mut |_, _| {}).expect("sound requests");
        for completion in &completions {
            let text = completion.text.trim_start();
            assert!(text.starts_with("[originally, someone who makes furniture with an axe]"), "{device:?}: {text}");
        }
        assert!(is_slow(device) || stats.preemptions > 0, "{device:?}: {stats:?}");
        // In both layers of V4 that have them, pages of entries are longer than their rows by less than a row, of 96 bytes for 16 tokens.
        let described = bytes_per_token(model.config(), load_as(KvCacheFormat::Fp8));
        let padded = described + if name.ends_with("v4") { 2 * 96 / 16 } else { 0 };
        assert!((described..=padded).contains(&stats.cache_bytes_per_token), "{device:?}: {stats:?}");
    });
}

fn bytes_per_token(config: &ModelConfig, load_as: LoadAs) -> usize {
    config.layers(load_as).iter().map(|layer| layer.bytes_per_token).sum()
}

/// Of one layer at a time, in 16 bits: 128 channels for each token of V3.2, for every fourth of V4. A GiB at most, and nothing of more.
#[test]
fn model_fp8_cache_counts_dequantised_index_keys() {
    let scratch = |name: &str, kv_cache, num_pages| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("examples/bench/models/{name}.json"));
        let size = CacheSize { num_pages, page_size: 128, max_requests: 1, max_tokens: 1280 };
        let config = ModelConfig::read_file(&path).expect("a configuration");
        let load_as = LoadAs { kv_cache, ..LoadAs::from(FloatDType::BF16) };
        config.index_scratch_bytes(size, load_as).expect("a sound size")
    };
    for (name, page, most) in [("deepseek-v32", 128 * 256, 1 << 15), ("deepseek-v4-flash", 32 * 256, 1 << 17)] {
        for (pages, found) in [(1, page), (10, 10 * page), (most, 1 << 30), (most + 1, 0)] {
            assert_eq!(scratch(name, KvCacheFormat::Fp8, pages), found, "{name}, {pages} pages");
        }
        assert_eq!(scratch(name, KvCacheFormat::Auto, 10), 0, "{name}");
    }
    assert_eq!(scratch("deepseek-v3", KvCacheFormat::Fp8, 10), 0);
}

/// V3's rows: 656 bytes in place of 1,152; V3.2's index keys 132 in place of 256. V4's entries that are picked: 584 bytes for four tokens in
/// place of 1,024, beside their index keys; for its 20 layers with an entry for 128 tokens 8 bytes a token. A page of 32 entries is as
/// long as 33 rows of 576 bytes, one of keys as its rows.
#[test]
fn model_fp8_cache_takes_half() {
    let config = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("examples/bench/models/{name}.json"));
        ModelConfig::read_file(&path).expect("a configuration")
    };
    let bf16 = |kv_cache| LoadAs { kv_cache, ..LoadAs::from(FloatDType::BF16) };
    for (name, dense, fp8) in [("deepseek-v3", 1152, 656), ("deepseek-v32", 1152 + 256, 656 + 132)] {
        let config = config(name);
        assert_eq!(bytes_per_token(&config, bf16(KvCacheFormat::Auto)), 61 * dense);
        assert_eq!(bytes_per_token(&config, bf16(KvCacheFormat::Fp8)), 61 * fp8);
        let size = CacheSize { num_pages: 10, page_size: 64, max_requests: 1, max_tokens: 640 };
        let bytes = config.cache_bytes(size, bf16(KvCacheFormat::Fp8)).expect("small");
        assert_eq!(bytes, 640 * 61 * fp8 as u128);
    }
    let v4 = config("deepseek-v4-flash");
    assert_eq!(bytes_per_token(&v4, bf16(KvCacheFormat::Auto)), 21 * (256 + 64) + 20 * 8);
    assert_eq!(bytes_per_token(&v4, bf16(KvCacheFormat::Fp8)), 21 * (146 + 33) + 20 * 8);
    let size = CacheSize { num_pages: 10, page_size: 128, max_requests: 1, max_tokens: 1280 };
    let bytes = |kv_cache| v4.cache_bytes(size, bf16(kv_cache)).expect("small");
    let saved = 32 * 1024 - 33 * 576 + 32 * (256 - 132);
    assert_eq!(bytes(KvCacheFormat::Auto) - bytes(KvCacheFormat::Fp8), 21 * 10 * saved);
}

#[test]
fn cli_describes_an_fp8_cache() {
    for demo in ["v3", "v4"] {
        let described = |kv_cache| program("generate", &["--demo", demo, "--kv-cache", kv_cache, "--describe"]).stdout;
        assert_ne!(described("auto"), described("fp8"), "{demo}");
    }
}
