//! What a backend has to do for [`mhc_pre`](super::mhc_pre), [`mhc_post`](super::mhc_post) and [`mhc_head`](super::mhc_head).

use burn::backend::{Backend, ExtensionType, backend_extension, tensor::FloatTensor};
#[cfg(all(feature = "fusion", feature = "_gpu"))]
use burn::tensor::DType;

use super::MhcOptions;

/// What makes numbers for mixing of the products of the streams.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub struct BackendMixer<B: Backend> {
    /// f32 `[3]`; of the head `[1]`.
    pub scale: FloatTensor<B>,
    /// f32 `[(2 + n) n]`; of the head `[n]`.
    pub base: FloatTensor<B>,
    /// Its numbers.
    pub options: MhcOptions,
}

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait HyperConnectionBackend: Backend {
    /// streams `[N, n, d]`, products f32 `[N, (2 + n) n]`, norm_weight f32 `[d]`: input `[N, d]`, post f32 `[N, n]` and comb f32
    /// `[N, n, n]`.
    #[fusion(meta = |streams, _products, _norm_weight, _mixer| {
        let [tokens, n, width] = streams.shape.dims();
        let post = crate::fusion::spec([tokens, n], DType::F32);
        let comb = crate::fusion::spec([tokens, n, n], DType::F32);
        (crate::fusion::spec([tokens, width], streams.dtype), post, comb)
    })]
    fn mhc_pre(
        streams: FloatTensor<Self>,
        products: FloatTensor<Self>,
        norm_weight: FloatTensor<Self>,
        #[extension_type] mixer: BackendMixer<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// streams `[N, n, d]`, products f32 `[N, n]`: `[N, d]`.
    #[fusion(meta = |streams, _products, _mixer| {
        let [tokens, _, width] = streams.shape.dims();
        crate::fusion::spec([tokens, width], streams.dtype)
    })]
    fn mhc_head(
        streams: FloatTensor<Self>,
        products: FloatTensor<Self>,
        #[extension_type] mixer: BackendMixer<Self>,
    ) -> FloatTensor<Self>;

    /// streams `[N, n, d]`, output `[N, d]`, post f32 `[N, n]`, comb f32 `[N, n, n]`: the streams after a block.
    #[fusion(meta = |streams, _output, _post, _comb| streams.clone())]
    fn mhc_post(
        streams: FloatTensor<Self>,
        output: FloatTensor<Self>,
        post: FloatTensor<Self>,
        comb: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}
