//! Conversations to prompts: the chat template of a checkpoint, or the encoding that its publisher describes.

mod encoding;
mod jinja;
mod message;

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use self::encoding::Encoding;
use self::jinja::Jinja;
pub use self::message::{Message, Role, read_conversation};
use crate::config::Fields;
use crate::{ModelError, Result, Tokenizer, files};

/// Bytes of a template. Those of DeepSeek's models have 4 KiB.
const MOST_TEMPLATE: usize = 64 << 10;

/// Special tokens that a template may name.
const TOKENS: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// How the messages of a conversation become the text that a model has learnt to answer.
///
/// A Jinja template is rendered as by `apply_chat_template` of transformers. It is untrusted: it runs with bounded steps, memory and
/// time. Without a template, DeepSeek-V3.2 and V4 have the encodings of their publisher, for messages of the system, the user and the
/// assistant.
///
/// ```
/// use deepseek_model::{ChatTemplate, Message, Tokenizer};
///
/// # let dir = tempfile::tempdir()?;
/// # let dir = dir.path();
/// std::fs::write(
///     dir.join("chat_template.jinja"),
///     "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}
/// {%- if add_generation_prompt %}assistant:{% endif %}",
/// )?;
/// let template = ChatTemplate::load(dir, &Tokenizer::bytes()?)?;
/// let messages = [Message::system("Be brief."), Message::user("What is a kluge?")];
/// assert_eq!(template.render(&messages, true)?, "system: Be brief.\nuser: What is a kluge?\nassistant:");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    form: Form,
    thinking: Option<bool>,
}

#[derive(Debug, Clone)]
enum Form {
    Jinja(Jinja),
    Encoding(Encoding, PathBuf),
}

/// A conversation that ends where the model answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatPrompt {
    /// The rendered text.
    pub text: String,
    /// Its tokens. The text names special tokens itself; none are added.
    pub ids: Vec<u32>,
}

impl ChatTemplate {
    /// The template of the checkpoint folder `dir`: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json` (a text, or
    /// a list of {name, template}, of which `default` is taken), else the encoding of the `model_type` of `config.json`.
    ///
    /// # Errors
    /// [`ModelError::ChatTemplate`] if there is none, if it is no template, or if `tokenizer` lacks the tokens of the encoding;
    /// [`ModelError::Io`], [`ModelError::Json`] and [`ModelError::Config`] for files that cannot be used.
    pub fn load(dir: &Path, tokenizer: &Tokenizer) -> Result<Self> {
        let config = absent_is_none(Fields::read(&dir.join("tokenizer_config.json"), ""))?;
        let tokens = config.as_ref().map(special_tokens).transpose()?.unwrap_or_default();
        let beside = dir.join("chat_template.jinja");
        let (path, source) = match absent_is_none(files::read_at_most(&beside, "", MOST_TEMPLATE))? {
            Some(text) => (beside.clone(), Some(text_of(&beside, text)?)),
            None => (dir.join("tokenizer_config.json"), config.as_ref().map(template_of).transpose()?.flatten()),
        };
        let form = match source {
            Some(source) if source.len() > MOST_TEMPLATE => {
                let found = format!("a chat template of {} bytes", source.len());
                return Err(ModelError::wrong_kind(path, found, format!("at most {MOST_TEMPLATE} bytes")));
            }
            Some(source) => Form::Jinja(Jinja::new(path, source, tokens)?),
            None => Form::Encoding(encoding_of(dir, &path, tokenizer)?, path),
        };
        Ok(Self { form, thinking: None })
    }

    /// Has the model think before it answers, or not. Templates get it as `thinking` and `enable_thinking`, which are undefined
    /// otherwise; those without such a choice are not changed. Encodings do not think otherwise.
    #[must_use]
    pub fn with_thinking(mut self, thinking: bool) -> Self {
        self.thinking = Some(thinking);
        self
    }

    /// The text of a conversation; with `add_generation_prompt` up to where the assistant's answer begins.
    ///
    /// # Errors
    /// [`ModelError::ChatTemplate`] if the template refuses the messages, fails, or takes too many steps, too much memory or time.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        match &self.form {
            Form::Jinja(jinja) => jinja.render(messages, add_generation_prompt, self.thinking),
            Form::Encoding(encoding, path) => encoding
                .render(messages, add_generation_prompt, self.thinking.unwrap_or(false))
                .map_err(|reason| ModelError::ChatTemplate { path: path.clone(), reason }),
        }
    }

    /// The tokens of a conversation that ends with a message to answer, for a model with so many positions.
    ///
    /// # Errors
    /// [`ModelError::Request`] for a conversation that is empty, too long, or whose last message is the assistant's; and those of
    /// [`Self::render`].
    pub fn prompt(&self, messages: &[Message], tokenizer: &Tokenizer, max_tokens: usize) -> Result<ChatPrompt> {
        let last = messages.last().map(|message| message.role);
        if let None | Some(Role::Assistant) = last {
            let actual = if last.is_none() { "empty" } else { "a conversation whose last message is the assistant's" };
            return Err(ModelError::request("messages", actual, "messages that end with one to answer, of the user"));
        }
        let text = self.render(messages, true)?;
        let ids = tokenizer.encode_at_most(&text, false, max_tokens)?;
        match ids.len() {
            0 => Err(ModelError::request("messages", "rendered to no tokens", "a template that renders them to some")),
            tokens if tokens > max_tokens => {
                let expected = format!("at most {max_tokens} tokens, the model's positions; shorten the conversation");
                Err(ModelError::request("messages", format!("{tokens} tokens long"), expected))
            }
            _ => Ok(ChatPrompt { text, ids }),
        }
    }
}

