//! The attention operations that DeepSeek models need, for Burn, and the paged cache that they read.
//!
//! | operation | what |
//! |---|---|
//! | [`mla_plan`] | divides a decode step's work, once per step for all layers |
//! | [`mla_decode`] | attention of a few query tokens over the paged latent cache |
//! | [`ragged_attention`] | prefill attention over packed sequences |
//! | [`page_table`], [`kv_indices`] | page ids of a batch, as a table or as a compressed list |
//! | [`lightning_index`] | the keys that a query token attends to, chosen by a few small heads |
//! | [`compress_kv`] | windows of tokens pooled into entries |
//! | [`write_latent`] | new tokens into the cache, in place |
//! | [`vertical_slash_index`] | the keys of each block of queries, from columns and diagonals |
//! | [`vertical_slash_attention`], [`packed_vertical_slash_attention`] | attention to those keys |
//! | [`sparse_mla`] | attention of each query token over rows gathered by index |
//! | [`sparse_mla_plan`] | how the lists of a step are divided, once for all layers |
//! | [`sparse_mla_parts`] | the same as unnormalised partials |
//! | [`merge_state`], [`merge_states`], [`Accumulator`] | attention over several key sets from the attentions over each |
//! | [`route_experts()`], [`experts_mlp()`] | mixture of experts: the choice, and the weighted sum |
//! | [`linear()`], [`linear_each`], [`linear_each_normed`], [`swiglu()`], [`linear_by_head()`] | projections; small batches as fast as the weights come |
//! | [`norm_rope()`], [`rms_norm`] | norms and RoPE in one pass |
//! | [`residual_norm()`] | a residual sum and its norm |
//! | [`mhc_pre`], [`mhc_post`], [`mhc_head`], [`Streams`] | several residual streams before and after a block, and behind the last |
//! | [`rope_write`] | RoPE on queries, which may be absorbed; norm and RoPE on latents, which go into the cache: one launch |
//! | [`argmax()`] | the greedy token of each row |
//! | [`sample()`] | the token of each row, drawn at random behind temperature, top-k, top-p, min-p and repetition penalty |
//! | [`log_probs()`] | logarithms of the probabilities of the tokens chosen, and of the most probable ones |
//! | [`matmul`] | Burn's product of matrices, without TF32 |
//! | [`PeerRank::all_reduce`] | the sum over the devices of one process, by way of one another's memory |
//! | [`capture()`] | a computation that is recorded once and replayed |
//! | [`read_beside()`] | numbers to the host, while the device goes on with what is launched next |
//! | [`write_data()`] | numbers of the host into a part of a tensor, in place |
//!
//! Beside them: [`batch`], where the tokens of a step are, in which slots, and where sequences begin; [`RopeConfig`], tables of RoPE,
//! with YaRN; [`cache`], the paged KV cache. [`device_memory`] says how much memory is free, [`check_written`] and [`failed_allocation`] that it was too little.
//!
//! What follows an operation may be computed in its launch. So [`route_experts()`] and [`experts_mlp()`] return values that are not
//! in memory yet ([`Routing`], [`ExpertsSum`]), a model's [`Residual`] stream waits with a summand until its [`Normed`] rows are
//! read, and an operation that takes [`Rows`] decides whether its own launch computes them. The bits are the same either way.
//!
//! Several operations have more than one implementation on a device. [`explain_path`] says which of the [`available_paths`] runs, and
//! why, for a [`Problem`]: an [`MlaDecodeProblem`], a [`RaggedAttentionProblem`], a [`VerticalSlashAttentionProblem`], a
//! [`SparseMlaProblem`], a [`LightningIndexProblem`] or, for all products of rows and weights, a [`LinearProblem`].
//!
//! A projection takes a [`Weight`] (one matrix) or a [`StackedWeight`] (experts, heads), and a [`Determinism`].
//!
//! Letters in shapes: `B` sequences, `Sq` query tokens of each, `H` query heads, `D` key width, `Dv` value width, `P`
//! pages, `S` page size, `N` tokens of all sequences, `T` tokens. Index tensors are i32; floats are f32, f16 or bf16,
//! sums and log-sum-exps f32.
//!
//! Arguments and options are structs with public fields. `new`, or `Default`, has what is mostly wanted, and takes what has no
//! default: `MlaDecodeOptions { causal: false, ..MlaDecodeOptions::new(512, 0.07) }` goes on compiling when a field is added.
//!
//! The operations are for inference: they have no backward pass. `docs/guide.md` of the repository builds a layer with a paged cache
//! from them.

pub mod batch;
pub mod cache;
mod capture;
mod check;
mod check_written;
mod compile_ahead;
mod determinism;
mod device;
mod dispatch;
mod error;
#[cfg(all(feature = "fusion", feature = "_gpu"))]
mod fusion;
mod independent;
mod limits;
mod memory;
mod nccl;
mod ops;
mod path;
mod peer;
mod read_beside;
#[cfg(feature = "flex")]
mod reference;
mod rope;
#[cfg(feature = "_gpu")]
mod tensors;
mod weight;
mod write_data;

pub use capture::capture;
pub use check::validate_always;
pub use check_written::check_written;
pub use compile_ahead::{
    CompiledKernels, compile_ahead, compile_all_ahead, compiled_kernels, launched_kernels, on_device_thread,
    wait_for_kernels,
};
pub use determinism::Determinism;
pub use device::{DeviceName, check_opens, is_cuda, largest_buffer};
pub use error::MlaError;
pub use independent::map_independent;
pub use memory::{DeviceMemory, device_memory, failed_allocation, host_memory};
pub use nccl::find_nccl;
#[cfg(feature = "cuda")]
pub use nccl::nccl_all_reduce;
pub use ops::*;
pub use path::{Path, PathChoice, Problem, UnknownPath, available_paths, explain_path};
pub use peer::PeerRank;
pub use read_beside::read_beside;
pub use rope::{RopeConfig, YarnConfig};
pub use weight::{BlockFormat, StackedWeight, Weight, WeightBlocks, WeightFormat};
pub use write_data::write_data;
