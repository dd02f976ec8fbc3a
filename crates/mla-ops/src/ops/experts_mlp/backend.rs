//! What a backend has to do for [`experts_mlp`](super::experts_mlp), and what the CPU does.

use burn::backend::{Backend, ExtensionType, backend_extension, tensor::FloatTensor};

use super::args::ExpertsMlpOptions;
use crate::ops::hyper_connection::{BackendMixer, BackendMixing, BackendRead};
use crate::ops::residual_norm::{BackendNormed, BackendReader};
use crate::ops::route_experts::BackendRouting;
use crate::weight::BackendWeight;

/// Experts that every token passes.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub enum BackendShared<B: Backend> {
    /// There are none.
    None,
    /// What they computed, `[N, hidden]`.
    Rows(FloatTensor<B>),
    /// Their weights `[2 S, hidden]` and `[hidden, S]`, for a single token.
    Weights(#[extension_type] BackendWeight<B>, #[extension_type] BackendWeight<B>),
}

/// What is computed behind the weighted sum.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub enum BackendEpilogue<B: Backend> {
    /// Nothing.
    None,
    /// Its sum with a residual stream `[N, hidden]`, the norm of that with a weight f32 `[hidden]`, and what reads the norm.
    ResidualNorm {
        /// The stream.
        residual: FloatTensor<B>,
        /// Of the norm.
        weight: FloatTensor<B>,
        /// What reads the norm.
        #[extension_type]
        reader: BackendReader<B>,
        /// Added to the mean square.
        eps: f32,
    },
    /// The streams `[N, n, hidden]` after a block with this sum as its output, and parts of their products with a mixer.
    Streams {
        /// How the sum goes into them.
        #[extension_type]
        mixing: BackendMixing<B>,
        /// f32 `[m, n hidden]`.
        weight: FloatTensor<B>,
    },
    /// The same streams, and what the next block reads of them.
    Read {
        /// How the sum goes into them.
        #[extension_type]
        mixing: BackendMixing<B>,
        /// f32 `[m, n hidden]`.
        weight: FloatTensor<B>,
        /// f32 `[hidden]`.
        norm_weight: FloatTensor<B>,
        /// Its numbers.
        #[extension_type]
        mixer: BackendMixer<B>,
    },
}

/// What an epilogue leaves.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub enum BackendExpertsOut<B: Backend> {
    /// The weighted sum, `[N, hidden]`.
    Sum(FloatTensor<B>),
    /// The residual sum, its norm, and what read that.
    Normed(#[extension_type] BackendNormed<B>),
    /// The streams, and parts of their products, f32 `[N, S, m + 1]`.
    Streams(FloatTensor<B>, FloatTensor<B>),
    /// The streams, and what a block reads of them.
    Read(#[extension_type] BackendRead<B>),
}

/// [`experts_mlp`](crate::experts_mlp()) on backend primitives.
#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait ExpertsMlpBackend: Backend {
    /// x `[N, hidden]`, gate and up `[E, 2 I, hidden]`, down `[E, hidden, I]`.
    #[fusion(meta = fusion::experts_mlp)]
    fn experts_mlp(
        x: FloatTensor<Self>,
        #[extension_type] routing: BackendRouting<Self>,
        #[extension_type] gate_up: BackendWeight<Self>,
        #[extension_type] down: BackendWeight<Self>,
        #[extension_type] shared: BackendShared<Self>,
        #[extension_type] epilogue: BackendEpilogue<Self>,
        options: ExpertsMlpOptions,
    ) -> BackendExpertsOut<Self>;
}

#[cfg(all(feature = "fusion", feature = "_gpu"))]
mod fusion {
    use burn::backend::fusion::custom::TensorSpec;

    use super::{BackendEpilogueMetadata, BackendExpertsOutMetadata, BackendSharedMetadata, ExpertsMlpOptions};
    use crate::ops::hyper_connection::fusion::{projected, read};
    use crate::ops::residual_norm::fusion::normed;
    use crate::ops::route_experts::BackendRoutingMetadata;
    use crate::weight::BackendWeightMetadata;

    pub(super) fn experts_mlp(
        x: &TensorSpec,
        _routing: &BackendRoutingMetadata,
        _gate_up: &BackendWeightMetadata,
        _down: &BackendWeightMetadata,
        _shared: &BackendSharedMetadata,
        epilogue: &BackendEpilogueMetadata,
        _options: &ExpertsMlpOptions,
    ) -> BackendExpertsOutMetadata {
        match epilogue {
            BackendEpilogueMetadata::None => BackendExpertsOutMetadata::Sum(x.clone()),
            BackendEpilogueMetadata::ResidualNorm { reader, .. } => {
                BackendExpertsOutMetadata::Normed(normed(x, reader))
            }
            BackendEpilogueMetadata::Streams { mixing, weight } => {
                let (streams, parts) = projected(&mixing.streams, weight);
                BackendExpertsOutMetadata::Streams(streams, parts)
            }
            BackendEpilogueMetadata::Read { mixing, .. } => BackendExpertsOutMetadata::Read(read(&mixing.streams)),
        }
    }
}

#[cfg(feature = "flex")]
impl ExpertsMlpBackend for burn::backend::Flex {
    fn experts_mlp(
        x: FloatTensor<Self>,
        routing: BackendRouting<Self>,
        gate_up: BackendWeight<Self>,
        down: BackendWeight<Self>,
        shared: BackendShared<Self>,
        epilogue: BackendEpilogue<Self>,
        options: ExpertsMlpOptions,
    ) -> BackendExpertsOut<Self> {
        use crate::ops::hyper_connection::{BackendStreams, HyperConnectionBackend};
        use crate::ops::residual_norm::ResidualNormBackend;
        use crate::ops::{linear, swiglu};
        use crate::reference::{IntoFlex, tensor};
        let ExpertsMlpOptions { limit, determinism } = options;
        let shared = match shared {
            BackendShared::None => None,
            BackendShared::Rows(rows) => Some(tensor(rows)),
            BackendShared::Weights(gate_up, down) => {
                let rows = swiglu::reference::swiglu(tensor(x.clone()), &gate_up.weight(), limit, determinism);
                Some(linear::reference::linear(rows, &down.weight(), determinism))
            }
        };
        let (indices, weights) = routing.materialise();
        let experts = [gate_up, down].map(BackendWeight::stacked);
        let sum =
            super::reference::experts_mlp(tensor(x), (tensor(indices), tensor(weights)), experts, shared, &options);
        let sum = sum.into_flex();
        match epilogue {
            BackendEpilogue::None => BackendExpertsOut::Sum(sum),
            BackendEpilogue::ResidualNorm { residual, weight, reader, eps } => {
                BackendExpertsOut::Normed(Self::residual_norm(residual, sum, weight, reader, eps))
            }
            BackendEpilogue::Streams { mixing, weight } => {
                let (streams, parts) = Self::mhc_project(BackendStreams::Mixed(sum, mixing), weight);
                BackendExpertsOut::Streams(streams, parts)
            }
            BackendEpilogue::Read { mixing, weight, norm_weight, mixer } => {
                let streams = BackendStreams::Mixed(sum, mixing);
                BackendExpertsOut::Read(Self::mhc_read(streams, weight, norm_weight, mixer))
            }
        }
    }
}
