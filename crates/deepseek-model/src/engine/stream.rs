//! What a request's owner sees of it.

use std::sync::mpsc::{Receiver, Sender};

use mla_ops::cache::CacheError;

/// Why a generation ended.
#[derive(Debug, Clone, PartialEq)]
pub enum FinishReason {
    /// The model ended the text.
    Eos,
    /// A stop string occurred.
    StopString,
    /// `max_new_tokens` is reached.
    MaxNewTokens,
    /// The model has no position for another token.
    MaxPositions,
    /// The cache is too small for another token; the text up to there is kept.
    OutOfCache(CacheError),
    /// No token can be sampled, for this reason: the model has computed no finite logit. The text up to there is kept.
    Failed(String),
    /// Cancelled by the client; the text up to there is kept.
    Cancelled,
}

impl FinishReason {
    /// A word for it, as in JSON.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Eos => "eos",
            Self::StopString => "stop_string",
            Self::MaxNewTokens => "max_new_tokens",
            Self::MaxPositions => "max_positions",
            Self::OutOfCache(_) => "out_of_cache",
            Self::Failed(_) => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// What became of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// The generated tokens, an ending token included.
    pub token_ids: Vec<u32>,
    /// Their text, without an ending token or stop string.
    pub text: String,
    /// Why it ended.
    pub finish: FinishReason,
    /// One for each of `token_ids` where [`SamplingParams::logprobs`](crate::SamplingParams::logprobs) asks for them, otherwise none.
    pub logprobs: Vec<TokenLogprobs>,
}

/// What the model says of a token, as natural logarithms of probabilities.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// Of the token itself.
    pub logprob: f32,
    /// The most probable tokens, the best first, of equal ones the lowest id: as many as were asked for, or as have a probability.
    pub top: Vec<(u32, f32)>,
}

/// News of a request.
#[derive(Debug, Clone, PartialEq)]
pub enum StreamEvent {
    /// A piece of text that is certain; valid UTF-8.
    Text(String),
    /// The end. The chunks of text add up to [`Completion::text`].
    Finished(Completion),
}

/// The news of one request, in order; another thread may wait for them. Whoever drops it cancels the request,
/// with the engine's next step.
///
/// As an iterator it waits for the engine's next step, and ends after [`StreamEvent::Finished`] or with the engine: the thread
/// that runs the engine uses [`Self::try_next`].
#[derive(Debug)]
pub struct RequestStream {
    pub(super) id: u64,
    pub(super) events: Receiver<StreamEvent>,
    /// Where the engine hears that the stream is dropped: its own channel only tells it when something is sent.
    pub(super) dropped: Sender<u64>,
}

impl RequestStream {
    /// Names the request, for [`Engine::cancel`](crate::Engine::cancel).
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The next event, if there is one already.
    pub fn try_next(&mut self) -> Option<StreamEvent> {
        self.events.try_recv().ok()
    }
}

impl Iterator for RequestStream {
    type Item = StreamEvent;

    fn next(&mut self) -> Option<StreamEvent> {
        self.events.recv().ok()
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        // An engine that is gone has no use for it.
        let _ = self.dropped.send(self.id);
    }
}
