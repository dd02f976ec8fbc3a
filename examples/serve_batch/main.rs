//! Answers prompts from JSON lines with continuous batching; the answers are JSON lines in the order of completion.
//!
//! ```sh
//! echo '{"id": "a", "prompt": "hacker: n."}' | cargo run --release --example serve_batch
//! ```

#[path = "../common/mod.rs"]
mod common;
mod file_id;
mod input;
#[path = "../common/options.rs"]
mod options;
mod output;
mod progress;
mod request;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::tensor::Device;
use burn_mla::model::{
    ChatTemplate, Completion, Engine, EngineOptions, FinishReason, ModelConfig, ModelError, RequestStream,
    SamplingParams, StopStrings, StreamEvent, TokenLogprobs, Tokenizer, compile_ranks_ahead,
};
use clap::Parser;
use common::{fail, note};
use serde::Serialize;
use serde_json::Value;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::input::{Input, Next, Source};
use crate::options::{EngineArgs, ModelArgs, TextArgs, by_option};
use crate::output::Output;
use crate::progress::Progress;
use crate::request::{Defaults, Line, LineError, Reader};

/// Exit code after Ctrl-C, as shells have it.
const INTERRUPTED: u8 = 130;
/// Unfinished requests that are named.
const NAMED: usize = 20;

/// Answer prompts from JSON lines: {"prompt": TEXT}, or {"messages": [{"role": ROLE, "content": TEXT}, ...]} with the checkpoint's chat
/// template, and, if they differ from the options below, "id", "max_new_tokens", "stop",
/// "seed", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", and "logprobs": of each token and of so many most
/// probable ones, at most 20.
#[derive(Debug, Parser)]
struct Args {
    /// File or pipe of prompts, a line of at most 16 MiB each; - is stdin.
    #[arg(default_value = "-")]
    input: PathBuf,
    /// File for the answers, which is emptied, or a pipe that is read; stdout if absent.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    engine: EngineArgs,
    /// Maximum number of running requests.
    #[arg(long, value_name = "N", default_value_t = 16)]
    max_batch: usize,
    /// KV cache pages. If absent as many as the free memory has room for beside the weights and a step, on the CPU at most an eighth
    /// of it and 32768 tokens; never more than --max-batch requests of all positions need.
    #[arg(long, value_name = "N")]
    cache_pages: Option<usize>,
    /// No prefix caching: compute every prompt from its beginning.
    #[arg(long)]
    no_prefix_caching: bool,
    /// Tokens of prompts per forward pass at most where other requests generate in it, of --token-budget: fewer have their readers wait
    /// less, and prompts more.
    #[arg(long, value_name = "N", default_value_t = EngineOptions::default().mixed_prompt_tokens)]
    mixed_prompt_tokens: usize,
    /// Tokens between two snapshots of a request's state, which prefix caching needs for DeepSeek-V4: a multiple of the pages.
    #[arg(long, value_name = "N", default_value_t = EngineOptions::default().snapshot_spacing)]
    snapshot_spacing: usize,
    /// Batch-invariant: an answer depends on no other request, bit for bit. Slower.
    #[arg(long)]
    deterministic: bool,
    #[command(flatten)]
    text: TextArgs,
}

fn main() -> ExitCode {
    let outcome = match common::parse() {
        Ok(args) => run(&args),
        Err(code) => return code,
    };
    outcome.unwrap_or_else(fail)
}

fn run(args: &Args) -> Result<ExitCode, String> {
    let show = |error: ModelError| by_option(&error);
    let defaults = args.defaults();
    defaults.sampling.validate().map_err(show)?;
    StopStrings::new(defaults.stop.clone()).map_err(show)?;
    let source = Source::new(&args.input)?;
    let source_id = source.id();
    output::differs(args.output.as_deref(), source_id)?;
    let devices = args.model.devices()?;
    let options = args.engine_options(&devices[0]);
    let config = ModelConfig::read(args.model.dir()).map_err(show)?;
    compile_ranks_ahead(&config, &devices, args.model.load_as(), &options, &prompt_sizes(&options)).map_err(show)?;
    let model = common::load(args.model.dir(), &devices, args.model.load_as()).map_err(show)?;
    let tokenizer = Tokenizer::load(args.model.dir()).map_err(show)?;
    // Only now it is known what the weights leave.
    let options = if args.cache_pages.is_some() { options } else { options.fit_cache(&model).map_err(show)? };
    let engine = Engine::new(&model, &tokenizer, options).map_err(show)?;
    // Nothing is emptied for a model that does not load; until here Ctrl-C ends the program at once.
    let output = Output::open(args.output.as_deref(), source_id)?;
    let interrupted = catch_interrupts()?;
    let mut batch = Batch {
        engine,
        most_waiting: args.max_batch,
        live: Vec::new(),
        output,
        progress: Progress::new(),
        ids: HashMap::new(),
        lines: 0,
        written: 0,
        faults: 0,
    };
    let chat = ChatTemplate::load(args.model.dir(), &tokenizer).map_err(show);
    let reader = Reader { defaults, tokenizer: tokenizer.clone(), chat, max_positions: model.first().max_positions() };
    let outcome = batch.serve(source.read(reader), &interrupted);
    batch.close(outcome, interrupted.load(Ordering::Relaxed), &args.input)
}

