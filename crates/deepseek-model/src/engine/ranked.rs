//! An engine on several ranks: each has a thread with a [`RankEngine`], and all are told the same.

use std::collections::HashMap;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::rank_engine::RankEngine;
use super::{EngineOptions, EngineStats, RequestStream, StreamEvent};
use crate::model::DeepseekModel;
use crate::ranks::{ModelRanks, Rank, first_or_cause, panicked};
use crate::request::GenerationRequest;
use crate::tokenizer::Tokenizer;
use crate::{ModelError, Result};

/// How long the others have for their answers once a rank has failed. A device that waits for another one may never answer.
const GRACE: Duration = Duration::from_secs(10);

/// What all ranks are told.
#[derive(Debug, Clone)]
enum Command {
    Submit(Box<GenerationRequest>),
    Cancel(u64),
    Step,
    ResetPrefixCache,
    ResetLatency,
}

/// What a rank answers.
#[derive(Debug)]
struct Answer {
    rank: usize,
    outcome: Result<Done>,
    /// Of the first rank.
    view: Option<View>,
    /// Its thread has ended, and answers no more.
    is_last: bool,
}

#[derive(Debug)]
enum Done {
    Ready,
    /// The first rank gives the stream away.
    Submitted(Option<RequestStream>),
    Cancelled(bool),
    /// Whether requests are left; and what was sampled so far, as one number.
    Stepped(bool, u64),
    Reset,
}

/// What can be seen of an engine from outside.
#[derive(Debug, Clone, Copy, Default)]
struct View {
    running: usize,
    waiting: usize,
    stats: EngineStats,
}

/// The thread of a rank.
#[derive(Debug)]
struct RankThread {
    /// None once it has ended.
    commands: Option<Sender<Command>>,
    thread: JoinHandle<()>,
}

/// The ranks' engines.
#[derive(Debug)]
pub(super) struct RankedEngine {
    threads: Vec<RankThread>,
    answers: Receiver<Answer>,
    /// The ids of streams that were dropped. All ranks are told at the same time.
    dropped: (Sender<u64>, Receiver<u64>),
    view: View,
    /// The error of the step that failed, if one has.
    failed: Option<String>,
    /// Whether a rank has not answered, and is not waited for.
    is_stuck: bool,
}

impl RankedEngine {
    /// # Errors
    /// As [`Engine::new`](super::Engine::new), of any rank.
    pub(super) fn new(ranks: &ModelRanks, tokenizer: &Tokenizer, options: EngineOptions) -> Result<Self> {
        let tokenizer = Arc::new(tokenizer.clone());
        let (sender, answers) = channel();
        let mut threads = Vec::new();
        for (rank, Rank { model, stream }) in ranks.ranks().iter().cloned().enumerate() {
            let (commands, received) = channel();
            let (tokenizer, sender) = (tokenizer.clone(), sender.clone());
            let run = move || stream.executes(|| run(rank, &model, &tokenizer, options, &received, &sender));
            let thread = thread::Builder::new().name(format!("rank {rank}")).spawn(run);
            threads.push(RankThread { commands: Some(commands), thread: thread.map_err(ModelError::device)? });
        }
        // Threads that have all ended are heard of.
        drop(sender);
        let view = View::default();
        let mut engine = Self { threads, answers, dropped: channel(), view, failed: None, is_stuck: false };
        first_or_cause(engine.collect())?;
        Ok(engine)
    }

    pub(super) fn submit(&mut self, request: GenerationRequest) -> Result<RequestStream> {
        self.check_works()?;
        // A refused request is refused by all.
        match self.tell(&Command::Submit(Box::new(request)))? {
            Done::Submitted(Some(mut stream)) => {
                stream.dropped = self.dropped.0.clone();
                Ok(stream)
            }
            _ => Err(unexpected()),
        }
    }

    pub(super) fn cancel(&mut self, id: u64) -> Result<bool> {
        match self.tell(&Command::Cancel(id))? {
            Done::Cancelled(found) => Ok(found),
            _ => Err(unexpected()),
        }
    }

    pub(super) fn step(&mut self) -> Result<bool> {
        self.check_works()?;
        let outcome = self.try_step();
        if let Err(error) = &outcome {
            self.failed = Some(error.to_string());
        }
        outcome
    }

    fn try_step(&mut self) -> Result<bool> {
        let mut ids: Vec<u64> = self.dropped.1.try_iter().collect();
        ids.sort_unstable();
        for id in ids {
            self.cancel(id)?;
        }
        match self.tell(&Command::Step)? {
            Done::Stepped(more, _) => Ok(more),
            _ => Err(unexpected()),
        }
    }

    pub(super) fn reset_prefix_cache(&mut self) -> Result<()> {
        self.tell(&Command::ResetPrefixCache).map(|_| ())
    }

    pub(super) fn reset_latency(&mut self) -> Result<()> {
        self.tell(&Command::ResetLatency).map(|_| ())
    }

    pub(super) fn running(&self) -> usize {
        self.view.running
    }

    pub(super) fn waiting(&self) -> usize {
        self.view.waiting
    }

    pub(super) fn stats(&self) -> EngineStats {
        self.view.stats
    }

