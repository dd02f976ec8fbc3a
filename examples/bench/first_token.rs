//! Time to first token in a fresh process: nothing is compiled, tuned or allocated but by the prompt itself.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Instant;

use burn::tensor::FloatDType;
use burn_mla::model::{DeepseekModel, Engine, EngineOptions, Tokenizer, compile_ahead};
use burn_mla::ops::compiled_kernels;
use serde_json::json;

use crate::args::Args;
use crate::cases::Bench;
use crate::common::note;
use crate::models::{self, ModelCase, show};
use crate::report::rounded;
use crate::{data, prefill};

const PROMPT: usize = 2048;
const PAGE: usize = 64;
/// What the other process writes when it has come so far.
const MARKS: [&str; 4] = ["device", "kernels", "weights", "token"];

/// The section: this program once more, as [`child`].
pub fn run(bench: &mut Bench, model: &ModelCase) {
    bench.case(&format!("ttft {}", model.name), |bench| {
        let marks = marks()?;
        let [device, kernels, weights, token] = marks;
        let shape = [("model", json!(model.name)), ("context", json!(PROMPT))];
        let numbers = [
            ("ms", rounded(token, 1)),
            ("ms_from_device", rounded(token - device, 1)),
            ("ms_asking", rounded(kernels - device, 1)),
            ("ms_loading", rounded(weights - kernels, 1)),
            ("ms_from_weights", rounded(token - weights, 1)),
        ];
        bench.report.rate("e2e_ttft", &shape, &numbers);
        Ok(())
    });
}

/// Milliseconds from the start of the other process to each of its marks.
fn marks() -> Result<[f64; 4], String> {
    let program = std::env::current_exe().map_err(show)?;
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).arg("--ttft-child").stdout(Stdio::piped());
    let start = Instant::now();
    let mut process = command.spawn().map_err(show)?;
    let lines = BufReader::new(process.stdout.take().ok_or("the process has no output")?).lines();
    let mut at = [None; 4];
    for line in lines.map_while(Result::ok) {
        if let Some(mark) = MARKS.iter().position(|mark| *mark == line) {
            at[mark] = Some(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    let status = process.wait().map_err(show)?;
    match at {
        [Some(device), Some(kernels), Some(weights), Some(token)] if status.success() => {
            Ok([device, kernels, weights, token])
        }
        _ => Err(format!("the other process ended before its token: {status}")),
    }
}

/// The other process: loads the model and computes one prompt.
pub fn child(args: &Args) -> Result<(), String> {
    let device = args.devices()?.swap_remove(0);
    device.sync().map_err(show)?;
    mark(0)?;
    let case = args.random().as_ref().map_or_else(|| Ok(models::v2_lite()), ModelCase::read)?;
    let dtype = FloatDType::from(args.dtype);
    let options = EngineOptions {
        page_size: PAGE,
        cache_pages: (PROMPT + 1).div_ceil(PAGE),
        max_batch: 1,
        token_budget: PROMPT,
        mixed_prompt_tokens: PROMPT,
        prefix_caching: false,
        snapshot_spacing: 1024,
        deterministic: false,
        graphs: false,
    };
    let config = case.config(false)?;
    compile_ahead(&config, &device, dtype, &options, &[PROMPT]).map_err(show)?;
    mark(1)?;
    let model =
        DeepseekModel::random(config, models::init(args.weights_seed), &device, dtype, &mut |_| {}).map_err(show)?;
    device.sync().map_err(show)?;
    mark(2)?;
    let tokenizer = Tokenizer::bytes().map_err(show)?;
    let mut engine = Engine::new(&model, &tokenizer, options).map_err(show)?;
    let request = prefill::request(PROMPT, model.vocab_size(), &mut data::rng(PROMPT as u64));
    let _stream = engine.submit(request).map_err(show)?;
    while engine.step().map_err(show)? {}
    match engine.stats().generated_tokens {
        1 => {
            let kernels = compiled_kernels();
            note(format_args!("{} kernels compiled, {} from the disk", kernels.compiled, kernels.from_disk));
            mark(3)
        }
        tokens => Err(format!("the prompt gave {tokens} tokens")),
    }
}

/// Tells the other process how far this one is.
fn mark(number: usize) -> Result<(), String> {
    let mut out = std::io::stdout();
    writeln!(out, "{}", MARKS[number]).and_then(|()| out.flush()).map_err(show)
}
