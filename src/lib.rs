//! DeepSeek's attention for [Burn](https://burn.dev), and the models on top of it.
//!
//! [`ops`] are the operations on Burn tensors, with the paged cache; [`model`] loads published checkpoints and generates
//! text.

pub use deepseek_model as model;
pub use mla_ops as ops;

/// The example of the README compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// So do those of the guide.
#[cfg(doctest)]
#[doc = include_str!("../docs/guide.md")]
struct Guide;
