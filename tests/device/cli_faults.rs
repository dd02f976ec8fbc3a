//! The program `generate` on input that it cannot use: exit code 2, a message that says what and where, nothing on
//! stdout, and no panic.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rstest::rstest;
use tempfile::TempDir;

use crate::model_parity::folder;

const FIXTURE: &str = "tests/fixtures/v3-tiny";

fn generate(args: &[&str]) -> Output {
    program("generate", args)
}

/// Where an example program is, if it is built.
fn place(name: &str) -> PathBuf {
    let mut path = std::env::current_exe().expect("this test has a path");
    path.pop();
    path.pop();
    path.extend(["examples", name]);
    path.with_extension(std::env::consts::EXE_EXTENSION)
}

/// Whether there is the program `bench`: of an example that has tests `cargo test` builds those alone.
pub fn has_bench() -> bool {
    let built = place("bench").is_file();
    if !built {
        eprintln!("skipped for bench: `cargo build --example bench` builds it");
    }
    built
}

/// An example program, which `cargo test` builds beside this test.
pub fn command(name: &str) -> Command {
    let path = place(name);
    assert!(path.is_file(), "{} is not built: run `cargo test`, or `cargo build --example {name}`", path.display());
    Command::new(path)
}

/// What an example program says.
pub fn program(name: &str, args: &[&str]) -> Output {
    command(name).args(args).output().expect("the program starts")
}

pub fn refused(output: &Output, needles: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(output.stdout.is_empty(), "stdout: {}", String::from_utf8_lossy(&output.stdout));
    assert!(!stderr.contains("panicked"), "{stderr}");
    for needle in needles {
        assert!(stderr.contains(needle), "`{needle}` is not in: {stderr}");
    }
}

/// A copy of a fixture to be damaged.
pub fn copy(name: &str) -> TempDir {
    let copy = tempfile::tempdir().expect("a temporary folder");
    for file in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(folder(name).join(file), copy.path().join(file)).expect("a copy");
    }
    copy
}

fn generate_from(dir: &Path) -> Output {
    generate(&["--model", dir.to_str().expect("a UTF-8 path"), "--prompt", "attention", "--max-new-tokens", "4"])
}

fn replace_in(path: &PathBuf, from: &str, to: &str) {
    let text = std::fs::read_to_string(path).expect("a text file");
    let changed = text.replace(from, to);
    assert_ne!(text, changed, "`{from}` is not in {}", path.display());
    std::fs::write(path, changed).expect("the file is written");
}

#[test]
fn cli_generates_from_a_sound_copy() {
    let output = generate_from(copy(FIXTURE).path());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// From the config alone.
#[test]
fn cli_describes_the_layers() {
    let copy = copy("tests/fixtures/v4-tiny");
    std::fs::remove_file(copy.path().join("model.safetensors")).expect("the weights are gone");
    let output = generate(&["--model", copy.path().to_str().expect("a UTF-8 path"), "--describe"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    // A window of 8 tokens; 8 tokens of 64 keys and 64 gates for each of two compressors; 16 tokens of 32 and 32.
    let window = 8 * 32 * 4;
    let (csa, hca) = (window + 2 * 8 * 128 * 4, window + 16 * 64 * 4);
    let end = |row: usize| rows[row][rows[row].len() - 2..].join(" ");
    assert_eq!(rows.len(), 10, "{text}");
    assert_eq!((rows[1][0], end(1)), ("0", format!("0 {window}")));
    assert_eq!((rows[2][0], end(2)), ("1", format!("64 {csa}")));
    assert_eq!((rows[3][0], end(3)), ("2", format!("8 {hca}")));
    assert_eq!(end(6), format!("144 {}", window + 2 * (csa + hca)));
    assert!(text.contains("bytes on the device"), "{text}");
    assert!(text.contains("window + HCA, 16 tokens per entry") && text.contains("hash MoE"), "{text}");
    let state = window + 2 * (csa + hca);
    assert_eq!(
        rows[7].join(" "),
        format!("a request of 1024 tokens, the most there are: {} bytes", 1024 * 144 + state)
    );
    assert!(rows[8].join(" ").contains(&format!("a snapshot, of {state} bytes")), "{text}");
}

#[test]
fn cli_refuses_a_missing_folder() {
    refused(&generate_from(Path::new("no/such/folder")), &["no/such/folder", "does not exist"]);
}

#[rstest]
#[case("config.json")]
#[case("tokenizer.json")]
#[case("model.safetensors")]
fn cli_refuses_a_missing_file(#[case] file: &str) {
    let dir = copy(FIXTURE);
    std::fs::remove_file(dir.path().join(file)).expect("the file was there");
    refused(&generate_from(dir.path()), &[file]);
}

#[test]
fn cli_refuses_a_missing_shard() {
    let dir = copy(FIXTURE);
    std::fs::rename(dir.path().join("model.safetensors"), dir.path().join("model-00001-of-00002.safetensors"))
        .expect("the file was there");
    let index = r#"{"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors",
                    "model.norm.weight": "model-00002-of-00002.safetensors"}}"#;
    std::fs::write(dir.path().join("model.safetensors.index.json"), index).expect("the index is written");
    refused(&generate_from(dir.path()), &["model-00002-of-00002.safetensors", "model.safetensors.index.json"]);
}

#[rstest]
fn cli_refuses_a_truncated_file(#[values(0, 4, 100, 20_000, 2_000_000)] length: usize) {
    let dir = copy(FIXTURE);
    let path = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&path).expect("the file was there");
    std::fs::write(&path, &bytes[..length]).expect("the file is written");
    refused(&generate_from(dir.path()), &["model.safetensors"]);
}

