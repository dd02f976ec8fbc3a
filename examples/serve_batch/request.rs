//! A line of the input: a prompt or a conversation, and what it wants otherwise than the others.

use std::fmt;

use burn_mla::model::{ChatTemplate, GenerationRequest, Message, ModelError, SamplingParams, Tokenizer};
use serde::Deserialize;
use serde_json::{Map, Value};

/// What a line says nothing about.
#[derive(Debug, Clone)]
pub struct Defaults {
    pub sampling: SamplingParams,
    pub max_new_tokens: usize,
    pub stop: Vec<String>,
}

/// What it takes to make requests of lines.
pub struct Reader {
    pub defaults: Defaults,
    pub tokenizer: Tokenizer,
    /// The chat template, or why there is none.
    pub chat: Result<ChatTemplate, String>,
    /// Tokens that a prompt may have.
    pub max_positions: usize,
}

/// A request, and how its answer is named.
#[derive(Debug)]
pub struct Line {
    /// As in the line; its number where it has none.
    pub id: Value,
    pub request: GenerationRequest,
}

/// Why a line is no request.
#[derive(Debug)]
pub enum LineError {
    TooLong {
        most: usize,
    },
    NotText(std::str::Utf8Error),
    ByteOrderMark,
    NotJson(serde_json::Error),
    NotAnObject(&'static str),
    Missing(&'static str),
    Unknown(String),
    WrongType {
        field: &'static str,
        actual: String,
        expected: &'static str,
    },
    /// Something in `messages` is none.
    Messages(serde_json::Error),
    /// A line is continued or answered.
    Both,
    /// `messages` without a chat template, and why there is none.
    NoTemplate(String),
    /// Answers are told apart by their ids; a line without one has its number.
    IdInUse {
        line: usize,
    },
    /// A value that the model or the engine refuses; the message names the field.
    Refused(ModelError),
}

impl fmt::Display for LineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong { most } => write!(f, "longer than {most} bytes"),
            Self::NotText(error) => write!(f, "not UTF-8: {error}"),
            Self::ByteOrderMark => write!(f, "begins with a byte order mark (BOM); save the file as UTF-8 without one"),
            // The parser counts lines too, and sees one.
            Self::NotJson(error) => {
                write!(f, "not JSON: {}", error.to_string().replace(" at line 1 column", " at column"))
            }
            Self::NotAnObject(found) => write!(f, "{found}, expected an object with the field `prompt`"),
            Self::Missing(field) => write!(f, "`{field}` is missing"),
            Self::Unknown(field) => write!(f, "`{field}` is no field; there are {}", FIELDS.join(", ")),
            Self::WrongType { field, actual, expected } => write!(f, "`{field}` is {actual}, expected {expected}"),
            Self::Messages(error) => write!(f, "`messages`: {}", short(&error.to_string())),
            Self::Both => write!(f, "`messages` is beside `prompt`, expected one of them"),
            Self::NoTemplate(why) => write!(f, "`messages` need a chat template: {why}"),
            Self::IdInUse { line } => write!(f, "`id` is already used by line {line}"),
            Self::Refused(error) => write!(f, "{error}"),
        }
    }
}

/// The fields that a line may have.
const FIELDS: [&str; 12] = [
    "id",
    "prompt",
    "messages",
    "max_new_tokens",
    "stop",
    "seed",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "logprobs",
];

