//! [`sparse_mla`](super::sparse_mla) and its parts as a backend extension, for devices that compute it in one piece.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};

use super::SparseMlaOptions;
use crate::cache::BackendPool;

/// A scope as a backend takes it: rows `[P, S, D]`, slots i32 `[B, Sq, K]`.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) enum BackendScope<B: Backend> {
    /// All entries count.
    Whole(#[extension_type] BackendPool<B>, IntTensor<B>),
    /// So many of a token's, i32 `[B, Sq]`.
    Lengths(#[extension_type] BackendPool<B>, IntTensor<B>, IntTensor<B>),
}

/// What else a token sees.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) enum BackendSecond<B: Backend> {
    /// Nothing.
    None,
    /// Rows of another pool.
    Scope(#[extension_type] BackendScope<B>),
}

/// What joins the denominators.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) enum BackendSink<B: Backend> {
    /// Nothing.
    None,
    /// f32 `[H]`.
    Sink(FloatTensor<B>),
}

/// How the lists are divided.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) enum BackendPlan<B: Backend> {
    /// As many splits for each query token.
    None,
    /// By a plan: items i32 `[capacity, 4]`, cube_ptr i32 `[cubes + 1]`, split_ptr i32 `[N + 1]`.
    Plan(IntTensor<B>, IntTensor<B>, IntTensor<B>),
}

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait SparseMlaBackend: Backend {
    /// [`sparse_mla`](super::sparse_mla): out, lse.
    #[fusion(meta = |q, _scope, _second, _sink, _plan, options| {
        let [batch, query_len, heads, _] = q.shape.dims();
        let out = crate::fusion::spec([batch, query_len, heads, options.value_width], q.dtype);
        (out, crate::fusion::spec([batch, query_len, heads], burn::tensor::DType::F32))
    })]
    fn sparse_mla(
        q: FloatTensor<Self>,
        #[extension_type] scope: BackendScope<Self>,
        #[extension_type] second: BackendSecond<Self>,
        #[extension_type] sink: BackendSink<Self>,
        #[extension_type] plan: BackendPlan<Self>,
        options: SparseMlaOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// [`sparse_mla_parts`](super::sparse_mla_parts()): acc, max, row_sum.
    #[fusion(meta = |q, _scope, _second, options| {
        let [batch, query_len, heads, _] = q.shape.dims();
        let number = crate::fusion::spec([batch, query_len, heads], burn::tensor::DType::F32);
        let acc = crate::fusion::spec([batch, query_len, heads, options.value_width], burn::tensor::DType::F32);
        (acc, number.clone(), number)
    })]
    fn sparse_mla_parts(
        q: FloatTensor<Self>,
        #[extension_type] scope: BackendScope<Self>,
        #[extension_type] second: BackendSecond<Self>,
        options: SparseMlaOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}
