//! Options of the programs that generate text.

use std::path::{Path, PathBuf};

use burn::tensor::Device;
use burn_mla::model::{EngineOptions, LoadAs, ModelError, SamplingParams};
use burn_mla::ops::cache::CacheError;
use burn_mla::ops::{DeviceName, MlaError};
use clap::{Args, ValueEnum};

use crate::common::{DTypeArg, KvCacheArg, WeightsArg};

/// Arguments by their names in code and in messages, and the options that they come from.
const TYPED: [(&str, &str); 19] = [
    ("page_size", "--page-size"),
    ("kv_cache", "--kv-cache"),
    ("cache_pages", "--cache-pages"),
    ("num_pages", "--cache-pages"),
    ("num_pages * page_size", "--cache-pages * --page-size"),
    ("pools", "--cache-pages * --page-size"),
    ("max_batch", "--max-batch"),
    ("max_requests", "--max-batch"),
    ("token_budget", "--token-budget"),
    ("mixed_prompt_tokens", "--mixed-prompt-tokens"),
    ("snapshot_spacing", "--snapshot-spacing"),
    ("stop", "--stop"),
    ("temperature", "--temperature"),
    ("top_k", "--top-k"),
    ("top_p", "--top-p"),
    ("min_p", "--min-p"),
    ("repetition_penalty", "--repetition-penalty"),
    ("layers", "--layers"),
    ("dtype", "--dtype"),
];

/// The message of an error, with options under the names that were typed.
pub fn by_option(error: &ModelError) -> String {
    let message = error.to_string();
    if matches!(error, ModelError::OutOfMemory { what: "a KV cache", .. }) {
        return format!("{message}; it has --cache-pages of --page-size tokens each");
    }
    if matches!(error, ModelError::OutOfMemory { what: "the KV cache of the longest request beside a step", .. }) {
        return format!("{message}; it has the tokens of a prompt and --max-new-tokens");
    }
    if matches!(error, ModelError::OutOfMemory { what: "snapshots of requests' states", .. }) {
        return format!("{message}; there is one for every --snapshot-spacing tokens of the pages");
    }
    let of_ops = |error: &MlaError| matches!(error, MlaError::Value { .. } | MlaError::DeviceLimit { .. });
    let of_options = match error {
        ModelError::Request { .. } => true,
        ModelError::Ops(error) | ModelError::Cache(CacheError::Mla(error)) => of_ops(error),
        _ => false,
    };
    // Other messages name fields of files, which may be called the same.
    match of_options {
        true => TYPED
            .iter()
            .fold(message, |text, (name, option)| text.replace(&format!("`{name}`"), &format!("`{option}`"))),
        false => message,
    }
}

/// Opens devices; one at least.
pub fn open(names: &[DeviceName]) -> Result<Vec<Device>, String> {
    names.iter().map(|name| name.open().map_err(|error| error.to_string())).collect()
}

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
    /// flex (CPU), wgpu, cuda or cuda:N; several with commas between them, among which the model is divided, as in cuda:0,cuda:1.
    #[arg(long, value_name = "DEVICE", value_delimiter = ',', default_value = "flex")]
    pub device: Vec<DeviceName>,
    /// dtype of weights, activations and, unless --kv-cache says otherwise, the KV cache.
    #[arg(long, value_enum, default_value_t = DTypeArg::F32)]
    pub dtype: DTypeArg,
    /// Weights in FP8 or FP4: as they are stored, or dequantised to --dtype.
    #[arg(long, value_enum, default_value_t = WeightsArg::Stored)]
    weights: WeightsArg,
    /// The rows of the KV cache: in --dtype, or latents in FP8 (DeepSeek-V2, V3 and V3.2).
    #[arg(long, value_enum, default_value_t = KvCacheArg::Auto)]
    kv_cache: KvCacheArg,
}

impl ModelArgs {
    /// What weights become.
    pub fn load_as(&self) -> LoadAs {
        self.weights.of(self.dtype, self.kv_cache)
    }

    /// The devices, opened.
    pub fn devices(&self) -> Result<Vec<Device>, String> {
        open(&self.device)
    }

    /// The checkpoint folder.
    pub fn dir(&self) -> &Path {
        self.model.as_deref().unwrap_or(self.demo.folder())
    }
}

/// Sizes and modes of the engine, named as in `EngineOptions`.
#[derive(Debug, Args)]
pub struct EngineArgs {
    /// Tokens per KV cache page, a power of two. A cache that the memory has no room for is refused.
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
    /// Stop string, also one special token; may be given several times.
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
            logprobs: otherwise.logprobs,
        }
    }
}
