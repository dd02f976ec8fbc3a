//! Messages, and files of them.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::{ModelError, Result, files};

/// Bytes of a file of messages.
const MOST: usize = 16 << 20;

/// Who says something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions that hold for the whole conversation.
    System,
    /// Who is answered.
    User,
    /// The model.
    Assistant,
}

/// Something that is said in a conversation. As JSON an object with these fields; others are refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    /// Who says it.
    pub role: Role,
    /// What.
    pub content: String,
    /// What the assistant has thought before. Templates and encodings leave it out of earlier turns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
}

impl Message {
    /// A message of the system.
    pub fn system(content: impl Into<String>) -> Self {
        Self::of(Role::System, content)
    }

    /// A message of the user.
    pub fn user(content: impl Into<String>) -> Self {
        Self::of(Role::User, content)
    }

    /// A message of the assistant.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::of(Role::Assistant, content)
    }

    /// A message of this role.
    pub fn of(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: content.into(), reasoning_content: None }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Conversation {
    messages: Vec<Message>,
}

/// Reads a file of at most 16 MiB: a JSON list of messages, or an object whose field `messages` it is.
///
/// # Errors
/// [`ModelError::MissingFile`], [`ModelError::Io`] and [`ModelError::WrongKind`] for a file that cannot be read or is too large;
/// [`ModelError::Json`] with line and column for anything else in it.
pub fn read_conversation(path: &Path) -> Result<Vec<Message>> {
    let text = files::read_at_most(path, "a conversation is read from it", MOST)?;
    let is_list = text.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[');
    match is_list {
        true => files::parse(path, &text),
        false => files::parse::<Conversation>(path, &text).map(|conversation| conversation.messages),
    }
    .map_err(|error| match error {
        // Words of a hostile file may be long.
        ModelError::Json { path, reason } => ModelError::Json { path, reason: super::jinja::shortened(&reason) },
        other => other,
    })
}