/// Names in the file's header say what a tensor is; the bytes stay.
#[rstest]
#[case(
    r#""model.norm.weight":{"dtype":"BF16","shape":[128]"#,
    r#""model.norm.weight":{"dtype":"U16","shape":[128] "#,
    "model.norm.weight"
)]
#[case(r#""model.norm.weight""#, r#""model.nozm.weight""#, "model.norm.weight")]
fn cli_refuses_a_wrong_tensor(#[case] from: &str, #[case] to: &str, #[case] name: &str) {
    let dir = copy(FIXTURE);
    let path = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).expect("the file was there");
    let at = bytes.windows(from.len()).position(|window| window == from.as_bytes());
    let at = at.unwrap_or_else(|| panic!("`{from}` is not in the header"));
    assert_eq!(from.len(), to.len());
    bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
    std::fs::write(&path, bytes).expect("the file is written");
    refused(&generate_from(dir.path()), &[name]);
}

#[rstest]
#[case("\"model_type\": \"deepseek_v3\"", "\"model_type\": \"llama\"", &["model_type", "llama", "deepseek_v3"])]
#[case("\"n_group\": 4", "\"n_group\": 5", &["n_group", "5", "n_routed_experts"])]
#[case("\"hidden_size\": 128", "\"hidden_size\": 96", &["wrong shape", "model.embed_tokens.weight"])]
#[case("\"num_hidden_layers\": 4", "\"num_hidden_layers\": 5", &["missing", "model.layers.4."])]
#[case("\"num_hidden_layers\": 4", "\"num_hidden_layers\": 3", &["unexpected", "model.layers.3."])]
#[case("\"vocab_size\": 512", "\"vocab_size\": \"many\"", &["config.json", "vocab_size"])]
fn cli_refuses_a_wrong_config(#[case] from: &str, #[case] to: &str, #[case] needles: &[&str]) {
    let dir = copy(FIXTURE);
    replace_in(&dir.path().join("config.json"), from, to);
    refused(&generate_from(dir.path()), needles);
}

#[rstest]
#[case(&["--prompt", ""], &["prompt", "empty"])]
#[case(&["--prompt", "a", "--temperature=-1"], &["`--temperature`"])]
#[case(&["--prompt", "a", "--top-p", "1.5"], &["`--top-p`"])]
#[case(&["--prompt", "a", "--page-size", "3"], &["`--page-size`", "power of two"])]
#[case(&["--prompt", "a", "--token-budget", "0"], &["`--token-budget`"])]
#[case(&["--prompt", "a", "--stop", ""], &["`--stop`"])]
#[case(&["--prompt-file", "no/such/file"], &["no/such/file"])]
#[case(&["--prompt", "a", "--device", "tpu"], &["--device", "flex"])]
#[case(&["--prompt", "a", "--dtype", "int4"], &["--dtype"])]
fn cli_refuses_a_bad_argument(#[case] args: &[&str], #[case] needles: &[&str]) {
    refused(&generate(args), needles);
}

/// As many tokens as a number can say: the model's positions or a stop string are the end.
#[rstest]
#[case(&["--dry-run"])]
#[case(&["--stop", "furniture"])]
fn cli_takes_the_largest_number_of_new_tokens(#[case] args: &[&str]) {
    let most = usize::MAX.to_string();
    let output = generate(&[&["--prompt", "hacker: n.", "--max-new-tokens", &most], args].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !output.stdout.is_empty(), "{stderr}");
}

#[cfg(not(feature = "cuda"))]
#[test]
fn cli_says_which_feature_a_device_needs() {
    refused(&generate(&["--device", "cuda"]), &["cuda:0", "--features cuda"]);
}

#[test]
fn cli_refuses_a_prompt_past_the_last_position() {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), "word ".repeat(5000)).expect("the file is written");
    let path = file.path().to_str().expect("a UTF-8 path");
    refused(&generate(&["--prompt-file", path]), &["prompt", "tokens long", "4096"]);
}

/// The cache ends one prompt: its text and that of the others are printed, and the exit code tells.
#[test]
fn cli_keeps_the_text_of_a_batch_that_fills_the_cache() {
    let prompts = ["--prompt", "hacker: n.", "--prompt", "foo", "--max-new-tokens", "200"];
    let output = generate(&[&prompts[..], &["--page-size", "16", "--cache-pages", "8"]].concat());
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("--cache-pages") && !stderr.contains("panicked"), "{stderr}");
    assert!(stdout.contains("makes furniture with an axe") && stdout.contains("== 2: foo"), "{stdout}");
}
