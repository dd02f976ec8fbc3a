//! The operations, each in a file or folder of its own: the public function with its arguments, documentation and checks; the
//! trait that registers it as a Burn backend extension; what it does on CubeCL devices (`cube`: a launch of `mla-kernels`) and on
//! the CPU (`reference`: ordinary tensor operations, which say what the kernels must compute).
//!
//! A new operation is such a file, and two lines here; its kernel a folder of `kernels/src` and two lines in that `lib.rs`, with
//! limits in `offline-limits.txt`; a test in `tests/device`; and a row in the tables of both READMEs: `docs/extending.md`.

mod argmax;
mod compress_kv;
mod experts_mlp;
mod hyper_connection;
mod kv_indices;
mod lightning_index;
mod linear;
mod linear_by_head;
mod log_probs;
pub(crate) mod matmul;
mod merge_state;
mod mla_decode;
mod mla_plan;
mod norm_rope;
mod page_table;
mod products;
mod ragged_attention;
mod residual_norm;
mod rms_norm;
mod rope_write;
mod route_experts;
mod sample;
mod sparse_mla;
mod swiglu;
mod vertical_slash_attention;
mod vertical_slash_index;
mod write_latent;

pub use argmax::argmax;
pub use compress_kv::{CompressKvArgs, CompressKvError, CompressKvOptions, CompressedKv, EntryCache, compress_kv};
pub use experts_mlp::{ExpertsMlpArgs, ExpertsMlpOptions, ExpertsSum, SharedExperts, experts_mlp};
pub use hyper_connection::{MhcOptions, MhcPreArgs, Mixer, Mixing, Streams, mhc_head, mhc_post, mhc_pre};
pub use kv_indices::{KvIndices, kv_indices};
pub(crate) use lightning_index::scratch_bytes;
pub use lightning_index::{
    IndexForm, LightningIndexArgs, LightningIndexOptions, LightningIndexProblem, lightning_index,
};
pub use linear::{linear, linear_each, linear_each_normed};
pub use linear_by_head::{HeadRows, InverseRope, linear_by_head};
pub use log_probs::{LogProbs, log_probs};
pub use matmul::matmul;
pub use merge_state::{Accumulator, MergeStateArgs, merge_state, merge_states};
pub use mla_decode::{Decoded, MlaDecodeArgs, MlaDecodeOptions, MlaDecodeProblem, MlaQuery, mla_decode};
pub use mla_plan::{MlaPlan, MlaPlanArgs, Splits, mla_plan};
pub use norm_rope::{NormRopeArgs, NormRopeOptions, norm_rope};
pub use page_table::{PageTable, PagedBatchArgs, page_table};
pub use products::LinearProblem;
#[doc(hidden)]
pub use products::measure;
pub use ragged_attention::{RaggedAttentionArgs, RaggedAttentionOptions, RaggedAttentionProblem, ragged_attention};
pub use residual_norm::{Addend, Normed, Residual, Rows, residual_norm};
pub use rms_norm::rms_norm;
pub use rope_write::{RopeQuery, RopeWriteArgs, RopeWriteError, RopeWritten, rope_write};
pub use route_experts::{
    ExpertChoice, ExpertGroups, ExpertScoring, LocalExperts, RouteExpertsArgs, RouteExpertsOptions, RouterLogits,
    Routing, route_experts,
};
pub use sample::{SampleArgs, SampleParams, SampleRows, Sampled, sample};
pub use sparse_mla::{
    ListLengths, SparseMlaArgs, SparseMlaOptions, SparseMlaPlan, SparseMlaPlanArgs, SparseMlaProblem, SparseParts,
    SparseScope, sparse_mla, sparse_mla_parts, sparse_mla_plan,
};
pub use swiglu::swiglu;
pub use vertical_slash_attention::{
    PackedVerticalSlashArgs, VerticalSlashAttentionArgs, VerticalSlashAttentionOptions, VerticalSlashAttentionProblem,
    packed_vertical_slash_attention, vertical_slash_attention,
};
pub use vertical_slash_index::{
    VerticalSlashIndex, VerticalSlashIndexArgs, VerticalSlashIndexOptions, vertical_slash_index,
};
pub use write_latent::{WriteLatentArgs, WriteLatentError, write_latent};
