use std::path::Path;
use std::time::Instant;

use proptest::prelude::*;
use rstest::rstest;
use serde_json::{Value, json};

use super::*;

/// A folder with this tokenizer_config.json, and this chat_template.jinja.
fn load(config: Option<Value>, beside: Option<&str>) -> Result<ChatTemplate> {
    let dir = tempfile::tempdir().unwrap();
    if let Some(config) = config {
        std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    }
    if let Some(source) = beside {
        std::fs::write(dir.path().join("chat_template.jinja"), source).unwrap();
    }
    ChatTemplate::load(dir.path(), &Tokenizer::bytes().unwrap())
}

fn render(source: &str, messages: &[Message]) -> Result<String> {
    load(Some(json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}})), Some(source))?.render(messages, true)
}

fn message<T: std::fmt::Debug>(result: Result<T>) -> String {
    let error = result.unwrap_err();
    assert!(matches!(
        error,
        ModelError::ChatTemplate { .. } | ModelError::Config { .. } | ModelError::WrongKind { .. }
    ));
    error.to_string()
}

#[test]
fn the_template_is_found_where_transformers_finds_it() {
    let render = |config: Value, beside| load(Some(config), beside).unwrap().render(&[], false).unwrap();
    assert_eq!(render(json!({"chat_template": "text"}), None), "text");
    assert_eq!(render(json!({"chat_template": "text"}), Some("file")), "file");
    let list = json!([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]);
    assert_eq!(render(json!({"chat_template": list}), None), "usual");
    assert_eq!(load(None, Some("file{{ bos_token }}")).unwrap().render(&[], false).unwrap(), "file");
}

#[rstest]
#[case::none(json!({}), "no `chat_template` in it")]
#[case::null(json!({"chat_template": null}), "no `chat_template` in it")]
#[case::number(json!({"chat_template": 5}), "`chat_template` is something else")]
#[case::names(json!({"chat_template": [{"name": "rag", "template": "x"}, 3]}), "[rag], expected one of them to be named `default`")]
#[case::no_list(json!({"chat_template": []}), "a list of the templates []")]
#[case::token(json!({"chat_template": "x", "bos_token": 7}), "`bos_token` is 7")]
#[case::content(json!({"chat_template": "x", "eos_token": {"content": []}}), "`eos_token` is []")]
#[case::syntax(json!({"chat_template": "a\n{% if"}), "syntax error")]
#[case::size(json!({"chat_template": "x".repeat(70_000)}), "a chat template of 70000 bytes")]
fn folders_without_a_usable_template_are_refused(#[case] config: Value, #[case] needle: &str) {
    let message = message(load(Some(config), None));
    assert!(message.contains("tokenizer_config.json") && message.contains(needle), "{message}");
}

/// Neither demo has one, and that of V4 lacks the tokens of its encoding.
#[test]
fn the_demos_are_no_chat_models() {
    for (demo, needle) in [("demo-v3", "no chat models"), ("demo-v4", "<｜begin▁of▁sentence｜> of DeepSeek-V4's")]
    {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets").join(demo);
        let message = message(ChatTemplate::load(&dir, &Tokenizer::load(&dir).unwrap()));
        assert!(message.contains(needle), "{message}");
    }
}

