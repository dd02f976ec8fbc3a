//! The models: one file each.

mod deepseek_v3;
mod deepseek_v4;

pub use deepseek_v3::{DeepseekV3, Hidden};
pub use deepseek_v4::DeepseekV4;
