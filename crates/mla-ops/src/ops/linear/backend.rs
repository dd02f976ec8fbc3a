//! What a backend has to do for [`linear`](super::linear) and [`linear_each`](super::linear_each), and what the CPU does.

use burn::backend::{Backend, ExtensionType, backend_extension, tensor::FloatTensor};

use crate::Determinism;
use crate::ops::norm_rope::BackendNorm;
use crate::ops::residual_norm::BackendProducts;
use crate::weight::BackendWeight;

/// The weights of several projections of the same rows.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub enum BackendWeights<B: Backend> {
    /// Two.
    Two(#[extension_type] BackendWeight<B>, #[extension_type] BackendWeight<B>),
    /// Three.
    Three(#[extension_type] BackendWeight<B>, #[extension_type] BackendWeight<B>, #[extension_type] BackendWeight<B>),
    /// Four.
    Four(
        #[extension_type] BackendWeight<B>,
        #[extension_type] BackendWeight<B>,
        #[extension_type] BackendWeight<B>,
        #[extension_type] BackendWeight<B>,
    ),
    /// Five.
    Five(
        #[extension_type] BackendWeight<B>,
        #[extension_type] BackendWeight<B>,
        #[extension_type] BackendWeight<B>,
        #[extension_type] BackendWeight<B>,
        #[extension_type] BackendWeight<B>,
    ),
}

/// Weights of a [`BackendWeights`] at most.
pub(crate) const MOST_WEIGHTS: usize = 5;

impl<B: Backend> BackendWeights<B> {
    /// These, if they are as many.
    pub(crate) fn new(weights: impl IntoIterator<Item = BackendWeight<B>>) -> Option<Self> {
        let mut weights = weights.into_iter();
        let mut next = || weights.next();
        match (next(), next(), next(), next(), next(), next()) {
            (Some(a), Some(b), None, ..) => Some(Self::Two(a, b)),
            (Some(a), Some(b), Some(c), None, ..) => Some(Self::Three(a, b, c)),
            (Some(a), Some(b), Some(c), Some(d), None, _) => Some(Self::Four(a, b, c, d)),
            (Some(a), Some(b), Some(c), Some(d), Some(e), None) => Some(Self::Five(a, b, c, d, e)),
            _ => None,
        }
    }

    /// In their order.
    #[cfg(any(feature = "flex", feature = "_gpu"))]
    pub(crate) fn into_vec(self) -> Vec<BackendWeight<B>> {
        match self {
            Self::Two(a, b) => vec![a, b],
            Self::Three(a, b, c) => vec![a, b, c],
            Self::Four(a, b, c, d) => vec![a, b, c, d],
            Self::Five(a, b, c, d, e) => vec![a, b, c, d, e],
        }
    }
}

/// [`linear`](crate::linear()) and [`linear_each`](crate::linear_each()) of a few rows on backend primitives.
#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait LinearBackend: Backend {
    /// x `[N, in]`: `[N, out]` of the dtype of the weight, which is that of x, or f32.
    #[fusion(meta = |x, weight, _| fusion::linear(x, weight))]
    fn linear(
        x: FloatTensor<Self>,
        #[extension_type] weight: BackendWeight<Self>,
        determinism: Determinism,
    ) -> FloatTensor<Self>;

    /// x `[N, in]`: the products with each of the weights, which have its dtype. Of the first one a weighted norm takes the place.
    #[fusion(meta = |x, weights, _, _| fusion::linear_each(x, weights))]
    fn linear_each(
        x: FloatTensor<Self>,
        #[extension_type] weights: BackendWeights<Self>,
        #[extension_type] norm: BackendNorm<Self>,
        determinism: Determinism,
    ) -> BackendProducts<Self>;
}

#[cfg(all(feature = "fusion", feature = "_gpu"))]
pub(crate) mod fusion {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::Shape;

    use super::BackendWeightsMetadata;
    use crate::ops::residual_norm::BackendProductsMetadata;
    use crate::weight::BackendWeightMetadata;

    /// Shape and dtype of a product.
    pub(crate) fn linear(x: &TensorSpec, weight: &BackendWeightMetadata) -> TensorSpec {
        let ([rows, _], [outputs, _]) = (x.shape.dims(), weight.dims());
        TensorSpec::new(Shape::new([rows, outputs]), weight.dtype())
    }

    pub(super) fn linear_each(x: &TensorSpec, weights: &BackendWeightsMetadata) -> BackendProductsMetadata {
        let of = |weight| linear(x, weight);
        match weights {
            BackendWeightsMetadata::Two(a, b) => BackendProductsMetadata::Two(of(a), of(b)),
            BackendWeightsMetadata::Three(a, b, c) => BackendProductsMetadata::Three(of(a), of(b), of(c)),
            BackendWeightsMetadata::Four(a, b, c, d) => BackendProductsMetadata::Four(of(a), of(b), of(c), of(d)),
            BackendWeightsMetadata::Five(a, b, c, d, e) => {
                BackendProductsMetadata::Five(of(a), of(b), of(c), of(d), of(e))
            }
        }
    }
}

#[cfg(feature = "flex")]
impl LinearBackend for burn::backend::Flex {
    fn linear(x: FloatTensor<Self>, weight: BackendWeight<Self>, determinism: Determinism) -> FloatTensor<Self> {
        use super::reference::linear;
        use crate::reference::{IntoFlex, tensor};
        linear(tensor(x), &weight.weight(), determinism).into_flex()
    }

    fn linear_each(
        x: FloatTensor<Self>,
        weights: BackendWeights<Self>,
        norm: BackendNorm<Self>,
        determinism: Determinism,
    ) -> BackendProducts<Self> {
        use crate::ops::norm_rope::reference::rms_norm;
        use crate::reference::{IntoFlex, tensor};
        let product = |weight| <Self as LinearBackend>::linear(x.clone(), weight, determinism);
        let mut products = Vec::from_iter(weights.into_vec().into_iter().map(product));
        if let BackendNorm::Weighted(weight, eps) = norm {
            products[0] = rms_norm(tensor(products[0].clone()), tensor(weight), eps).into_flex();
        }
        BackendProducts::new(products)
    }
}
