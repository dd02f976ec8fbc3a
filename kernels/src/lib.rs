//! CubeCL kernels for multi-head latent attention, and what they need to know of the machine. Nothing here knows Burn.

#[cfg(feature = "offline")]
pub mod offline;
pub mod portable;
#[cfg(feature = "cuda")]
#[allow(dead_code, unused_imports, reason = "kernels take from it what they need")]
pub(crate) mod ptx;
mod runtime;
#[cfg(feature = "cuda")]
pub(crate) mod sm100;
#[cfg(feature = "cuda")]
pub(crate) mod sm80;
#[cfg(feature = "cuda")]
pub(crate) mod sm90;

pub use runtime::{Runtime, RuntimeError};
