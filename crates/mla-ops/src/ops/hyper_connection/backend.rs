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
    /// f32 `[m]`: `m` is `(2 + n) n`; of the head `n`.
    pub base: FloatTensor<B>,
    /// Its numbers.
    pub options: MhcOptions,
}

/// Products of the streams with a mixer of `m` rows.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub enum BackendMixerProducts<B: Backend> {
    /// f32 `[N, m]`.
    Whole(FloatTensor<B>),
    /// f32 `[N, S, m + 1]`: what is to be added up, behind them of the streams' squares.
    InParts(FloatTensor<B>),
}

/// Streams `[N, n, d]` before a block, and how its output goes into them.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub struct BackendMixing<B: Backend> {
    /// `[N, n, d]`.
    pub streams: FloatTensor<B>,
    /// f32 `[N, n]`.
    pub post: FloatTensor<B>,
    /// f32 `[N, n, n]`.
    pub comb: FloatTensor<B>,
}

/// What a block reads of streams, and they.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub struct BackendRead<B: Backend> {
    /// `[N, n, d]`.
    pub streams: FloatTensor<B>,
    /// `[N, d]`.
    pub input: FloatTensor<B>,
    /// f32 `[N, n]`.
    pub post: FloatTensor<B>,
    /// f32 `[N, n, n]`.
    pub comb: FloatTensor<B>,
}

/// Streams `[N, n, d]`.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub enum BackendStreams<B: Backend> {
    /// They are in memory.
    InMemory(FloatTensor<B>),
    /// Those after a block with this output `[N, d]`.
    Mixed(FloatTensor<B>, #[extension_type] BackendMixing<B>),
}

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait HyperConnectionBackend: Backend {
    /// streams `[N, n, d]`, weight f32 `[m, n d]`: the streams in memory, and their products in parts, f32 `[N, S, m + 1]`.
    #[fusion(meta = fusion::mhc_project)]
    fn mhc_project(
        #[extension_type] streams: BackendStreams<Self>,
        weight: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// streams `[N, n, d]`, norm_weight f32 `[d]`: input `[N, d]`, post f32 `[N, n]` and comb f32 `[N, n, n]`.
    #[fusion(meta = |streams, _products, _norm_weight, _mixer| {
        let [tokens, n, width] = streams.shape.dims();
        let post = crate::fusion::spec([tokens, n], DType::F32);
        let comb = crate::fusion::spec([tokens, n, n], DType::F32);
        (crate::fusion::spec([tokens, width], streams.dtype), post, comb)
    })]
    fn mhc_pre(
        streams: FloatTensor<Self>,
        #[extension_type] products: BackendMixerProducts<Self>,
        norm_weight: FloatTensor<Self>,
        #[extension_type] mixer: BackendMixer<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// [`mhc_project`](Self::mhc_project), and [`mhc_pre`](Self::mhc_pre) with what it gives: the streams, input, post and comb.
    #[fusion(meta = fusion::mhc_read)]
    fn mhc_read(
        #[extension_type] streams: BackendStreams<Self>,
        weight: FloatTensor<Self>,
        norm_weight: FloatTensor<Self>,
        #[extension_type] mixer: BackendMixer<Self>,
    ) -> BackendRead<Self>;

    /// streams `[N, n, d]`: `[N, d]`.
    #[fusion(meta = |streams, _products, _mixer| {
        let [tokens, _, width] = streams.shape.dims();
        crate::fusion::spec([tokens, width], streams.dtype)
    })]
    fn mhc_head(
        streams: FloatTensor<Self>,
        #[extension_type] products: BackendMixerProducts<Self>,
        #[extension_type] mixer: BackendMixer<Self>,
    ) -> FloatTensor<Self>;

    /// output `[N, d]`: the streams after a block.
    #[fusion(meta = |_output, mixing| mixing.streams.clone())]
    fn mhc_post(output: FloatTensor<Self>, #[extension_type] mixing: BackendMixing<Self>) -> FloatTensor<Self>;
}

#[cfg(all(feature = "fusion", feature = "_gpu"))]
pub(crate) mod fusion {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::DType;
    use mla_kernels::hyper_connection::slices;

    use super::{BackendMixerMetadata, BackendReadMetadata, BackendStreamsMetadata};

    /// Streams in memory, and parts of their products.
    pub(crate) fn projected(streams: &TensorSpec, weight: &TensorSpec) -> (TensorSpec, TensorSpec) {
        let ([tokens, _, width], [rows, _]) = (streams.shape.dims(), weight.shape.dims());
        (streams.clone(), crate::fusion::spec([tokens, slices(width), rows + 1], DType::F32))
    }

    pub(super) fn mhc_project(streams: &BackendStreamsMetadata, weight: &TensorSpec) -> (TensorSpec, TensorSpec) {
        projected(in_memory(streams), weight)
    }

    pub(super) fn mhc_read(
        streams: &BackendStreamsMetadata,
        _weight: &TensorSpec,
        _norm_weight: &TensorSpec,
        _mixer: &BackendMixerMetadata,
    ) -> BackendReadMetadata {
        read(in_memory(streams))
    }

    /// What a block reads of streams.
    pub(crate) fn read(streams: &TensorSpec) -> BackendReadMetadata {
        let [tokens, n, width] = streams.shape.dims();
        BackendReadMetadata {
            streams: streams.clone(),
            input: crate::fusion::spec([tokens, width], streams.dtype),
            post: crate::fusion::spec([tokens, n], DType::F32),
            comb: crate::fusion::spec([tokens, n, n], DType::F32),
        }
    }

    fn in_memory(streams: &BackendStreamsMetadata) -> &TensorSpec {
        match streams {
            BackendStreamsMetadata::InMemory(streams) => streams,
            BackendStreamsMetadata::Mixed(_, mixing) => &mixing.streams,
        }
    }
}
