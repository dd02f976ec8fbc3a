//! The cases of a picture, out of the files that the benchmarks have written.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::Picture;
use crate::measurement::{Case, Measurement};

/// Our own name.
pub const OURS: &str = "burn-mla";
/// Decode: sequences and their tokens.
const BATCHES: [u64; 4] = [1, 16, 64, 128];
const LENGTHS: [u64; 2] = [4096, 16384];

/// All cases that ours has, with what each program reached: the best where a program has several rows.
///
/// # Errors
/// Files of several machines or commits, and files without a case or a ceiling that the picture needs.
pub fn measurement(picture: Picture, files: &[Value]) -> Result<Measurement, String> {
    let mut measurement = about(files)?;
    let rows = || files.iter().filter_map(|file| file["rows"].as_array()).flatten();
    for row in rows().filter(|row| row["peer"] == OURS) {
        let Some((group, name)) = case(picture, row) else { continue };
        if measurement.cases.iter().any(|case| case.group == group && case.name == name) {
            continue;
        }
        let mut values = BTreeMap::new();
        for row in rows().filter(|row| case(picture, row).is_some_and(|key| key == (group.clone(), name.clone()))) {
            let best: &mut f64 = values.entry(program(text(row, "peer"))).or_default();
            *best = best.max(value(picture, row)?);
        }
        let (bound, flop_per_byte) = bound(picture, row, &measurement)?;
        measurement.cases.push(Case { group, name, bound: tenth(bound), flop_per_byte, values });
    }
    match measurement.cases.is_empty() {
        true => Err("the files have no case of this picture".into()),
        false => Ok(measurement),
    }
}

/// What all files say of the machine, and how they came about.
fn about(files: &[Value]) -> Result<Measurement, String> {
    let smi = |file: &Value| {
        let line = file["meta"]["gpu_start"].as_str().or(file["meta"]["smi_start"].as_str()).unwrap_or_default();
        let mut words = line.split(", ").map(str::to_string);
        (words.next().unwrap_or_default(), words.next().unwrap_or_default())
    };
    let commits = files.iter().filter_map(|file| file["meta"]["commit"].as_str().map(str::to_string));
    let (machine, driver) = one(files.iter().map(smi), "machine and driver")?;
    if driver.is_empty() {
        return Err("a file does not name its GPU: nvidia-smi was not there when it was made".into());
    }
    let dates = files.iter().filter_map(|file| file["meta"]["date"].as_str()?.get(..10));
    Ok(Measurement {
        machine,
        driver,
        commit: one(commits, "commit")?,
        date: dates.max().unwrap_or_default().to_string(),
        memory_gbps: ceiling(files, |name| name.ends_with("_GBps")),
        matmul_tflops: ceiling(files, |name| name == "bf16_matmul_8192_TFLOPs"),
        cases: Vec::new(),
    })
}

/// The only one of these.
fn one<T: PartialEq + std::fmt::Debug>(mut all: impl Iterator<Item = T>, what: &str) -> Result<T, String> {
    let first = all.next().ok_or_else(|| format!("no file has a {what}"))?;
    match all.find(|other| *other != first) {
        Some(other) => Err(format!("the files have more than one {what}: {first:?} and {other:?}")),
        None => Ok(first),
    }
}

/// The most that any program saw, at its start or its end.
fn ceiling(files: &[Value], is_wanted: impl Fn(&str) -> bool) -> f64 {
    let times = files.iter().flat_map(|file| [&file["ceilings"]["start"], &file["ceilings"]["end"]]);
    let named = times.filter_map(Value::as_object).flatten();
    named.filter(|(name, _)| is_wanted(name)).filter_map(|(_, value)| value.as_f64()).fold(0.0, f64::max)
}

/// Group and name of a row's case, if the picture has it.
fn case(picture: Picture, row: &Value) -> Option<(String, String)> {
    match picture {
        Picture::Decode => decode_case(row),
        Picture::Prefill => prefill_case(row),
        Picture::Models => model_case(row),
    }
}

fn decode_case(row: &Value) -> Option<(String, String)> {
    let [b, s_q, h_q, s_k] = ["b", "s_q", "h_q", "s_k"].map(|key| row[key].as_u64());
    let (b, s_q, h_q, s_k) = (b?, s_q?, h_q?, s_k?);
    let wanted = row["op"] == "dense" && row["lens"] == "fixed" && BATCHES.contains(&b) && LENGTHS.contains(&s_k);
    let tokens = if s_q == 1 { String::new() } else { format!(", {s_q} tokens") };
    wanted.then(|| (format!("{h_q} heads{tokens}"), format!("{b} x {s_k}")))
}

