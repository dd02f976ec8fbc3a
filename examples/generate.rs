//! Generates text with a DeepSeek checkpoint. Without arguments: the demo checkpoint of this repository, on the CPU.
//!
//!     cargo run --release --example generate -- --prompt "kluge: /klooj/" --max-new-tokens 100

#[path = "common/chat.rs"]
mod chat;
mod common;
#[path = "common/dry_run.rs"]
mod dry_run;
#[path = "common/options.rs"]
mod options;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn::tensor::Device;
use burn_mla::model::{
    Completion, DeepseekModel, EngineOptions, EngineStats, FinishReason, GenerationOptions, GenerationRequest,
    Inspection, LayerSummary, LoadAs, ModelConfig, ModelError, ModelRanks, PrefixSupport, SamplingParams, Tokenizer,
    compile_ranks_ahead, generate, weight_sizes,
};
use burn_mla::ops::DeviceName;
use chat::ChatArgs;
use clap::Parser;
use common::{Bar, fail, note, print, read_text};
use options::{EngineArgs, ModelArgs, TextArgs, by_option};

const DEMO_PROMPT: &str = "hacker: n.";

/// Generate text with a DeepSeek-V4, V3.2, V3 or V2-Lite checkpoint.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    engine: EngineArgs,
    /// A prompt; may be given several times.
    #[arg(long, value_name = "TEXT", conflicts_with = "prompt_file")]
    prompt: Vec<String>,
    /// A file (no pipe) whose whole text is the prompt.
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Sample as the checkpoint's generation_config.json says; greedy if absent.
    #[arg(long)]
    sample: bool,
    #[command(flatten)]
    text: TextArgs,
    /// Maximum number of KV cache pages; never more than the prompts need. If absent, no more than a GPU's memory has room for.
    #[arg(long, value_name = "N")]
    cache_pages: Option<usize>,
    /// Print one JSON object at the end instead of the text.
    #[arg(long)]
    json: bool,
    /// Print the layers and the KV cache bytes of each, and those of the longest request, from the config alone, and exit.
    #[arg(long)]
    describe: bool,
    /// Compare the folder's files with what the model needs, print tensors and memory, and exit. Loads nothing.
    #[arg(long, conflicts_with = "random_weights")]
    dry_run: bool,
    /// Initialise weights at random on the device, for this configuration file. Without a tokenizer.json beside it, bytes are
    /// tokens.
    #[arg(long, value_name = "CONFIG", conflicts_with_all = ["model", "demo"])]
    random_weights: Option<PathBuf>,
    /// Only the first N layers.
    #[arg(long, value_name = "N", requires = "random_weights")]
    layers: Option<usize>,
    /// Seed of the random initialisation.
    #[arg(long, value_name = "N", default_value_t = 0, requires = "random_weights")]
    weights_seed: u64,
    #[command(flatten)]
    chat: ChatArgs,
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
    let dir = args.model.dir();
    if args.describe {
        let config = match &args.random_weights {
            Some(path) => random_config(path, args.layers),
            None => ModelConfig::read(dir),
        };
        print(describe(&config.map_err(show)?, args.model.load_as()))?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.chat.chat {
        let options = chat::Options {
            model: &args.model,
            engine: &args.engine,
            text: &args.text,
            cache_pages: args.cache_pages,
            sampling: &|model| recommended(args, model),
        };
        return chat::run(&args.chat, &options);
    }
    let prompts = prompts(args)?;
    if args.dry_run {
        return dry_run(args, dir, &prompts);
    }
    let devices = args.model.devices()?;
    let (config, tokenizer) = match &args.random_weights {
        Some(path) => random_config(path, args.layers).and_then(|config| Ok((config, tokenizer_beside(path)?))),
        None => ModelConfig::read(dir).and_then(|config| Ok((config, Tokenizer::load(dir)?))),
    }
    .map_err(show)?;
    compile_kernels(args, &config, &tokenizer, &prompts, &devices).map_err(show)?;
    let model = match &args.random_weights {
        Some(_) => random(&config, args, &devices),
        None => common::load(dir, &devices, args.model.load_as()),
    }
    .map_err(show)?;
    let requests = requests(args, &prompts, model.first(), &tokenizer).map_err(show)?;
    let options = GenerationOptions {
        page_size: args.engine.page_size,
        cache_pages: args.cache_pages,
        token_budget: args.engine.token_budget(&devices[0]),
        graphs: !args.engine.no_graphs,
    };

    let stream = !args.json;
    let mut title = Some(heading(0, &prompts)).filter(|_| stream && prompts.len() > 1);
    let (completions, stats) = generate(&model, &tokenizer, &requests, &options, &mut |request, text| {
        // Two texts cannot stream at once: the first does, the others follow when they are complete.
        if stream
            && request == 0
            && let Err(message) = print(title.take().unwrap_or_default() + text)
        {
            // Nobody reads what is still to come.
            fail(message);
            std::process::exit(common::BAD_INPUT.into());
        }
    })
    .map_err(show)?;

    if args.json {
        print(format_args!("{}\n", json(&prompts, &completions, &stats)))?;
    } else {
        print(title.unwrap_or_default() + "\n")?;
        for (request, completion) in completions.iter().enumerate().skip(1) {
            print(format_args!("{}{}\n", heading(request, &prompts), completion.text))?;
        }
    }
    note(report(model.first(), args, &requests, &stats));
    Ok(outcome(&completions))
}

