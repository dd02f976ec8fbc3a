//! What somebody asks of a model: a prompt, and how it goes on.

use crate::sampling::SamplingParams;
use crate::{ModelError, Result};

/// A prompt and how to continue it.
#[derive(Debug, Clone)]
pub struct GenerationRequest {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Tokens to generate at most.
    pub max_new_tokens: usize,
    /// Texts that end the generation; they are not part of the result. One that is a special token ends it with that token; special
    /// tokens within longer ones do not occur in the text.
    pub stop: Vec<String>,
}

impl GenerationRequest {
    /// Whether a model with so many positions and token ids can carry it out.
    ///
    /// # Errors
    /// [`ModelError::Request`] naming what is wrong with it.
    pub(crate) fn check(&self, max_positions: usize, vocab_size: usize) -> Result<()> {
        self.sampling.validate()?;
        if self.prompt.is_empty() {
            return Err(ModelError::request("prompt", "empty", "at least one token"));
        }
        if self.prompt.len() > max_positions {
            let expected = format!("at most {max_positions}, the model's positions; shorten the prompt");
            return Err(ModelError::request("prompt", format!("{} tokens long", self.prompt.len()), expected));
        }
        if let Some(id) = self.prompt.iter().find(|&&id| id as usize >= vocab_size) {
            let expected =
                format!("token ids below {vocab_size}, the model's vocabulary: is this the model's tokenizer?");
            return Err(ModelError::request("prompt", format!("with token id {id}"), expected));
        }
        Ok(())
    }

    /// Tokens whose rows are in the cache when it is complete. The last generated token is never computed.
    pub(crate) fn cached_tokens(&self, max_positions: usize) -> usize {
        self.prompt.len().saturating_add(self.max_new_tokens.saturating_sub(1)).min(max_positions)
    }
}
