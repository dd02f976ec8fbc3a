//! The cases of a picture, out of the files that the benchmarks have written.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::{Case, Measurement};

/// Our own name.
pub const OURS: &str = "burn-mla";

/// All cases that ours has, with what each program reached: the best where a program has several rows.
pub fn measurement(picture: &str, files: &[Value]) -> Result<Measurement, String> {
    let mut measurement = about(files)?;
    let rows = || files.iter().filter_map(|file| file["rows"].as_array()).flatten();
    let mut keys: Vec<[String; 2]> =
        rows().filter(|row| row["peer"] == OURS).filter_map(|row| case(picture, row)).collect();
    let mut seen = std::collections::HashSet::new();
    keys.retain(|key| seen.insert(key.clone()));
    for key in keys {
        let (mut values, mut bounds) = (BTreeMap::new(), [None; 2]);
        for row in rows().filter(|row| case(picture, row).as_ref() == Some(&key)) {
            let value = number(row, if picture == "models" { "tokens_per_s" } else { "tflops" })?;
            let best: &mut f64 = values.entry(program(text(row, "peer"))).or_default();
            *best = best.max(value);
            if row["peer"] == OURS {
                bounds = limits(picture, row, &measurement)?;
            }
        }
        let ([group, name], [bound, intensity]) = (key, bounds);
        measurement.cases.push(Case { group, name, bound, intensity, values });
    }
    if measurement.cases.is_empty() { Err(format!("the files have no case of {picture}")) } else { Ok(measurement) }
}

/// What all files say of the machine.
fn about(files: &[Value]) -> Result<Measurement, String> {
    let smi = |file: &Value| {
        let line = file["meta"]["gpu_start"].as_str().or(file["meta"]["smi_start"].as_str());
        let words: Option<Vec<&str>> = line.map(|line| line.splitn(3, ", ").take(2).collect());
        words.filter(|words| words.len() == 2).map(|words| words.join(", driver ")).unwrap_or("no known GPU".into())
    };
    let commits = files.iter().filter_map(|file| file["meta"]["commit"].as_str().map(str::to_string));
    let date = files.iter().filter_map(|file| file["meta"]["date"].as_str()?.get(..10)).max().unwrap_or_default();
    let (machine, commit) = (one(files.iter().map(smi), "machine")?, one(commits, "commit")?);
    let ceiling = |ends: &str| {
        let times = files.iter().flat_map(|file| [&file["ceilings"]["start"], &file["ceilings"]["end"]]);
        let named = times.filter_map(Value::as_object).flatten().filter(|(name, _)| name.ends_with(ends));
        let most = named.filter_map(|(_, value)| value.as_f64()).fold(0.0, f64::max);
        if most > 0.0 {
            Ok(most)
        } else {
            Err(format!("no file has a ceiling {ends}: add one of the section `ceilings`"))
        }
    };
    let origin = format!("{machine}, {date}, commit {commit}");
    let (memory_gbps, matmul_tflops) = (ceiling("_GBps")?, ceiling("bf16_matmul_8192_TFLOPs")?);
    Ok(Measurement { origin, memory_gbps, matmul_tflops, cases: Vec::new() })
}

/// The only one of these.
fn one(mut all: impl Iterator<Item = String>, what: &str) -> Result<String, String> {
    let first = all.next().ok_or_else(|| format!("no file has a {what}"))?;
    let other = all.find(|other| *other != first);
    other.map_or(Ok(first.clone()), |other| Err(format!("the files have more than one {what}: {first} and {other}")))
}

/// Group and name of a row's case, if the picture has it.
fn case(picture: &str, row: &Value) -> Option<[String; 2]> {
    let get = |key: &str| row[key].as_u64().unwrap_or(0);
    let [b, s_q, h_q, s_k, layers, context] = ["b", "s_q", "h_q", "s_k", "layers", "context"].map(get);
    let (group, name) = match (picture, text(row, "op"), text(row, "lens"), text(row, "model")) {
        ("decode", "dense", "fixed", _) if [1, 16, 64, 128].contains(&b) && [4096, 16384].contains(&s_k) => {
            let tokens = if s_q == 1 { String::new() } else { format!(", {s_q} tokens") };
            (format!("{h_q} heads{tokens}"), format!("{b} x {s_k}"))
        }
        ("prefill", "sparse_prefill", ..) if [get("d"), h_q, get("topk"), s_q] == [576, 128, 2048, 4096] => {
            ("128 heads of 576 / 512, 2048 keys of each token (V3.2)".into(), format!("{s_q} tokens, {s_k} keys"))
        }
        ("prefill", "ragged", lens, _) if row["causal"] == true => {
            let group = match [h_q, get("h_kv"), get("dqk"), get("shared")] {
                [128, 128, 192, 64] => "128 heads of 192 / 128 (V3)",
                [16, 16, 192, 64] => "16 heads of 192 / 128 (V2-Lite)",
                [32, 8, 128, 0] => "32 heads of 128, 8 of keys and values",
                _ => return None,
            };
            let name = match (b, s_q) {
                _ if lens != "fixed" => format!("{b} x {} tokens", lens.replace("..", " to ")),
                (1, 4096 | 16384) | (16, 2048) => format!("{b} x {s_q} tokens"),
                _ => return None,
            };
            (group.into(), name)
        }
        // With graphs and without: the better one counts.
        ("models", op @ ("e2e_decode" | "e2e_prefill"), _, model @ ("v2-lite" | "v3"))
            if row["temperature"].as_f64().unwrap_or(0.0) == 0.0
                && row["deterministic"] != true
                && get("ranks") < 2 =>
        {
            let model = if model == "v3" { format!("V3, {layers} of 61 layers") } else { "V2-Lite".into() };
            match op {
                "e2e_decode" => (format!("{model}: decode after {context} tokens"), format!("batch {b}")),
                _ => (format!("{model}: prefill"), format!("{b} x {context} tokens")),
            }
        }
        _ => return None,
    };
    Some([group, name])
}