/// The configuration of a model with random weights.
fn random_config(path: &Path, layers: Option<usize>) -> Result<ModelConfig, ModelError> {
    let config = ModelConfig::read_file(path)?;
    layers.map_or(Ok(config.clone()), |layers| config.with_layers(layers))
}

/// The tokenizer beside a configuration, or bytes as tokens.
fn tokenizer_beside(path: &Path) -> Result<Tokenizer, ModelError> {
    let dir = path.parent().unwrap_or(Path::new(""));
    if dir.join("tokenizer.json").exists() { Tokenizer::load(dir) } else { Tokenizer::bytes() }
}

/// A model with random weights.
fn random(config: &ModelConfig, args: &Args, devices: &[Device]) -> Result<ModelRanks, ModelError> {
    let bar = Bar::new("initialising");
    let (seed, load_as) = (args.weights_seed, args.model.load_as());
    ModelRanks::random(config, seed, devices, load_as, &mut |step| bar.show(step))
}

/// Has the kernels compiled that these prompts need, while the weights are loaded.
fn compile_kernels(
    args: &Args,
    config: &ModelConfig,
    tokenizer: &Tokenizer,
    prompts: &[String],
    devices: &[Device],
) -> Result<(), ModelError> {
    let most = config.max_position_embeddings();
    let lengths = prompts.iter().map(|prompt| Ok(tokenizer.encode_at_most(prompt, true, most)?.len()));
    let lengths = lengths.collect::<Result<Vec<usize>, ModelError>>()?;
    let options = EngineOptions {
        page_size: args.engine.page_size,
        max_batch: prompts.len(),
        token_budget: args.engine.token_budget(&devices[0]),
        prefix_caching: false,
        graphs: !args.engine.no_graphs,
        ..EngineOptions::default()
    };
    compile_ranks_ahead(config, devices, args.model.load_as(), &options, &lengths)
}

/// Prints what the folder has and what the model needs; everything that is wrong with it goes to stderr.
fn dry_run(args: &Args, dir: &Path, prompts: &[String]) -> Result<ExitCode, String> {
    let show = |error: ModelError| by_option(&error);
    let ranks = args.model.device.len();
    let inspection = Inspection::of_ranks(dir, args.model.load_as(), ranks).map_err(show)?;
    // Without a tokenizer no prompt has more tokens than bytes.
    let (tokenizer, no_tokenizer) = match Tokenizer::load(dir) {
        Ok(tokenizer) => (tokenizer, None),
        Err(error) => (Tokenizer::bytes().map_err(show)?, Some(error.to_string())),
    };
    let most = inspection.config.max_position_embeddings();
    let tokens = |text: &String| {
        let prompt = tokenizer.encode_at_most(text, true, most)?.len();
        Ok::<_, ModelError>(prompt.saturating_add(args.text.max_new_tokens).min(most))
    };
    let tokens = prompts.iter().map(tokens).collect::<Result<Vec<usize>, _>>().map_err(show)?;
    let graphs = !args.engine.no_graphs && !args.model.device.contains(&DeviceName::Flex);
    let cuda = args.model.device.iter().any(|name| matches!(name, DeviceName::Cuda(_)));
    let needs = dry_run::Needs { tokens, page_size: args.engine.page_size, graphs, cuda, ranks };
    print(
        dry_run::table(&inspection, args.model.load_as(), &needs, dry_run::least_memory(&args.model.device))
            .map_err(show)?,
    )?;
    let problems: Vec<String> = dry_run::problems(&inspection).into_iter().chain(no_tokenizer).collect();
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { fail(problems.join("\n")) })
}

