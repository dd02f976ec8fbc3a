//! The portable kernels on the devices of this machine, against f64 loops. Without a feature that has a device there
//! is nothing to test.

#![cfg(any(feature = "wgpu", feature = "cuda"))]

mod compact_slots;
mod compress_kv;
mod experts;
mod fp8_index_keys;
mod kv_indices;
mod lightning_index;
mod many_rows;
mod merge_splits;
mod merge_state;
mod mla_decode;
mod mla_plan;
mod packed;
mod page_table;
mod ragged_attention;
mod route_experts;
mod support;
mod vertical_slash_attention;
mod vertical_slash_case;
mod vertical_slash_index;
mod write_latent;
