//! `generate --chat`: conversations from options, files and a terminal, and what cannot be answered.

use std::path::Path;
use std::process::{Output, Stdio};

use burn_mla::model::{ChatTemplate, Message, Tokenizer};
use proptest::prelude::*;
use rstest::rstest;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::cli_faults::{command, refused};
use crate::model_parity::folder;

/// The template of these tests: the messages as lines of the Jargon File, which the demo checkpoint has learnt.
const TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}{{ '\\n\\n' }}{% endif %}{% endfor %}";

/// The demo checkpoint with a chat template.
fn model(template: &str) -> TempDir {
    let dir = tempfile::tempdir().expect("a temporary folder");
    for entry in std::fs::read_dir(folder("assets/demo-v3")).expect("the demo") {
        let entry = entry.expect("a file");
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).expect("copied");
    }
    std::fs::write(dir.path().join("chat_template.jinja"), template).expect("written");
    dir
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a UTF-8 path")
}

fn chat(dir: &Path, args: &[&str]) -> Output {
    let mut command = command("generate");
    command.args(["--chat", "--model", text(dir), "--max-new-tokens", "12"]).args(args).stdin(Stdio::null());
    command.output().expect("the program starts")
}

fn said(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn cli_chat_answers_options_and_files_alike() {
    let model = model(TEMPLATE);
    let dir = model.path();
    let plain = command("generate").args(["--prompt", "hacker: n.", "--max-new-tokens", "12"]).output();
    let plain = said(&plain.expect("the program starts"));
    assert_eq!(said(&chat(dir, &["--user", "hacker: n."])), plain);
    // In the order of the options, but for the system, which is first.
    let options = ["--user", "a", "--assistant", "b", "--user", "c", "--system", "d"];
    let conversation = dir.join("conversation.json");
    let messages = json!([
        {"role": "system", "content": "d"}, {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
    ]);
    let by_options = said(&chat(dir, &options));
    for file in [messages.clone(), json!({"messages": messages})] {
        std::fs::write(&conversation, file.to_string()).expect("written");
        assert_eq!(said(&chat(dir, &["--conversation", text(&conversation)])), by_options);
    }
    // What the library renders is what the program continues.
    let tokenizer = Tokenizer::load(dir).expect("a tokenizer");
    let template = ChatTemplate::load(dir, &tokenizer).expect("a template");
    let messages = [Message::system("d"), Message::user("a"), Message::assistant("b"), Message::user("c")];
    let rendered = template.render(&messages, true).expect("rendered");
    assert_eq!(rendered, "<bos>dab\n\nc");
    let prompt = rendered.strip_prefix("<bos>").expect("one bos");
    let plain = command("generate").args(["--prompt", prompt, "--max-new-tokens", "12"]).output();
    assert_eq!(said(&plain.expect("the program starts")), by_options);
}

#[rstest]
#[case::nothing(&[], "give --user TEXT or --conversation FILE")]
#[case::system(&["--system", "a"], "give --user TEXT or --conversation FILE")]
#[case::missing(&["--conversation", "/nowhere.json"], "/nowhere.json does not exist")]
#[case::prompt(&["--user", "a", "--prompt", "b"], "cannot be used with")]
#[case::both(&["--user", "a", "--conversation", "b"], "cannot be used with")]
fn cli_chat_refuses_what_it_cannot_answer(#[case] args: &[&str], #[case] needle: &str) {
    refused(&chat(&folder("assets/demo-v3"), args), &[needle]);
}

#[test]
fn cli_chat_does_not_answer_the_assistant() {
    let output = chat(model(TEMPLATE).path(), &["--user", "a", "--assistant", "b"]);
    refused(&output, &["last message is the assistant's"]);
}

#[test]
fn cli_chat_without_a_template_says_so() {
    refused(&chat(&folder("assets/demo-v3"), &["--user", "a"]), &["tokenizer_config.json", "no `chat_template` in it"]);
    refused(
        &chat(&folder("assets/demo-v4"), &["--user", "a"]),
        &["lacks the token", "DeepSeek-V4's published encoding"],
    );
    let alone = command("generate").args(["--user", "a"]).output().expect("the program starts");
    refused(&alone, &["--chat"]);
}

#[rstest]
#[case::raised("{{ raise_exception('no system') }}", "it refuses the conversation: no system, at line 1")]
#[case::endless("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "steps")]
#[case::syntax("{% if", "syntax error")]
#[case::nothing("", "rendered to no tokens")]
fn cli_chat_names_the_template_that_fails(#[case] template: &str, #[case] needle: &str) {
    refused(&chat(model(template).path(), &["--user", "a"]), &[needle]);
}

#[test]
fn cli_chat_refuses_hostile_files_with_the_place() {
    let model = model(TEMPLATE);
    let path = model.path().join("conversation.json");
    for (content, needle) in [
        ("".to_string(), "line 1 column 0"),
        (
            "[{\"role\": \"user\", \"content\": \"a\"},\n {\"role\": \"root\", \"content\": \"a\"}]".into(),
            "at line 2 column",
        ),
        ("[]".into(), "`messages` is empty"),
        ("[".repeat(1 << 20), "column"),
        (json!([{"role": "user", "content": "word ".repeat(1 << 16)}]).to_string(), "4096 tokens"),
        (json!([{"role": "user", "content": "a", "tool_calls": []}]).to_string(), "`tool_calls`"),
        (" ".repeat((16 << 20) + 1), "at most 16777216 bytes"),
    ] {
        std::fs::write(&path, content).expect("written");
        refused(&chat(model.path(), &["--conversation", text(&path)]), &[needle]);
    }
    refused(&chat(model.path(), &["--conversation", text(model.path())]), &["is a folder"]);
}

#[test]
fn cli_chat_ends_with_130_after_ctrl_c() {
    use std::io::Read;
    use std::process::Command;
    let model = model(TEMPLATE);
    let mut child = command("generate")
        .args(["--chat", "--model", text(model.path()), "--user", "hacker: n.", "--max-new-tokens", "4000"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program starts");
    child.stdout.as_mut().expect("a pipe").read_exact(&mut [0]).expect("the answer begins");
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill runs");
    assert!(killed.success());
    assert_eq!(child.wait().expect("it ends").code(), Some(130));
}

#[test]
fn cli_chat_lines_of_serve_batch_have_messages() {
    let model = model(TEMPLATE);
    let lines = [
        json!({"id": "prompt", "prompt": "hacker: n."}),
        json!({"id": "messages", "messages": [{"role": "user", "content": "hacker: n."}]}),
        json!({"messages": [{"role": "user", "content": "a"}], "prompt": "a"}),
        json!({"messages": [{"role": "tool", "content": "a"}]}),
        json!({"messages": []}),
        json!({"messages": 5}),
    ];
    let path = model.path().join("lines.jsonl");
    std::fs::write(&path, lines.iter().map(|line| format!("{line}\n")).collect::<String>()).expect("written");
    let serve = |dir: &Path| {
        let mut command = command("serve_batch");
        command.arg(&path).args(["--model", text(dir), "--max-new-tokens", "8"]).output().expect("the program starts")
    };
    let output = serve(model.path());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    let answers: Vec<Value> =
        output.stdout.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect();
    assert_eq!(answers.len(), 2, "{stderr}");
    assert_eq!(answers[0]["text"], answers[1]["text"]);
    for needle in [
        "line 3: `messages` is beside `prompt`",
        "line 4: `messages`: unknown variant `tool`",
        "line 5: `messages` is empty",
        "line 6: `messages`: ",
    ] {
        assert!(stderr.contains(needle), "`{needle}` is not in: {stderr}");
    }
    let without = serve(&folder("assets/demo-v3"));
    let stderr = String::from_utf8_lossy(&without.stderr);
    assert!(
        stderr.contains("line 2: `messages` need a chat template: ") && stderr.contains("no `chat_template`"),
        "{stderr}"
    );
}

/// At a terminal: two turns, the second of which knows the first; a line that is too long is forgotten.
#[cfg(target_os = "linux")]
#[test]
fn cli_chat_at_a_terminal_keeps_what_was_said() {
    use std::io::Write;
    use std::process::Command;
    let model = model(
        "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if messages | length == 3 %}{{ raise_exception(messages[1].role) }}{% endif %}",
    );
    let program = command("generate");
    let line =
        format!("{} --chat --model {} --max-new-tokens 4", text(program.get_program().as_ref()), text(model.path()));
    let script =
        Command::new("script").args(["-qec", &line, "/dev/null"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let Ok(mut script) = script else {
        eprintln!("skipped: there is no `script`, which opens a terminal");
        return;
    };
    let mut stdin = script.stdin.take().expect("a pipe");
    stdin.write_all(b"hacker: n.\nfoo\n\n/exit\n").expect("it reads");
    let output = script.wait_with_output().expect("its output");
    let screen = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{screen}");
    assert!(
        screen.contains("(cut after 4 tokens") && screen.contains("it refuses the conversation: assistant"),
        "{screen}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Whatever the file has: exit code 2 and a message, since the folder has no template.
    #[test]
    fn cli_chat_survives_any_file(content in prop_oneof![
        any::<Vec<u8>>(),
        r#"\[(\{"role": ?"(user|system|tool)", "content": (".{0,9}"|1|null)\},?){0,3}\]?"#.prop_map(String::into_bytes),
    ]) {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let path = dir.path().join("conversation.json");
        std::fs::write(&path, content).expect("written");
        refused(&chat(&folder("assets/demo-v3"), &["--conversation", text(&path)]), &["error: "]);
    }
}
