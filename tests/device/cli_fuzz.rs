//! Files and lines that are nearly right, by a seed: whatever they say, nothing panics, and nothing is allocated for what they only
//! claim.

use std::ops::Range;
use std::path::Path;

use burn::tensor::{Device, FloatDType};
use burn_mla::model::{
    CacheSize, Checkpoint, Cut, Inspection, ModelConfig, SamplingParams, Tokenizer, WeightLoader, device_bytes,
    weight_specs,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::model_parity::folder;

#[allow(dead_code)]
#[path = "../../examples/serve_batch/request.rs"]
mod request;

use self::request::{Defaults, Line, Reader};

const CASES: usize = 10_000;

/// Values that no field expects, and some that it may.
fn value(rng: &mut ChaCha8Rng) -> Value {
    let powers = [0, 1, 7, 8, 15, 16, 17, 31, 32, 40, 53, 60, 62, 63];
    match rng.random_range(0..12) {
        0 => Value::Null,
        1 => json!(rng.random::<bool>()),
        2 => json!(""),
        3 => json!("deepseek_v3"),
        4 => json!([]),
        5 => json!({}),
        6 => json!(-rng.random_range(0..1_i64 << 40)),
        7 => json!([1e300, -1e-300, 0.5, f64::MAX, -0.0][rng.random_range(0..5)]),
        8 => json!([rng.random::<u64>(), "x", null]),
        9 => json!(rng.random_range(0..600_u64)),
        _ => json!((1_u64 << powers[rng.random_range(0..powers.len())]).wrapping_add(rng.random_range(0..3)) - 1),
    }
}

/// Another value somewhere in an object, or a field less.
fn change(object: &mut Value, rng: &mut ChaCha8Rng) {
    let Some(fields) = object.as_object_mut().filter(|fields| !fields.is_empty()) else {
        *object = value(rng);
        return;
    };
    let at = rng.random_range(0..fields.len());
    let Some((name, found)) = fields.iter_mut().nth(at).map(|(name, found)| (name.clone(), found)) else { return };
    match rng.random_range(0..4) {
        0 => drop(fields.remove(&name)),
        1 if found.is_object() => change(found, rng),
        _ => *found = value(rng),
    }
}

/// Some bytes of a text that are others, more or fewer.
fn damage(bytes: &mut Vec<u8>, within: Range<usize>, rng: &mut ChaCha8Rng) {
    for _ in 0..rng.random_range(1..4) {
        let at = rng.random_range(within.clone()).min(bytes.len() - 1);
        match rng.random_range(0..4) {
            0 => bytes[at] = rng.random(),
            1 => bytes[at] = b"0123456789[]{},:\"\\-eE. "[rng.random_range(0..23)],
            2 => drop(bytes.remove(at)),
            _ => bytes.insert(at, rng.random_range(b'0'..b':')),
        }
    }
}

fn configurations() -> Vec<Value> {
    let names = ["v3-tiny", "v4-tiny", "v32-tiny", "v2lite-tiny"];
    let files = names
        .iter()
        .flat_map(|name| ["config.json", "config.hub.json"].map(|file| format!("tests/fixtures/{name}/{file}")));
    let texts = files.filter_map(|file| std::fs::read(folder(&file)).ok());
    texts.map(|text| serde_json::from_slice(&text).expect("a configuration")).collect()
}

/// Everything that is computed of a configuration before weights are there.
fn use_up(config: &ModelConfig, rng: &mut ChaCha8Rng) {
    let dtype = FloatDType::F32;
    let sum: usize = config.layers(dtype).iter().map(|layer| layer.bytes_per_token + layer.bytes_per_request).sum();
    assert!(sum > 0);
    let mut size = || 1_usize << rng.random_range(0..64);
    let size = CacheSize { num_pages: size(), page_size: size(), max_requests: size(), max_tokens: size() };
    let _ = config.cache_bytes(size, dtype);
    // Larger ones are listed in seconds.
    if config.num_layers() * config.n_routed_experts() < 300 {
        assert!(device_bytes(&weight_specs(config), dtype) > 0);
    }
}

#[test]
fn cli_fuzz_of_configurations() {
    let (mut rng, dir) = (ChaCha8Rng::seed_from_u64(1), tempfile::tempdir().expect("a temporary folder"));
    let (path, all) = (dir.path().join("config.json"), configurations());
    assert!(all.len() > 5);
    let mut read = 0;
    for case in 0..CASES {
        let mut config = all[case % all.len()].clone();
        (0..rng.random_range(1..4)).for_each(|_| change(&mut config, &mut rng));
        let mut text = config.to_string().into_bytes();
        if case % 5 == 0 {
            let all = 0..text.len();
            damage(&mut text, all, &mut rng);
        }
        std::fs::write(&path, text).expect("written");
        if let Ok(config) = ModelConfig::read_file(&path) {
            read += 1;
            use_up(&config, &mut rng);
        }
    }
    assert!(read > CASES / 20, "{read} were read: the others say little");
}

/// A small file, its header changed: offsets, shapes, dtypes, lengths.
#[test]
fn cli_fuzz_of_safetensors_headers() {
    let (mut rng, dir) = (ChaCha8Rng::seed_from_u64(2), tempfile::tempdir().expect("a temporary folder"));
    let header = json!({
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
        "b.weight": {"dtype": "F8_E4M3", "shape": [4, 4], "data_offsets": [12, 28]},
        "b.weight_scale_inv": {"dtype": "F32", "shape": [1, 1], "data_offsets": [28, 32]},
        "c": {"dtype": "I64", "shape": [1, 2], "data_offsets": [32, 48]},
    });
    let mut opened = 0;
    for case in 0..CASES {
        let mut changed = header.clone();
        if case % 2 == 0 {
            change(&mut changed, &mut rng);
        }
        let text = changed.to_string();
        let mut bytes = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &[0; 48]].concat();
        if case % 2 == 1 {
            let within = if case % 4 == 1 { 0..8 + text.len() } else { 9..8 + text.len() };
            damage(&mut bytes, within, &mut rng);
        }
        std::fs::write(dir.path().join("model.safetensors"), bytes).expect("written");
        if let Ok(checkpoint) = Checkpoint::open(dir.path()) {
            opened += 1;
            load(&checkpoint);
        }
    }
    assert!(opened > CASES / 20, "{opened} were opened: the others say little");
}

