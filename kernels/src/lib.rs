//! CubeCL kernels for multi-head latent attention, and what they need to know of the machine. Nothing here knows Burn.

#[cfg(feature = "offline")]
pub mod offline;
pub mod portable;
mod runtime;
#[cfg(feature = "cuda")]
pub(crate) mod sm90;

pub use runtime::{Runtime, RuntimeError};
