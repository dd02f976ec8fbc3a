//! [`ragged_attention`](super::ragged_attention) as a backend extension.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};

use super::RaggedAttentionOptions;

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait RaggedAttentionBackend: Backend {
    /// [`ragged_attention`](super::ragged_attention): out, lse.
    #[fusion(meta = |q, _k, v, _cu_seqlens, _options| {
        let [tokens, heads, _] = q.shape.dims();
        (v.clone(), crate::fusion::spec([tokens, heads], burn::tensor::DType::F32))
    })]
    fn ragged_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        cu_seqlens: IntTensor<Self>,
        options: RaggedAttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}
