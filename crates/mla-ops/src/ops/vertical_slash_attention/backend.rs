//! [`vertical_slash_attention`](super::vertical_slash_attention) as a backend extension.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};

/// What [`VerticalSlashAttentionBackend::vertical_slash_attention`] needs beside the tensors.
#[derive(Debug, Clone)]
pub(crate) struct AttentionSpec {
    /// Rows of q, and of k and v, from one sequence to the next; none where the sequences are packed.
    pub(super) strides: Option<[usize; 2]>,
    /// Queries in a block row.
    pub(super) block_size_m: usize,
    /// Keys in a key block.
    pub(super) block_size_n: usize,
    /// The factor of the scores.
    pub(super) softmax_scale: f32,
    /// What scaled scores are bent to stay below; 0 for nothing.
    pub(super) softcap: f32,
    /// Whether a query sees only the keys up to its own position.
    pub(super) causal: bool,
}

/// What each block row attends to, as in [`VerticalSlashIndex`](crate::VerticalSlashIndex).
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) struct BackendKeyLists<B: Backend> {
    /// i32 `[B, H, rows]`.
    pub(super) block_count: IntTensor<B>,
    /// i32 `[B, H, rows, _]`.
    pub(super) block_offset: IntTensor<B>,
    /// i32 `[B, H, rows]`.
    pub(super) column_count: IntTensor<B>,
    /// i32 `[B, H, rows, _]`.
    pub(super) column_index: IntTensor<B>,
}

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait VerticalSlashAttentionBackend: Backend {
    /// [`packed_vertical_slash_attention`](super::packed_vertical_slash_attention): out, lse. The bounds are lengths, or where
    /// sequences are packed, their ends.
    #[fusion(meta = |q, _k, v, _q_bounds, _kv_bounds, _lists, _spec| {
        let [tokens, heads, _] = q.shape.dims();
        let out = crate::fusion::spec([tokens, heads, v.shape[2]], q.dtype);
        (out, crate::fusion::spec([tokens, heads], burn::tensor::DType::F32))
    })]
    fn vertical_slash_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        q_bounds: IntTensor<Self>,
        kv_bounds: IntTensor<Self>,
        #[extension_type] lists: BackendKeyLists<Self>,
        spec: AttentionSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}
