//! Tests that run on devices, in one program, so that a single binary travels to a GPU machine.
//!
//! `cargo test --test device -- ops_` runs the tests of the operations, `model_` those of the models, `cli_` those of the
//! programs. Which devices they run on: `devices.rs`.

mod cli_checkpoints;
mod cli_faults;
mod cli_serve_batch;
mod devices;
mod hashes;
mod model_compile_ahead;
mod model_engine;
mod model_engine_soak;
mod model_generate;
mod model_long_prompt;
mod model_parity;
mod model_quantized;
mod model_random;
mod model_read_backs;
mod model_steps;
mod ops_argmax;
mod ops_batch_invariant;
mod ops_compress_kv;
mod ops_errors;
mod ops_errors_compress_kv;
mod ops_errors_decode;
mod ops_errors_experts;
mod ops_errors_lightning_index;
mod ops_errors_limits;
mod ops_errors_vertical_slash;
mod ops_experts;
mod ops_fixture;
mod ops_fusion;
mod ops_lightning_index;
mod ops_linear;
mod ops_many_rows;
mod ops_merge_state;
mod ops_merge_state_large;
mod ops_mla_decode;
mod ops_mla_decode_blackwell;
mod ops_mla_decode_fuzz;
mod ops_mla_decode_grid;
mod ops_mutants;
mod ops_mutants_blackwell;
mod ops_norm_linear;
mod ops_norm_rope;
mod ops_paging;
mod ops_paths;
mod ops_ragged_attention;
mod ops_rope_write;
mod ops_route_experts;
mod ops_sparse_mla;
mod ops_sparse_parts;
mod ops_vertical_slash;
mod ops_vertical_slash_index;
mod oracle;
mod refusals;
