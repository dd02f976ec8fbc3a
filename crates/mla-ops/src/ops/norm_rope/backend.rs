//! What a backend has to do for [`norm_rope`](super::norm_rope()) and [`rms_norm`](crate::rms_norm).

use burn::backend::{Backend, ExtensionType, backend_extension, tensor::FloatTensor};

/// The norm of heads.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub enum BackendNorm<B: Backend> {
    /// There is none.
    None,
    /// Without a weight; what is added to the mean square.
    Plain(f32),
    /// With a weight f32; what is added to the mean square.
    Weighted(FloatTensor<B>, f32),
}

/// RoPE of the last channels of heads.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub enum BackendRope<B: Backend> {
    /// There is none.
    None,
    /// By cosines and sines f32 `[N, dr / 2]`.
    Tables {
        /// Cosines.
        cos: FloatTensor<B>,
        /// Sines.
        sin: FloatTensor<B>,
        /// Whether it is inverse RoPE.
        inverse: bool,
    },
}

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait NormRopeBackend: Backend {
    /// x `[N, H, d]`; `norm_whole_head` is [`NormRopeOptions::norm_whole_head`](crate::NormRopeOptions::norm_whole_head).
    #[fusion(meta = |x, _norm, _rope, _norm_whole_head| x.clone())]
    fn norm_rope(
        x: FloatTensor<Self>,
        #[extension_type] norm: BackendNorm<Self>,
        #[extension_type] rope: BackendRope<Self>,
        norm_whole_head: bool,
    ) -> FloatTensor<Self>;
}
