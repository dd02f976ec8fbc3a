//! The text of a request on its way: from logits to tokens to text.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Weak};

use super::stream::{Completion, FinishReason, RequestStream, StreamEvent};
use crate::Result;
use crate::request::GenerationRequest;
use crate::sampling::{Sampler, no_finite_logit};
use crate::tokenizer::{StopStrings, TextStream, Tokenizer};

/// The tokens and the text so far. It stays when the request is preempted.
#[derive(Debug)]
pub(crate) struct Reply {
    sampler: Sampler,
    stream: TextStream,
    stop: StopStrings,
    /// Stop strings that are special tokens, which leave no trace in the text.
    stop_ids: Vec<u32>,
    text: String,
    max_new_tokens: usize,
    events: Sender<StreamEvent>,
    /// Gone when the stream is dropped.
    alive: Weak<()>,
}

/// What the model says of the next token.
pub(crate) enum Next<'l> {
    /// The argmax of so many logits; negative if none was finite.
    Greedy { id: i32, vocab: usize },
    /// All logits, which are overwritten.
    Logits(&'l mut [f32]),
}

/// The ends of a text that the model sets.
pub(crate) struct Limits<'a> {
    pub(crate) eos_token_ids: &'a [u32],
    pub(crate) max_positions: usize,
}

impl Reply {
    /// The reply to a request, and the stream where it is heard.
    ///
    /// # Errors
    /// A sampling parameter or stop string that cannot be.
    pub(crate) fn new(id: u64, request: &GenerationRequest, tokenizer: &Tokenizer) -> Result<(Self, RequestStream)> {
        let (sender, events) = channel();
        let alive = Arc::new(());
        let reply = Self {
            sampler: Sampler::new(request.sampling.clone())?,
            stream: TextStream::new(tokenizer, true),
            stop: StopStrings::new(request.stop.clone())?,
            stop_ids: request.stop.iter().filter_map(|stop| tokenizer.special_id(stop)).collect(),
            text: String::new(),
            max_new_tokens: request.max_new_tokens,
            events: sender,
            alive: Arc::downgrade(&alive),
        };
        Ok((reply, RequestStream { id, events, _alive: alive }))
    }

    /// Whether somebody listens.
    pub(crate) fn is_heard(&self) -> bool {
        self.alive.strong_count() > 0
    }

    /// Whether the argmax is all that it needs of the logits.
    pub(crate) fn is_greedy(&self) -> bool {
        self.sampler.params().is_greedy()
    }

    /// Whether a text of so many tokens, of which `prompt_len` are the prompt, is at its end.
    fn end_by_length(&self, tokens: usize, prompt_len: usize, limits: &Limits) -> Option<FinishReason> {
        match () {
            _ if tokens - prompt_len >= self.max_new_tokens => Some(FinishReason::MaxNewTokens),
            _ if tokens > limits.max_positions => Some(FinishReason::MaxPositions),
            _ => None,
        }
    }

    /// Whether the text may go on after its next token, whatever that is.
    pub(crate) fn may_go_on(&self, tokens: usize, prompt_len: usize, limits: &Limits) -> bool {
        self.end_by_length(tokens + 1, prompt_len, limits).is_none()
    }

    /// Samples the next token of `tokens` and says what is certain; the reason, if there is none or it was the last one.
    pub(crate) fn sample(
        &mut self,
        next: Next,
        tokens: &mut Vec<u32>,
        prompt_len: usize,
        limits: &Limits,
    ) -> Option<FinishReason> {
        let id = match next {
            Next::Greedy { id, vocab } => u32::try_from(id).map_err(|_| no_finite_logit(vocab)),
            Next::Logits(logits) => self.sampler.sample(logits, tokens),
        };
        let id = match id {
            Ok(id) => id,
            Err(error) => return Some(FinishReason::Failed(error.to_string())),
        };
        tokens.push(id);
        if limits.eos_token_ids.contains(&id) {
            return Some(FinishReason::Eos);
        }
        if self.stop_ids.contains(&id) {
            self.say_rest();
            return Some(FinishReason::StopString);
        }
        let mut stopped = false;
        if let Some(text) = self.stream.push(id) {
            let outcome = self.stop.push(&text);
            stopped = outcome.stopped;
            self.say(outcome.emit);
        }
        if stopped {
            return Some(FinishReason::StopString);
        }
        self.end_by_length(tokens.len(), prompt_len, limits)
    }

    /// Ends the text: what was held back is certain now.
    pub(crate) fn finish(mut self, token_ids: Vec<u32>, finish: FinishReason) {
        if finish != FinishReason::StopString {
            self.say_rest();
        }
        let _ = self.events.send(StreamEvent::Finished(Completion { token_ids, text: self.text, finish }));
    }

    /// What was held back, at the end of the text.
    fn say_rest(&mut self) {
        let tail = self.stream.clone().finish().unwrap_or_default();
        let outcome = self.stop.push(&tail);
        let held_back = if outcome.stopped { String::new() } else { self.stop.clone().finish() };
        self.say(outcome.emit + &held_back);
    }

    fn say(&mut self, text: String) {
        self.text.push_str(&text);
        if !text.is_empty() {
            // Whoever has gone away does not need it.
            let _ = self.events.send(StreamEvent::Text(text));
        }
    }
}
