//! DeepSeek-V2-Lite, V3, V3.2 and V4 for Burn: from a published checkpoint folder to text.
//!
//! | part | what |
//! |---|---|
//! | [`DeepseekModel`] | loads a checkpoint folder onto a device, or makes up weights; forward passes over a [`ModelCache`] |
//! | [`Engine`] | requests that come and go: continuous batching, chunked prefill, shared prefixes, preemption |
//! | [`generate`] | prompts in, text out, streaming: an engine for a few requests that are there from the start |
//! | [`verify()`] | compares a model with results stored beside its checkpoint |
//! | [`ModelConfig`], [`DeepseekV3Config`], [`DeepseekV4Config`] | `config.json`, validated; [`GenerationDefaults`] for `generation_config.json` |
//! | [`Checkpoint`], [`WeightLoader`] | safetensors files, sharded or not, quantised or not, to tensors on a device |
//! | [`Inspection`], [`weight_specs`] | what a folder has and what a model asks for, without loading it |
//! | [`write_checkpoint`] | folders in the published layout: quantised from others, or random |
//! | [`Tokenizer`], [`TextStream`], [`StopStrings`] | text to ids, and ids to text as they come |
//! | [`SamplingParams`], [`Sampler`] | logits to the next id |
//!
//! Everything that can fail returns [`ModelError`], which names the file or field, what it is and what it should be.

mod cache;
mod config;
mod decode_graph;
mod engine;
mod error;
mod generation;
mod layers;
mod model;
mod models;
mod sampling;
mod step;
mod step_v4;
mod tokenizer;
mod verify;
mod weights;

pub use cache::{CacheSize, ModelCache, V4Cache};
pub use config::{
    AttentionSpec, DeepseekV3Config, DeepseekV4Config, GenerationDefaults, IndexerConfig, LayerSpec, LayerSummary,
    MlpSpec, ModelConfig, ModelType, Quantization, RopeConfig, Scoring, YarnConfig,
};
pub use engine::{Completion, Engine, EngineOptions, EngineStats, FinishReason, RequestStream, StreamEvent};
pub use error::{ModelError, WeightReport, WrongDType, WrongQuantization, WrongShape};
pub use generation::{GenerationOptions, GenerationRequest, GenerationStats, generate};
pub use model::DeepseekModel;
pub use models::{DeepseekV3, DeepseekV4, Hidden};
pub use sampling::{Sampler, SamplingParams};
pub use step::Chunk;
pub use tokenizer::{StopOutcome, StopStrings, TextStream, Tokenizer};
pub use verify::{Comparison, VerifyOptions, verify};
pub use weights::{
    Checkpoint, Inspection, LoadProgress, LoadSummary, WeightForm, WeightGroup, WeightLoader, WeightRole, WeightSpec,
    WeightsFrom, WriteSummary, device_bytes, weight_specs, write_checkpoint,
};

/// What everything here returns.
pub type Result<T> = std::result::Result<T, ModelError>;