/// Of one of our rows: what the machine allows at most, and FLOPs for each byte.
fn limits(picture: &str, row: &Value, of: &Measurement) -> Result<[Option<f64>; 2], String> {
    let tenth = |value: f64| Some((10.0 * value).round() / 10.0);
    Ok(match picture {
        "decode" => [None, tenth(1e3 * number(row, "tflops")? / number(row, "gbps")?)],
        "prefill" => [None, None],
        _ if row["op"] == "e2e_decode" => {
            [tenth(number(row, "b")? * of.memory_gbps / number(row, "weights_gb")?), None]
        }
        _ => [tenth(1e3 * of.matmul_tflops / number(row, "weight_gflop_per_token")?), None],
    })
}

/// As its authors write it.
fn program(peer: &str) -> String {
    let known = [("flashmla", "FlashMLA"), ("vllm", "vLLM"), ("flashinfer", "FlashInfer"), ("fa3", "FlashAttention-3")];
    known.iter().find(|(start, _)| peer.starts_with(start)).map_or(peer, |(_, name)| name).into()
}

fn number(row: &Value, key: &str) -> Result<f64, String> {
    row[key].as_f64().filter(|&value| value > 0.0).ok_or_else(|| format!("a row has no `{key}`: {row}"))
}

fn text<'a>(row: &'a Value, key: &str) -> &'a str {
    row[key].as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{OURS, measurement};
    use crate::draw::picture;

    /// A file of ours and one of peers.
    fn files() -> [Value; 2] {
        let row = |peer: &str, op: &str, value: f64| {
            json!({"peer": peer, "op": op, "lens": "fixed", "b": 16, "s_q": 1, "h_q": 16, "s_k": 4096, "model": "v2-lite", "context": 264,
                "gbps": 3000.0, "weights_gb": 32.0, "weight_gflop_per_token": 5.0, "tflops": value, "tokens_per_s": value})
        };
        let mut other = row(OURS, "dense", 99.0);
        other["lens"] = json!("var");
        let ours = json!({
            "meta": {"gpu_start": "GPU, 1.2, 3 MHz", "commit": "abc", "date": "2026-01-01 10:00:00 UTC"},
            "ceilings": {"start": {"copy_GBps": 4000.0, "bf16_matmul_8192_TFLOPs": 90.0, "flush_us": 1e9}},
            "rows": [row(OURS, "dense", 90.0), other, row(OURS, "e2e_decode", 1e3), row(OURS, "e2e_decode", 1400.0),
                row(OURS, "e2e_prefill", 9e4)],
        });
        let peers = json!({
            "meta": {"smi_start": "GPU, 1.2, 4 MHz", "date": "2026-01-02 10:00:00"},
            "ceilings": {"end": {"triton_read_GBps": 4500.0, "bf16_matmul_8192_TFLOPs": 790.0}},
            "rows": [row("flashinfer-fa2", "dense", 60.0), row("flashinfer-fa3", "dense", 80.0), row("vllm", "e2e_decode", 1200.0)],
        });
        [ours, peers]
    }

    #[test]
    fn cases_have_the_best_of_each_program_and_their_bound() {
        for (name, unit, expected) in [
            (
                "decode",
                "TFLOP/s",
                json!([{"group": "16 heads", "name": "16 x 4096", "intensity": 30.0,
                "values": {"burn-mla": 90.0, "FlashInfer": 80.0}}]),
            ),
            (
                "models",
                "tokens/s",
                json!([{"group": "V2-Lite: decode after 264 tokens", "name": "batch 16", "bound": 2250.0,
                "values": {"burn-mla": 1400.0, "vLLM": 1200.0}},
                {"group": "V2-Lite: prefill", "name": "16 x 264 tokens", "bound": 158_000.0, "values": {"burn-mla": 9e4}}]),
            ),
        ] {
            let picked = measurement(name, &files()).expect("a measurement");
            assert_eq!(serde_json::to_value(&picked.cases).expect("JSON"), expected);
            let svg = picture(name, &picked);
            for text in [
                "GPU, driver 1.2, 2026-01-02, commit abc",
                unit,
                "burn-mla",
                if name == "decode" { "FlashInfer" } else { "vLLM" },
            ] {
                assert!(svg.contains(text), "{text} is not in {svg}");
            }
        }
    }

    #[test]
    fn files_of_different_machines_are_refused() {
        let [ours, mut peers] = files();
        let refused = |picture, files: &[Value]| measurement(picture, files).expect_err("an error");
        assert_eq!(refused("prefill", &files()), "the files have no case of prefill");
        peers["meta"]["smi_start"] = json!("GPU, 1.3");
        let error = refused("decode", &[ours, peers]);
        assert_eq!(error, "the files have more than one machine: GPU, driver 1.2 and GPU, driver 1.3");
    }
}
