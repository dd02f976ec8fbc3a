//! The program `serve_batch`: answers as they come, bad lines, full disks, readers that go away, Ctrl-C.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use burn_mla::model::Tokenizer;
use rstest::rstest;
use serde_json::{Value, json};

use crate::cli_faults::command;
use crate::model_engine::with_a_token_that_is_nan;
use crate::model_parity::folder;

fn program() -> Command {
    command("serve_batch")
}

fn prompts(dir: &Path, lines: &[Value]) -> PathBuf {
    let path = dir.join("prompts.jsonl");
    std::fs::write(&path, lines.iter().map(|line| format!("{line}\n")).collect::<String>()).expect("written");
    path
}

fn serve(lines: &[Value], args: &[&str]) -> Output {
    let dir = tempfile::tempdir().expect("a temporary folder");
    program().arg(prompts(dir.path(), lines)).args(args).output().expect("the program starts")
}

fn answers(stdout: &[u8]) -> Vec<Value> {
    let text = String::from_utf8_lossy(stdout);
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

fn stderr(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!text.contains("panicked"), "{text}");
    text
}

#[test]
fn cli_serve_answers_every_line_in_its_own_way() {
    let lines = [
        json!({"id": "long", "prompt": "hacker: n.", "max_new_tokens": 30}),
        json!({"id": 7, "prompt": "hacker: n.", "max_new_tokens": 3}),
        json!({"prompt": "hacker: n.", "stop": "furniture"}),
        json!({"id": "nothing", "prompt": "foo", "max_new_tokens": 0}),
        json!({"id": "drawn", "prompt": "foo", "temperature": 1.0, "seed": 3, "max_new_tokens": 8}),
    ];
    let args = ["--deterministic", "--token-budget", "20", "--max-batch", "4", "--max-new-tokens", "40"];
    let output = serve(&lines, &args);
    assert!(output.status.success(), "{}", stderr(&output));
    let answers = answers(&output.stdout);
    let find = |id: Value| answers.iter().find(|answer| answer["id"] == id).unwrap_or_else(|| panic!("no {id}"));
    assert_eq!(answers.len(), 5);
    // The short one is written first, though it came later.
    assert!(answers.iter().position(|a| a["id"] == 7) < answers.iter().position(|a| a["id"] == "long"));
    assert_eq!(
        (&find(json!(7))["completion_tokens"], &find(json!(7))["finish_reason"]),
        (&json!(3), &json!("max_new_tokens"))
    );
    assert_eq!(find(json!(3))["finish_reason"], "stop_string");
    assert!(find(json!(3))["text"].as_str().is_some_and(|text| text.ends_with("who makes ")));
    assert_eq!(find(json!("nothing"))["text"], "");
    let alone = serve(&lines[4..], &["--deterministic"]);
    assert_eq!(self::answers(&alone.stdout)[0], *find(json!("drawn")));
    assert!(stderr(&output).contains("tokens"), "no report");
}

#[test]
fn cli_serve_names_bad_lines_and_goes_on() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("prompts.jsonl");
    let mut text = b"{\"prompt\": \"foo\"}\n\nnot json\n[1]\n{\"id\": 1}\n{\"prompt\": 5}\n".to_vec();
    text.extend(
        b"{\"prompt\": \"a\", \"max_tokens\": 5}\n{\"prompt\": \"a\", \"temperature\": -1}\n{\"prompt\": \"\"}\n",
    );
    text.extend(
        b"{\"prompt\": \"a\", \"stop\": [\"x\", 3]}\n{\"prompt\": \"\xff\"}\n{\"prompt\": \"foo\", \"id\": \"last\"}",
    );
    std::fs::write(&path, text).expect("written");
    let output = program().arg(&path).args(["--max-new-tokens", "4"]).output().expect("the program starts");
    let stderr = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    let ids: Vec<Value> = answers(&output.stdout).into_iter().map(|answer| answer["id"].clone()).collect();
    assert_eq!(ids, [json!(1), json!("last")]);
    for needles in [
        ["line 3:", "not JSON"],
        ["line 4:", "a list, expected an object"],
        ["line 5:", "`prompt` is missing"],
        ["line 6:", "`prompt` is 5, expected a text"],
        ["line 7:", "`max_tokens` is no field"],
        ["line 8:", "`temperature` is -1"],
        ["line 9:", "`prompt` is empty"],
        ["line 10:", "`stop` is [\"x\",3]"],
        ["line 11:", "not UTF-8"],
    ] {
        assert!(stderr.lines().any(|line| needles.iter().all(|needle| line.contains(needle))), "{needles:?}: {stderr}");
    }
    assert!(stderr.contains("9 of 11 lines"), "{stderr}");
}