/// Prompts whose kernels are compiled while the model is loaded: of as many tokens as a step takes, and of fewer.
fn prompt_sizes(options: &EngineOptions) -> Vec<usize> {
    [options.token_budget, options.mixed_prompt_tokens, 512, 128, 32]
        .into_iter()
        .filter(|&tokens| tokens <= options.token_budget)
        .collect()
}

impl Args {
    fn defaults(&self) -> Defaults {
        let sampling = self.text.sampling(&SamplingParams::greedy());
        Defaults { sampling, max_new_tokens: self.text.max_new_tokens, stop: self.text.stop.clone() }
    }

    fn engine_options(&self, device: &Device) -> EngineOptions {
        EngineOptions {
            page_size: self.engine.page_size,
            cache_pages: self.cache_pages.unwrap_or_else(|| EngineOptions::default().cache_pages),
            max_batch: self.max_batch,
            token_budget: self.engine.token_budget(device),
            mixed_prompt_tokens: self.mixed_prompt_tokens,
            prefix_caching: !self.no_prefix_caching,
            snapshot_spacing: self.snapshot_spacing,
            deterministic: self.deterministic,
            graphs: !self.engine.no_graphs,
        }
    }
}

/// Ctrl-C (and SIGTERM) ends the batch after the step that runs; a second one ends the program.
fn catch_interrupts() -> Result<Arc<AtomicBool>, String> {
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first signal finds the flag unset.
        flag::register_conditional_shutdown(signal, INTERRUPTED.into(), interrupted.clone())
            .and_then(|_| flag::register(signal, interrupted.clone()))
            .map_err(|error| format!("cannot catch Ctrl-C: {error}"))?;
    }
    Ok(interrupted)
}

/// Requests on their way from the input to the output.
struct Batch<'a> {
    engine: Engine<'a>,
    most_waiting: usize,
    live: Vec<Live>,
    output: Output,
    progress: Progress,
    /// The line of each id that names an answer, by its JSON.
    ids: HashMap<String, usize>,
    /// Lines that were taken.
    lines: usize,
    /// Completions.
    written: usize,
    /// Lines that were no requests, and requests that ended too early.
    faults: usize,
}

/// A request without an answer.
struct Live {
    line: usize,
    id: Value,
    prompt_tokens: usize,
    stream: RequestStream,
}

/// A line of the output.
#[derive(Serialize)]
struct Answer<'a> {
    id: &'a Value,
    text: &'a str,
    finish_reason: &'static str,
    prompt_tokens: usize,
    completion_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<TokenAnswer>>,
}

/// A token, and the logarithm of its probability.
#[derive(Serialize)]
struct TokenAnswer {
    token_id: u32,
    logprob: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    top: Option<Vec<TokenAnswer>>,
}

/// Those of a completion's tokens, if they were asked for.
fn logprobs(completion: &Completion) -> Option<Vec<TokenAnswer>> {
    if completion.logprobs.is_empty() {
        return None;
    }
    let of = |(&token_id, all): (&u32, &TokenLogprobs)| {
        let top = all.top.iter().map(|&(token_id, logprob)| TokenAnswer { token_id, logprob, top: None });
        TokenAnswer { token_id, logprob: all.logprob, top: Some(top.collect()) }
    };
    Some(completion.token_ids.iter().zip(&completion.logprobs).map(of).collect())
}

