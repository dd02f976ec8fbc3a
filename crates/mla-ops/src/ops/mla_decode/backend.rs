//! [`mla_decode`](super::mla_decode()) as a backend extension.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};

use crate::Path;
use crate::cache::BackendPool;

/// What [`BackendDecode`] has beside the tensors.
#[derive(Debug, Clone)]
pub(crate) struct DecodeSpec {
    /// Leading channels of a cache row that are the value.
    pub(crate) value_width: usize,
    /// The factor of the scores.
    pub(crate) softmax_scale: f32,
    /// Whether later query tokens see more keys than earlier ones.
    pub(crate) causal: bool,
    /// The implementation, one that the device has; otherwise the fastest.
    pub(crate) path: Option<Path>,
}

/// A decode step: [`MlaDecodeArgs`](super::MlaDecodeArgs) and the [`MlaPlan`](crate::MlaPlan), checked.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) struct BackendDecode<B: Backend> {
    /// `[B, Sq, H, D]`.
    pub(crate) q: FloatTensor<B>,
    /// `[P, S, D]`.
    #[extension_type]
    pub(crate) kv_cache: BackendPool<B>,
    /// i32 `[B, maxP]`.
    pub(crate) page_table: IntTensor<B>,
    /// i32 `[B]`.
    pub(crate) seq_lens: IntTensor<B>,
    /// i32 `[capacity, 4]`.
    pub(crate) items: IntTensor<B>,
    /// i32 `[cubes + 1]`.
    pub(crate) cube_ptr: IntTensor<B>,
    /// i32 `[B + 1]`.
    pub(crate) split_ptr: IntTensor<B>,
    pub(crate) spec: DecodeSpec,
}

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait MlaDecodeBackend: Backend {
    /// [`mla_decode`](super::mla_decode()): out, lse.
    #[fusion(meta = |step| {
        let [batch, query_len, heads, _] = step.q.shape.dims();
        let out = crate::fusion::spec([batch, query_len, heads, step.spec.value_width], step.q.dtype);
        (out, crate::fusion::spec([batch, query_len, heads], burn::tensor::DType::F32))
    })]
    fn mla_decode(#[extension_type] step: BackendDecode<Self>) -> (FloatTensor<Self>, FloatTensor<Self>);
}
