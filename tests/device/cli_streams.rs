//! The programs on full disks, closed pipes, and what is no regular file: an exit code and a message, no panic, no hang.
#![cfg(target_os = "linux")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rstest::rstest;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::cli_faults::{command, copy, has_bench, refused};
use crate::model_parity::folder;

const FIXTURE: &str = "tests/fixtures/v3-tiny";

fn text(path: &Path) -> &str {
    path.to_str().expect("a UTF-8 path")
}

/// What a program says that may hang: then it is stopped, and the test fails.
fn ends(mut child: Child) -> Output {
    let patience = Instant::now();
    while child.try_wait().expect("its state").is_none() {
        if patience.elapsed() > Duration::from_secs(120) {
            child.kill().expect("it is stopped");
            panic!("it does not end");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().expect("its output")
}

fn run(name: &str, args: &[&str]) -> Output {
    let child = command(name).args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    ends(child.expect("the program starts"))
}

/// A pipe that nobody reads, or a device that is always full.
fn sink(closed: bool) -> Stdio {
    match closed {
        true => std::io::pipe().expect("a pipe").1.into(),
        false => File::options().write(true).open("/dev/full").expect("a device").into(),
    }
}

fn fifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().expect("mkfifo runs").success());
}

/// Each program with little to do.
fn each_program(dir: &TempDir) -> Vec<(&'static str, Vec<String>)> {
    let (from, to) = (folder(FIXTURE), dir.path().join("to"));
    let rows = dir.path().join("rows.json");
    let row = json!({"rows": [{"op": "merge", "peer": "a", "us": 1.0}], "meta": {}, "ceilings": {}, "errors": []});
    std::fs::write(&rows, row.to_string()).expect("written");
    let prompts = dir.path().join("prompts.jsonl");
    std::fs::write(&prompts, "{\"prompt\": \"foo\", \"max_new_tokens\": 2}\n").expect("written");
    let (from, to, rows, prompts) = (text(&from), text(&to), text(&rows), text(&prompts));
    let all: [(&str, &[&str]); 10] = [
        ("generate", &["--prompt", "a", "--max-new-tokens", "3"]),
        ("generate", &["--prompt", "a", "--prompt", "b", "--max-new-tokens", "3"]),
        ("generate", &["--prompt", "a", "--max-new-tokens", "3", "--json"]),
        ("generate", &["--describe"]),
        ("generate", &["--dry-run"]),
        ("generate", &["--help"]),
        ("serve_batch", &[prompts]),
        ("verify", &[from]),
        ("make_checkpoint", &["--from", from, "--to", to]),
        ("bench", &["--compare", rows, rows]),
    ];
    let built = all.into_iter().filter(|(name, _)| *name != "bench" || has_bench());
    built.map(|(name, args)| (name, args.iter().map(|arg| arg.to_string()).collect())).collect()
}

#[test]
fn cli_ends_with_2_where_stdout_is_full_or_closed() {
    for closed in [false, true] {
        let dir = tempfile::tempdir().expect("a temporary folder");
        for (name, args) in each_program(&dir) {
            let child =
                command(name).args(&args).stdin(Stdio::null()).stdout(sink(closed)).stderr(Stdio::piped()).spawn();
            let output = ends(child.expect("the program starts"));
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{name} {args:?}: {stderr}");
            let why = if closed { "Broken pipe" } else { "No space left" };
            assert!(stderr.contains("cannot write to stdout") && stderr.contains(why), "{name} {args:?}: {stderr}");
            assert!(!stderr.contains("panicked"), "{name} {args:?}: {stderr}");
        }
    }
}