impl Batch<'_> {
    /// Until the input ends or Ctrl-C. If the input cannot be read to its end, what was read is answered first.
    fn serve(&mut self, mut input: Input, interrupted: &AtomicBool) -> Result<(), String> {
        let mut end = None;
        while !interrupted.load(Ordering::Relaxed) {
            if end.is_none() {
                end = self.read(&mut input, interrupted);
            }
            if self.live.is_empty() && end.is_some() {
                break;
            }
            let stepped = self.engine.step().map_err(|error| error.to_string());
            // A step that fails may have ended requests before.
            self.deliver()?;
            stepped?;
            self.progress.show(&self.engine, self.written);
        }
        end.unwrap_or(Ok(()))
    }

    /// Takes lines until enough requests wait; how the input has ended, if it has.
    fn read(&mut self, input: &mut Input, interrupted: &AtomicBool) -> Option<Result<(), String>> {
        // Lines that are no requests count too: others must not wait for them.
        for _ in 0..self.most_waiting {
            if self.engine.waiting() >= self.most_waiting || interrupted.load(Ordering::Relaxed) {
                break;
            }
            match input.next(self.live.is_empty()) {
                Next::Line(number, line) => self.take(number, *line),
                Next::Pending => break,
                Next::End => return Some(Ok(())),
                Next::Failed(error) => return Some(Err(error)),
            }
        }
        None
    }

    /// A line that is no request is reported; the others go on.
    fn take(&mut self, number: usize, line: Result<Line, LineError>) {
        self.lines += 1;
        match line.and_then(|line| self.submit(number, line)) {
            Ok(live) => self.live.push(live),
            Err(error) => self.fault(&format!("line {number}: {error}")),
        }
    }

    fn submit(&mut self, number: usize, Line { id, request }: Line) -> Result<Live, LineError> {
        let name = id.to_string();
        if let Some(&line) = self.ids.get(&name) {
            return Err(LineError::IdInUse { line });
        }
        let prompt_tokens = request.prompt.len();
        let stream = self.engine.submit(request).map_err(LineError::Refused)?;
        self.ids.insert(name, number);
        Ok(Live { line: number, id, prompt_tokens, stream })
    }

    fn fault(&mut self, message: &str) {
        self.faults += 1;
        self.progress.suspend(|| note(format_args!("error: {message}")));
    }

    /// Writes what has become complete.
    fn deliver(&mut self) -> Result<(), String> {
        let mut index = 0;
        while index < self.live.len() {
            let mut finished = None;
            while let Some(event) = self.live[index].stream.try_next() {
                if let StreamEvent::Finished(completion) = event {
                    finished = Some(completion);
                }
            }
            match finished {
                None => index += 1,
                Some(completion) => self.write(index, &completion)?,
            }
        }
        Ok(())
    }

    /// The request is live until its answer is written.
    fn write(&mut self, index: usize, completion: &Completion) -> Result<(), String> {
        let Live { line, id, prompt_tokens, .. } = &self.live[index];
        let answer = Answer {
            id,
            text: &completion.text,
            finish_reason: completion.finish.name(),
            prompt_tokens: *prompt_tokens,
            completion_tokens: completion.token_ids.len(),
            logprobs: logprobs(completion),
        };
        let line = *line;
        let answer = serde_json::to_string(&answer).map_err(|error| error.to_string())?;
        self.progress.suspend(|| self.output.line(answer))?;
        self.live.remove(index);
        self.written += 1;
        let done = completion.token_ids.len();
        match &completion.finish {
            FinishReason::OutOfCache(error) => {
                self.fault(&format!("line {line} ended after {done} tokens: {error}; raise --cache-pages"));
            }
            FinishReason::Failed(reason) => self.fault(&format!("line {line} ended after {done} tokens: {reason}")),
            _ => {}
        }
        Ok(())
    }

    /// Reports what was done, and what was not.
    fn close(self, outcome: Result<(), String>, interrupted: bool, input: &Path) -> Result<ExitCode, String> {
        self.progress.clear();
        let (written, unfinished) = (self.written, unfinished(&self.live));
        // In any case: what is written is to stay.
        let closed = self.output.close();
        if let Err(error) = outcome.and(closed) {
            return Err(format!("{error}; {written} completions are written{unfinished}"));
        }
        self.progress.report(&self.engine, written);
        if interrupted {
            let input = input.display();
            note(format_args!(
                "interrupted: {written} completions are written{unfinished}; later lines of {input} are not read"
            ));
            return Ok(ExitCode::from(INTERRUPTED));
        }
        match self.faults {
            0 => Ok(ExitCode::SUCCESS),
            faults => Ok(fail(format!("{faults} of {} lines have no complete answer, see above", self.lines))),
        }
    }
}

/// Which requests have no answer.
fn unfinished(live: &[Live]) -> String {
    if live.is_empty() {
        return String::new();
    }
    let mut names: Vec<String> =
        live.iter().take(NAMED).map(|live| format!("line {} ({})", live.line, live.id)).collect();
    if live.len() > NAMED {
        names.push(format!("{} more", live.len() - NAMED));
    }
    format!(", {} requests are not finished: {}", live.len(), names.join(", "))
}