/// An id names one answer; a line without one has its number.
#[test]
fn cli_serve_names_lines_with_an_id_that_is_taken() {
    let line = |id: Value| json!({"id": id, "prompt": "foo", "max_new_tokens": 2});
    let lines = [line(json!("a")), line(json!("a")), line(json!(4)), line(Value::Null), line(json!("4"))];
    let output = serve(&lines, &[]);
    let stderr = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    let ids: Vec<Value> = answers(&output.stdout).into_iter().map(|answer| answer["id"].clone()).collect();
    assert_eq!(ids, [json!("a"), json!(4), json!("4")]);
    for needle in ["line 2: `id` is already used by line 1", "line 4: `id` is already used by line 3", "2 of 5 lines"] {
        assert!(stderr.contains(needle), "`{needle}` is not in: {stderr}");
    }
}

/// The line is named, the others are answered.
#[test]
fn cli_serve_says_which_request_has_failed() {
    const FIXTURE: &str = "tests/fixtures/v3-tiny";
    let ids = |text| Tokenizer::load(&folder(FIXTURE)).and_then(|it| it.encode(text, true)).expect("a text");
    let sound = ids("attention");
    let bad = *ids("zebra").iter().find(|id| !sound.contains(id)).expect("other tokens");
    let model = with_a_token_that_is_nan(FIXTURE, bad);
    let lines = ["attention", "zebra", "attention"].map(|prompt| json!({"prompt": prompt, "max_new_tokens": 1}));
    let output = serve(&lines, &["--model", model.path().to_str().expect("UTF-8")]);
    let stderr = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("line 2 ended after 0 tokens: `logits`") && stderr.contains("1 of 3 lines"), "{stderr}");
    let mut reasons: Vec<(u64, Value)> = answers(&output.stdout)
        .into_iter()
        .map(|answer| (answer["id"].as_u64().expect("a line"), answer["finish_reason"].clone()))
        .collect();
    reasons.sort_by_key(|(line, _)| *line);
    assert_eq!(reasons, [(1, json!("max_new_tokens")), (2, json!("failed")), (3, json!("max_new_tokens"))]);
}

/// What cannot be answered empties no file: a folder without a model, and an output that is the input.
#[test]
fn cli_serve_keeps_a_file_that_it_will_not_write() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let input = prompts(dir.path(), &[json!({"prompt": "foo"})]);
    let before = std::fs::read(&input).expect("it was written");
    let same = dir.path().join(".").join("prompts.jsonl");
    let answers = dir.path().join("answers.jsonl");
    std::fs::write(&answers, "{}\n").expect("written");
    for (output, model, needles) in [
        (&same, None, ["--output", "is the input"]),
        (&answers, Some("no/such/model"), ["no/such/model", "does not exist"]),
    ] {
        let mut command = program();
        command.arg(&input).arg("--output").arg(output);
        if let Some(model) = model {
            command.args(["--model", model]);
        }
        let output = command.output().expect("the program starts");
        let stderr = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(needles.iter().all(|needle| stderr.contains(needle)), "{stderr}");
    }
    assert_eq!(std::fs::read(&input).expect("still there"), before);
    assert_eq!(std::fs::read(&answers).expect("still there"), b"{}\n");
}

#[test]
fn cli_serve_says_that_no_step_was_replayed() {
    let lines = [json!({"prompt": "foo", "max_new_tokens": 2})];
    let unasked = if cfg!(feature = "fusion") { "feature `fusion`" } else { "the device captures no graphs" };
    for (args, why) in [(&[][..], unasked), (&["--no-graphs"], "graphs are switched off")] {
        let output = serve(&lines, args);
        let stderr = stderr(&output);
        assert!(output.status.success(), "{stderr}");
        assert_eq!(stderr.matches("none, every kernel was launched").count(), 1, "{args:?}: {stderr}");
        assert!(stderr.contains(why), "{args:?}: {stderr}");
    }
}

#[rstest]
#[case(&["no/such/file"], &["no/such/file"])]
#[case(&["-", "--output", "no/such/folder/file"], &["no/such/folder/file"])]
#[case(&["-", "--token-budget", "3"], &["`--token-budget`", "`--max-batch`"])]
#[case(&["-", "--mixed-prompt-tokens", "0"], &["`--mixed-prompt-tokens`"])]
#[case(&["-", "--page-size", "3"], &["`--page-size`"])]
#[case(&["-", "--top-p", "0"], &["`--top-p`"])]
#[case(&["-", "--model", "no/such/model"], &["no/such/model"])]
fn cli_serve_refuses_a_bad_argument(#[case] args: &[&str], #[case] needles: &[&str]) {
    let output = program().args(args).stdin(Stdio::null()).output().expect("the program starts");
    let stderr = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(needles.iter().all(|needle| stderr.contains(needle)), "{stderr}");
}

