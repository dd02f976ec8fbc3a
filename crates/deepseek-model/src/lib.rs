//! DeepSeek-V2-Lite, V3, V3.2 and V4 for Burn: from a published checkpoint folder to text.
//!
//! | part | what |
//! |---|---|
//! | [`DeepseekModel`] | loads a checkpoint folder onto a device, or initialises weights at random; forward passes over a [`ModelCache`] |
//! | [`Engine`] | requests that come and go: continuous batching, chunked prefill, prefix caching, preemption |
//! | [`compile_ahead`] | the kernels of a model, compiled while its weights are loaded |
//! | [`generate`] | prompts in, text out, streaming: an engine for a few requests that are there from the start |
//! | [`verify()`] | compares a model with results stored beside its checkpoint |
//! | [`layers`] | attention, experts and other layers as Burn modules, each usable alone |
//! | [`ModelConfig`], [`DeepseekV3Config`], [`DeepseekV4Config`] | `config.json`, validated; [`GenerationDefaults`] for `generation_config.json` |
//! | [`ModelRanks`] | a model divided among several devices of this process; engines, [`generate`] and [`verify()`] take it as they take a model |
//! | [`Parallel`], [`Communicator`], [`Cut`] | one rank among others, and what it says to them, see [`DeepseekModel::load_rank`] |
//! | [`Checkpoint`], [`WeightLoader`] | safetensors files, sharded or not, quantised or not, to tensors on a device |
//! | [`Inspection`], [`weight_specs`] | what a folder has and what a model asks for, without loading it |
//! | [`write_checkpoint`] | folders in the published layout: quantised from others, or random |
//! | [`Tokenizer`], [`TextStream`], [`StopStrings`] | text to ids, and ids to text as they come |
//! | [`ChatTemplate`], [`Message`] | conversations to prompts |
//! | [`SamplingParams`] | how the next id is chosen of the logits |
//!
//! Everything that can fail returns [`ModelError`], which names the file or field, what it is and what it should be.

mod cache;
mod chat;
mod config;
mod decode_graph;
mod engine;
mod error;
mod files;
mod generation;
mod index_keys;
mod inspection;
pub mod layers;
mod memory;
mod model;
mod models;
mod parallel;
mod ranks;
mod request;
mod runner;
mod sampling;
mod step;
mod tokenizer;
mod verify;
mod weights;

pub use cache::{CacheSize, KvCacheFormat, ModelCache};
pub use chat::{ChatPrompt, ChatTemplate, Message, Role, read_conversation};
pub use config::{GenerationDefaults, LayerSummary, Quantization};
pub use decode_graph::GraphSupport;
pub use engine::{
    Completion, Engine, EngineOptions, EngineStats, FinishReason, RequestStream, StreamEvent, TokenLogprobs,
    compile_ahead, compile_all_ahead, compile_ranks_ahead,
};
pub use error::{ModelError, WeightReport, WrongCut, WrongDType, WrongQuantization, WrongShape};
pub use generation::{GenerationOptions, generate};
pub use inspection::{Inspection, WeightGroup, weight_sizes, weight_specs};
pub use mla_ops::{RopeConfig, YarnConfig};
pub use model::DeepseekModel;
pub use models::deepseek_v3::{DeepseekV3Config, IndexerConfig, ModelType, Scoring};
pub use models::deepseek_v4::{AttentionSpec, DeepseekV4Config, LayerSpec, MlpSpec};
pub use models::{Hidden, ModelConfig, PrefixSupport};
pub use parallel::{Communicator, Cut, HostCommunicator, Parallel};
pub use ranks::{ModelRanks, ModelRef};
pub use request::GenerationRequest;
pub use sampling::{MAX_LOGPROBS, SamplingParams};
pub use step::Chunk;
pub use tokenizer::{StopOutcome, StopStrings, TextStream, Tokenizer};
pub use verify::{Comparison, VerifyOptions, verify};
pub use weights::{
    Checkpoint, LoadAs, LoadProgress, LoadSummary, RandomInit, WeightForm, WeightLoader, WeightRole, WeightSpec,
    WeightStorage, WeightsFrom, WriteSummary, device_bytes, write_checkpoint,
};

/// What everything here returns.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;
