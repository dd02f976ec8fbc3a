//! Jinja templates, as transformers renders them, within bounds: a template comes with a checkpoint, and may be anything.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter};

use super::Message;
use crate::{ModelError, Result};

/// Steps, and 64 bytes each of what a template makes. Of DeepSeek's templates a message takes some 60, and its text thrice its bytes.
const FUEL: u64 = 1_000_000;
/// Bytes of a rendered text.
const MOST_TEXT: usize = 64 << 20;
/// What fuel does not count, as values that contain themselves many times when they are printed, ends with this.
pub(super) const TIME: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 10 });
/// Syntax and values are nested as deeply as the size of a template and fuel allow. What is not touched takes no memory.
const STACK: usize = 1 << 30;
/// The name of the template in messages.
const NAME: &str = "chat_template";

/// A template, its special tokens, and where it comes from.
#[derive(Debug, Clone)]
pub(super) struct Jinja {
    path: PathBuf,
    environment: Arc<Environment<'static>>,
    tokens: Vec<(&'static str, String)>,
}

impl Jinja {
    /// Parses a template.
    pub(super) fn new(path: PathBuf, source: String, tokens: Vec<(&'static str, String)>) -> Result<Self> {
        let environment = bounded(move || {
            let mut environment = environment().map_err(|error| reason(&error))?;
            environment.add_template_owned(NAME, source).map_err(|error| reason(&error))?;
            Ok(Arc::new(environment))
        });
        match environment {
            Ok(environment) => Ok(Self { path, environment, tokens }),
            Err(reason) => Err(ModelError::ChatTemplate { path, reason }),
        }
    }

    /// Renders it with the variables that transformers gives.
    pub(super) fn render(&self, messages: &[Message], prompt: bool, thinking: Option<bool>) -> Result<String> {
        let messages: Vec<Value> = messages.iter().map(|message| Value::from(Serde(message))).collect();
        let tokens = self.tokens.iter().map(|(name, text)| (*name, Value::from(text.as_str())));
        let thinking = thinking.into_iter().flat_map(|on| [("thinking", on.into()), ("enable_thinking", on.into())]);
        let variables = [("messages", messages.into()), ("add_generation_prompt", prompt.into())];
        let variables: BTreeMap<&str, Value> = variables.into_iter().chain(tokens).chain(thinking).collect();
        let variables = Value::from(variables);
        let environment = self.environment.clone();
        let text = bounded(move || {
            let mut text = Bounded(Vec::new());
            let template = environment.get_template(NAME).map_err(|error| reason(&error))?;
            template.render_captured_to(variables, &mut text).map_err(|error| reason(&error))?;
            String::from_utf8(text.0).map_err(|error| error.to_string())
        });
        text.map_err(|reason| ModelError::ChatTemplate { path: self.path.clone(), reason })
    }
}

/// Runs `work` on a stack that is large enough, and waits for it as long as is sensible. Beyond that the thread is left alone: it
/// cannot be ended, but its fuel is.
fn bounded<T: Send + 'static>(
    work: impl FnOnce() -> std::result::Result<T, String> + Send + 'static,
) -> std::result::Result<T, String> {
    let (send, receive) = mpsc::sync_channel(1);
    let thread = thread::Builder::new().name(NAME.into()).stack_size(STACK).spawn(move || {
        // Nobody waits any more after TIME.
        let _ = send.send(work());
    });
    thread.map_err(|error| format!("no thread to render it on: {error}"))?;
    match receive.recv_timeout(TIME) {
        Ok(outcome) => outcome,
        Err(mpsc::RecvTimeoutError::Timeout) => Err(format!("not rendered after {} seconds", TIME.as_secs())),
        Err(mpsc::RecvTimeoutError::Disconnected) => Err("the template engine failed".into()),
    }
}

/// The settings, functions and filters of transformers.
fn environment() -> std::result::Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_fuel(Some(FUEL));
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.add_function("raise_exception", raise_exception);
    environment.add_filter("tojson", tojson);
    Ok(environment)
}

fn raise_exception(message: &str) -> std::result::Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{}", shortened(message))))
}

const RAISED: &str = "it refuses the conversation: ";

/// Why a template cannot be parsed or rendered.
fn reason(error: &Error) -> String {
    let place = error.line().map(|line| format!(", at line {line} of the template")).unwrap_or_default();
    match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, _) => format!("it takes more than {FUEL} steps, or as much memory{place}"),
        (ErrorKind::WriteFailure, _) => format!("it renders more than {MOST_TEXT} bytes{place}"),
        (_, Some(detail)) if detail.starts_with(RAISED) => format!("{detail}{place}"),
        (kind, Some(detail)) => format!("{kind}: {}{place}", shortened(detail)),
        (kind, None) => format!("{kind}{place}"),
    }
}

/// The beginning of a text that may be long.
pub(super) fn shortened(text: &str) -> String {
    match text.char_indices().nth(300) {
        Some((end, _)) => format!("{}...{}", &text[..end], tail(text)),
        None => text.into(),
    }
}

/// Where in the file, as serde ends its messages.
fn tail(text: &str) -> &str {
    text.rfind(" at line ").map(|at| &text[at..]).filter(|tail| tail.len() < 60).unwrap_or("")
}

/// A buffer that refuses to grow beyond bounds.
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MOST_TEXT {
            return Err(io::Error::other("too much text"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// `json.dumps` of Python: spaces behind commas and colons, no escapes but JSON's own.
fn tojson(value: &Value, options: Kwargs) -> std::result::Result<String, Error> {
    let indent = options.get::<Option<usize>>("indent")?;
    // That of transformers already.
    let _ = options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;
    let mut json = Bounded(Vec::new());
    let spaces = " ".repeat(indent.unwrap_or(0).min(64));
    let written = match indent {
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut json, OneLine)),
        Some(_) => {
            let formatter = PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut json, formatter))
        }
    };
    let failed = |error: String| Error::new(ErrorKind::BadSerialization, error);
    written.map_err(|error| failed(error.to_string()))?;
    String::from_utf8(json.0).map_err(|error| failed(error.to_string()))
}

/// Python's separators.
struct OneLine;

impl Formatter for OneLine {
    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
