//! The programs with sizes that no machine has memory for: refused in a moment, by name, before anything is allocated or written.

use std::path::Path;
use std::time::Instant;

use rstest::rstest;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::cli_faults::{copy, program, refused};
use crate::model_parity::folder;

const V3: &str = "tests/fixtures/v3-tiny";
const V4: &str = "tests/fixtures/v4-tiny";

fn text(path: &Path) -> &str {
    path.to_str().expect("a UTF-8 path")
}

/// The configuration of a fixture with other fields, in a folder of its own.
fn changed(fixture: &str, fields: &Value) -> TempDir {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let config = std::fs::read(folder(fixture).join("config.json")).expect("a configuration");
    let mut config: Value = serde_json::from_slice(&config).expect("JSON");
    for (field, value) in fields.as_object().expect("fields") {
        config[field] = value.clone();
    }
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("written");
    dir
}

/// 2^40 layers, 2^60 experts and the like. No program gets as far as a list of tensors.
#[rstest]
#[case(V3, json!({"num_hidden_layers": 1_u64 << 40}), "num_hidden_layers")]
#[case(V3, json!({"num_hidden_layers": 1 << 30}), "num_hidden_layers")]
#[case(V3, json!({"hidden_size": 1_u64 << 63}), "hidden_size")]
#[case(V3, json!({"n_routed_experts": 1_u64 << 60, "n_group": 1, "topk_group": 1}), "n_routed_experts")]
#[case(V3, json!({"n_routed_experts": 1 << 30, "n_group": 1, "topk_group": 1}), "n_routed_experts")]
#[case(V3, json!({"num_nextn_predict_layers": u64::MAX}), "num_nextn_predict_layers")]
#[case(V3, json!({"qk_rope_head_dim": 1 << 30}), "qk_rope_head_dim")]
#[case(V3, json!({"q_lora_rank": 1_u64 << 62}), "q_lora_rank")]
#[case(V3, json!({"hidden_size": i32::MAX, "num_attention_heads": i32::MAX}), "9223372036854775807 can be addressed")]
#[case(V4, json!({"num_hidden_layers": 1_u64 << 40}), "num_hidden_layers")]
#[case(V4, json!({"num_hidden_layers": i32::MAX}), "num_hidden_layers")]
#[case(V4, json!({"hc_mult": 1 << 20}), "hc_mult")]
#[case(V4, json!({"hc_sinkhorn_iters": 1 << 30}), "hc_sinkhorn_iters")]
#[case(V4, json!({"sliding_window": 1_u64 << 50}), "sliding_window")]
#[case(V4, json!({"o_lora_rank": i32::MAX, "q_lora_rank": i32::MAX, "o_groups": 1, "hidden_size": i32::MAX}), "addressed")]
fn cli_refuses_sizes_that_cannot_be(#[case] fixture: &str, #[case] fields: Value, #[case] needle: &str) {
    let dir = changed(fixture, &fields);
    let (config, to) = (dir.path().join("config.json"), dir.path().join("written"));
    let start = Instant::now();
    refused(&program("generate", &["--random-weights", text(&config)]), &["config.json", needle]);
    refused(&program("generate", &["--random-weights", text(&config), "--describe"]), &[needle]);
    refused(&program("generate", &["--model", text(dir.path()), "--dry-run"]), &[needle]);
    refused(&program("make_checkpoint", &["--config", text(&config), "--to", text(&to)]), &[needle]);
    assert!(!to.exists() && start.elapsed().as_secs() < 30, "{:?}", start.elapsed());
}

