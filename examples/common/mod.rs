//! What the example programs share: choosing a device and a dtype, loading with a progress bar, and exit codes.

use std::fmt;
use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;
use std::str::FromStr;

use burn::tensor::{Device, FloatDType};
use burn_mla::model::{DeepseekModel, ModelError};
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};

/// Where to compute: `flex`, `wgpu`, `cuda` or `cuda:N`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceArg {
    Flex,
    Wgpu,
    Cuda(usize),
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "flex" => Ok(Self::Flex),
            None if text == "wgpu" => Ok(Self::Wgpu),
            None if text == "cuda" => Ok(Self::Cuda(0)),
            Some(("cuda", index)) => {
                index.parse().map(Self::Cuda).map_err(|_| format!("`{index}` is not a device number"))
            }
            _ => Err("expected flex (CPU), wgpu, cuda or cuda:N".into()),
        }
    }
}

impl fmt::Display for DeviceArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flex => write!(f, "flex"),
            Self::Wgpu => write!(f, "wgpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

impl DeviceArg {
    /// Opens the device, if this build has its backend.
    pub fn open(self) -> Result<Device, String> {
        let device = match self {
            #[cfg(feature = "flex")]
            Self::Flex => Some(Device::flex()),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => Some(Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)),
            #[cfg(feature = "cuda")]
            Self::Cuda(index) => Some(Device::cuda(index)),
            #[allow(unreachable_patterns)]
            _ => None,
        };
        device.ok_or_else(|| {
            let feature = match self {
                Self::Flex => "flex",
                Self::Wgpu => "wgpu",
                Self::Cuda(_) => "cuda",
            };
            format!("`--device {self}`: this build has no {feature} backend; build it with `--features {feature}`")
        })
    }
}

/// What weights, activations and cache are stored in.
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

/// Loads a model; on a terminal a bar shows how far.
pub fn load(dir: &Path, device: &Device, dtype: DTypeArg) -> Result<DeepseekModel, ModelError> {
    let bar = if std::io::stderr().is_terminal() { ProgressBar::new(0) } else { ProgressBar::hidden() };
    if let Ok(style) = ProgressStyle::with_template("loading {bar:30} {bytes}/{total_bytes} {wide_msg}") {
        bar.set_style(style);
    }
    let model = DeepseekModel::load(dir, device, dtype.into(), &mut |progress| {
        bar.set_length(progress.total_bytes);
        bar.set_position(progress.loaded_bytes);
        bar.set_message(progress.tensor.to_string());
    });
    bar.finish_and_clear();
    model
}

/// Exit code of input that cannot be used.
pub const BAD_INPUT: u8 = 2;

/// Reports why a program cannot go on.
pub fn fail(message: impl fmt::Display) -> ExitCode {
    eprintln!("error: {message}");
    ExitCode::from(BAD_INPUT)
}