/// The layer schedule, layers that follow one another and are alike in one line; what a request needs, and what the weights take.
fn describe(config: &ModelConfig, load_as: LoadAs) -> String {
    let layers = config.layers(load_as);
    let mut lines = format!(
        "{:<8}{:<36}{:<14}{:>12}{:>15}\n",
        "layer", "attention", "feed-forward", "bytes/token", "bytes/request"
    );
    let mut first = 0;
    for alike in layers.chunk_by(|a, b| a == b) {
        let last = first + alike.len() - 1;
        let numbers = if first == last { first.to_string() } else { format!("{first}-{last}") };
        let LayerSummary { attention, mlp, bytes_per_token, bytes_per_request } = &alike[0];
        lines += &format!("{numbers:<8}{attention:<36}{mlp:<14}{bytes_per_token:>12}{bytes_per_request:>15}\n");
        first = last + 1;
    }
    let sum = |value: fn(&LayerSummary) -> usize| layers.iter().map(value).sum::<usize>();
    let (per_token, per_request) = (sum(|layer| layer.bytes_per_token), sum(|layer| layer.bytes_per_request));
    lines += &format!("{:<58}{per_token:>12}{per_request:>15}\n", format!("{} layers", layers.len()));
    let positions = config.max_position_embeddings();
    let longest = (per_token as u128).saturating_mul(positions as u128).saturating_add(per_request as u128);
    lines += &format!("a request of {positions} tokens, the most there are: {longest} bytes\n");
    lines += &match config.prefix_support(load_as.dtype) {
        PrefixSupport::Pages => "prefix caching: by whole pages\n".to_string(),
        PrefixSupport::Snapshots { bytes } => format!("prefix caching: up to a snapshot, of {bytes} bytes each\n"),
    };
    let weights: u64 = weight_sizes(config, load_as).iter().map(|(_, bytes)| bytes).sum();
    lines + &format!("weights: {weights} bytes on the device\n")
}

/// The texts to continue.
fn prompts(args: &Args) -> Result<Vec<String>, String> {
    if let Some(path) = &args.prompt_file {
        return Ok(vec![read_text(path)?]);
    }
    let prompts = if args.prompt.is_empty() { vec![DEMO_PROMPT.to_string()] } else { args.prompt.clone() };
    Ok(prompts)
}

/// How tokens are drawn where no option says so.
fn recommended(args: &Args, model: &DeepseekModel) -> SamplingParams {
    let defaults = model.generation_defaults();
    let recommended = args.sample && defaults.do_sample;
    SamplingParams {
        temperature: match (args.sample, defaults.temperature) {
            (true, Some(temperature)) if recommended => temperature,
            (true, _) => 1.0,
            (false, _) => 0.0,
        },
        top_k: defaults.top_k.filter(|_| recommended),
        top_p: defaults.top_p.filter(|_| recommended).unwrap_or(1.0),
        ..SamplingParams::greedy()
    }
}

fn requests(
    args: &Args,
    prompts: &[String],
    model: &DeepseekModel,
    tokenizer: &Tokenizer,
) -> Result<Vec<GenerationRequest>, ModelError> {
    let sampling = args.text.sampling(&recommended(args, model));
    let request = |text: &String| {
        if text.is_empty() {
            let expected = "some text to continue".to_string();
            return Err(ModelError::Request { argument: "prompt", actual: "empty".into(), expected });
        }
        Ok(GenerationRequest {
            prompt: tokenizer.encode_at_most(text, true, model.max_positions())?,
            sampling: sampling.clone(),
            max_new_tokens: args.text.max_new_tokens,
            stop: args.text.stop.clone(),
        })
    };
    prompts.iter().map(request).collect()
}