fn prefill_case(row: &Value) -> Option<(String, String)> {
    let get = |key: &str| row[key].as_u64();
    if row["op"] == "sparse_prefill" {
        let of_v32 = [get("d"), get("h_q"), get("topk"), get("s_q")] == [576, 128, 2048, 4096].map(Some);
        let name = || format!("4096 tokens, {} keys", row["s_k"]);
        return of_v32.then(|| ("128 heads of 576 / 512, 2048 keys of each token (V3.2)".into(), name()));
    }
    if row["op"] != "ragged" || row["causal"] != true {
        return None;
    }
    let group = match ["h_q", "h_kv", "dqk", "dv", "shared"].map(get) {
        [Some(128), Some(128), Some(192), Some(128), Some(64)] => "128 heads of 192 / 128 (V3)",
        [Some(16), Some(16), Some(192), Some(128), Some(64)] => "16 heads of 192 / 128 (V2-Lite)",
        [Some(32), Some(8), Some(128), Some(128), Some(0)] => "32 heads of 128, 8 of keys and values",
        _ => return None,
    };
    let name = match (get("b")?, get("s_q")?, row["lens"].as_str()?) {
        (b, s_q @ (4096 | 16384), "fixed") | (b @ 16, s_q @ 2048, "fixed") => format!("{b} x {s_q} tokens"),
        (b, _, lens) if lens != "fixed" => format!("{b} x {} tokens", lens.replace("..", " to ")),
        _ => return None,
    };
    Some((group.into(), name))
}

/// Of a program with and without graphs the better one counts.
fn model_case(row: &Value) -> Option<(String, String)> {
    let sampled = row["temperature"].as_f64().is_some_and(|temperature| temperature > 0.0);
    if sampled || row["deterministic"] == true || row["ranks"].as_u64().is_some_and(|ranks| ranks > 1) {
        return None;
    }
    let (b, context, layers) = (row["b"].as_u64()?, row["context"].as_u64()?, row["layers"].as_u64()?);
    let model = match text(row, "model") {
        "v2-lite" => "V2-Lite".to_string(),
        "v3" => format!("V3, {layers} of 61 layers"),
        _ => return None,
    };
    match text(row, "op") {
        "e2e_decode" => Some((format!("{model}: decode after {context} tokens"), format!("batch {b}"))),
        "e2e_prefill" => Some((format!("{model}: prefill"), format!("{b} x {context} tokens"))),
        _ => None,
    }
}

/// What is drawn of a row: TFLOP/s, of models tokens per second.
fn value(picture: Picture, row: &Value) -> Result<f64, String> {
    number(row, if picture == Picture::Models { "tokens_per_s" } else { "tflops" })
}

/// What the machine allows at most for one of our rows, and FLOPs for each byte where memory may be what does not.
fn bound(picture: Picture, row: &Value, of: &Measurement) -> Result<(f64, Option<f64>), String> {
    if of.memory_gbps == 0.0 || of.matmul_tflops == 0.0 {
        return Err("no file has ceilings of memory and of a bf16 matmul: add one of the section `ceilings`".into());
    }
    match picture {
        Picture::Decode => {
            let intensity = 1e3 * number(row, "tflops")? / number(row, "gbps")?;
            Ok((of.matmul_tflops.min(intensity * of.memory_gbps / 1e3), Some(tenth(intensity))))
        }
        Picture::Prefill => Ok((of.matmul_tflops, None)),
        Picture::Models if row["op"] == "e2e_decode" => {
            Ok((number(row, "b")? * of.memory_gbps / number(row, "weights_gb")?, None))
        }
        Picture::Models => Ok((1e3 * of.matmul_tflops / number(row, "weight_gflop_per_token")?, None)),
    }
}

/// As its authors write it.
fn program(peer: &str) -> String {
    let name = match peer {
        "flashmla" => "FlashMLA",
        "vllm" => "vLLM",
        _ if peer.starts_with("flashinfer") => "FlashInfer",
        _ if peer.starts_with("fa3") => "FlashAttention-3",
        other => other,
    };
    name.into()
}

fn number(row: &Value, key: &str) -> Result<f64, String> {
    row[key].as_f64().filter(|&value| value > 0.0).ok_or_else(|| format!("a row has no `{key}`: {row}"))
}

fn text<'a>(row: &'a Value, key: &str) -> &'a str {
    row[key].as_str().unwrap_or_default()
}