/// What cannot be said changes nothing of what is done.
#[test]
fn cli_does_its_work_where_stderr_is_full_or_closed() {
    for closed in [false, true] {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let mut programs = each_program(&dir);
        // A refusal has its exit code.
        programs.push(("generate", vec!["--top-p".into(), "7".into()]));
        programs.push(("generate", vec!["--no-such-option".into()]));
        for (name, args) in programs {
            let expected = if args[0] == "--top-p" || args[0] == "--no-such-option" { 2 } else { 0 };
            let child =
                command(name).args(&args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(sink(closed)).spawn();
            let output = ends(child.expect("the program starts"));
            assert_eq!(output.status.code(), Some(expected), "{name} {args:?}");
            assert_eq!(output.stdout.is_empty(), expected == 2, "{name} {args:?}");
        }
    }
}

/// In the place of each file that is read.
#[rstest]
fn cli_refuses_what_is_no_file(
    #[values("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")] file: &str,
    #[values("a pipe", "a folder", "a socket", "a device")] kind: &str,
) {
    let dir = copy(FIXTURE);
    let path = dir.path().join(file);
    std::fs::remove_file(&path).expect("the file was there");
    let _socket = place(&path, kind);
    let needles = [file, &format!("is {kind}, expected a file")];
    refused(&run("generate", &["--model", text(dir.path()), "--prompt", "a"]), &needles);
    if file == "config.json" {
        let to = dir.path().join("to");
        refused(&run("generate", &["--random-weights", text(&path)]), &needles);
        refused(&run("make_checkpoint", &["--config", text(&path), "--to", text(&to)]), &needles);
        assert!(!to.exists());
    }
    let output = run("generate", &["--model", text(dir.path()), "--dry-run"]);
    assert_eq!(output.status.code(), Some(if file == "generation_config.json" { 0 } else { 2 }));
}

/// Makes something that is no file.
fn place(path: &Path, kind: &str) -> Option<UnixListener> {
    match kind {
        "a pipe" => fifo(path),
        "a folder" => std::fs::create_dir(path).expect("a folder"),
        "a device" => symlink("/dev/zero", path).expect("a link"),
        _ => return Some(UnixListener::bind(path).expect("a socket")),
    }
    None
}

#[rstest]
fn cli_refuses_other_files_that_are_none(#[values("a pipe", "a folder", "a socket", "a device")] kind: &str) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("it");
    let _socket = place(&path, kind);
    let shown = text(&path);
    refused(&run("generate", &["--prompt-file", shown]), &[shown, "no regular file"]);
    let has_bench = has_bench();
    if has_bench {
        refused(&run("bench", &["--compare", shown, shown]), &[shown, "no regular file"]);
        refused(&run("bench", &["--device", "flex", "--dtype", "f32", "--random-weights", shown]), &[shown]);
    }
    if kind != "a device" {
        refused(&run("serve_batch", &["-", "--output", shown]), &["cannot write", shown]);
    }
    if kind != "a device" && has_bench {
        let bench = run("bench", &["--device", "flex", "--dtype", "f32", "--smoke", "--only", "merge", "--out", shown]);
        assert_eq!(bench.status.code(), Some(2), "{}", String::from_utf8_lossy(&bench.stderr));
    }
    if kind == "a folder" || kind == "a socket" {
        refused(&run("serve_batch", &[shown]), &["cannot read", shown]);
    }
    if kind != "a folder" {
        refused(&run("generate", &["--model", shown]), &[shown, &format!("is {kind}, expected a folder")]);
        let made = run("make_checkpoint", &["--from", text(&folder(FIXTURE)), "--to", shown]);
        refused(&made, &[shown, "expected a folder"]);
    }
}

/// A file where a folder is wanted.
#[test]
fn cli_wants_folders_for_folders() {
    let config = folder(FIXTURE).join("config.json");
    let needles = [text(&config), "is a file, expected a folder"];
    refused(&run("generate", &["--model", text(&config)]), &needles);
    refused(&run("generate", &["--model", text(&config), "--dry-run"]), &needles);
    refused(&run("verify", &[text(&config)]), &needles);
    refused(&run("make_checkpoint", &["--from", text(&folder(FIXTURE)), "--to", text(&config)]), &needles);
}

#[test]
fn cli_serves_pipes() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let [input, output] = ["in", "out"].map(|name| dir.path().join(name));
    fifo(&input);
    fifo(&output);
    let reading = output.clone();
    let reader = std::thread::spawn(move || {
        let mut all = String::new();
        File::open(reading).and_then(|mut file| file.read_to_string(&mut all)).expect("a pipe");
        all
    });
    let args = [text(&input), "--output", text(&output), "--max-new-tokens", "2"];
    let child = command("serve_batch").args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    std::thread::spawn(move || {
        let mut writer = File::options().write(true).open(&input).expect("the program reads");
        writeln!(writer, "{}", json!({"prompt": "foo"})).expect("written");
    });
    let done = ends(child.expect("the program starts"));
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let answer: Value = serde_json::from_str(&reader.join().expect("it was read")).expect("one answer");
    assert_eq!(answer["id"], 1);
}

/// Neither a name that leads out of the folder nor an absolute one.
#[rstest]
fn cli_refuses_an_index_that_leaves_the_folder(
    #[values("../model.safetensors", "/dev/zero", "a/../../b", "", ".", "..")] name: &str,
) {
    let dir = copy(FIXTURE);
    std::fs::remove_file(dir.path().join("model.safetensors")).expect("the weights were there");
    let index = json!({"weight_map": {"model.norm.weight": name, "lm_head.weight": "model.safetensors"}});
    std::fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).expect("written");
    let needles = ["model.safetensors.index.json", &format!("{name:?}"), "expected one in the folder"];
    refused(&run("generate", &["--model", text(dir.path())]), &needles);
    refused(&run("generate", &["--model", text(dir.path()), "--dry-run"]), &needles);
}

