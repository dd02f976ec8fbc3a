//! The layers that the models are made of, named as in the papers and checkpoints.

mod compressor;
mod hyper_connection;
mod indexer;
mod layer_norm;
mod linear;
mod mla;
mod mlp;
mod moe;
mod moe_v4;
mod partial_rotary;
mod rms_norm;
mod rotary;
mod shared_kv_attention;

pub(crate) use hyper_connection::{HyperConnection, HyperHead};
pub(crate) use indexer::Indexer;
pub(crate) use layer_norm::LayerNorm;
pub(crate) use linear::Linear;
pub(crate) use mla::{AttentionInput, MultiHeadLatentAttention};
pub(crate) use mlp::Mlp;
pub(crate) use moe::Moe;
pub(crate) use moe_v4::MoeV4;
pub(crate) use partial_rotary::{PartialRotary, PartialRotation};
pub(crate) use rms_norm::RmsNorm;
pub(crate) use rotary::{RotaryEmbedding, Rotation};
pub(crate) use shared_kv_attention::SharedKvAttention;
