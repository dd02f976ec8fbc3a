//! CubeCL kernels for multi-head latent attention and mixtures of experts, and what they need to know of the machine. Nothing
//! here knows Burn.
//!
//! A folder for each operation: arguments, errors and launch in `mod.rs`, a file or folder for each path (`plain`, `mma`, `sm90`,
//! `sm100`). Buffers are contiguous, row-major, and of the sizes that the launchers' arguments state; launchers check what they
//! can without reading from the device.

#[cfg(feature = "cuda")]
pub mod all_reduce;
pub mod argmax;
pub mod cache_rows;
pub mod compact_slots;
pub mod compress_kv;
pub mod experts_mlp;
pub mod hyper_connection;
pub mod kv_indices;
pub mod lightning_index;
pub mod linear;
pub mod log_probs;
pub mod merge_splits;
pub mod merge_state;
pub mod mla_decode;
pub mod mla_plan;
pub mod norm_rope;
pub mod page_table;
pub mod ragged_attention;
pub mod residual_norm;
pub mod rope_write;
pub mod route_experts;
pub mod sample;
pub mod sparse_mla;
pub mod sparse_parts;
pub mod vertical_slash_attention;
pub mod vertical_slash_index;
pub mod write_latent;

pub mod compiler;

mod common;
#[cfg(feature = "offline")]
pub mod offline;
#[cfg(feature = "cuda")]
#[allow(dead_code, unused_imports, reason = "kernels take from it what they need")]
pub(crate) mod ptx;
mod runtime;
mod tiles;

pub use common::device::DeviceError;
pub use common::select::{Available, Path};
pub use runtime::{Runtime, RuntimeError};

/// The operations, for the offline check. They are declared above as well: rustfmt does not find modules in a macro. One that is
/// left out here has an `offline` that nobody calls, a warning.
macro_rules! operations {
    ($($operation:ident),+ $(,)?) => {
        /// All kernels in every form that is launched.
        #[cfg(feature = "offline")]
        pub(crate) fn offline_entries() -> Vec<offline::Entry> {
            [$($operation::offline()),+].into_iter().flatten().collect()
        }
    };
}

operations! {
    all_reduce,
    argmax,
    cache_rows,
    compact_slots,
    compress_kv,
    experts_mlp,
    hyper_connection,
    kv_indices,
    lightning_index,
    linear,
    log_probs,
    merge_splits,
    merge_state,
    mla_decode,
    mla_plan,
    norm_rope,
    page_table,
    ragged_attention,
    residual_norm,
    rope_write,
    route_experts,
    sample,
    sparse_mla,
    sparse_parts,
    vertical_slash_attention,
    vertical_slash_index,
    write_latent,
}