#[test]
fn variables_filters_and_white_space_are_those_of_transformers() {
    let messages = [Message::user("q <b> \"ü\""), Message::assistant("one</think>two")];
    let cases = [
        ("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ nothing }}", "<s>|</s>||"),
        ("{{ messages[0] | tojson }}", r#"{"role": "user", "content": "q <b> \"ü\""}"#),
        ("{{ [1, {'a': none}] | tojson(indent=1) }}", "[\n 1,\n {\n  \"a\": null\n }\n]"),
        ("{% for m in messages %}\n  {% if loop.first %}\nx\n  {% endif %}\n{% endfor %}\n", "x\n"),
        (
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "02",
        ),
        ("{{ messages[1].content.split('</think>')[-1] }}", "two"),
        ("{{ messages[1]['content'].startswith('one') }}", "True"),
        (
            "{{ thinking is defined }}{{ add_generation_prompt }}{{ messages[0].tool_calls is defined }}",
            "FalseTrueFalse",
        ),
        ("{{ messages[0].content }}", "q <b> \"ü\""),
    ];
    for (source, expected) in cases {
        assert_eq!(render(source, &messages).unwrap(), expected, "{source}");
    }
}

#[rstest]
#[case::raised(
    "{{ raise_exception('roles must alternate') }}",
    "it refuses the conversation: roles must alternate, at line 1"
)]
#[case::undefined("\n{{ messages[0].content.x.y }}", "at line 2")]
#[case::concatenation("{{ nothing + 'x' }}", "at line 1")]
#[case::filter("{{ 1 | nosuch }}", "nosuch")]
#[case::function("{{ open('x') }}", "open")]
#[case::include("{% include 'x' %}", "syntax error")]
#[case::index("{{ messages['x']['y'] }}", "at line 1")]
fn failures_name_the_file_and_the_line(#[case] source: &str, #[case] needle: &str) {
    let message = message(render(source, &[Message::user("a")]));
    assert!(message.contains("chat_template.jinja") && message.contains(needle), "{message}");
}

const NESTED: &str = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}";

/// Loops, memory, recursion and text have bounds; nothing aborts the process.
#[rstest]
#[case::endless("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}".into(), "steps")]
#[case::repeated("{{ 'x' * 1000000000 }}".into(), "memory")]
#[case::doubled("{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}".into(), "memory")]
#[case::printed("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}".into(), "steps")]
#[case::macros("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".into(), "recursion")]
#[case::brackets("{{ ".to_string() + &"(".repeat(50_000), "recursion")]
#[case::minus("{{ ".to_string() + &"-".repeat(60_000) + "1 }}", "")]
#[case::chained("{{ ".to_string() + &"1+".repeat(30_000) + "1 }}", "")]
#[case::exponential(format!("{NESTED}{{{{ ns.x }}}}"), "")]
#[case::exponential_concatenated(format!("{NESTED}{{{{ (ns.x ~ '') | length }}}}"), "not rendered after")]
#[case::exponential_json(format!("{NESTED}{{{{ ns.x | tojson }}}}"), "")]
fn hostile_templates_end(#[case] source: String, #[case] needle: &str) {
    let start = Instant::now();
    let outcome = render(&source, &[Message::user("a")]);
    if !needle.is_empty() {
        let message = message(outcome);
        assert!(message.contains(needle), "{message}");
    }
    assert!(start.elapsed() < 4 * super::jinja::TIME, "{:?}", start.elapsed());
}

/// Deep values take stack where they are printed, compared and dropped: there is enough for all that fuel pays.
#[test]
fn values_nested_as_deeply_as_fuel_allows_print() {
    let (open, close) = ("[".repeat(100), "]".repeat(100));
    for turns in [1_000, 3_000, 9_000, 99_999] {
        let turn = format!("{{% for i in range({turns}) %}}{{% set ns.x = {open}ns.x{close} %}}{{% endfor %}}");
        for end in ["ns.x | string", "ns.x == [ns.x]", "ns.x | tojson", "1 in ns.x", "ns.x"] {
            let _ = render(&format!("{{% set ns = namespace(x=[]) %}}{turn}{{{{ {end} }}}}"), &[]);
        }
    }
}

#[test]
fn prompts_end_with_a_message_to_answer_and_get_no_second_bos() {
    let tokenizer = crate::tokenizer::tests::fixture();
    let bos = tokenizer.encode("", true).unwrap();
    let template = load(
        Some(json!({"bos_token": tokenizer.decode(&bos, false).unwrap()})),
        Some("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"),
    )
    .unwrap();
    let prompt = template.prompt(&[Message::user("attention")], &tokenizer, 100).unwrap();
    assert_eq!(prompt.ids, tokenizer.encode("attention", true).unwrap());
    for (messages, most, needle) in [
        (vec![], 100, "`messages` is empty"),
        (vec![Message::assistant("a")], 100, "last message is the assistant's"),
        (vec![Message::user("attention ".repeat(50))], 20, "at most 20 tokens"),
    ] {
        let message = template.prompt(&messages, &tokenizer, most).unwrap_err().to_string();
        assert!(message.contains(needle), "{message}");
    }
}