/// Sizes that some machine has memory for are described, and refused by those that have not.
#[test]
fn cli_refuses_weights_that_the_memory_has_no_room_for() {
    let dir = changed(V3, &json!({"vocab_size": 1_000_000_000, "hidden_size": 1_000_000}));
    let (config, to) = (dir.path().join("config.json"), dir.path().join("written"));
    let described = program("generate", &["--random-weights", text(&config), "--describe"]);
    assert!(described.status.success(), "{}", String::from_utf8_lossy(&described.stderr));
    let random = program("generate", &["--random-weights", text(&config), "--prompt", "a"]);
    // Embedding and head alone.
    refused(&random, &["no room for weights of 80", "bytes free"]);
    let made = program("make_checkpoint", &["--config", text(&config), "--to", text(&to), "--dequantized", "f32"]);
    refused(&made, &["`--to` is in a file system with", "bytes free", "which the weights take"]);
    assert!(!to.exists());
}

/// A cache is as large as its pages, whatever is put into it.
#[rstest]
#[case(&["--page-size", "16777216", "--cache-pages", "128"])]
#[case(&["--page-size", "1073741824", "--cache-pages", "1"])]
#[case(&["--page-size", "9223372036854775808"])]
#[case(&["--page-size", "3"])]
#[case(&["--page-size", "0"])]
fn cli_refuses_pages_that_cannot_be(#[case] args: &[&str]) {
    let long = "--max-new-tokens=1000000000000";
    for demo in ["v3", "v4"] {
        let output = program("serve_batch", &[&["-", "--demo", demo], args].concat());
        refused(&output, &["--page-size"]);
        if args.len() == 2 {
            let prompts = ["--prompt", "a", "--prompt", "b", long, "--demo", demo];
            refused(&program("generate", &[&prompts, args].concat()), &["--page-size"]);
            refused(&program("generate", &[&prompts, args, &["--dry-run"]].concat()), &["--page-size"]);
        }
    }
}

/// What the cache got is in the report: as many pages as the requests can fill, or as many as the option says.
#[test]
fn cli_says_how_many_pages_there_are() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let prompts = dir.path().join("prompts.jsonl");
    std::fs::write(&prompts, "{\"prompt\": \"a\", \"max_new_tokens\": 1}\n").expect("written");
    for (args, pages) in [(vec!["--max-batch", "1"], 64), (vec!["--cache-pages", "7"], 7), (vec![], 512)] {
        let output = program("serve_batch", &[vec![text(&prompts)], args].concat());
        let report = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && report.contains(&format!(" {pages} pages, ")), "{report}");
    }
}

/// The cache of a dry run is that of the run.
#[test]
fn cli_dry_run_counts_whole_pages() {
    let args = ["--dry-run", "--prompt", "a", "--max-new-tokens", "4", "--page-size"];
    let output = program("generate", &[&args[..], &["1048576"]].concat());
    let table = String::from_utf8_lossy(&output.stdout);
    let number = |name: &str| {
        let row = table.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{table}"));
        row.split_whitespace().next().and_then(|word| word.parse::<u64>().ok()).unwrap_or_else(|| panic!("{row}"))
    };
    assert_eq!(number("KV cache  "), number("KV cache per token") << 20);
    let large = program("generate", &[&args[..], &["536870912"]].concat());
    assert!(String::from_utf8_lossy(&large.stdout).contains("NOT ENOUGH"));
}

/// On a device that has graphs: one of 8 MiB and 4 buffers of 16 for each size of the batch and number of pages, and no more than 16.
#[rstest]
#[case(&["a"], "16", Some(72))]
#[case(&["a"; 3], "16", Some(3 * 72))]
#[case(&["a"; 5], "1", Some(16 * 72))]
#[case(&["a", "--no-graphs"], "16", None)]
fn cli_dry_run_counts_captured_steps(
    #[case] prompts: &[&str],
    #[case] page_size: &str,
    #[case] mebibytes: Option<u64>,
) {
    let prompts = prompts.iter().flat_map(|&text| if text == "a" { vec!["--prompt", text] } else { vec![text] });
    let options = ["--dry-run", "--device", "wgpu", "--max-new-tokens", "8", "--page-size", page_size];
    let table = program("generate", &options.into_iter().chain(prompts).collect::<Vec<_>>());
    let table = String::from_utf8_lossy(&table.stdout);
    let row = table.lines().find_map(|line| line.strip_prefix("captured steps"));
    let bytes = row.map(|row| row.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0));
    assert_eq!(bytes, mebibytes.map(|mebibytes| mebibytes << 20), "{table}");
}

