//! What publishers show of their templates, byte for byte. The sources: `tests/fixtures/chat/README.md`.

use std::path::{Path, PathBuf};

use super::{ChatTemplate, Form, Message, encoding::Encoding};
use crate::Tokenizer;

fn fixture(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/chat")).join(name)
}

/// A published template in a folder of its own.
fn template(fixture_name: &str) -> ChatTemplate {
    let dir = tempfile::tempdir().unwrap();
    let copy = |from: &str, to: &str| std::fs::copy(fixture(from), dir.path().join(to)).unwrap();
    copy(if fixture_name.ends_with("json") { fixture_name } else { "v3.json" }, "tokenizer_config.json");
    if fixture_name.ends_with("jinja") {
        copy(fixture_name, "chat_template.jinja");
    }
    ChatTemplate::load(dir.path(), &Tokenizer::bytes().unwrap()).unwrap()
}

fn encoding(encoding: Encoding) -> ChatTemplate {
    ChatTemplate { form: Form::Encoding(encoding, "config.json".into()), thinking: None }
}

fn with_reasoning(reasoning: &str, content: &str) -> Message {
    Message { reasoning_content: Some(reasoning.into()), ..Message::assistant(content) }
}

#[test]
fn deepseek_v2_is_as_in_its_readme() {
    let v2 = template("v2.json");
    let messages = [
        Message::system("{system_message}"),
        Message::user("{user_message_1}"),
        Message::assistant("{assistant_message_1}"),
        Message::user("{user_message_2}"),
    ];
    let turns = "User: {user_message_1}\n\nAssistant: {assistant_message_1}<｜end▁of▁sentence｜>User: {user_message_2}\n\nAssistant:";
    assert_eq!(v2.render(&messages[1..], true).unwrap(), format!("<｜begin▁of▁sentence｜>{turns}"));
    assert_eq!(v2.render(&messages, true).unwrap(), format!("<｜begin▁of▁sentence｜>{{system_message}}\n\n{turns}"));
}

/// The V3.1 model card, "Usage Example"; V3.2-Exp renders it alike.
#[test]
fn deepseek_v3_1_is_as_on_its_model_card() {
    let messages = [
        Message::system("You are a helpful assistant"),
        Message::user("Who are you?"),
        Message::assistant("<think>Hmm</think>I am DeepSeek"),
        Message::user("1+1=?"),
    ];
    let thinking = "<｜begin▁of▁sentence｜>You are a helpful assistant<｜User｜>Who are you?<｜Assistant｜></think>I am DeepSeek<｜end▁of▁sentence｜><｜User｜>1+1=?<｜Assistant｜><think>";
    let chat = "<｜begin▁of▁sentence｜>You are a helpful assistant<｜User｜>Who are you?<｜Assistant｜></think>I am DeepSeek<｜end▁of▁sentence｜><｜User｜>1+1=?<｜Assistant｜></think>";
    for name in ["v3.1.jinja", "v3.2-exp.json"] {
        let template = template(name);
        assert_eq!(template.clone().with_thinking(true).render(&messages, true).unwrap(), thinking, "{name}");
        assert_eq!(template.clone().with_thinking(false).render(&messages, true).unwrap(), chat, "{name}");
        assert_eq!(template.render(&messages, true).unwrap(), chat, "{name}");
    }
}

/// Its publisher has no example of it.
#[test]
fn deepseek_v3_is_what_its_template_says() {
    let messages = [
        Message::system("a"),
        Message::user("Hello"),
        Message::assistant("Hi"),
        Message::system("b"),
        Message::user("1+1=?"),
    ];
    let text = "<｜begin▁of▁sentence｜>a\n\nb<｜User｜>Hello<｜Assistant｜>Hi<｜end▁of▁sentence｜><｜User｜>1+1=?";
    assert_eq!(template("v3.json").render(&messages, false).unwrap(), text);
    assert_eq!(template("v3.json").render(&messages, true).unwrap(), format!("{text}<｜Assistant｜>"));
}

/// The V3.2 model card, "Chat Template".
#[test]
fn deepseek_v3_2_is_as_on_its_model_card() {
    let messages =
        [Message::user("hello"), with_reasoning("thinking...", "Hello! I am DeepSeek."), Message::user("1+1=?")];
    let text = "<｜begin▁of▁sentence｜><｜User｜>hello<｜Assistant｜></think>Hello! I am DeepSeek.<｜end▁of▁sentence｜><｜User｜>1+1=?<｜Assistant｜>";
    let v32 = encoding(Encoding::V32);
    assert_eq!(v32.clone().with_thinking(true).render(&messages, true).unwrap(), format!("{text}<think>"));
    assert_eq!(v32.render(&messages, true).unwrap(), format!("{text}</think>"));
}

/// `encoding/tests/test_input_2.json` and `test_output_2.txt`, published with the weights of V4.
#[test]
fn deepseek_v4_is_as_its_published_test() {
    let messages = [
        Message::system("You are a helpful assistant."),
        Message::user("Hello"),
        with_reasoning("The user said hello, I should greet back.", "Hi there! How can I help you?"),
        Message::user("What is the capital of France?"),
        with_reasoning("The user asks about the capital of France. It is Paris.", "The capital of France is Paris."),
    ];
    let text = "<｜begin▁of▁sentence｜>You are a helpful assistant.<｜User｜>Hello<｜Assistant｜></think>Hi there! How can I help you?<｜end▁of▁sentence｜><｜User｜>What is the capital of France?<｜Assistant｜><think>The user asks about the capital of France. It is Paris.</think>The capital of France is Paris.<｜end▁of▁sentence｜>";
    let v4 = encoding(Encoding::V4).with_thinking(true);
    assert_eq!(v4.render(&messages, true).unwrap(), text);
    // The prompt of its last answer.
    let (prompt, _) = text.split_once("The user asks").unwrap();
    assert_eq!(v4.render(&messages[..4], true).unwrap(), prompt);
}

/// What their code says of what no example shows.
#[test]
fn encodings_of_other_orders_are_what_the_published_code_says() {
    let [v32, v4] = [Encoding::V32, Encoding::V4].map(encoding);
    let twice = [Message::user("a"), Message::user("b")];
    assert_eq!(v4.render(&twice, true).unwrap(), "<｜begin▁of▁sentence｜><｜User｜>a\n\nb<｜Assistant｜></think>");
    assert_eq!(
        v32.render(&twice, true).unwrap(),
        "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜></think><｜User｜>b<｜Assistant｜></think>"
    );
    assert_eq!(v4.render(&twice, false).unwrap(), "<｜begin▁of▁sentence｜><｜User｜>a\n\nb");
    let answered = [Message::user("a"), Message::assistant("b")];
    let text = "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜><think></think>b<｜end▁of▁sentence｜>";
    assert_eq!(v4.with_thinking(true).render(&answered, true).unwrap(), text);
    let message = v32.with_thinking(true).render(&answered, true).unwrap_err().to_string();
    assert!(message.contains("message 2 has no `reasoning_content`"), "{message}");
}
