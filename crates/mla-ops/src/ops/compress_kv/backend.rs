//! [`compress_kv`](super::compress_kv) as a backend extension.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};

use super::CompressKvOptions;

/// The rows of tokens, new and carried, as in [`CompressKvArgs`](super::CompressKvArgs).
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) struct BackendTokens<B: Backend> {
    /// `[N, 2 C]`.
    pub(super) kv_gates: FloatTensor<B>,
    /// f32 `[R, L, 2 C]`.
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

/// Where entries go.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) enum BackendEntryCache<B: Backend> {
    /// Into no cache.
    None,
    /// Into slots i32 `[B]` of a cache `[P, S, d]`.
    Slots(FloatTensor<B>, IntTensor<B>),
}

/// What [`CompressKvBackend::compress_and_write`] gives: the state and the cache are the buffers that it got.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) struct BackendCompressed<B: Backend> {
    /// `[B, 1, d]`.
    pub(super) entries: FloatTensor<B>,
    /// f32 `[R, L, 2 C]`.
    pub(super) state: FloatTensor<B>,
    #[extension_type]
    pub(super) cache: BackendWrittenCache<B>,
}

/// A cache with new entries.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) enum BackendWrittenCache<B: Backend> {
    /// There is none.
    None,
    /// `[P, S, d]`.
    Cache(FloatTensor<B>),
}

/// A decode step: an entry of each sequence, or none.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) struct BackendStep<B: Backend> {
    #[extension_type]
    pub(super) tokens: BackendTokens<B>,
    /// i32 `[N]`: where the new tokens go in the state.
    pub(super) state_slots: IntTensor<B>,
    #[extension_type]
    pub(super) cache: BackendEntryCache<B>,
    #[extension_type]
    pub(super) compressor: BackendCompressor<B>,
}

/// Steps of compressors that a launch of something else takes in.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) enum BackendSteps<B: Backend> {
    /// None.
    None,
    /// One.
    One(#[extension_type] BackendStep<B>),
    /// Two.
    Two(#[extension_type] BackendStep<B>, #[extension_type] BackendStep<B>),
}

/// What became of [`BackendSteps`].
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) enum BackendStepsDone<B: Backend> {
    /// There were none.
    None,
    /// Of one.
    One(#[extension_type] BackendCompressed<B>),
    /// Of two.
    Two(#[extension_type] BackendCompressed<B>, #[extension_type] BackendCompressed<B>),
}

#[cfg(any(feature = "flex", feature = "_gpu"))]
impl<B: Backend> BackendSteps<B> {
    /// With each of them.
    pub(crate) fn map(self, mut step: impl FnMut(BackendStep<B>) -> BackendCompressed<B>) -> BackendStepsDone<B> {
        match self {
            Self::None => BackendStepsDone::None,
            Self::One(only) => BackendStepsDone::One(step(only)),
            Self::Two(first, second) => {
                let first = step(first);
                BackendStepsDone::Two(first, step(second))
            }
        }
    }
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

    /// The same of a step; the new tokens go into the state, and the entries into a cache.
    #[fusion(meta = fusion::compressed)]
    fn compress_and_write(#[extension_type] step: BackendStep<Self>) -> BackendCompressed<Self>;
}

#[cfg(all(feature = "fusion", feature = "_gpu"))]
pub(crate) mod fusion {
    use super::{
        BackendCompressedMetadata, BackendEntryCacheMetadata, BackendStepMetadata, BackendStepsDoneMetadata,
        BackendStepsMetadata, BackendWrittenCacheMetadata,
    };

    pub(crate) fn done(steps: &BackendStepsMetadata) -> BackendStepsDoneMetadata {
        match steps {
            BackendStepsMetadata::None => BackendStepsDoneMetadata::None,
            BackendStepsMetadata::One(only) => BackendStepsDoneMetadata::One(compressed(only)),
            BackendStepsMetadata::Two(first, second) => {
                BackendStepsDoneMetadata::Two(compressed(first), compressed(second))
            }
        }
    }

    pub(super) fn compressed(step: &BackendStepMetadata) -> BackendCompressedMetadata {
        let BackendStepMetadata { tokens, cache, compressor, .. } = step;
        let ([batch, entries, _], [width]) = (compressor.cos.shape.dims(), compressor.norm_weight.shape.dims());
        BackendCompressedMetadata {
            entries: crate::fusion::spec([batch, entries, width], compressor.options.dtype.into()),
            state: tokens.state.clone(),
            cache: match cache {
                BackendEntryCacheMetadata::None => BackendWrittenCacheMetadata::None,
                BackendEntryCacheMetadata::Slots(cache, _) => BackendWrittenCacheMetadata::Cache(cache.clone()),
            },
        }
    }
}
