//! The text of a request on its way: from logits to tokens to pieces of text.

use std::sync::mpsc::Sender;

use super::stream::{Completion, FinishReason, StreamEvent};
use crate::Result;
use crate::generation::GenerationRequest;
use crate::sampling::Sampler;
use crate::tokenizer::{StopStrings, TextStream, Tokenizer};

/// What has been drawn and said. It stays when the request gives up its pages.
#[derive(Debug)]
pub(crate) struct Reply {
    sampler: Sampler,
    stream: TextStream,
    stop: StopStrings,
    text: String,
    max_new_tokens: usize,
    events: Sender<StreamEvent>,
}

/// The ends of a text that the model sets.
pub(crate) struct Limits<'a> {
    pub(crate) eos_token_ids: &'a [u32],
    pub(crate) max_positions: usize,
}

impl Reply {
    /// # Errors
    /// A sampling parameter or stop string that cannot be.
    pub(crate) fn new(request: &GenerationRequest, tokenizer: &Tokenizer, events: Sender<StreamEvent>) -> Result<Self> {
        Ok(Self {
            sampler: Sampler::new(request.sampling.clone())?,
            stream: TextStream::new(tokenizer, true),
            stop: StopStrings::new(request.stop.clone())?,
            text: String::new(),
            max_new_tokens: request.max_new_tokens,
            events,
        })
    }

    /// Draws the next token of `tokens` and says what is certain; the reason, if that was the last one.
    ///
    /// # Errors
    /// Logits of which none is finite.
    pub(crate) fn draw(
        &mut self,
        logits: &mut [f32],
        tokens: &mut Vec<u32>,
        prompt_len: usize,
        limits: &Limits,
    ) -> Result<Option<FinishReason>> {
        let id = self.sampler.sample(logits, tokens)?;
        tokens.push(id);
        if limits.eos_token_ids.contains(&id) {
            return Ok(Some(FinishReason::Eos));
        }
        let (mut stopped, mut heard) = (false, true);
        if let Some(text) = self.stream.push(id) {
            let outcome = self.stop.push(&text);
            stopped = outcome.stopped;
            heard = self.say(outcome.emit);
        }
        Ok(match () {
            _ if stopped => Some(FinishReason::StopString),
            _ if !heard => Some(FinishReason::Cancelled),
            _ if tokens.len() - prompt_len >= self.max_new_tokens => Some(FinishReason::MaxNewTokens),
            _ if tokens.len() > limits.max_positions => Some(FinishReason::MaxPositions),
            _ => None,
        })
    }

    /// Ends the text: what was held back is certain now.
    pub(crate) fn finish(mut self, token_ids: Vec<u32>, finish: FinishReason) {
        if finish != FinishReason::StopString {
            let tail = self.stream.clone().finish().unwrap_or_default();
            let outcome = self.stop.push(&tail);
            let held_back = if outcome.stopped { String::new() } else { self.stop.clone().finish() };
            self.say(outcome.emit + &held_back);
        }
        // Whoever has gone away does not need it.
        let _ = self.events.send(StreamEvent::Finished(Completion { token_ids, text: self.text, finish }));
    }

    /// Whether somebody listens.
    fn say(&mut self, text: String) -> bool {
        self.text.push_str(&text);
        text.is_empty() || self.events.send(StreamEvent::Text(text)).is_ok()
    }
}
