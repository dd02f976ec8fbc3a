//! The public operations, one file each: argument structs, documentation, validation, dispatch.

pub mod argmax;
pub mod compress_kv;
pub mod experts;
pub mod kv_indices;
pub mod lightning_index;
pub mod linear;
pub mod matmul;
pub mod merge_state;
pub mod mla_decode;
pub mod mla_plan;
pub mod norm_linear;
pub mod norm_rope;
pub mod page_table;
pub mod ragged_attention;
pub mod rope_write;
pub mod sparse_mla;
pub mod sparse_parts;
pub mod vertical_slash_attention;
pub mod vertical_slash_index;
pub mod write_latent;
