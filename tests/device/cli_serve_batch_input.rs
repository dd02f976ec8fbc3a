//! The program `serve_batch` on input that would fill the memory, take for ever, or be overwritten.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Instant;

use rstest::rstest;
use serde_json::{Value, json};

use crate::cli_faults::command;
use crate::model_parity::folder;

fn serve(lines: &[u8], args: &[&str]) -> Output {
    let mut child = command("serve_batch")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    let lines = lines.to_vec();
    let writer = std::thread::spawn(move || stdin.write_all(&lines));
    let output = child.wait_with_output().expect("it ends");
    writer.join().expect("it was written").expect("all of it is read");
    output
}

fn said(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!text.contains("panicked"), "{text}");
    text
}

fn ids(output: &Output) -> Vec<Value> {
    let text = String::from_utf8_lossy(&output.stdout);
    let answers = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    answers.map(|answer| answer["id"].clone()).collect()
}

/// A line that is too long, a prompt that is, a mark before the text, ids and stop strings without bounds: the others are answered.
#[test]
fn cli_serve_bounds_what_it_reads() {
    let long = |bytes: usize| "word ".repeat(bytes / 5);
    let lines = [
        format!("\u{FEFF}{}", json!({"prompt": "foo"})),
        json!({"prompt": long(17 << 20)}).to_string(),
        json!({"prompt": "foo"}).to_string(),
        json!({"prompt": long(15 << 20)}).to_string(),
        json!({"prompt": "foo", "id": long(2000)}).to_string(),
        json!({"prompt": "foo", "stop": vec!["a"; 5000]}).to_string(),
        json!({long(2000): "foo"}).to_string(),
        "\0".repeat(40 << 20),
        json!({"prompt": "foo"}).to_string(),
    ];
    let start = Instant::now();
    let output = serve(lines.join("\n").as_bytes(), &["--max-new-tokens", "2"]);
    let stderr = said(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert_eq!(ids(&output), [json!(3), json!(9)], "{stderr}");
    for needles in [
        ["line 1:", "byte order mark"],
        ["line 2:", "longer than 16777216 bytes"],
        ["line 4:", "`prompt` is 15728640 bytes long"],
        ["line 5:", "a text of at most 1024 bytes"],
        ["line 6:", "`stop` is 5000 strings"],
        ["line 7:", "is no field"],
        ["line 8:", "longer than"],
        ["7 of 9 lines", "no complete answer"],
    ] {
        let line = stderr.lines().find(|line| needles.iter().all(|needle| line.contains(needle)));
        assert!(line.is_some_and(|line| line.len() < 400), "{needles:?}: {stderr}");
    }
    // Tokenised, the long prompt alone would take half a minute.
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}

/// A line without an end is reported as soon as it is too long, while the pipe stays open.
#[cfg(unix)]
#[test]
fn cli_serve_reports_a_line_without_an_end() {
    let mut child = command("serve_batch")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(&vec![b'x'; (16 << 20) + 1]).expect("it is read");
    let mut stderr = std::io::BufReader::new(child.stderr.take().expect("a pipe"));
    let mut next_line = || {
        let mut line = String::new();
        std::io::BufRead::read_line(&mut stderr, &mut line).expect("a message");
        line
    };
    let loaded = next_line();
    assert!(loaded.starts_with("weights") && loaded.contains("loaded in"), "{loaded}");
    let line = next_line();
    assert!(line.contains("line 1: longer than"), "{line}");
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill runs");
    assert!(killed.success());
    assert_eq!(child.wait().expect("it ends").code(), Some(130));
}

/// Another name of the input.
#[cfg(unix)]
fn other_name(dir: &Path, input: &Path, kind: &str) -> PathBuf {
    let other = dir.join("other.jsonl");
    match kind {
        "the same path" => return input.into(),
        "a hard link" => std::fs::hard_link(input, &other).expect("a link"),
        _ => std::os::unix::fs::symlink(input, &other).expect("a link"),
    }
    other
}

#[cfg(unix)]
#[rstest]
fn cli_serve_refuses_an_output_that_is_the_input(
    #[values("the same path", "a hard link", "a symbolic link")] kind: &str,
    #[values(false, true)] by_stdin: bool,
) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let input = dir.path().join("prompts.jsonl");
    let text = format!("{}\n", json!({"prompt": "foo", "max_new_tokens": 2}));
    std::fs::write(&input, &text).expect("written");
    let output = other_name(dir.path(), &input, kind);
    let mut program = command("serve_batch");
    match by_stdin {
        true => program.arg("-").stdin(std::fs::File::open(&input).expect("a file")),
        false => program.arg(&input),
    };
    let output = program.arg("--output").arg(&output).output().expect("the program starts");
    let stderr = said(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("--output") && stderr.contains("is the input"), "{stderr}");
    assert_eq!(std::fs::read_to_string(&input).expect("a file"), text);
}

/// Answers that are appended to the prompts would be read as prompts.
#[cfg(unix)]
#[test]
fn cli_serve_refuses_to_append_to_its_input() {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    let text = format!("{}\n", json!({"prompt": "foo", "max_new_tokens": 2}));
    std::fs::write(file.path(), &text).expect("written");
    let appended = std::fs::File::options().append(true).open(file.path()).expect("a file");
    let output = command("serve_batch").arg(file.path()).stdout(appended).output().expect("the program starts");
    let stderr = said(&output);
    assert!(output.status.code() == Some(2) && stderr.contains("stdout is the input"), "{stderr}");
    assert_eq!(std::fs::read_to_string(file.path()).expect("a file"), text);
}

/// It leaves no trace in the text, which ends all the same: here the demo's end of text, which nothing else ends it by.
#[test]
fn cli_serve_stops_at_a_special_token() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    for entry in std::fs::read_dir(folder("assets/demo-v3")).expect("the demo").flatten() {
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).expect("a copy");
    }
    for (file, fields) in [("config.json", None), ("generation_config.json", Some(json!({})))] {
        let path = dir.path().join(file);
        let mut json: Value = match fields {
            None => serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON"),
            Some(fields) => fields,
        };
        json["eos_token_id"] = Value::Null;
        std::fs::write(&path, json.to_string()).expect("written");
    }
    let line = json!({"prompt": "quux", "stop": ["<eos>", "\nx"], "max_new_tokens": 200});
    let output = serve(line.to_string().as_bytes(), &["--model", dir.path().to_str().expect("UTF-8")]);
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", said(&output)));
    assert_eq!(answer["finish_reason"], "stop_string", "{answer}");
    let text = answer["text"].as_str().expect("a text");
    assert!(text.len() > 5 && !text.contains("eos"), "{text}");
}
