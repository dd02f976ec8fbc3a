//! CubeCL kernels for multi-head latent attention, and what they need to know of the machine. Nothing here knows Burn.

pub mod portable;
mod runtime;

pub use runtime::{Runtime, RuntimeError};
