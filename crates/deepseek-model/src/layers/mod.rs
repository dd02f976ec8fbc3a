//! The layers that several models are made of, named as in the papers and checkpoints.

mod experts;
mod linear;
mod mlp;
mod rms_norm;
mod rope_table;

pub(crate) use experts::Experts;
pub(crate) use linear::Linear;
pub(crate) use mlp::{Mlp, MlpNames};
pub(crate) use rms_norm::RmsNorm;
pub(crate) use rope_table::RopeTable;
