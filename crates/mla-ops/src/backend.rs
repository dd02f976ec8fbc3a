//! Registration: the operations as a Burn backend extension.
//!
//! The public functions in `ops` validate and call the `Dispatch` implementation that the macro generates; it picks the
//! backend from the tensors. Every registered backend runs the tensor reference for now, so that all operations exist
//! on all devices.

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use burn::backend::Cube;
#[cfg(feature = "flex")]
use burn::backend::Flex;
use burn::backend::{
    Backend, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::Tensor;

use crate::{Splits, reference};

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
#[backend_extension(Cube: cfg(any(feature = "wgpu", feature = "cuda")), Flex: cfg(feature = "flex"))]
pub trait MlaBackend: Backend {
    /// [`mla_plan`](crate::mla_plan): items, cube_ptr, split_ptr.
    fn mla_plan(seq_lens: IntTensor<Self>, spec: PlanSpec) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>);

    /// [`mla_decode`](crate::mla_decode): out, lse.
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
    fn ragged_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        cu_seqlens: IntTensor<Self>,
        spec: RaggedSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// [`page_table`](crate::page_table).
    fn page_table(
        req_to_token: IntTensor<Self>,
        req_rows: IntTensor<Self>,
        seq_lens: IntTensor<Self>,
        kv_start: IntTensor<Self>,
        spec: PageTableSpec,
    ) -> IntTensor<Self>;

    /// [`kv_indices`](crate::kv_indices): indptr, indices, last_page_len, overflow.
    fn kv_indices(
        req_to_token: IntTensor<Self>,
        req_rows: IntTensor<Self>,
        seq_lens: IntTensor<Self>,
        kv_start: IntTensor<Self>,
        spec: KvIndicesSpec,
    ) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>, IntTensor<Self>);

    /// [`write_latent`](crate::write_latent) of latent and rotary part: the cache's own buffer.
    fn write_latent(
        cache: FloatTensor<Self>,
        slots: IntTensor<Self>,
        latent: FloatTensor<Self>,
        rope: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// [`write_latent`](crate::write_latent) of whole rows: the cache's own buffer.
    fn write_rows(cache: FloatTensor<Self>, slots: IntTensor<Self>, rows: FloatTensor<Self>) -> FloatTensor<Self>;

    /// [`merge_state`](crate::merge_state): out, lse.
    fn merge_state(
        out_a: FloatTensor<Self>,
        lse_a: FloatTensor<Self>,
        out_b: FloatTensor<Self>,
        lse_b: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// [`merge_states`](crate::merge_states): out, lse.
    fn merge_states(outs: FloatTensor<Self>, lses: FloatTensor<Self>) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// [`Accumulator::merge`](crate::Accumulator::merge): out, lse of the accumulator.
    fn merge_state_into(
        acc_out: FloatTensor<Self>,
        acc_lse: FloatTensor<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

/// Implements the trait for a backend by the tensor reference.
macro_rules! run_reference {
    ($backend:ty) => {
        impl MlaBackend for $backend {
            fn mla_plan(
                seq_lens: IntTensor<Self>,
                spec: PlanSpec,
            ) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>) {
                let (items, cube_ptr, split_ptr) = reference::mla_plan(int(seq_lens), &spec);
                (int_primitive(items), int_primitive(cube_ptr), int_primitive(split_ptr))
            }

            fn mla_decode(
                q: FloatTensor<Self>,
                kv_cache: FloatTensor<Self>,
                page_table: IntTensor<Self>,
                seq_lens: IntTensor<Self>,
                items: IntTensor<Self>,
                _cube_ptr: IntTensor<Self>,
                _split_ptr: IntTensor<Self>,
                spec: DecodeSpec,
            ) -> (FloatTensor<Self>, FloatTensor<Self>) {
                let cache = reference::PagedRows::new(float(kv_cache), int(page_table));
                let (out, lse) = reference::mla_decode(float(q), cache, int(seq_lens), int(items), &spec);
                (float_primitive(out), float_primitive(lse))
            }

            fn ragged_attention(
                q: FloatTensor<Self>,
                k: FloatTensor<Self>,
                v: FloatTensor<Self>,
                cu_seqlens: IntTensor<Self>,
                spec: RaggedSpec,
            ) -> (FloatTensor<Self>, FloatTensor<Self>) {
                let (out, lse) = reference::ragged_attention(float(q), float(k), float(v), int(cu_seqlens), &spec);
                (float_primitive(out), float_primitive(lse))
            }

            fn page_table(
                req_to_token: IntTensor<Self>,
                req_rows: IntTensor<Self>,
                seq_lens: IntTensor<Self>,
                kv_start: IntTensor<Self>,
                spec: PageTableSpec,
            ) -> IntTensor<Self> {
                let (rows, lens, kv_start) = (int(req_rows), int(seq_lens), int(kv_start));
                int_primitive(reference::page_table(int(req_to_token), rows, lens, kv_start, &spec))
            }

            fn kv_indices(
                req_to_token: IntTensor<Self>,
                req_rows: IntTensor<Self>,
                seq_lens: IntTensor<Self>,
                kv_start: IntTensor<Self>,
                spec: KvIndicesSpec,
            ) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>, IntTensor<Self>) {
                let (rows, lens, kv_start) = (int(req_rows), int(seq_lens), int(kv_start));
                let csr = reference::kv_indices(int(req_to_token), rows, lens, kv_start, &spec);
                let [indptr, indices, last_page_len, overflow] = csr.map(int_primitive);
                (indptr, indices, last_page_len, overflow)
            }

            fn write_latent(
                cache: FloatTensor<Self>,
                slots: IntTensor<Self>,
                latent: FloatTensor<Self>,
                rope: FloatTensor<Self>,
            ) -> FloatTensor<Self> {
                let parts = [float(latent), float(rope)];
                float_primitive(reference::write_latent(float(cache), int(slots), &parts))
            }

            fn write_rows(
                cache: FloatTensor<Self>,
                slots: IntTensor<Self>,
                rows: FloatTensor<Self>,
            ) -> FloatTensor<Self> {
                float_primitive(reference::write_latent(float(cache), int(slots), &[float(rows)]))
            }

            fn merge_state(
                out_a: FloatTensor<Self>,
                lse_a: FloatTensor<Self>,
                out_b: FloatTensor<Self>,
                lse_b: FloatTensor<Self>,
            ) -> (FloatTensor<Self>, FloatTensor<Self>) {
                let (out, lse) = reference::merge_state(float(out_a), float(lse_a), float(out_b), float(lse_b));
                (float_primitive(out), float_primitive(lse))
            }

            fn merge_states(
                outs: FloatTensor<Self>,
                lses: FloatTensor<Self>,
            ) -> (FloatTensor<Self>, FloatTensor<Self>) {
                let (out, lse) = reference::merge_states(float(outs), float(lses));
                (float_primitive(out), float_primitive(lse))
            }

            fn merge_state_into(
                acc_out: FloatTensor<Self>,
                acc_lse: FloatTensor<Self>,
                out: FloatTensor<Self>,
                lse: FloatTensor<Self>,
            ) -> (FloatTensor<Self>, FloatTensor<Self>) {
                // The accumulator is f32, and a merge has the dtype of its first state.
                Self::merge_state(acc_out, acc_lse, out, lse)
            }
        }
    };
}

/// Tensors of one backend from its primitives and back.
macro_rules! on_tensors {
    ($module:ident, $backend:ty) => {
        mod $module {
            use super::*;

            fn float<const D: usize>(primitive: FloatTensor<$backend>) -> Tensor<D> {
                Tensor::from_primitive::<$backend>(primitive)
            }

            fn int<const D: usize>(primitive: IntTensor<$backend>) -> Tensor<D, burn::tensor::Int> {
                Tensor::from_primitive::<$backend>(primitive)
            }

            fn float_primitive<const D: usize>(tensor: Tensor<D>) -> FloatTensor<$backend> {
                tensor.try_into_primitive::<$backend>().expect("computed from tensors of this backend")
            }

            fn int_primitive<const D: usize>(tensor: Tensor<D, burn::tensor::Int>) -> IntTensor<$backend> {
                tensor.try_into_primitive::<$backend>().expect("computed from tensors of this backend")
            }

            run_reference!($backend);
        }
    };
}

#[cfg(feature = "flex")]
on_tensors!(flex, Flex);
// With the feature `fusion`, `Cube` is the fusing backend; the reference is ordinary tensor operations, which fuse.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
on_tensors!(cube, Cube);
