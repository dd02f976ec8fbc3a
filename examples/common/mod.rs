//! What the example programs share: choosing a dtype, loading with a progress bar, reading and printing, and exit codes.

use std::fmt;
use std::io::{self, IsTerminal, Read, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use burn::tensor::{Device, FloatDType};
use burn_mla::model::{KvCacheFormat, LoadAs, LoadProgress, ModelError, ModelRanks, WeightStorage};
use clap::{Parser, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};

// A forward pass on the CPU allocates every intermediate tensor. glibc returns the memory to the system each time and
// spends a fifth of a prefill on getting it back; mimalloc keeps it.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// dtype of weights, activations and KV cache.
#[allow(dead_code)]
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum DTypeArg {
    F32,
    F16,
    Bf16,
}

impl From<DTypeArg> for FloatDType {
    fn from(dtype: DTypeArg) -> Self {
        match dtype {
            DTypeArg::F32 => FloatDType::F32,
            DTypeArg::F16 => FloatDType::F16,
            DTypeArg::Bf16 => FloatDType::BF16,
        }
    }
}

/// What becomes of weights that are stored in blocks of codes (FP8, FP4).
#[allow(dead_code)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WeightsArg {
    /// They stay so, and take as much memory as in the files.
    Stored,
    /// They are dequantised to --dtype.
    Dense,
}

/// How the KV cache stores its rows.
#[allow(dead_code)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KvCacheArg {
    /// In --dtype.
    Auto,
    /// Latents in FP8 with a scale for every 128 channels, rotary channels in bf16: half of the memory of bf16.
    Fp8,
}

impl From<KvCacheArg> for KvCacheFormat {
    fn from(format: KvCacheArg) -> Self {
        match format {
            KvCacheArg::Auto => Self::Auto,
            KvCacheArg::Fp8 => Self::Fp8,
        }
    }
}

impl WeightsArg {
    /// Weights of this dtype, stored so, and such a cache.
    #[allow(dead_code)]
    pub fn of(self, dtype: DTypeArg, kv_cache: KvCacheArg) -> LoadAs {
        let storage = match self {
            Self::Stored => WeightStorage::Stored,
            Self::Dense => WeightStorage::Dense,
        };
        LoadAs { dtype: dtype.into(), storage, kv_cache: kv_cache.into() }
    }
}

/// How far weights are, with bytes and rate; shown on a terminal only.
pub struct Bar(ProgressBar);

impl Bar {
    /// A bar for what `doing` says.
    pub fn new(doing: &'static str) -> Self {
        let bar = if std::io::stderr().is_terminal() { ProgressBar::new(0) } else { ProgressBar::hidden() };
        let template = "{prefix} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {wide_msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_prefix(doing);
        Self(bar)
    }

    /// Moves it.
    pub fn show(&self, progress: LoadProgress<'_>) {
        self.0.set_length(progress.total_bytes);
        self.0.set_position(progress.loaded_bytes);
        self.0.set_message(progress.tensor.to_string());
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Loads a model onto one device or several, and says how long that took; on a terminal a bar shows how far.
#[allow(dead_code)]
pub fn load(dir: &Path, devices: &[Device], load_as: LoadAs) -> Result<ModelRanks, ModelError> {
    let (bar, start, mut bytes) = (Bar::new("loading"), Instant::now(), 0);
    let model = ModelRanks::load(dir, devices, load_as, &mut |progress| {
        bytes = progress.loaded_bytes;
        bar.show(progress);
    })?;
    drop(bar);
    let seconds = start.elapsed().as_secs_f64();
    let (megabytes, rate) = (bytes as f64 / 1e6, bytes as f64 / 1e9 / seconds);
    let each = if devices.len() > 1 { " on each device" } else { "" };
    note(format_args!(
        "weights              {megabytes:.1} MB{each}, loaded in {:.1} ms, {rate:.2} GB/s",
        seconds * 1e3
    ));
    Ok(model)
}

/// Exit code of input that cannot be used, and of output that cannot be written.
pub const BAD_INPUT: u8 = 2;

/// The command line; otherwise the exit code, when help or an error is printed.
pub fn parse<A: Parser>() -> Result<A, ExitCode> {
    let said = match A::try_parse() {
        Ok(args) => return Ok(args),
        Err(said) => said,
    };
    if said.use_stderr() {
        let _ = said.print();
        return Err(ExitCode::from(BAD_INPUT));
    }
    let help = said.render();
    // Clap would take a full disk for success.
    let printed = if io::stdout().is_terminal() { print(help.ansi()) } else { print(help) };
    Err(printed.map_or_else(fail, |()| ExitCode::SUCCESS))
}

/// Prints to stdout at once. `println!` would panic where nobody reads, or a disk is full.
pub fn print(text: impl fmt::Display) -> Result<(), String> {
    let mut out = io::stdout().lock();
    write!(out, "{text}").and_then(|()| out.flush()).map_err(|error| stdout_failed(&error))
}

fn stdout_failed(error: &io::Error) -> String {
    format!("cannot write to stdout: {error}")
}

/// A line on stderr, if anybody can read it: there is nowhere else to say so.
pub fn note(line: impl fmt::Display) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Reports why a program cannot go on.
pub fn fail(message: impl fmt::Display) -> ExitCode {
    note(format_args!("error: {message}"));
    ExitCode::from(BAD_INPUT)
}

/// Bytes of a text file that is read whole.
const MOST: u64 = 256 << 20;

/// The text of a file. A pipe may never end, and is refused.
#[allow(dead_code)]
pub fn read_text(path: &Path) -> Result<String, String> {
    let failed = |error: &dyn fmt::Display| format!("cannot read {}: {error}", path.display());
    if !std::fs::metadata(path).map_err(|error| failed(&error))?.is_file() {
        return Err(failed(&"it is no regular file"));
    }
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(|error| failed(&error))?;
    file.take(MOST + 1).read_to_string(&mut text).map_err(|error| failed(&error))?;
    match text.len() as u64 > MOST {
        true => Err(failed(&format_args!("it has more than {MOST} bytes"))),
        false => Ok(text),
    }
}
