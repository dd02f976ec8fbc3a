//! Conversations: messages from the command line, from a file or typed at a terminal, and their answers.

use std::io::{self, BufRead, IsTerminal, Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use burn_mla::model::{
    ChatTemplate, Completion, DeepseekModel, Engine, EngineOptions, FinishReason, GenerationRequest, Message,
    ModelConfig, ModelError, Role, SamplingParams, StreamEvent, Tokenizer, compile_ranks_ahead, read_conversation,
};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::common::{self, fail, note, print};
use crate::options::{EngineArgs, ModelArgs, TextArgs, by_option};

/// Exit code after Ctrl-C, as shells have it.
const INTERRUPTED: i32 = 130;
/// Bytes of a line that is typed.
const MOST: u64 = 1 << 20;

/// What belongs to a conversation.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// Answer a conversation, with the checkpoint's chat template: --user and --assistant, or --conversation, or typed at a terminal
    /// (Ctrl-D or /exit ends it).
    #[arg(long, conflicts_with_all = ["prompt", "prompt_file", "json", "describe", "dry_run", "random_weights"])]
    pub chat: bool,
    #[command(flatten)]
    turns: Turns,
    /// A JSON file: a list of {"role": "system", "user" or "assistant", "content": TEXT}, or an object whose field "messages" it is.
    #[arg(long, value_name = "FILE", requires = "chat", conflicts_with_all = ["system", "user", "assistant"])]
    conversation: Option<PathBuf>,
    /// Have the model think before it answers, where the chat template leaves the choice.
    #[arg(long, requires = "chat")]
    thinking: bool,
}

/// Messages of options, in their order. A derived struct would have lost it.
#[derive(Debug)]
struct Turns(Vec<Message>);

const TURNS: [(&str, Role, &str); 3] = [
    ("system", Role::System, "What holds for the whole conversation"),
    ("user", Role::User, "What the user says; may be given several times, with --assistant between"),
    ("assistant", Role::Assistant, "What the assistant has answered"),
];

impl Args for Turns {
    fn augment_args(command: Command) -> Command {
        command.args(TURNS.map(|(name, role, help)| {
            let action = if role == Role::System { ArgAction::Set } else { ArgAction::Append };
            Arg::new(name).long(name).value_name("TEXT").requires("chat").action(action).help(help)
        }))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Turns {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut turns = Vec::new();
        for (name, role, _) in TURNS {
            let places = matches.indices_of(name).into_iter().flatten();
            // The system speaks first, wherever its option is.
            let places = places.map(|place| if role == Role::System { 0 } else { place });
            let texts = matches.get_many::<String>(name).into_iter().flatten();
            turns.extend(places.zip(texts).map(|(place, text)| (place, Message::of(role, text))));
        }
        turns.sort_by_key(|(place, _)| *place);
        Ok(Self(turns.into_iter().map(|(_, message)| message).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The other options that a conversation needs.
pub struct Options<'a> {
    pub model: &'a ModelArgs,
    pub engine: &'a EngineArgs,
    pub text: &'a TextArgs,
    pub cache_pages: Option<usize>,
    /// How tokens are drawn.
    pub sampling: &'a dyn Fn(&DeepseekModel) -> SamplingParams,
}

/// Answers the conversation, or converses.
pub fn run(args: &ChatArgs, options: &Options<'_>) -> Result<ExitCode, String> {
    exit_when_interrupted()?;
    let show = |error: ModelError| by_option(&error);
    let messages = match &args.conversation {
        Some(path) => read_conversation(path).map_err(show)?,
        None => args.turns.0.clone(),
    };
    let typed = args.conversation.is_none() && messages.iter().all(|message| message.role == Role::System);
    if typed && !io::stdin().is_terminal() {
        return Err(
            "--chat has nothing to answer: give --user TEXT or --conversation FILE, or run it at a terminal".into()
        );
    }
    let dir = options.model.dir();
    let config = ModelConfig::read(dir).map_err(show)?;
    let tokenizer = Tokenizer::load(dir).map_err(show)?;
    let mut template = ChatTemplate::load(dir, &tokenizer).map_err(show)?;
    if args.thinking {
        template = template.with_thinking(true);
    }
    let devices = options.model.devices()?;
    let engine_options = engine_options(options, options.engine.token_budget(&devices[0]));
    // Whatever is wrong with a conversation is said before the weights are loaded.
    let lengths = match typed {
        true => [engine_options.token_budget, 512, 128].map(|tokens| tokens.min(engine_options.token_budget)).to_vec(),
        false => {
            let prompt = template.prompt(&messages, &tokenizer, config.max_position_embeddings());
            vec![prompt.map_err(show)?.ids.len()]
        }
    };
    compile_ranks_ahead(&config, &devices, options.model.load_as(), &engine_options, &lengths).map_err(show)?;
    let model = common::load(dir, &devices, options.model.load_as()).map_err(show)?;
    let engine_options = match options.cache_pages {
        Some(_) => engine_options,
        None => engine_options.fit_cache(&model).map_err(show)?,
    };
    let mut chat = Chat {
        engine: Engine::new(&model, &tokenizer, engine_options).map_err(show)?,
        tokenizer: &tokenizer,
        template,
        sampling: options.text.sampling(&(options.sampling)(model.first())),
        text: options.text,
        max_positions: model.first().max_positions(),
        messages,
    };
    let code = if typed { chat.converse()? } else { chat.answer()?.map_or_else(fail, |()| ExitCode::SUCCESS) };
    let stats = chat.engine.stats();
    let (prompt, generated, rate) = (stats.prompt_tokens, stats.generated_tokens, stats.decode_rate());
    note(format_args!("{prompt} prompt tokens, {generated} generated, {rate:.0} tokens/s"));
    Ok(code)
}

/// Ctrl-C ends the program at once: what was printed is written.
fn exit_when_interrupted() -> Result<(), String> {
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, INTERRUPTED, Arc::new(AtomicBool::new(true)))
            .map_err(|error| format!("cannot catch Ctrl-C: {error}"))?;
    }
    Ok(())
}

/// One request at a time. With prefix caching the history is computed once.
fn engine_options(options: &Options<'_>, token_budget: usize) -> EngineOptions {
    let default = EngineOptions::default();
    EngineOptions {
        page_size: options.engine.page_size,
        cache_pages: options.cache_pages.unwrap_or(default.cache_pages),
        max_batch: 1,
        token_budget,
        prefix_caching: true,
        graphs: !options.engine.no_graphs,
        ..default
    }
}

struct Chat<'a> {
    engine: Engine<'a>,
    tokenizer: &'a Tokenizer,
    template: ChatTemplate,
    sampling: SamplingParams,
    text: &'a TextArgs,
    max_positions: usize,
    messages: Vec<Message>,
}

impl Chat<'_> {
    /// Answers line by line. A line that cannot be answered is forgotten, what was said before is not.
    fn converse(&mut self) -> Result<ExitCode, String> {
        loop {
            let line = match read_line()? {
                None => return Ok(ExitCode::SUCCESS),
                Some(Err(problem)) => {
                    note(format_args!("error: {problem}"));
                    continue;
                }
                Some(Ok(line)) => line,
            };
            match line.trim() {
                "" => continue,
                "/exit" => return Ok(ExitCode::SUCCESS),
                said => self.messages.push(Message::user(said)),
            }
            if let Err(problem) = self.answer()? {
                self.messages.pop();
                note(format_args!("error: {problem}"));
            }
        }
    }

