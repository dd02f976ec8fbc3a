//! [`rope_write`](super::rope_write()) as a backend extension.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};

/// Latents and where they go, as in [`RopeWriteArgs`](super::RopeWriteArgs).
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) struct BackendLatents<B: Backend> {
    /// `[N, D]`.
    pub(super) latent: FloatTensor<B>,
    /// f32 `[D - dr]`.
    pub(super) norm_weight: FloatTensor<B>,
    /// f32 `[N, dr / 2]`.
    pub(super) cos: FloatTensor<B>,
    /// f32 `[N, dr / 2]`.
    pub(super) sin: FloatTensor<B>,
    /// `[P, S, D]`.
    pub(super) cache: FloatTensor<B>,
    /// i32 `[N]`.
    pub(super) slots: IntTensor<B>,
    pub(super) norm_eps: f32,
}

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait RopeWriteBackend: Backend {
    /// [`rope_write`](super::rope_write()): queries, latents, the cache's own buffer.
    #[fusion(meta = |q, latents| (q.clone(), latents.latent.clone(), latents.cache.clone()))]
    fn rope_write(
        q: FloatTensor<Self>,
        #[extension_type] latents: BackendLatents<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// [`rope_write_absorb`](super::rope_write_absorb()) of a few tokens: absorbed queries, the cache's own buffer.
    #[fusion(meta = |q, latents, weight| {
        let ([rows, heads, width], [_, outputs, inputs]) = (q.shape.dims(), weight.shape.dims());
        (crate::fusion::spec([rows, heads, outputs + width - inputs], q.dtype), latents.cache.clone())
    })]
    fn rope_write_absorb(
        q: FloatTensor<Self>,
        #[extension_type] latents: BackendLatents<Self>,
        weight: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}