#[rstest]
#[case("generate", &["--token-budget", "0"], "`--token-budget`")]
#[case("generate", &["--layers", "99999999999"], "--random-weights")]
#[case("generate", &["--cache-pages", "0", "--prompt", "a"], "`--cache-pages`")]
#[case("serve_batch", &["--max-batch", "4294967296", "--token-budget", "18446744073709551615"], "`--max-batch`")]
#[case("serve_batch", &["--max-batch", "0"], "`--max-batch`")]
#[case("serve_batch", &["--cache-pages", "18446744073709551615"], "`--cache-pages`")]
#[case("serve_batch", &["--stop", ""], "`--stop`")]
#[case("serve_batch", &["--demo", "v4", "--snapshot-spacing", "1000"], "`--snapshot-spacing` is 1000, expected a multiple of 64")]
#[case("serve_batch", &["--top-p", "7"], "`--top-p`")]
fn cli_names_options_as_they_are_typed(#[case] name: &str, #[case] args: &[&str], #[case] needle: &str) {
    refused(&program(name, args), &[needle]);
}

/// A number that is none, in the last tensor: what was written before vanishes, what was there before stays.
#[test]
fn cli_leaves_nothing_of_a_checkpoint_that_fails() {
    let from = copy(V3);
    let path = from.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).expect("weights");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).expect("a header");
    let last = header["model.layers.3.self_attn.q_b_proj.weight"]["data_offsets"][1].as_u64().expect("an offset");
    let end = 8 + length + last as usize;
    bytes[end - 2..end].copy_from_slice(&[0xc0, 0x7f]);
    std::fs::write(&path, bytes).expect("written");
    let to = from.path().join("to/there");
    let args = |to| ["--from", text(from.path()), "--to", to, "--shard-bytes", "100000"];
    refused(&program("make_checkpoint", &args(text(&to))), &["q_b_proj", "not finite"]);
    assert!(!from.path().join("to").exists());
    std::fs::create_dir_all(&to).expect("a folder");
    std::fs::write(to.join("config.json"), "mine").expect("written");
    refused(&program("make_checkpoint", &args(text(&to))), &["q_b_proj"]);
    let left: Vec<_> = std::fs::read_dir(&to).expect("a folder").flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(left, ["config.json"]);
    assert_eq!(std::fs::read(to.join("config.json")).expect("a file"), b"mine");
}

/// The disk is full after some kilobytes.
#[cfg(target_os = "linux")]
#[test]
fn cli_leaves_nothing_of_a_checkpoint_for_which_there_is_no_space() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let to = dir.path().join("to");
    // A file may have 20 blocks; to write more is an error, no signal.
    let output = std::process::Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 20; exec \"$0\" \"$@\""])
        .arg(crate::cli_faults::command("make_checkpoint").get_program())
        .args(["--from", text(&folder(V3)), "--to", text(&to)])
        .output()
        .expect("a shell");
    refused(&output, &["cannot write", "model.safetensors", "bytes in all"]);
    assert!(!to.exists());
}

/// A folder that has a configuration only gets its weights beside it.
#[test]
fn cli_writes_weights_beside_their_configuration() {
    let dir = copy(V3);
    std::fs::remove_file(dir.path().join("model.safetensors")).expect("the weights were there");
    let tokenizer = std::fs::read(dir.path().join("tokenizer.json")).expect("a tokenizer");
    let config = dir.path().join("config.json");
    let output = program("make_checkpoint", &["--config", text(&config), "--to", text(dir.path())]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(std::fs::read(dir.path().join("tokenizer.json")).expect("still there"), tokenizer);
}
