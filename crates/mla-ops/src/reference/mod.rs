//! The operations as ordinary tensor operations, registered for the CPU: they say what the kernels must compute. But for
//! those whose inner loops are too small for tensor operations (`rows.rs`), nothing in them is particular to a backend.
//!
//! Inputs are validated by the public functions. Lengths and page lists are read back to the host, so that only the
//! pages in use are touched; each sequence is computed on its own, so that its result does not depend on its neighbours.

mod argmax;
mod compact_slots;
mod compress_kv;
mod experts;
mod kv_indices;
mod lightning_index;
mod merge_state;
mod mla_decode;
mod mla_plan;
mod norm_rope;
mod page_table;
mod ragged_attention;
mod rows;
mod softmax;
mod sparse_mla;
mod vertical_slash_attention;
mod vertical_slash_index;
mod write_latent;

pub(crate) use argmax::argmax;
pub(crate) use compact_slots::compact_slots;
pub(crate) use compress_kv::{Compressor, Tokens};
pub(crate) use experts::{choose_experts, experts_mlp, weigh_experts};
pub(crate) use kv_indices::kv_indices;
pub(crate) use lightning_index::lightning_index;
pub(crate) use merge_state::{merge_state, merge_states};
pub(crate) use mla_decode::{PagedRows, mla_decode};
pub(crate) use mla_plan::mla_plan;
pub(crate) use norm_rope::norm_rope;
pub(crate) use page_table::page_table;
pub(crate) use ragged_attention::ragged_attention;
pub(crate) use sparse_mla::{sparse_mla, sparse_mla_parts};
pub(crate) use vertical_slash_attention::{KeyLists, vertical_slash_attention};
pub(crate) use vertical_slash_index::{Entries, vertical_slash_index};
pub(crate) use write_latent::write_latent;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// Query tokens that are computed together at most.
const QUERY_TILE: usize = 64;
/// Scores that exist at a time, all heads together: 8 MB of f32.
const SCORES: usize = 1 << 20;

/// The values of an i32 tensor, on the host.
fn host<const D: usize>(tensor: Tensor<D, Int>) -> Vec<i32> {
    // A failed read means that an earlier kernel faulted: there is no value to go on with, and the trait of the backend
    // extension has no error to return.
    tensor.try_into_vec_as::<i32>().expect("reading back from a device that has failed")
}

/// An i32 tensor of these values.
fn device_i32<const D: usize>(values: Vec<i32>, shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(values, shape), (device, DType::I32))
}