fn tenth(value: f64) -> f64 {
    (10.0 * value).round() / 10.0
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A file of ours and one of peers.
    fn files() -> [Value; 2] {
        let row = |peer: &str, op: &str, more: Value| {
            let mut row = json!({"peer": peer, "op": op, "lens": "fixed", "b": 16, "s_q": 1, "h_q": 16, "s_k": 4096, "model": "v2-lite",
                "layers": 27, "context": 264, "gbps": 3000.0, "weights_gb": 32.0, "weight_gflop_per_token": 5.0});
            more.as_object().into_iter().flatten().for_each(|(key, value)| row[key] = value.clone());
            row
        };
        let (dense, decode) = (
            |peer, tflops| row(peer, "dense", json!({"tflops": tflops})),
            |peer, speed| row(peer, "e2e_decode", json!({"tokens_per_s": speed})),
        );
        let ours = json!({
            "meta": {"gpu_start": "GPU, 1.2, 3 MHz", "commit": "abc", "date": "2026-01-01 10:00:00 UTC", },
            "ceilings": {"start": {"copy_GBps": 4000.0, "bf16_matmul_8192_TFLOPs": 90.0, "flush_us": 1e9}},
            "rows": [dense(OURS, 90.0), row(OURS, "dense", json!({"lens": "var", "tflops": 99.0})), decode(OURS, 1000.0),
                decode(OURS, 1400.0), row(OURS, "e2e_decode", json!({"temperature": 1.0})),
                row(OURS, "e2e_prefill", json!({"model": "v3", "layers": 4, "tokens_per_s": 9e4}))],
        });
        let peers = json!({
            "meta": {"smi_start": "GPU, 1.2, 4 MHz", "date": "2026-01-02 10:00:00", },
            "ceilings": {"end": {"triton_read_GBps": 4500.0, "bf16_matmul_8192_TFLOPs": 790.0}},
            "rows": [dense("flashinfer-fa2", 60.0), dense("flashinfer-fa3", 80.0), decode("vllm", 1200.0)],
        });
        [ours, peers]
    }

    fn case(group: &str, name: &str, bound: f64, flop_per_byte: Option<f64>, values: &[(&str, f64)]) -> Case {
        let values = values.iter().map(|(peer, value)| (peer.to_string(), *value)).collect();
        Case { group: group.into(), name: name.into(), bound, flop_per_byte, values }
    }

    #[test]
    fn cases_have_the_best_of_each_program() {
        let decode = measurement(Picture::Decode, &files()).expect("a measurement");
        let values = [("burn-mla", 90.0), ("FlashInfer", 80.0)];
        assert_eq!(decode.cases, [case("16 heads", "16 x 4096", 135.0, Some(30.0), &values)]);
        assert_eq!(decode.origin(), "GPU, driver 1.2, 2026-01-02, commit abc");
        assert_eq!([decode.memory_gbps, decode.matmul_tflops], [4500.0, 790.0]);

        let models = measurement(Picture::Models, &files()).expect("a measurement");
        let values = [("burn-mla", 1400.0), ("vLLM", 1200.0)];
        let decode = case("V2-Lite: decode after 264 tokens", "batch 16", 2250.0, None, &values);
        let prefill = case("V3, 4 of 61 layers: prefill", "16 x 264 tokens", 158_000.0, None, &[("burn-mla", 9e4)]);
        assert_eq!(models.cases, [decode, prefill]);
    }

    #[test]
    fn pictures_name_what_they_show() {
        for picture in [Picture::Decode, Picture::Models] {
            let measurement = measurement(picture, &files()).expect("a measurement");
            let written = serde_json::from_str(&measurement.to_json().expect("text")).expect("JSON");
            let svg = picture.draw(&Measurement::from_json(&written).expect("the same"));
            let unit = if picture == Picture::Decode { "TFLOP/s" } else { "tokens/s" };
            for text in measurement.peers().iter().chain([&unit, &measurement.origin().as_str()]) {
                assert!(svg.contains(text), "{text} is not in {svg}");
            }
        }
    }

    #[test]
    fn files_of_different_machines_are_refused() {
        let [ours, mut peers] = files();
        let error = measurement(Picture::Prefill, &[ours.clone(), peers.clone()]).expect_err("no case");
        assert_eq!(error, "the files have no case of this picture");
        peers["meta"]["smi_start"] = json!("GPU, 1.3");
        let error = measurement(Picture::Decode, &[ours.clone(), peers]).expect_err("two drivers");
        assert!(error.starts_with("the files have more than one machine and driver"), "{error}");
        let mut later = ours.clone();
        later["meta"]["commit"] = json!("def");
        assert!(measurement(Picture::Decode, &[ours, later]).expect_err("two commits").contains("commit"));
    }
}
