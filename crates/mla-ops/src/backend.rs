//! Registration: the operations as a Burn backend extension.
//!
//! The public functions in `ops` validate and call the `Dispatch` implementation that the macro generates; it picks the
//! backend from the tensors. `CubeBackend` runs kernels (`cube.rs`), `Flex` the tensor reference (`flex.rs`). With the
//! feature `fusion` a generated implementation defers the calls of `CubeBackend`, for which the functions in `fusion.rs`
//! say what the outputs will be.

use burn::backend::{
    Backend, backend_extension,
    tensor::{FloatTensor, IntTensor},
};

use crate::Splits;
#[cfg(all(feature = "fusion", any(feature = "wgpu", feature = "cuda")))]
use crate::fusion;

/// What [`MlaBackend::mla_plan`] needs beside the lengths.
#[derive(Debug, Clone)]
pub struct PlanSpec {
    /// Keys in a tile.
    pub tile: usize,
    /// Cubes that run at a time.
    pub cubes: usize,
    /// How the keys of a sequence are divided.
    pub splits: Splits,
    /// Longer lengths are cut to this.
    pub max_seq_len: usize,
    /// Rows of the item list.
    pub capacity: usize,
}

/// What [`MlaBackend::mla_decode`] needs beside the tensors.
#[derive(Debug, Clone)]
pub struct DecodeSpec {
    /// Leading channels of a cache row that are the value.
    pub value_width: usize,
    /// The factor of the scores.
    pub softmax_scale: f32,
    /// Whether later query tokens see more keys than earlier ones.
    pub causal: bool,
}

/// What [`MlaBackend::ragged_attention`] needs beside the tensors.
#[derive(Debug, Clone)]
pub struct RaggedSpec {
    /// The factor of the scores.
    pub softmax_scale: f32,
    /// Whether a token sees only itself and those before it.
    pub causal: bool,
}

/// What [`MlaBackend::page_table`] needs beside the tensors.
#[derive(Debug, Clone)]
pub struct PageTableSpec {
    /// Tokens in a page.
    pub page_size: usize,
    /// Columns of the table.
    pub max_pages: usize,
}

/// What [`MlaBackend::kv_indices`] needs beside the tensors.
#[derive(Debug, Clone)]
pub struct KvIndicesSpec {
    /// Tokens in a page.
    pub page_size: usize,
    /// Length of the list.
    pub capacity: usize,
}

/// The operations on backend primitives. Arguments are those of the public functions, validated.
#[backend_extension(
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", any(feature = "wgpu", feature = "cuda")))
)]
pub trait MlaBackend: Backend {
    /// [`mla_plan`](crate::mla_plan): items, cube_ptr, split_ptr.
    #[fusion(meta = fusion::mla_plan)]
    fn mla_plan(seq_lens: IntTensor<Self>, spec: PlanSpec) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>);

    /// [`mla_decode`](crate::mla_decode): out, lse.
    #[fusion(meta = fusion::mla_decode)]
    #[allow(clippy::too_many_arguments)]
    fn mla_decode(
        q: FloatTensor<Self>,
        kv_cache: FloatTensor<Self>,
        page_table: IntTensor<Self>,
        seq_lens: IntTensor<Self>,
        items: IntTensor<Self>,
        cube_ptr: IntTensor<Self>,
        split_ptr: IntTensor<Self>,
        spec: DecodeSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// [`ragged_attention`](crate::ragged_attention): out, lse.
    #[fusion(meta = fusion::ragged_attention)]
    fn ragged_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        cu_seqlens: IntTensor<Self>,
        spec: RaggedSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// [`page_table`](crate::page_table).
    #[fusion(meta = fusion::page_table)]
    fn page_table(
        req_to_token: IntTensor<Self>,
        req_rows: IntTensor<Self>,
        seq_lens: IntTensor<Self>,
        kv_start: IntTensor<Self>,
        spec: PageTableSpec,
    ) -> IntTensor<Self>;

    /// [`kv_indices`](crate::kv_indices): indptr, indices, last_page_len, overflow.
    #[fusion(meta = fusion::kv_indices)]
    fn kv_indices(
        req_to_token: IntTensor<Self>,
        req_rows: IntTensor<Self>,
        seq_lens: IntTensor<Self>,
        kv_start: IntTensor<Self>,
        spec: KvIndicesSpec,
    ) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>, IntTensor<Self>);

    /// [`write_latent`](crate::write_latent) of latent and rotary part: the cache's own buffer.
    #[fusion(meta = fusion::write_latent)]
    fn write_latent(
        cache: FloatTensor<Self>,
        slots: IntTensor<Self>,
        latent: FloatTensor<Self>,
        rope: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// [`write_latent`](crate::write_latent) of whole rows: the cache's own buffer.
    #[fusion(meta = fusion::write_rows)]
    fn write_rows(cache: FloatTensor<Self>, slots: IntTensor<Self>, rows: FloatTensor<Self>) -> FloatTensor<Self>;

    /// [`merge_state`](crate::merge_state): out, lse.
    #[fusion(meta = fusion::merge_state)]
    fn merge_state(
        out_a: FloatTensor<Self>,
        lse_a: FloatTensor<Self>,
        out_b: FloatTensor<Self>,
        lse_b: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// [`merge_states`](crate::merge_states): out, lse.
    #[fusion(meta = fusion::merge_states)]
    fn merge_states(outs: FloatTensor<Self>, lses: FloatTensor<Self>) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// [`Accumulator::merge`](crate::Accumulator::merge): out, lse of the accumulator.
    #[fusion(meta = fusion::merge_state_into)]
    fn merge_state_into(
        acc_out: FloatTensor<Self>,
        acc_lse: FloatTensor<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}