    fn check_works(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), |reason| Err(ModelError::EngineFailed { reason }))
    }

    /// Tells all ranks that are left, and waits for all of them.
    fn tell(&mut self, command: &Command) -> Result<Done> {
        if self.is_stuck {
            return Err(ModelError::EngineFailed { reason: self.failed.clone().unwrap_or_else(|| no_answer(GRACE)) });
        }
        for commands in self.threads.iter().flat_map(|rank| &rank.commands) {
            // It is heard of when it has ended.
            let _ = commands.send(command.clone());
        }
        let outcomes = self.collect();
        let sampled: Vec<u64> = outcomes
            .iter()
            .filter_map(|outcome| match outcome {
                Ok(Done::Stepped(_, sampled)) => Some(*sampled),
                _ => None,
            })
            .collect();
        let done = first_or_cause(outcomes)?;
        match sampled.iter().all(|one| *one == sampled[0]) {
            true => Ok(done),
            false => Err(ModelError::Communicator { reason: "they have sampled different tokens".into() }),
        }
    }

    /// An answer of each rank that is left, in their order. Once one has failed, the others are not waited for without end.
    fn collect(&mut self) -> Vec<Result<Done>> {
        let asked: Vec<usize> = (0..self.threads.len()).filter(|&rank| self.threads[rank].commands.is_some()).collect();
        let mut outcomes: Vec<Option<Result<Done>>> = self.threads.iter().map(|_| None).collect();
        let mut deadline = None;
        while asked.iter().any(|&rank| outcomes[rank].is_none()) {
            let answer = match deadline {
                None => self.answers.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(deadline) => {
                    self.answers.recv_timeout(Instant::saturating_duration_since(&deadline, Instant::now()))
                }
            };
            let Ok(Answer { rank, outcome, view, is_last }) = answer else {
                self.is_stuck = true;
                break;
            };
            if outcome.is_err() {
                deadline = deadline.or(Some(Instant::now() + GRACE));
            }
            if is_last {
                self.threads[rank].commands = None;
            }
            self.view = view.unwrap_or(self.view);
            outcomes[rank] = Some(outcome);
        }
        let silent = || Err(ModelError::Communicator { reason: no_answer(GRACE) });
        asked.into_iter().map(|rank| outcomes[rank].take().unwrap_or_else(silent)).collect()
    }
}

impl Drop for RankedEngine {
    fn drop(&mut self) {
        for RankThread { commands, thread } in self.threads.drain(..) {
            drop(commands);
            if !self.is_stuck {
                let _ = thread.join();
            }
        }
    }
}

fn no_answer(patience: Duration) -> String {
    format!("a rank has not answered {} s after another one had failed", patience.as_secs())
}

/// A rank that answers something else than it was asked.
fn unexpected() -> ModelError {
    ModelError::Communicator { reason: "they are at different calls".into() }
}

/// What the thread of a rank does, until nobody tells it anything.
fn run(
    rank: usize,
    model: &DeepseekModel,
    tokenizer: &Tokenizer,
    options: EngineOptions,
    commands: &Receiver<Command>,
    answers: &Sender<Answer>,
) {
    // Nobody listens if the engine is gone.
    let end = |error| drop(answers.send(Answer { rank, outcome: Err(error), view: None, is_last: true }));
    let new = || RankEngine::new(model, tokenizer, options);
    let mut engine = match panic::catch_unwind(AssertUnwindSafe(new)).unwrap_or_else(panicked) {
        Ok(engine) => engine,
        // The others have not begun to wait for this one.
        Err(error) => return end(error),
    };
    let serve = || serve(rank, &mut engine, commands, answers);
    if let Err(error) = panic::catch_unwind(AssertUnwindSafe(serve)).or_else(panicked) {
        model.parallel().leave(&error.to_string());
        end(error);
    }
}

/// Does what it is told, also after a step that failed: requests can be cancelled then.
fn serve(rank: usize, engine: &mut RankEngine<'_>, commands: &Receiver<Command>, answers: &Sender<Answer>) {
    // A stream that is dropped would cancel its request, on this rank alone.
    let mut streams = HashMap::new();
    let answer = |engine: &RankEngine<'_>, outcome| {
        let view = || View { running: engine.running(), waiting: engine.waiting(), stats: engine.stats() };
        let view = (rank == 0).then(view);
        let _ = answers.send(Answer { rank, outcome, view, is_last: false });
    };
    answer(engine, Ok(Done::Ready));
    for command in commands {
        let outcome = match command {
            Command::Submit(request) => engine.submit(*request).map(|stream| match rank {
                0 => Done::Submitted(Some(stream)),
                _ => {
                    streams.insert(stream.id(), stream);
                    Done::Submitted(None)
                }
            }),
            Command::Cancel(id) => engine.cancel(id).map(Done::Cancelled),
            Command::Step => {
                let stepped = engine.step().inspect_err(|error| engine.leave(&error.to_string()));
                streams.retain(|_, stream| !is_finished(stream));
                stepped.map(|more| Done::Stepped(more, engine.sampled()))
            }
            Command::ResetPrefixCache => engine.reset_prefix_cache().map(|()| Done::Reset),
            Command::ResetLatency => {
                engine.reset_latency();
                Ok(Done::Reset)
            }
        };
        answer(engine, outcome);
    }
}

/// Whether a stream is at its end; what it had to say is forgotten.
fn is_finished(stream: &mut RequestStream) -> bool {
    while let Some(event) = stream.try_next() {
        if matches!(event, StreamEvent::Finished(_)) {
            return true;
        }
    }
    false
}
