//! The encodings of models that are published without a Jinja template, for messages of the system, the user and the assistant.
//!
//! Their definition is the folder `encoding` beside the published weights (`encoding_dsv32.py`, `encoding_dsv4.py`). What was thought
//! before the last message of the user is left out (`drop_thinking`, their default).

use std::fmt;

use super::{Message, Role};

const BOS: &str = "<｜begin▁of▁sentence｜>";
const EOS: &str = "<｜end▁of▁sentence｜>";
const USER: &str = "<｜User｜>";
const ASSISTANT: &str = "<｜Assistant｜>";
const THINK: &str = "<think>";
const END_OF_THINKING: &str = "</think>";

/// Tokens that a vocabulary needs for an encoding.
pub(super) const TOKENS: [&str; 6] = [BOS, EOS, USER, ASSISTANT, THINK, END_OF_THINKING];

/// Whose encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoding {
    V32,
    V4,
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V32 => "DeepSeek-V3.2",
            Self::V4 => "DeepSeek-V4",
        })
    }
}

impl Encoding {
    /// By the name in `config.json`.
    pub(super) fn of(model_type: &str) -> Option<Self> {
        match model_type {
            "deepseek_v32" => Some(Self::V32),
            "deepseek_v4" => Some(Self::V4),
            _ => None,
        }
    }

    /// The text of a conversation, or why there is none.
    pub(super) fn render(self, messages: &[Message], prompt: bool, thinking: bool) -> Result<String, String> {
        let last_user = messages.iter().rposition(|message| message.role == Role::User);
        let mut text = BOS.to_string();
        for (index, message) in messages.iter().enumerate() {
            let next = messages.get(index + 1).map(|message| message.role);
            match message.role {
                Role::System => text += &message.content,
                Role::User => {
                    // V4 has one turn of the user for messages that follow one another.
                    let goes_on = index > 0 && messages[index - 1].role == Role::User;
                    text += if self == Self::V4 && goes_on { "\n\n" } else { USER };
                    text += &message.content;
                    if self.turns_to_the_assistant(next, prompt) {
                        text += ASSISTANT;
                        text += if thinking && Some(index) == last_user { THINK } else { END_OF_THINKING };
                    }
                }
                Role::Assistant => {
                    if thinking && last_user.is_none_or(|user| index > user) {
                        text += self.reasoning(message, index)?;
                        text += END_OF_THINKING;
                    }
                    text += &message.content;
                    text += EOS;
                }
            }
        }
        Ok(text)
    }

    /// Whether a message of the user is followed by the beginning of an answer.
    fn turns_to_the_assistant(self, next: Option<Role>, prompt: bool) -> bool {
        match (self, next) {
            (_, None) => prompt,
            (Self::V32, Some(_)) => true,
            (Self::V4, Some(next)) => next == Role::Assistant,
        }
    }

    /// What was thought for the answer to the last message of the user.
    fn reasoning(self, message: &Message, index: usize) -> Result<&str, String> {
        match (self, message.reasoning_content.as_deref()) {
            (_, Some(reasoning)) if !reasoning.is_empty() => Ok(reasoning),
            (Self::V4, _) => Ok(""),
            (Self::V32, _) => Err(format!(
                "message {} has no `reasoning_content`, which {self}'s encoding needs of the last answer when it thinks",
                index + 1
            )),
        }
    }
}