impl ChatPrompt {
    /// The message that `text`, which the model has generated, is. What the model thinks ends with `</think>`; all of it is thinking
    /// where the prompt opens it and the text does not close it.
    pub fn answer(&self, text: &str) -> Message {
        let opened = self.text.trim_end().ends_with("<think>");
        let (reasoning, content) = match text.split_once("</think>") {
            Some((reasoning, content)) => (Some(reasoning), content),
            None if opened => (Some(text), ""),
            None => (None, text),
        };
        let reasoning = reasoning.map(|text| text.strip_prefix("<think>").unwrap_or(text).to_string());
        Message { reasoning_content: reasoning, ..Message::assistant(content) }
    }
}

/// A file that may be absent.
fn absent_is_none<T>(read: Result<T>) -> Result<Option<T>> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(ModelError::MissingFile { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

fn text_of(path: &Path, bytes: Vec<u8>) -> Result<String> {
    let not_text = |error| ModelError::ChatTemplate { path: path.into(), reason: format!("not UTF-8: {error}") };
    String::from_utf8(bytes).map_err(|error| not_text(error.utf8_error()))
}

/// Special tokens, published as texts or as objects with `content`.
fn special_tokens(config: &Fields) -> Result<Vec<(&'static str, String)>> {
    let expected = "a string, or an object with `content`";
    let token = |name: &'static str| {
        let text = match config.optional::<Value>(name, expected)? {
            None => return Ok(None),
            Some(Value::Object(mut object)) => object.remove("content").unwrap_or_default(),
            Some(other) => other,
        };
        match text {
            Value::String(text) => Ok(Some((name, text))),
            other => Err(config.error(name, other.to_string().chars().take(40).collect(), expected.into())),
        }
    };
    TOKENS.into_iter().filter_map(|name| token(name).transpose()).collect()
}

/// The field `chat_template`.
fn template_of(config: &Fields) -> Result<Option<String>> {
    let (field, expected) = ("chat_template", "a string, or a list of objects with `name` and `template`");
    let named = match config.optional::<Value>(field, expected)? {
        None => return Ok(None),
        Some(Value::String(source)) => return Ok(Some(source)),
        Some(Value::Array(named)) => named,
        Some(_) => return Err(config.error(field, "something else".into(), expected.into())),
    };
    let mut names = Vec::new();
    for entry in named.iter().filter_map(Value::as_object) {
        let text = |entry: &Map<String, Value>, key: &str| entry.get(key)?.as_str().map(str::to_string);
        match (text(entry, "name"), text(entry, "template")) {
            (Some(name), Some(source)) if name == "default" => return Ok(Some(source)),
            (Some(name), Some(_)) if names.len() < 12 => names.push(name.chars().take(40).collect::<String>()),
            _ => {}
        }
    }
    let expected = "one of them to be named `default`, with a `template`";
    Err(config.error(field, format!("a list of the templates [{}]", names.join(", ")), expected.into()))
}

/// The encoding of a model whose publisher has no template for it.
fn encoding_of(dir: &Path, path: &Path, tokenizer: &Tokenizer) -> Result<Encoding> {
    let refused = |reason| ModelError::ChatTemplate { path: path.into(), reason };
    let none = "no `chat_template` in it, and no chat_template.jinja beside it";
    let config = absent_is_none(Fields::read(&dir.join("config.json"), ""))?;
    let model_type = config.map(|config| config.word_or("model_type", "")).transpose()?.unwrap_or_default();
    let Some(encoding) = Encoding::of(&model_type) else {
        return Err(refused(format!("{none}; models without one are no chat models, give a prompt instead")));
    };
    match encoding::TOKENS.iter().find(|token| !tokenizer.has_token(token)) {
        Some(token) => Err(refused(format!(
            "{none}, and tokenizer.json lacks the token {token} of {encoding}'s published encoding"
        ))),
        None => Ok(encoding),
    }
}

#[cfg(test)]
mod published_tests;
#[cfg(test)]
mod tests;
