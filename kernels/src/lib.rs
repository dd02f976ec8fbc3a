//! CubeCL kernels for multi-head latent attention, and what they need to know of the machine. Nothing here knows Burn.

#[cfg(feature = "offline")]
pub mod offline;
pub mod portable;
mod runtime;

pub use runtime::{Runtime, RuntimeError};
