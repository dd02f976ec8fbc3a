//! [`compress_kv`](super::compress_kv) as a backend extension.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};

use super::CompressKvOptions;

/// The rows of tokens, new and carried, as in [`CompressKvArgs`](super::CompressKvArgs).
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) struct BackendTokens<B: Backend> {
    /// f32 `[N, 2 C]`.
    pub(super) kv_gates: FloatTensor<B>,
    /// f32 `[R, L, 2 C]`, read.
    pub(super) state: FloatTensor<B>,
    /// i32 `[B]`.
    pub(super) state_rows: IntTensor<B>,
    /// i32 `[B + 1]`.
    pub(super) cu_seqlens: IntTensor<B>,
    /// i32 `[B]`.
    pub(super) starts: IntTensor<B>,
}

/// What makes entries of windows, as in [`CompressKvArgs`](super::CompressKvArgs).
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) struct BackendCompressor<B: Backend> {
    /// f32 `[m, C]`.
    pub(super) position_bias: FloatTensor<B>,
    /// f32 `[d]`.
    pub(super) norm_weight: FloatTensor<B>,
    /// f32 `[B, n, dr / 2]`.
    pub(super) cos: FloatTensor<B>,
    /// f32 `[B, n, dr / 2]`.
    pub(super) sin: FloatTensor<B>,
    pub(super) options: CompressKvOptions,
}

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait CompressKvBackend: Backend {
    /// [`compress_kv`](super::compress_kv): the entries. The state is read; the public function writes it.
    #[fusion(meta = |_tokens, compressor| {
        let ([batch, entries, _], [width]) = (compressor.cos.shape.dims(), compressor.norm_weight.shape.dims());
        crate::fusion::spec([batch, entries, width], compressor.options.dtype.into())
    })]
    fn compress_kv(
        #[extension_type] tokens: BackendTokens<Self>,
        #[extension_type] compressor: BackendCompressor<Self>,
    ) -> FloatTensor<Self>;
}
