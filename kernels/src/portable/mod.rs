//! Kernels for every CubeCL runtime: no instruction that only some devices have, no plane size taken for granted.
//!
//! Buffers are contiguous, row-major, and of the sizes that the launchers' arguments state; launchers check what they can
//! without reading from the device.

pub mod add_rms_norm;
pub mod argmax;
pub mod compact_slots;
pub mod compress_kv;
pub mod experts;
pub mod kv_indices;
pub(crate) mod launch;
pub mod lightning_index;
pub mod merge_splits;
pub mod merge_state;
pub mod mla_decode;
pub mod mla_plan;
pub mod norm_linear;
pub mod norm_rope;
pub mod page_table;
pub mod ragged_attention;
pub mod rope_write;
mod scan;
pub mod sparse_parts;
pub mod tile_attention;
pub mod vertical_slash_attention;
pub mod vertical_slash_index;
pub mod write_latent;
