//! The models: one file each.

mod deepseek_v3;

pub use deepseek_v3::{DeepseekV3, Hidden};
