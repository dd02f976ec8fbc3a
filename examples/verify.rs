//! Compares a checkpoint folder with the results that are stored in it (`expected.safetensors`).
//!
//!     cargo run --release --example verify -- tests/fixtures/v3-tiny

mod common;
#[allow(dead_code)]
#[path = "common/options.rs"]
mod options;

use std::path::PathBuf;
use std::process::ExitCode;

use burn_mla::model::{Comparison, ModelError, VerifyOptions, verify};
use burn_mla::ops::DeviceName;
use clap::Parser;
use common::{DTypeArg, KvCacheArg, WeightsArg, fail};
use options::by_option;

/// Full forward, chunked prefill, cached decode and the ragged batch against stored results; exit code 0 if all agree.
#[derive(Debug, Parser)]
struct Args {
    /// Checkpoint folder with expected.safetensors.
    dir: PathBuf,
    /// flex (CPU), wgpu, cuda or cuda:N; several with commas between them, among which the model is divided.
    #[arg(long, value_name = "DEVICE", value_delimiter = ',', default_value = "flex")]
    device: Vec<DeviceName>,
    /// dtype of weights, activations and KV cache; the tolerances hold for f32.
    #[arg(long, value_enum, default_value_t = DTypeArg::F32)]
    dtype: DTypeArg,
    /// Weights in FP8 or FP4: as they are stored, or dequantised to --dtype.
    #[arg(long, value_enum, default_value_t = WeightsArg::Stored)]
    weights: WeightsArg,
    /// The rows of the KV cache: in --dtype, or latents in FP8 (DeepSeek-V2, V3 and V3.2), for which the tolerances do not hold.
    #[arg(long, value_enum, default_value_t = KvCacheArg::Auto)]
    kv_cache: KvCacheArg,
    /// Tokens per KV cache page, a power of two.
    #[arg(long, value_name = "N", default_value_t = 64)]
    page_size: usize,
}

fn main() -> ExitCode {
    let args = match common::parse::<Args>() {
        Ok(args) => args,
        Err(code) => return code,
    };
    let rows = match compare(&args) {
        Ok(rows) => rows,
        Err(message) => return fail(message),
    };
    match common::print(table(&rows)) {
        // A difference is an answer, not bad input.
        Ok(()) if rows.iter().all(Comparison::passed) => ExitCode::SUCCESS,
        Ok(()) => ExitCode::FAILURE,
        Err(message) => fail(message),
    }
}

fn compare(args: &Args) -> Result<Vec<Comparison>, String> {
    let devices = options::open(&args.device)?;
    let show = |error: ModelError| by_option(&error);
    let model = common::load(&args.dir, &devices, args.weights.of(args.dtype, args.kv_cache)).map_err(show)?;
    let options = VerifyOptions { page_size: args.page_size, ..VerifyOptions::default() };
    verify(&model, &args.dir, &options).map_err(show)
}

fn table(rows: &[Comparison]) -> String {
    let mut text = format!("{:24} {:>10} {:>10} {:>10}\n", "", "max error", "allowed", "greedy");
    for row in rows {
        let greedy = row.greedy.map_or(String::new(), |(agree, of)| format!("{agree}/{of}"));
        let verdict = if row.passed() { "ok" } else { "FAILED" };
        let Comparison { what, max_error, tolerance, .. } = row;
        text += &format!("{what:24} {max_error:10.1e} {tolerance:10.1e} {greedy:>10}  {verdict}\n");
    }
    text
}