#[test]
fn cli_serve_says_which_answer_the_cache_has_cut() {
    let lines = [json!({"prompt": "hacker: n.", "max_new_tokens": 400}), json!({"prompt": "foo", "max_new_tokens": 5})];
    let output = serve(&lines, &["--page-size", "16", "--cache-pages", "5"]);
    let stderr = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("line 1 ended after") && stderr.contains("--cache-pages"), "{stderr}");
    let answers = answers(&output.stdout);
    assert_eq!((&answers[0]["id"], &answers[1]["finish_reason"]), (&json!(2), &json!("out_of_cache")));
    assert!(answers[1]["text"].as_str().is_some_and(|text| text.contains("makes furniture with an axe")));
}

/// The first write fails, as on a disk that is full.
#[cfg(target_os = "linux")]
#[test]
fn cli_serve_says_that_the_disk_is_full() {
    let lines =
        [json!({"prompt": "foo", "max_new_tokens": 2}), json!({"id": "b", "prompt": "foo", "max_new_tokens": 50})];
    let output = serve(&lines, &["--output", "/dev/full"]);
    let stderr = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    for needle in ["/dev/full", "No space left", "0 completions are written", "line 2 (\"b\")"] {
        assert!(stderr.contains(needle), "`{needle}` is not in: {stderr}");
    }
}

/// The disk is full after a few answers: those stay whole, and are counted.
#[cfg(target_os = "linux")]
#[test]
fn cli_serve_keeps_what_it_wrote_before_the_disk_was_full() {
    let lines: Vec<Value> = (0..20).map(|n| json!({"id": format!("request {n}"), "prompt": "foo"})).collect();
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (input, file) = (prompts(dir.path(), &lines), dir.path().join("answers.jsonl"));
    // A file may have one block; to write more is an error, no signal.
    let output = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 1; exec \"$0\" \"$@\""])
        .arg(program().get_program())
        .arg(input)
        .args(["--max-new-tokens", "8", "--output"])
        .arg(&file)
        .output()
        .expect("a shell");
    let stderr = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    let written = answers(&std::fs::read(&file).expect("the file")).len();
    assert!((1..20).contains(&written), "{written} answers");
    let needles = ["cannot write to", &format!("; {written} completions are written"), "requests are not finished"];
    assert!(needles.iter().all(|needle| stderr.contains(needle)), "{written} answers: {stderr}");
}

#[cfg(unix)]
fn start(args: &[&str]) -> Child {
    let pipes = program().args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    pipes.expect("the program starts")
}

/// A reader that takes one line and goes.
#[cfg(unix)]
#[test]
fn cli_serve_says_that_the_reader_has_gone() {
    let mut child = start(&["--max-new-tokens", "3"]);
    let mut stdin = child.stdin.take().expect("a pipe");
    writeln!(stdin, "{}", json!({"prompt": "foo"})).expect("the program reads");
    let mut first = String::new();
    BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut first).expect("an answer");
    assert_eq!(answers(first.as_bytes())[0]["id"], 1);
    writeln!(stdin, "{}", json!({"prompt": "foo"})).expect("the program reads");
    drop(stdin);
    let output = child.wait_with_output().expect("it ends");
    let stderr = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(
        stderr.contains("stdout") && stderr.contains("Broken pipe") && stderr.contains("1 completions"),
        "{stderr}"
    );
}

/// While a pipe stays open and a long answer is on its way: what is finished is in the file, the rest is named.
#[cfg(unix)]
#[test]
fn cli_serve_ends_cleanly_at_ctrl_c() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let file = dir.path().join("answers.jsonl");
    let mut child =
        start(&["-", "--output", file.to_str().expect("UTF-8"), "--temperature", "1", "--max-new-tokens", "3000"]);
    let mut stdin = child.stdin.take().expect("a pipe");
    writeln!(stdin, "{}", json!({"id": "short", "prompt": "foo", "max_new_tokens": 2})).expect("the program reads");
    for n in 0..6 {
        let line = json!({"id": format!("long {n}"), "prompt": "foo", "seed": n});
        writeln!(stdin, "{line}").expect("the program reads");
    }
    // The short one is written while the others run.
    let written = || std::fs::read(&file).is_ok_and(|bytes| bytes.ends_with(b"\n"));
    let patience = std::time::Instant::now();
    while !written() {
        assert!(patience.elapsed().as_secs() < 120, "no answer");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill runs");
    assert!(killed.success());
    let output = child.wait_with_output().expect("it ends");
    drop(stdin);
    let stderr = stderr(&output);
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    let answers = answers(&std::fs::read(&file).expect("the file"));
    assert_eq!(answers[0]["id"], "short");
    for n in 0..6 {
        let id = format!("long {n}");
        let answered = answers.iter().any(|answer| answer["id"] == id.as_str());
        assert!(answered != stderr.contains(&id), "{id} is answered: {answered}; {stderr}");
    }
    assert!(answers.len() < 7, "nothing was interrupted: the test says nothing");
}