fn heading(request: usize, prompts: &[String]) -> String {
    format!("== {}: {}\n", request + 1, prompts[request])
}

/// Success, unless the cache was too small for a request.
fn outcome(completions: &[Completion]) -> ExitCode {
    let mut code = ExitCode::SUCCESS;
    for (request, completion) in completions.iter().enumerate() {
        let why = match &completion.finish {
            FinishReason::OutOfCache(error) => format!("{error}; raise --cache-pages"),
            FinishReason::Failed(reason) => reason.clone(),
            _ => continue,
        };
        let done = completion.token_ids.len();
        code = fail(format!("prompt {} ended after {done} tokens: {why}", request + 1));
    }
    code
}

/// Counts and speeds.
fn report(model: &DeepseekModel, args: &Args, requests: &[GenerationRequest], stats: &EngineStats) -> String {
    // A terminal has the text as well.
    let mut text = if std::io::stderr().is_terminal() { "\n".to_string() } else { String::new() };
    let mut line = |name: &str, value: String| text.push_str(&format!("{name:<21}{value}\n"));
    line("prompt tokens", stats.prompt_tokens.to_string());
    line("generated tokens", stats.generated_tokens.to_string());
    if let Some(time) = stats.time_to_first_token {
        line("time to first token", format!("{:.1} ms", time.as_secs_f64() * 1e3));
    }
    let prefill_ms = stats.prefill_time.as_secs_f64() * 1e3;
    line("prefill", format!("{prefill_ms:.1} ms, {:.0} tokens/s", stats.prefill_rate()));
    line("decode", format!("{:.0} tokens/s", stats.decode_rate()));
    if let (Some(p50), Some(p99)) = (stats.inter_token_p50, stats.inter_token_p99) {
        let [p50, p99] = [p50, p99].map(|time| time.as_secs_f64() * 1e3);
        line("inter-token latency", format!("{p50:.1} ms (p50), {p99:.1} ms (p99)"));
    }
    if stats.ranks > 1 {
        line("devices", format!("{}, {}", stats.ranks, model.parallel().describe()));
    }
    line("graphs", stats.graphs_in_words());
    let (per_token, peak) = (stats.cache_bytes_per_token, stats.cache_bytes_peak);
    line("KV cache", format!("{} pages, {per_token} bytes/token, peak {peak} bytes", stats.pages));
    line("attention", model.attention_path(requests.len(), args.engine.page_size).to_string());
    text.truncate(text.trim_end().len());
    text
}

fn json(prompts: &[String], completions: &[Completion], stats: &EngineStats) -> serde_json::Value {
    let one = |(prompt, completion): (&String, &Completion)| {
        serde_json::json!({
            "prompt": prompt,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish.name(),
        })
    };
    serde_json::json!({
        "completions": prompts.iter().zip(completions).map(one).collect::<Vec<_>>(),
        "prompt_tokens": stats.prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "time_to_first_token_ms": stats.time_to_first_token.map(|time| time.as_secs_f64() * 1e3),
        "prefill_ms": stats.prefill_time.as_secs_f64() * 1e3,
        "prefill_tokens_per_s": stats.prefill_rate(),
        "decode_tokens": stats.decode_tokens,
        "decode_ms": stats.decode_time.as_secs_f64() * 1e3,
        "decode_tokens_per_s": stats.decode_rate(),
        "inter_token_p50_ms": stats.inter_token_p50.map(|time| time.as_secs_f64() * 1e3),
        "inter_token_p99_ms": stats.inter_token_p99.map(|time| time.as_secs_f64() * 1e3),
        "ranks": stats.ranks,
        "graphs": stats.graphs.to_string(),
        "graph_steps": stats.graph_steps,
        "uncaptured_sizes": stats.uncaptured_sizes,
        "cache_bytes_per_token": stats.cache_bytes_per_token,
        "cache_bytes_peak": stats.cache_bytes_peak,
    })
}
