//! What a request's owner sees of it.

use std::sync::Arc;
use std::sync::mpsc::Receiver;

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
    /// Somebody lost interest; the text up to there is kept.
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
    /// The engine looks whether it is still there: a channel only tells when something is sent.
    pub(super) _alive: Arc<()>,
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
