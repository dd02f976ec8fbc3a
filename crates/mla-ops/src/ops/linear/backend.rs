//! What a backend has to do for [`linear`](super::linear) and [`linear_pair`](super::linear_pair), and what the CPU does.

use burn::backend::{Backend, backend_extension, tensor::FloatTensor};

use crate::Determinism;
use crate::weight::BackendWeight;

/// [`linear`](crate::linear()) and [`linear_pair`](crate::linear_pair()) of a few rows on backend primitives.
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

    /// x `[N, in]`: the products with both weights, which have its dtype.
    #[fusion(meta = |x, first, second, _| fusion::linear_pair(x, first, second))]
    fn linear_pair(
        x: FloatTensor<Self>,
        #[extension_type] first: BackendWeight<Self>,
        #[extension_type] second: BackendWeight<Self>,
        determinism: Determinism,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

#[cfg(all(feature = "fusion", feature = "_gpu"))]
pub(crate) mod fusion {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::Shape;

    use crate::weight::BackendWeightMetadata;

    /// Shape and dtype of a product.
    pub(crate) fn linear(x: &TensorSpec, weight: &BackendWeightMetadata) -> TensorSpec {
        let ([rows, _], [outputs, _]) = (x.shape.dims(), weight.dims());
        TensorSpec::new(Shape::new([rows, outputs]), weight.dtype())
    }

    pub(super) fn linear_pair(
        x: &TensorSpec,
        first: &BackendWeightMetadata,
        second: &BackendWeightMetadata,
    ) -> (TensorSpec, TensorSpec) {
        (linear(x, first), linear(x, second))
    }
}

#[cfg(feature = "flex")]
impl LinearBackend for burn::backend::Flex {
    fn linear(x: FloatTensor<Self>, weight: BackendWeight<Self>, determinism: Determinism) -> FloatTensor<Self> {
        use super::reference::linear;
        use crate::reference::{IntoFlex, tensor};
        linear(tensor(x), &weight.weight(), determinism).into_flex()
    }

    fn linear_pair(
        x: FloatTensor<Self>,
        first: BackendWeight<Self>,
        second: BackendWeight<Self>,
        determinism: Determinism,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [first, second] = [(x.clone(), first), (x, second)]
            .map(|(x, weight)| <Self as LinearBackend>::linear(x, weight, determinism));
        (first, second)
    }
}
