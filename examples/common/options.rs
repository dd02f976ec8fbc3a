//! Options of the programs that generate text.

use std::path::{Path, PathBuf};

use burn::tensor::Device;
use burn_mla::model::{EngineOptions, SamplingParams};
use burn_mla::ops::DeviceName;
use clap::{Args, ValueEnum};

use crate::common::DTypeArg;

/// A demo checkpoint of this repository.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Demo {
    V3,
    V4,
}

impl Demo {
    fn folder(self) -> &'static Path {
        Path::new(match self {
            Self::V3 => concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo-v3"),
            Self::V4 => concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo-v4"),
        })
    }
}

/// Which model, where, and in which form.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// Checkpoint folder (config.json, tokenizer.json, *.safetensors); the demo checkpoint if absent.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Demo checkpoint, if there is no --model.
    #[arg(long, value_enum, default_value_t = Demo::V3, conflicts_with = "model")]
    demo: Demo,
    /// flex (CPU), wgpu, cuda or cuda:N.
    #[arg(long, default_value_t = DeviceName::Flex)]
    pub device: DeviceName,
    /// dtype of weights, activations and KV cache.
    #[arg(long, value_enum, default_value_t = DTypeArg::F32)]
    pub dtype: DTypeArg,
}

impl ModelArgs {
    /// The checkpoint folder.
    pub fn dir(&self) -> &Path {
        self.model.as_deref().unwrap_or(self.demo.folder())
    }
}

/// Sizes and modes of the engine, named as in `EngineOptions`.
#[derive(Debug, Args)]
pub struct EngineArgs {
    /// Tokens per KV cache page, a power of two.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub page_size: usize,
    /// Maximum number of tokens per forward pass: one of each running request, the rest from prompts (chunked prefill). If absent
    /// 8192 on GPUs whose tensors may have 4 GiB, else 512.
    #[arg(long, value_name = "N")]
    token_budget: Option<usize>,
    /// Launch every kernel of a decode step, instead of capturing the step once and replaying it.
    #[arg(long)]
    pub no_graphs: bool,
}

impl EngineArgs {
    /// As given, or the default of the device.
    pub fn token_budget(&self, device: &Device) -> usize {
        self.token_budget.unwrap_or_else(|| EngineOptions::on(device).token_budget)
    }
}

/// Sampling, and when to stop.
#[derive(Debug, Args)]
pub struct TextArgs {
    /// Maximum number of tokens to generate per prompt.
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub max_new_tokens: usize,
    /// Stop string; may be given several times.
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Sampling temperature; 0 is greedy.
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// Sample from the K most probable tokens.
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Sample from the most probable tokens whose probabilities sum to P (nucleus sampling).
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Sample from tokens whose probability is at least P times the largest one.
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    min_p: f32,
    /// Repetition penalty: divisor of the logits of tokens that occurred already; 1 is none.
    #[arg(long, value_name = "R", default_value_t = 1.0)]
    repetition_penalty: f32,
    /// Seed of sampling.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

impl TextArgs {
    /// Sampling parameters; those not given are `otherwise`'s.
    pub fn sampling(&self, otherwise: &SamplingParams) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature.unwrap_or(otherwise.temperature),
            top_k: self.top_k.or(otherwise.top_k),
            top_p: self.top_p.unwrap_or(otherwise.top_p),
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
        }
    }
}
