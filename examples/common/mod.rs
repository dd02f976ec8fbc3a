//! What the example programs share: choosing a dtype, loading with a progress bar, and exit codes.

use std::fmt;
use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;

use burn::tensor::{Device, FloatDType};
use burn_mla::model::{DeepseekModel, LoadProgress, ModelError};
use clap::ValueEnum;
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

/// Loads a model; on a terminal a bar shows how far.
#[allow(dead_code)]
pub fn load(dir: &Path, device: &Device, dtype: DTypeArg) -> Result<DeepseekModel, ModelError> {
    let bar = Bar::new("loading");
    DeepseekModel::load(dir, device, dtype.into(), &mut |progress| bar.show(progress))
}

/// Exit code of input that cannot be used.
pub const BAD_INPUT: u8 = 2;

/// Reports why a program cannot go on.
pub fn fail(message: impl fmt::Display) -> ExitCode {
    eprintln!("error: {message}");
    ExitCode::from(BAD_INPUT)
}