fn load(checkpoint: &Checkpoint) {
    let mut loader = WeightLoader::new(checkpoint, &Device::flex(), FloatDType::F32, None);
    assert_eq!(loader.tensor("a.weight", [2, 3], Cut::Whole).dims(), [2, 3]);
    assert_eq!(loader.tensor("b.weight", [4, 4], Cut::Whole).dims(), [4, 4]);
    assert_eq!(loader.index_table("c", [1, 2], 4).dims(), [1, 2]);
    let _ = loader.finish();
}

/// A whole folder, of which the header and the index are changed.
#[test]
fn cli_fuzz_of_folders() {
    let (mut rng, dir) = (ChaCha8Rng::seed_from_u64(3), tempfile::tempdir().expect("a temporary folder"));
    let from = folder("tests/fixtures/v32-tiny");
    let index = "model.safetensors.index.json";
    for entry in std::fs::read_dir(&from).expect("a fixture").flatten() {
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).expect("a copy");
    }
    let shard = "model-00003-of-00003.safetensors";
    let [map, bytes] = [index, shard].map(|name| std::fs::read(from.join(name)).expect("a file"));
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    for case in 0..200 {
        let (mut map, mut bytes) = (map.clone(), bytes.clone());
        if case % 2 == 0 {
            let all = 0..map.len();
            damage(&mut map, all, &mut rng);
        } else {
            damage(&mut bytes, 0..8 + length, &mut rng);
        }
        write(dir.path(), index, &map);
        write(dir.path(), shard, &bytes);
        let _ = Inspection::of(dir.path(), FloatDType::BF16);
    }
}

/// The library that reads tokenizers has rules of its own; fewer cases, for a vocabulary takes a millisecond.
#[test]
fn cli_fuzz_of_tokenizers() {
    let (mut rng, dir) = (ChaCha8Rng::seed_from_u64(5), tempfile::tempdir().expect("a temporary folder"));
    let text = std::fs::read(folder("tests/fixtures/v3-tiny/tokenizer.json")).expect("a tokenizer");
    let whole: Value = serde_json::from_slice(&text).expect("JSON");
    let mut read = 0;
    for case in 0..1000 {
        let mut text = text.clone();
        if case % 2 == 0 {
            let mut changed = whole.clone();
            (0..rng.random_range(1..3)).for_each(|_| change(&mut changed, &mut rng));
            text = changed.to_string().into_bytes();
        } else {
            let all = 0..text.len();
            damage(&mut text, all, &mut rng);
        }
        write(dir.path(), "tokenizer.json", &text);
        if let Ok(tokenizer) = Tokenizer::load(dir.path()) {
            read += 1;
            let _ = tokenizer.encode_at_most("naïve 漢字 <eos> \n", true, 4).map(|ids| tokenizer.decode(&ids, true));
        }
    }
    assert!(read > 50, "{read} were read: the others say little");
}

fn write(dir: &Path, name: &str, bytes: &[u8]) {
    std::fs::write(dir.join(name), bytes).expect("written");
}

#[test]
fn cli_fuzz_of_serve_batch_lines() {
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    let line = json!({
        "id": "a", "prompt": "hacker: n. \u{1F600}\n\"", "max_new_tokens": 20, "stop": ["\n", "<eos>"], "seed": 7,
        "temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1
    });
    let reader = Reader {
        defaults: Defaults { sampling: SamplingParams::greedy(), max_new_tokens: 5, stop: Vec::new() },
        tokenizer: Tokenizer::load(&folder("assets/demo-v3")).expect("a tokenizer"),
        chat: Err("none here".into()),
        max_positions: 4096,
    };
    let mut read = 0;
    for number in 0..CASES {
        let mut changed = line.clone();
        change(&mut changed, &mut rng);
        let mut text = changed.to_string().into_bytes();
        if number % 2 == 0 {
            let all = 0..text.len();
            damage(&mut text, all, &mut rng);
        }
        match Line::parse(&text, number, &reader) {
            Ok(line) => {
                read += 1;
                let _ = line.request.sampling.validate();
            }
            Err(error) => assert!(!error.to_string().is_empty() && error.to_string().len() < 1000, "{error}"),
        }
    }
    assert!(read > CASES / 20, "{read} were read: the others say little");
}