    /// Streams the answer and adds it to the conversation. Inside: why there is none. Outside: why there is no going on.
    fn answer(&mut self) -> Result<Result<(), String>, String> {
        let prompt = match self.template.prompt(&self.messages, self.tokenizer, self.max_positions) {
            Ok(prompt) => prompt,
            Err(error) => return Ok(Err(by_option(&error))),
        };
        let request = GenerationRequest {
            prompt: prompt.ids.clone(),
            sampling: self.sampling.clone(),
            max_new_tokens: self.text.max_new_tokens,
            stop: self.text.stop.clone(),
        };
        let completion = match self.generate(request)? {
            Ok(completion) => completion,
            Err(problem) => return Ok(Err(problem)),
        };
        print("\n")?;
        match &completion.finish {
            FinishReason::OutOfCache(error) => return Ok(Err(format!("{error}; raise --cache-pages"))),
            FinishReason::Failed(reason) => return Ok(Err(reason.clone())),
            FinishReason::MaxNewTokens => {
                note(format_args!("(cut after {} tokens, --max-new-tokens)", completion.token_ids.len()))
            }
            _ => {}
        }
        self.messages.push(prompt.answer(&completion.text));
        Ok(Ok(()))
    }

    fn generate(&mut self, request: GenerationRequest) -> Result<Result<Completion, String>, String> {
        let mut stream = match self.engine.submit(request) {
            Ok(stream) => stream,
            Err(error) => return Ok(Err(by_option(&error))),
        };
        loop {
            let more = self.engine.step().map_err(|error| error.to_string())?;
            while let Some(event) = stream.try_next() {
                match event {
                    StreamEvent::Text(text) => print(text)?,
                    StreamEvent::Finished(completion) => return Ok(Ok(completion)),
                }
            }
            if !more {
                return Err("the request has ended without an answer".into());
            }
        }
    }
}

/// A line from the terminal, or why it is none; nothing at its end.
fn read_line() -> Result<Option<Result<String, &'static str>>, String> {
    let mut screen = io::stderr().lock();
    let _ = write!(screen, "> ").and_then(|()| screen.flush());
    let mut line = Vec::new();
    let read = io::stdin().lock().take(MOST).read_until(b'\n', &mut line);
    match read.map_err(|error| format!("cannot read from the terminal: {error}"))? {
        0 => {
            // What follows begins on a line of its own.
            note("");
            Ok(None)
        }
        _ => Ok(Some(String::from_utf8(line).map_err(|_| "the line is not UTF-8"))),
    }
}
