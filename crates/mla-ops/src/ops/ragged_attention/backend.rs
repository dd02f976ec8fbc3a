//! [`ragged_attention`](super::ragged_attention) as a backend extension.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};

use super::RaggedAttentionOptions;

/// Keys as a backend takes them.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) enum BackendKeys<B: Backend> {
    /// `[M, Hkv, dqk]`.
    Whole(FloatTensor<B>),
    /// `[M, Hkv, dqk - dr]`, and the last channels that all heads share, `[M, dr]`.
    Shared(FloatTensor<B>, FloatTensor<B>),
}

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait RaggedAttentionBackend: Backend {
    /// [`ragged_attention`](super::ragged_attention): out, lse. The ends of the sequences are those of queries and keys.
    #[fusion(meta = |q, _k, v, _cu_seqlens, _cu_seqlens_k, _options| {
        let [tokens, heads, _] = q.shape.dims();
        let out = crate::fusion::spec([tokens, heads, v.shape[2]], q.dtype);
        (out, crate::fusion::spec([tokens, heads], burn::tensor::DType::F32))
    })]
    fn ragged_attention(
        q: FloatTensor<Self>,
        #[extension_type] k: BackendKeys<Self>,
        v: FloatTensor<Self>,
        cu_seqlens: IntTensor<Self>,
        cu_seqlens_k: IntTensor<Self>,
        options: RaggedAttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}
