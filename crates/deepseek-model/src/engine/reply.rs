//! The text of a request on its way: from logits to tokens to text.

use std::sync::mpsc::{Sender, channel};

use super::stream::{Completion, FinishReason, RequestStream, StreamEvent, TokenLogprobs};
use crate::Result;
use crate::request::GenerationRequest;
use crate::sampling::{SamplingParams, no_finite_logit};
use crate::tokenizer::{StopStrings, TextStream, Tokenizer};

/// The tokens and the text so far. It stays when the request is preempted.
#[derive(Debug)]
pub(crate) struct Reply {
    sampling: SamplingParams,
    stream: TextStream,
    stop: StopStrings,
    /// Stop strings that are special tokens, which leave no trace in the text.
    stop_ids: Vec<u32>,
    text: String,
    logprobs: Vec<TokenLogprobs>,
    max_new_tokens: usize,
    events: Sender<StreamEvent>,
}

/// The ends of a text that the model sets.
pub(crate) struct Limits<'a> {
    pub(crate) eos_token_ids: &'a [u32],
    pub(crate) max_positions: usize,
    pub(crate) vocab_size: usize,
}

impl Reply {
    /// The reply to a request, and the stream where it is heard; when that is dropped, `dropped` gets the id.
    ///
    /// # Errors
    /// A sampling parameter or stop string that cannot be.
    pub(crate) fn new(
        id: u64,
        request: &GenerationRequest,
        tokenizer: &Tokenizer,
        dropped: Sender<u64>,
    ) -> Result<(Self, RequestStream)> {
        request.sampling.validate()?;
        let (sender, events) = channel();
        let reply = Self {
            sampling: request.sampling.clone(),
            stream: TextStream::new(tokenizer, true),
            stop: StopStrings::new(request.stop.clone())?,
            stop_ids: request.stop.iter().filter_map(|stop| tokenizer.special_id(stop)).collect(),
            text: String::new(),
            logprobs: Vec::new(),
            max_new_tokens: request.max_new_tokens,
            events: sender,
        };
        Ok((reply, RequestStream { id, events, dropped }))
    }

    /// How its tokens are chosen.
    pub(crate) fn sampling(&self) -> &SamplingParams {
        &self.sampling
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

    /// Takes the next token of `tokens`, negative if no logit was finite, and says what is certain; the reason, if there is none or
    /// it was the last one.
    pub(crate) fn push(
        &mut self,
        token: i32,
        logprobs: Option<TokenLogprobs>,
        tokens: &mut Vec<u32>,
        prompt_len: usize,
        limits: &Limits,
    ) -> Option<FinishReason> {
        let Ok(id) = u32::try_from(token) else {
            return Some(FinishReason::Failed(no_finite_logit(limits.vocab_size).to_string()));
        };
        tokens.push(id);
        self.logprobs.extend(logprobs);
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
        let _ = self.events.send(StreamEvent::Finished(Completion {
            token_ids,
            text: self.text,
            finish,
            logprobs: self.logprobs,
        }));
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
