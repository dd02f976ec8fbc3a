//! Writes checkpoint folders in the published layout: quantised to FP8 blocks from a folder in bf16 or f32, or random weights.
//!
//!     cargo run --release --example make_checkpoint -- --from assets/demo-v3 --to /tmp/demo-fp8
//!     cargo run --release --example make_checkpoint -- --config config.json --weights-seed 1 --to /tmp/random

mod common;

use std::path::PathBuf;
use std::process::ExitCode;

use burn::tensor::FloatDType;
use burn_mla::model::{ModelError, WeightForm, WeightsFrom, WriteSummary, write_checkpoint};
use clap::{ArgGroup, Parser, ValueEnum};
use common::{Bar, fail};

/// Write a checkpoint folder as DeepSeek publishes it: projections in FP8 blocks, DeepSeek-V4's routed experts in FP4.
#[derive(Debug, Parser)]
#[command(group(ArgGroup::new("source").required(true)))]
struct Args {
    /// Take the weights of this folder. FP8 weights are copied, or dequantised with --dequantized.
    #[arg(long, value_name = "DIR", group = "source")]
    from: Option<PathBuf>,
    /// Initialise weights at random for this configuration file.
    #[arg(long, value_name = "FILE", group = "source")]
    config: Option<PathBuf>,
    /// Seed of the random initialisation.
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "from")]
    weights_seed: u64,
    /// The folder to write: all of it, or nothing.
    #[arg(long, value_name = "DIR")]
    to: PathBuf,
    /// Write dequantised weights instead, in this dtype.
    #[arg(long, value_enum, value_name = "DTYPE")]
    dequantized: Option<Plain>,
    /// Maximum size of a shard in bytes.
    #[arg(long, value_name = "BYTES", default_value_t = 5_000_000_000)]
    shard_bytes: u64,
}

/// dtype of dequantised weights.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Plain {
    F32,
    Bf16,
}

fn main() -> ExitCode {
    let args = match common::parse::<Args>() {
        Ok(args) => args,
        Err(code) => return code,
    };
    let WriteSummary { shards, tensors, bytes } = match write(&args) {
        Ok(summary) => summary,
        Err(error) => return fail(typed(&error)),
    };
    let files = if shards == 1 { "file" } else { "files" };
    match common::print(format_args!("{tensors} tensors, {bytes} bytes, {shards} {files}\n")) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => fail(message),
    }
}

/// The message of an error, with options under the names that were typed.
fn typed(error: &ModelError) -> String {
    let message = error.to_string();
    match error {
        ModelError::Request { argument: "from" | "to", .. } => message.replacen('`', "`--", 1),
        _ => message,
    }
}

fn write(args: &Args) -> Result<WriteSummary, ModelError> {
    let seed = args.weights_seed;
    let from = match (&args.from, &args.config) {
        (Some(dir), _) => WeightsFrom::Folder(dir),
        (None, config) => WeightsFrom::Random { config: config.as_deref().unwrap_or("".as_ref()), seed },
    };
    let form = match args.dequantized {
        None => WeightForm::Quantized,
        Some(Plain::F32) => WeightForm::Dequantized(FloatDType::F32),
        Some(Plain::Bf16) => WeightForm::Dequantized(FloatDType::BF16),
    };
    let bar = Bar::new("writing");
    write_checkpoint(from, &args.to, form, args.shard_bytes, &mut |progress| bar.show(progress))
}
