//! The programs on checkpoints in the published layout: `make_checkpoint`, and `generate` with `--dry-run` and
//! `--random-weights`.

use std::path::Path;

use crate::cli_faults::{copy, program, refused};
use crate::model_parity::folder;

const FIXTURE: &str = "tests/fixtures/v3-tiny";

fn text(path: &Path) -> &str {
    path.to_str().expect("a UTF-8 path")
}

#[test]
fn cli_writes_an_fp8_folder_that_generates() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (from, to) = (folder(FIXTURE), dir.path().join("fp8"));
    let args = ["--from", text(&from), "--to", text(&to), "--shard-bytes", "400000"];
    let output = program("make_checkpoint", &args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    refused(&program("make_checkpoint", &args), &["model-0000", ".safetensors", "without weights"]);
    let output = program("generate", &["--model", text(&to), "--prompt", "attention", "--max-new-tokens", "4"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let output = program("generate", &["--model", text(&to), "--dry-run", "--prompt", "attention"]);
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let row = |name: &str| table.lines().find(|line| line.starts_with(name)).unwrap_or_default();
    // 3 layers of 16 experts of 3 projections of 24 by 128.
    assert_eq!(
        row("routed experts").split_whitespace().collect::<Vec<_>>()[2..6],
        ["144", "442368", "442944", "442944"]
    );
    assert!(row("routed experts").ends_with("F8_E4M3 x F32") && row("embedding").ends_with("BF16"), "{table}");
    // 4 layers of 80 numbers.
    assert!(row("KV cache per token").ends_with("1280 bytes") && table.contains("device memory"), "{table}");
}

/// All at once: a shard that is gone, one that is cut, a tensor of another shape, no tokenizer.
#[test]
fn cli_dry_run_lists_every_problem() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (from, to) = (folder(FIXTURE), dir.path().join("fp8"));
    let made = program("make_checkpoint", &["--from", text(&from), "--to", text(&to), "--shard-bytes", "200000"]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let mut shards: Vec<_> =
        std::fs::read_dir(&to).expect("a folder").map(|entry| entry.expect("a file").path()).collect();
    shards.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    shards.sort();
    std::fs::remove_file(&shards[1]).expect("a shard in the middle");
    std::fs::remove_file(to.join("tokenizer.json")).expect("the tokenizer");
    let bytes = std::fs::read(&shards[2]).expect("a shard");
    std::fs::write(&shards[2], &bytes[..bytes.len() / 2]).expect("it is shortened");
    let config = std::fs::read_to_string(to.join("config.json")).expect("a configuration");
    let config = config.replace("\"vocab_size\": 512", "\"vocab_size\": 513");
    std::fs::write(to.join("config.json"), config).expect("it is changed");
    let output = program("generate", &["--model", text(&to), "--dry-run"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("all weights"));
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let wrong = ["does not exist", "missing:", "lm_head.weight is [512, 128]", "tokenizer.json"];
    for needle in wrong.into_iter().chain([name(&shards[1]).as_str(), name(&shards[2]).as_str()]) {
        assert!(stderr.contains(needle), "`{needle}` is not in: {stderr}");
    }
}

#[test]
fn cli_generates_with_random_weights() {
    let dir = copy("tests/fixtures/v4-tiny");
    let config = dir.path().join("config.json");
    std::fs::remove_file(dir.path().join("model.safetensors")).expect("no weights");
    std::fs::remove_file(dir.path().join("tokenizer.json")).expect("no tokenizer");
    let generate = |extra: &[&str]| {
        let args =
            [&["--random-weights", text(&config), "--prompt", "attention", "--max-new-tokens", "5"], extra].concat();
        let output = program("generate", &args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(stderr.contains("generated tokens     5") && stderr.contains("prompt tokens        9"), "{stderr}");
    };
    generate(&[]);
    generate(&["--layers", "2", "--weights-seed", "3"]);
    refused(&program("generate", &["--random-weights", text(&config), "--layers", "6"]), &["layers", "1 to 5"]);
    let described = program("generate", &["--random-weights", text(&config), "--layers", "2", "--describe"]);
    assert!(String::from_utf8_lossy(&described.stdout).contains("2 layers"));
}

#[test]
fn cli_makes_a_random_checkpoint() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (config, to) = (folder(FIXTURE).join("config.json"), dir.path().join("random"));
    let args = ["--config", text(&config), "--weights-seed", "5", "--to", text(&to), "--dequantized", "bf16"];
    let output = program("make_checkpoint", &args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = program("generate", &["--model", text(&to), "--dry-run"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    refused(&program("make_checkpoint", &["--to", text(&to)]), &["--from", "--config"]);
}