impl Line {
    /// Reads line number `number`.
    pub fn parse(line: &[u8], number: usize, reader: &Reader) -> Result<Self, LineError> {
        let text = std::str::from_utf8(line).map_err(LineError::NotText)?;
        if text.starts_with('\u{FEFF}') {
            return Err(LineError::ByteOrderMark);
        }
        let fields = match serde_json::from_str(text).map_err(LineError::NotJson)? {
            Value::Object(fields) => Fields(fields),
            other => return Err(LineError::NotAnObject(kind(&other))),
        };
        if let Some(unknown) = fields.0.keys().find(|key| !FIELDS.contains(&key.as_str())) {
            return Err(LineError::Unknown(short(unknown)));
        }
        let Defaults { sampling, max_new_tokens, stop } = &reader.defaults;
        let (whole, number_of) = ("a whole number of at least 0", "a number");
        let sampling = SamplingParams {
            temperature: fields.get("temperature", number_of, float)?.unwrap_or(sampling.temperature),
            top_k: fields.get("top_k", whole, count)?.or(sampling.top_k),
            top_p: fields.get("top_p", number_of, float)?.unwrap_or(sampling.top_p),
            min_p: fields.get("min_p", number_of, float)?.unwrap_or(sampling.min_p),
            repetition_penalty: fields
                .get("repetition_penalty", number_of, float)?
                .unwrap_or(sampling.repetition_penalty),
            seed: fields.get("seed", whole, Value::as_u64)?.unwrap_or(sampling.seed),
            logprobs: fields.get("logprobs", whole, count)?.or(sampling.logprobs),
        };
        let request = GenerationRequest {
            prompt: fields.prompt(reader)?,
            sampling,
            max_new_tokens: fields.get("max_new_tokens", whole, count)?.unwrap_or(*max_new_tokens),
            stop: fields.get("stop", "a text or a list of texts", texts)?.unwrap_or_else(|| stop.clone()),
        };
        let id = fields.get("id", "a text of at most 1024 bytes, or a number", id)?;
        Ok(Self { id: id.unwrap_or_else(|| number.into()), request })
    }
}

struct Fields(Map<String, Value>);

impl Fields {
    /// The tokens of `prompt`, or of `messages`.
    fn prompt(&self, Reader { tokenizer, chat, max_positions, .. }: &Reader) -> Result<Vec<u32>, LineError> {
        let expected = "a list of objects with `role` and `content`";
        let list = |value: &Value| Some(Vec::<Message>::deserialize(value));
        let messages = self.get("messages", expected, list)?.transpose().map_err(LineError::Messages)?;
        let prompt = self.get("prompt", "a text", Value::as_str)?;
        match (prompt, messages) {
            (Some(_), Some(_)) => Err(LineError::Both),
            (None, None) => Err(LineError::Missing("prompt")),
            (Some(""), None) => {
                let (actual, expected) = ("empty".into(), "some text to continue".into());
                Err(LineError::Refused(ModelError::Request { argument: "prompt", actual, expected }))
            }
            (Some(text), None) => tokenizer.encode_at_most(text, true, *max_positions).map_err(LineError::Refused),
            (None, Some(messages)) => {
                let template = chat.as_ref().map_err(|why| LineError::NoTemplate(why.clone()))?;
                let prompt = template.prompt(&messages, tokenizer, *max_positions).map_err(LineError::Refused)?;
                Ok(prompt.ids)
            }
        }
    }

    /// A field that may be absent or null.
    fn get<'a, T>(
        &'a self,
        field: &'static str,
        expected: &'static str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, LineError> {
        match self.0.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match read(value) {
                Some(read) => Ok(Some(read)),
                None => Err(LineError::WrongType { field, actual: short(&value.to_string()), expected }),
            },
        }
    }
}

/// Ids are kept to the end.
fn id(value: &Value) -> Option<Value> {
    (value.is_number() || value.as_str().is_some_and(|id| id.len() <= 1024)).then(|| value.clone())
}

fn float(value: &Value) -> Option<f32> {
    value.as_f64().map(|value| value as f32)
}

fn count(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|value| usize::try_from(value).ok())
}

fn texts(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::String(text) => Some(vec![text.clone()]),
        Value::Array(texts) => texts.iter().map(|text| text.as_str().map(str::to_string)).collect(),
        _ => None,
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The beginning of a text that may be long.
fn short(text: &str) -> String {
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.into(),
    }
}