/// As a hub cache has it: a folder of links to blobs beside it.
#[test]
fn cli_follows_links_to_blobs() {
    let (cache, original) = (tempfile::tempdir().expect("a temporary folder"), folder(FIXTURE));
    let [blobs, snapshot] = ["blobs", "snapshots/1"].map(|name| cache.path().join(name));
    std::fs::create_dir_all(&blobs).expect("a folder");
    std::fs::create_dir_all(&snapshot).expect("a folder");
    for (number, file) in ["config.json", "tokenizer.json", "model.safetensors"].into_iter().enumerate() {
        std::fs::copy(original.join(file), blobs.join(number.to_string())).expect("a copy");
        symlink(PathBuf::from("../../blobs").join(number.to_string()), snapshot.join(file)).expect("a link");
    }
    let args = ["--model", text(&snapshot), "--prompt", "a", "--max-new-tokens", "2"];
    let output = run("generate", &args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::remove_file(blobs.join("2")).expect("a blob");
    refused(&run("generate", &args), &["model.safetensors does not exist"]);
}

/// The second of three shards is refused in the middle; what comes after it is looked at all the same.
#[test]
fn cli_dry_run_goes_on_after_a_shard_that_is_refused() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let to = dir.path().join("to");
    let args =
        ["--from", text(&folder(FIXTURE)), "--to", text(&to), "--dequantized", "bf16", "--shard-bytes", "900000"]
            .map(str::to_string);
    let made = run("make_checkpoint", &args.each_ref().map(String::as_str));
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let mut shards: Vec<PathBuf> =
        std::fs::read_dir(&to).expect("a folder").flatten().map(|entry| entry.path()).collect();
    shards.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    shards.sort();
    assert!(shards.len() >= 3, "{shards:?}");
    let mut bytes = std::fs::read(&shards[1]).expect("a shard");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header = String::from_utf8(bytes[8..8 + length].to_vec()).expect("a header");
    // Numbers of a byte each, twice as many of them.
    let mut fields: Value = serde_json::from_str(header.trim_end()).expect("JSON");
    let mut tensors = fields.as_object_mut().expect("tensors").values_mut();
    let last = tensors.find(|tensor| tensor["shape"][1].is_u64()).expect("a matrix");
    last["dtype"] = json!("F8_E5M2");
    let columns = last["shape"][1].as_u64().expect("a matrix");
    last["shape"][1] = json!(2 * columns);
    let changed = fields.to_string();
    bytes.splice(..8 + length, (changed.len() as u64).to_le_bytes().into_iter().chain(changed.into_bytes()));
    std::fs::write(&shards[1], bytes).expect("written");
    let output = run("generate", &["--model", text(&to), "--dry-run"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("F8_E5M2") && stderr.contains("missing:") && !stderr.contains("panicked"), "{stderr}");
}

/// Configurations that are no objects, and a limit after which there is no time.
#[test]
fn cli_bench_takes_any_limit_and_refuses_other_json() {
    if !has_bench() {
        return;
    }
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("config.json");
    std::fs::write(&path, "[1]").expect("written");
    let never = u64::MAX.to_string();
    let args =
        ["--device", "flex", "--dtype", "f32", "--only", "e2e", "--random-weights", text(&path), "--limit", &never];
    let output = run("bench", &args);
    let said = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && !stderr.contains("panicked"), "{stderr}");
    assert!(said.contains("no JSON object") || stderr.contains("no JSON object"), "{said}{stderr}");
}

/// A byte order mark, and a file that is wrong under its own name.
#[test]
fn cli_says_which_json_is_wrong_and_why() {
    for file in ["config.json", "generation_config.json"] {
        let dir = copy(FIXTURE);
        let path = dir.path().join(file);
        let marked = [b"\xef\xbb\xbf".to_vec(), std::fs::read(&path).expect("a file")].concat();
        std::fs::write(&path, marked).expect("written");
        refused(&run("generate", &["--model", text(dir.path())]), &[file, "byte order mark"]);
    }
    for (fields, needle) in
        [(json!({"temperature": -1}), "`temperature` is -1"), (json!({"top_p": 2.5}), "`top_p` is 2.5")]
    {
        let dir = copy(FIXTURE);
        std::fs::write(dir.path().join("generation_config.json"), fields.to_string()).expect("written");
        let output = run("generate", &["--model", text(dir.path()), "--sample"]);
        refused(&output, &["generation_config.json", needle]);
    }
}

/// Stored results that no model can be asked for.
#[rstest]
#[case(600, "token ids below 512")]
#[case(-1, "expected token ids")]
fn cli_verify_refuses_tokens_that_the_model_lacks(#[case] id: i64, #[case] needle: &str) {
    let dir = copy(FIXTURE);
    std::fs::copy(folder(FIXTURE).join("meta.json"), dir.path().join("meta.json")).expect("a copy");
    let path = dir.path().join("expected.safetensors");
    let mut bytes = std::fs::read(folder(FIXTURE).join("expected.safetensors")).expect("stored results");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).expect("a header");
    let start = 8 + length + header["input_ids"]["data_offsets"][0].as_u64().expect("an offset") as usize;
    bytes[start..start + 8].copy_from_slice(&id.to_le_bytes());
    std::fs::write(&path, bytes).expect("written");
    refused(&run("verify", &[text(dir.path())]), &["expected.safetensors", "input_ids", needle]);
}
