//! The layers that the models are made of, named as in the papers and checkpoints.

mod indexer;
mod layer_norm;
mod linear;
mod mla;
mod mlp;
mod moe;
mod moe_v4;
mod rms_norm;
mod rotary;

pub(crate) use indexer::Indexer;
pub(crate) use layer_norm::LayerNorm;
pub(crate) use linear::Linear;
pub(crate) use mla::MultiHeadLatentAttention;
pub(crate) use mlp::Mlp;
pub(crate) use moe::Moe;
pub(crate) use moe_v4::MoeV4;
pub(crate) use rms_norm::{RmsNorm, unit_rms};
pub(crate) use rotary::{RotaryEmbedding, Rotation};
