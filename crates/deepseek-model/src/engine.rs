//! Many requests on one model: continuous batching, chunked prefill, prefix caching, preemption and recomputation.

mod cache_pages;
mod choice;
mod latency;
mod launch;
mod options;
mod prefix_cache;
mod prefix_tree;
mod rank_engine;
mod ranked;
mod reply;
mod scheduler;
mod stats;
mod stream;
mod warm_up;

pub use self::options::EngineOptions;
use self::rank_engine::RankEngine;
use self::ranked::RankedEngine;
pub use self::stats::EngineStats;
pub use self::stream::{Completion, FinishReason, RequestStream, StreamEvent, TokenLogprobs};
pub use self::warm_up::{compile_ahead, compile_all_ahead, compile_ranks_ahead};
use crate::Result;
use crate::ranks::ModelRef;
use crate::request::GenerationRequest;
use crate::tokenizer::Tokenizer;

/// Runs requests together, a step at a time (continuous batching; Yu et al., Orca, OSDI 2022).
///
/// A step takes one token of each request that generates, and fills up `token_budget` with chunks of prompts, `mixed_prompt_tokens` of
/// them beside requests that generate: those of running requests first, then of waiting ones, in the order of their arrival. When the pages run out, the youngest request is
/// preempted: it gives up its own and waits; its tokens are kept and recomputed later, so that nothing of its text is lost. A text ends with
/// [`FinishReason::OutOfCache`] only if the whole cache is too small for it.
///
/// Tokens are chosen on the device, where logits stay. Where steps are captured ([`EngineOptions::graphs`]), the next step is launched
/// before the tokens of the last one are on the host: the device does not wait for it. A request that ends with a token that
/// was not foreseen has then computed one too many, which is discarded; a new one begins a step later.
///
/// ```
/// # fn main() -> deepseek_model::Result<()> {
/// # let device = burn::tensor::Device::flex();
/// # let dir = std::path::Path::new("../../assets/demo-v3");
/// # let dtype = burn::tensor::FloatDType::F32;
/// use deepseek_model::{DeepseekModel, Engine, EngineOptions, GenerationRequest, SamplingParams, StreamEvent, Tokenizer};
///
/// let model = DeepseekModel::load(dir, &device, dtype, &mut |_| {})?;
/// let tokenizer = Tokenizer::load(dir)?;
/// let mut engine = Engine::new(&model, &tokenizer, EngineOptions::default())?;
/// let prompt = tokenizer.encode("hacker: n.", true)?;
/// let sampling = SamplingParams::greedy();
/// let mut stream = engine.submit(GenerationRequest { prompt, sampling, max_new_tokens: 8, stop: vec![] })?;
/// while engine.step()? {
///     while let Some(StreamEvent::Text(text)) = stream.try_next() {
///         print!("{text}");
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Engine<'a>(Inner<'a>);

#[derive(Debug)]
enum Inner<'a> {
    /// On the thread of whoever calls.
    Alone(Box<RankEngine<'a>>),
    Ranks(RankedEngine),
}

impl<'a> Engine<'a> {
    /// An engine without requests; its cache is allocated, on every device.
    ///
    /// # Errors
    /// A size that is zero or too large, a page size that is no power of two, a budget below `max_batch`, snapshots that are not at
    /// ends of pages; `deterministic` where the device cannot be.
    pub fn new(model: impl Into<ModelRef<'a>>, tokenizer: &'a Tokenizer, options: EngineOptions) -> Result<Self> {
        Ok(Self(match model.into() {
            ModelRef::One(model) => Inner::Alone(Box::new(RankEngine::new(model, tokenizer, options)?)),
            ModelRef::Ranks(ranks) => Inner::Ranks(RankedEngine::new(ranks, tokenizer, options)?),
        }))
    }

    /// Takes a request, which starts with one of the next steps.
    ///
    /// # Errors
    /// [`ModelError::Request`](crate::ModelError::Request) naming what is wrong with it; the others go on.
    /// [`ModelError::EngineFailed`](crate::ModelError::EngineFailed) after a step that failed.
    pub fn submit(&mut self, request: GenerationRequest) -> Result<RequestStream> {
        match &mut self.0 {
            Inner::Alone(engine) => engine.submit(request),
            Inner::Ranks(engine) => engine.submit(request),
        }
    }

    /// Ends a request at once; its stream finishes with [`FinishReason::Cancelled`]. Whether it was there.
    ///
    /// # Errors
    /// A cache that is damaged.
    pub fn cancel(&mut self, id: u64) -> Result<bool> {
        match &mut self.0 {
            Inner::Alone(engine) => engine.cancel(id),
            Inner::Ranks(engine) => engine.cancel(id),
        }
    }

    /// One forward pass, and a token of each request whose prompt is complete. Whether requests are left.
    ///
    /// Logits of which none is finite end their request alone, with [`FinishReason::Failed`].
    ///
    /// # Errors
    /// [`ModelError::OutOfMemory`](crate::ModelError::OutOfMemory) and other failures of the device, or of a communicator. The tokens
    /// of the step are no longer in the cache, but in DeepSeek-V4's states they may be, and on a GPU the pools are then without
    /// numbers: every later call is [`ModelError::EngineFailed`](crate::ModelError::EngineFailed). A new engine on the same model can be
    /// used, unless there are several ranks. What streams hold can be read, and requests can be cancelled, but for ranks of which one
    /// does not answer.
    pub fn step(&mut self) -> Result<bool> {
        match &mut self.0 {
            Inner::Alone(engine) => engine.step(),
            Inner::Ranks(engine) => engine.step(),
        }
    }

    /// Requests that run or wait.
    pub fn requests(&self) -> usize {
        self.running() + self.waiting()
    }

    /// Requests that run.
    pub fn running(&self) -> usize {
        match &self.0 {
            Inner::Alone(engine) => engine.running(),
            Inner::Ranks(engine) => engine.running(),
        }
    }

    /// Requests that wait for a place in the batch or for pages.
    pub fn waiting(&self) -> usize {
        match &self.0 {
            Inner::Alone(engine) => engine.waiting(),
            Inner::Ranks(engine) => engine.waiting(),
        }
    }

    /// Counts and times so far; of several ranks those of the first, which has as many pages as the others.
    pub fn stats(&self) -> EngineStats {
        match &self.0 {
            Inner::Alone(engine) => engine.stats(),
            Inner::Ranks(engine) => engine.stats(),
        }
    }

    /// Frees the pages that only the prefix cache holds.
    ///
    /// # Errors
    /// A cache that is damaged.
    pub fn reset_prefix_cache(&mut self) -> Result<()> {
        match &mut self.0 {
            Inner::Alone(engine) => engine.reset_prefix_cache(),
            Inner::Ranks(engine) => engine.reset_prefix_cache(),
        }
    }

    /// Forgets the times between tokens so far: the percentiles of [`Self::stats`] are those of what follows, without a warm-up.
    ///
    /// # Errors
    /// Of several ranks, one that has failed.
    pub fn reset_latency(&mut self) -> Result<()> {
        match &mut self.0 {
            Inner::Alone(engine) => engine.reset_latency(),
            Inner::Ranks(engine) => return engine.reset_latency(),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server may build its engine on one thread and run it on another.
    #[test]
    fn an_engine_may_move_to_another_thread() {
        fn is_send<T: Send>() {}
        is_send::<Engine>();
    }
}
