//! Models of published sizes with random weights.

use std::path::PathBuf;

use burn::tensor::FloatDType;
use burn_mla::model::{
    KvCacheFormat, LoadAs, ModelConfig, ModelError, ModelRanks, RandomInit, WeightStorage, weight_sizes,
};
use serde_json::{Value, json};

use crate::cases::{Bench, Size};
use crate::common::WeightsArg;

const V2_LITE: &str = include_str!("models/deepseek-v2-lite.json");
const V3: &str = include_str!("models/deepseek-v3.json");
const V32: &str = include_str!("models/deepseek-v32.json");
const V4_FLASH: &str = include_str!("models/deepseek-v4-flash.json");

/// A configuration file, and how many of its layers are computed.
#[derive(Debug, Clone)]
pub struct RandomWeights {
    pub config: PathBuf,
    pub layers: Option<usize>,
}

/// A configuration, and how many of its layers are computed.
#[derive(Debug, Clone)]
pub struct ModelCase {
    pub name: String,
    /// The text of `config.json`.
    config: String,
    /// All if absent.
    layers: Option<usize>,
}

/// V2-Lite whole, and as many layers of V3, 3 of them dense; where only the program is tried, 2 layers of V2-Lite.
pub fn published(size: Size, v3_layers: usize) -> Vec<ModelCase> {
    match size {
        Size::Smoke => vec![ModelCase::published("v2-lite", V2_LITE, 2)],
        Size::Full | Size::Quick => vec![v2_lite(), ModelCase::published("v3", V3, v3_layers)],
    }
}

/// This model, or where the program is only tried, a small one.
pub fn small_or(size: Size, case: ModelCase) -> Vec<ModelCase> {
    if size == Size::Smoke { published(size, 0) } else { vec![case] }
}

/// V2-Lite, whole.
pub fn v2_lite() -> ModelCase {
    ModelCase::published("v2-lite", V2_LITE, 27)
}

/// As many layers of V3.2, 3 of them dense.
pub fn v32() -> ModelCase {
    ModelCase::published("v32", V32, 4)
}

/// As many layers of V4-Flash as fit beside their activations, the first 3 with experts by token id.
pub fn v4_flash() -> ModelCase {
    ModelCase::published("v4-flash", V4_FLASH, 6)
}

impl ModelCase {
    fn published(name: &str, config: &str, layers: usize) -> Self {
        Self { name: name.into(), config: config.into(), layers: Some(layers) }
    }

    /// The model that was asked for.
    pub fn read(weights: &RandomWeights) -> Result<Self, String> {
        let path = &weights.config;
        let config = crate::common::read_text(path)?;
        Ok(Self { name: path.display().to_string(), config, layers: weights.layers })
    }

    /// The configuration with fewer layers and without an end token; `tiny`, with fewer channels, too.
    pub fn config(&self, tiny: bool) -> Result<ModelConfig, String> {
        let mut config: Value =
            serde_json::from_str(&self.config).map_err(|error| format!("{}: {error}", self.name))?;
        if !config.is_object() {
            return Err(format!("{} has no JSON object, which a configuration is", self.name));
        }
        if tiny {
            for (field, value) in [
                ("vocab_size", 256),
                ("hidden_size", 64),
                ("intermediate_size", 96),
                ("moe_intermediate_size", 32),
                ("num_attention_heads", 2),
                ("bos_token_id", 0),
            ] {
                config[field] = json!(value);
            }
        }
        // With random weights a request would generate one, sooner or later.
        config["eos_token_id"] = Value::Null;
        let folder = tempfile::tempdir().map_err(show)?;
        let path = folder.path().join("config.json");
        std::fs::write(&path, config.to_string()).map_err(show)?;
        let config = ModelConfig::read_file(&path).map_err(show)?;
        let layers = self.layers.unwrap_or(config.num_layers());
        config.with_layers(layers).map_err(show)
    }

    /// The model, its weights drawn on the devices.
    pub fn load(&self, bench: &Bench) -> Result<ModelRanks, String> {
        let case = match bench.weights {
            Some(WeightsArg::Stored) => self.in_blocks()?,
            Some(WeightsArg::Dense) | None => self.clone(),
        };
        let config = case.config(bench.size == Size::Smoke)?;
        ModelRanks::random(&config, init(bench.weights_seed), &bench.devices, load_as(bench), &mut |_| {})
            .map_err(|error: ModelError| error.to_string())
    }

    /// The same, whose configuration says that weights are in blocks as DeepSeek publishes them: FP8, the experts of V4 in FP4.
    fn in_blocks(&self) -> Result<Self, String> {
        let mut config: Value =
            serde_json::from_str(&self.config).map_err(|error| format!("{}: {error}", self.name))?;
        if config["quantization_config"].is_null() {
            config["quantization_config"] = json!({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                "weight_block_size": [128, 128]});
            if config["model_type"] == "deepseek_v4" {
                config["expert_dtype"] = json!("fp4");
            }
        }
        Ok(Self { config: config.to_string(), ..self.clone() })
    }
}

/// What the weights of whole models become.
pub fn load_as(bench: &Bench) -> LoadAs {
    let storage = match bench.weights {
        Some(WeightsArg::Dense) => WeightStorage::Dense,
        Some(WeightsArg::Stored) | None => WeightStorage::Stored,
    };
    let kv_cache = bench.kv_cache.map_or(KvCacheFormat::Auto, KvCacheFormat::from);
    LoadAs { dtype: FloatDType::from(bench.dtype), storage, kv_cache }
}

/// FLOPs of a prompt's token in products with weights, those of the head left out, which the last token alone needs.
pub fn flops_per_token(config: &ModelConfig) -> f64 {
    let chosen = config.num_experts_per_tok() as f64 / config.n_routed_experts().max(1) as f64;
    let outside = ["model.embed_tokens.", "embed.", "lm_head.", "head."];
    let weights = weight_sizes(config, FloatDType::F32);
    let inside = weights.iter().filter(|(spec, _)| !outside.iter().any(|prefix| spec.name.starts_with(prefix)));
    inside.map(|(spec, _)| 2.0 * spec.len() as f64 * if spec.name.contains(".experts.") { chosen } else { 1.0 }).sum()
}

/// Weights as models are trained from, so that a batch chooses its experts like a model that is trained.
pub fn init(seed: u64) -> RandomInit {
    RandomInit::normal(seed, 0.02)
}

/// An error as the report has it.
pub fn show(error: impl std::fmt::Display) -> String {
    error.to_string()
}
