//! What a backend has to do for [`route_experts`](super::route_experts), and what the CPU does.

use burn::backend::{
    Backend, ExtensionType, backend_extension,
    tensor::{FloatTensor, IntTensor},
};

use super::args::RouteExpertsOptions;
use crate::Determinism;
use crate::weight::BackendWeight;

/// A router's logits f32 `[N, E]`.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub enum BackendLogits<B: Backend> {
    /// They are in memory.
    InMemory(FloatTensor<B>),
    /// The products of x `[N, hidden]` with a weight f32 `[E, hidden]`.
    Product(FloatTensor<B>, #[extension_type] BackendWeight<B>, Determinism),
}

/// Which experts a token gets.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub enum BackendChoice<B: Backend> {
    /// The `k` best scores.
    Scores(#[extension_type] BackendLogits<B>, usize),
    /// A bias `[E]`; the `k` best sums of score and bias.
    BiasedScores(#[extension_type] BackendLogits<B>, FloatTensor<B>, usize),
    /// These, i32 `[N, k]`.
    Given(#[extension_type] BackendLogits<B>, IntTensor<B>),
    /// Those of a table i32 `[T, k]`, in the row of each token, i32 `[N]`.
    Table(#[extension_type] BackendLogits<B>, IntTensor<B>, IntTensor<B>),
}

/// Which tokens are padding.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub enum BackendPadding<B: Backend> {
    /// None.
    None,
    /// Those with a slot below 0, i32 `[N]`.
    Slots(IntTensor<B>),
}

/// The experts of tokens and their weights, or what they are chosen from.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub enum BackendRouting<B: Backend> {
    /// Experts i32 `[N, k]` and weights f32 `[N, k]`.
    Given(IntTensor<B>, FloatTensor<B>),
    /// What [`RouteExpertsBackend::route_experts`] takes.
    Chosen(#[extension_type] BackendChoice<B>, #[extension_type] BackendPadding<B>, RouteExpertsOptions),
}

impl<B: RouteExpertsBackend> BackendRouting<B> {
    /// Experts and weights.
    pub fn materialise(self) -> (IntTensor<B>, FloatTensor<B>) {
        match self {
            Self::Given(indices, weights) => (indices, weights),
            Self::Chosen(choice, padding, options) => B::route_experts(choice, padding, options),
        }
    }
}

/// [`route_experts`](crate::route_experts()) on backend primitives.
#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait RouteExpertsBackend: Backend {
    /// Experts i32 `[N, k]` and weights f32 `[N, k]`.
    #[fusion(meta = fusion::route_experts)]
    fn route_experts(
        #[extension_type] choice: BackendChoice<Self>,
        #[extension_type] padding: BackendPadding<Self>,
        options: RouteExpertsOptions,
    ) -> (IntTensor<Self>, FloatTensor<Self>);
}

#[cfg(all(feature = "fusion", feature = "_gpu"))]
mod fusion {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::{DType, Shape};

    use super::{BackendChoiceMetadata, BackendLogitsMetadata, BackendPaddingMetadata, RouteExpertsOptions};

    /// Shapes and dtypes of what is computed.
    pub(super) fn route_experts(
        choice: &BackendChoiceMetadata,
        _padding: &BackendPaddingMetadata,
        _options: &RouteExpertsOptions,
    ) -> (TensorSpec, TensorSpec) {
        let (logits, top_k) = match choice {
            BackendChoiceMetadata::Scores(logits, top_k) | BackendChoiceMetadata::BiasedScores(logits, _, top_k) => {
                (logits, *top_k)
            }
            BackendChoiceMetadata::Given(logits, experts) | BackendChoiceMetadata::Table(logits, experts, _) => {
                (logits, experts.shape.dims::<2>()[1])
            }
        };
        let tokens = match logits {
            BackendLogitsMetadata::InMemory(rows) | BackendLogitsMetadata::Product(rows, ..) => {
                rows.shape.dims::<2>()[0]
            }
        };
        let spec = |dtype| TensorSpec::new(Shape::new([tokens, top_k]), dtype);
        (spec(DType::I32), spec(DType::F32))
    }
}

#[cfg(feature = "flex")]
impl RouteExpertsBackend for burn::backend::Flex {
    fn route_experts(
        choice: BackendChoice<Self>,
        padding: BackendPadding<Self>,
        options: RouteExpertsOptions,
    ) -> (IntTensor<Self>, FloatTensor<Self>) {
        use super::reference::{choose_experts, in_table, local_numbers, weigh_experts, without_padding};
        use crate::ops::linear::reference::linear;
        use crate::reference::{IntoFlex, tensor};
        let in_memory = |logits| match logits {
            BackendLogits::InMemory(logits) => tensor(logits),
            BackendLogits::Product(x, weight, determinism) => linear(tensor(x), &weight.weight(), determinism),
        };
        let (indices, weights) = match choice {
            BackendChoice::Scores(logits, top_k) => choose_experts(in_memory(logits), None, top_k, &options),
            BackendChoice::BiasedScores(logits, bias, top_k) => {
                choose_experts(in_memory(logits), Some(tensor(bias)), top_k, &options)
            }
            BackendChoice::Given(logits, given) => weigh_experts(in_memory(logits), tensor(given), &options),
            BackendChoice::Table(logits, experts, rows) => {
                weigh_experts(in_memory(logits), in_table(tensor(experts), tensor(rows)), &options)
            }
        };
        let mut indices = local_numbers(indices, options.local);
        if let BackendPadding::Slots(slots) = padding {
            indices = without_padding(indices, tensor(slots));
        }
        (indices.into_flex(), weights.into_flex())
    }
}