#[test]
fn answers_are_parted_from_what_was_thought() {
    let prompt = |text: &str| ChatPrompt { text: text.into(), ids: vec![] };
    for (text, generated, reasoning, content) in [
        ("<think>", "so</think>yes", Some("so"), "yes"),
        ("<think>\n", "so", Some("so"), ""),
        ("</think>", "yes", None, "yes"),
        ("", "<think>so</think>yes", Some("so"), "yes"),
    ] {
        let answer = prompt(text).answer(generated);
        assert_eq!((answer.reasoning_content.as_deref(), answer.content.as_str()), (reasoning, content), "{generated}");
        assert_eq!(answer.role, Role::Assistant);
    }
}

#[test]
fn conversations_are_lists_or_objects_and_errors_have_the_place() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("conversation.json");
    let read = |text: &str| {
        std::fs::write(&path, text).unwrap();
        read_conversation(&path)
    };
    let messages = vec![Message::system("a"), Message::user("b")];
    let list = r#"[{"role": "system", "content": "a"}, {"content": "b", "role": "user"}]"#;
    assert_eq!(read(list).unwrap(), messages);
    assert_eq!(read(&format!(r#" {{"messages": {list}}}"#)).unwrap(), messages);
    for (text, needle) in [
        ("", "line 1 column 0"),
        ("[\n{\"role\": \"tool\", \"content\": \"a\"}]", "unknown variant `tool`"),
        ("[\n{\"role\": \"user\", \"content\": 5}]", "expected a string at line 2 column"),
        ("[{\"role\": \"user\"}]", "missing field `content`"),
        ("[{\"role\": \"user\", \"content\": \"a\", \"tool_calls\": []}]", "unknown field `tool_calls`"),
        ("{\"messages\": [], \"tools\": []}", "unknown field `tools`"),
        ("{\"messages\": [], \"messages\": []}", "duplicate field"),
        (&"[".repeat(100_000), "column"),
        (&format!("[{{\"{}\": 1}}]", "x".repeat(9999)), "... at line 1 column"),
        ("\u{feff}[]", "byte order mark"),
    ] {
        let message = read(text).unwrap_err().to_string();
        assert!(message.contains("conversation.json") && message.contains(needle), "{message}");
        assert!(message.len() < 700, "{}", message.len());
    }
    let message = read(&" ".repeat((16 << 20) + 1)).unwrap_err().to_string();
    assert!(message.contains("at most 16777216 bytes"), "{message}");
    assert!(matches!(read_conversation(dir.path()), Err(ModelError::WrongKind { .. })));
}

fn messages() -> impl Strategy<Value = Vec<Message>> {
    let role = prop_oneof![Just(Role::System), Just(Role::User), Just(Role::Assistant)];
    let content = prop_oneof![".{0,20}", Just("<think>a</think>b".to_string()), Just("{{ 1 }}{% if".to_string())];
    let message = (role, content, proptest::option::of(".{0,5}"));
    let message =
        message.prop_map(|(role, content, reasoning)| Message { role, content, reasoning_content: reasoning });
    proptest::collection::vec(message, 0..8)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Content is data: it is rendered as it is, whatever it says, and nothing panics.
    #[test]
    fn conversations_render_or_are_refused(messages in messages(), prompt: bool, thinking: bool) {
        for encoding in [Encoding::V32, Encoding::V4] {
            let form = Form::Encoding(encoding, "config.json".into());
            if let Ok(text) = (ChatTemplate { form, thinking: Some(thinking) }).render(&messages, prompt) {
                prop_assert!(messages.iter().all(|message| text.contains(&message.content)));
            }
        }
        let plain = "{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}";
        let expected: String = messages
            .iter()
            .map(|m| format!("{}{}", json!(m.role).as_str().unwrap_or_default(), m.content))
            .collect();
        prop_assert_eq!(render(plain, &messages).unwrap(), expected);
    }

    #[test]
    fn templates_of_all_kinds_do_not_panic(source in r"(\{\{|\}\}|\{%|%\}|if|for|set|in|messages|x|\[|\]|\(|\)|\.|'|\||-| |\n|1){0,30}") {
        let _ = render(&source, &[Message::user("a")]);
    }
}
