//! What a backend has to do for the norm of a residual sum, and what the CPU does.

use burn::backend::{Backend, ExtensionType, backend_extension, tensor::FloatTensor};

use crate::Determinism;
use crate::ops::linear::{BackendWeights, LinearBackend};
#[cfg(any(feature = "flex", feature = "_gpu"))]
use crate::ops::norm_rope::BackendNorm;
use crate::weight::BackendWeight;

/// What reads a norm, where that may be in the launch that computes it.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub enum BackendReader<B: Backend> {
    /// Nothing.
    None,
    /// A projection: [`linear`](crate::linear()).
    Linear(#[extension_type] BackendWeight<B>, Determinism),
    /// Two projections: [`linear_each`](crate::linear_each()).
    LinearPair(#[extension_type] BackendWeight<B>, #[extension_type] BackendWeight<B>, Determinism),
}

/// What projections made of rows: those of a [`BackendReader`], or of [`BackendWeights`].
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub enum BackendProducts<B: Backend> {
    /// Nothing.
    None,
    /// Of one projection, `[N, out]`.
    One(FloatTensor<B>),
    /// Of two projections, `[N, out]` each.
    Two(FloatTensor<B>, FloatTensor<B>),
    /// Of three.
    Three(FloatTensor<B>, FloatTensor<B>, FloatTensor<B>),
    /// Of four.
    Four(FloatTensor<B>, FloatTensor<B>, FloatTensor<B>, FloatTensor<B>),
    /// Of five.
    Five(FloatTensor<B>, FloatTensor<B>, FloatTensor<B>, FloatTensor<B>, FloatTensor<B>),
}

impl<B: Backend> BackendProducts<B> {
    /// These, of as many as there are variants for.
    #[cfg(any(feature = "flex", feature = "_gpu"))]
    pub(crate) fn new(products: impl IntoIterator<Item = FloatTensor<B>>) -> Self {
        let mut products = products.into_iter();
        let mut next = || products.next();
        match (next(), next(), next(), next(), next()) {
            (None, ..) => Self::None,
            (Some(a), None, ..) => Self::One(a),
            (Some(a), Some(b), None, ..) => Self::Two(a, b),
            (Some(a), Some(b), Some(c), None, _) => Self::Three(a, b, c),
            (Some(a), Some(b), Some(c), Some(d), None) => Self::Four(a, b, c, d),
            (Some(a), Some(b), Some(c), Some(d), Some(e)) => Self::Five(a, b, c, d, e),
        }
    }

    /// In their order.
    pub(crate) fn into_vec(self) -> Vec<FloatTensor<B>> {
        match self {
            Self::None => vec![],
            Self::One(a) => vec![a],
            Self::Two(a, b) => vec![a, b],
            Self::Three(a, b, c) => vec![a, b, c],
            Self::Four(a, b, c, d) => vec![a, b, c, d],
            Self::Five(a, b, c, d, e) => vec![a, b, c, d, e],
        }
    }
}

/// A residual sum, its norm, and what reads that.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub struct BackendNormed<B: Backend> {
    /// `[N, d]`.
    pub sum: FloatTensor<B>,
    /// `[N, d]`.
    pub normed: FloatTensor<B>,
    /// What the reader computed.
    #[extension_type]
    pub products: BackendProducts<B>,
}

/// [`residual_norm`](crate::residual_norm()) on backend primitives.
#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait ResidualNormBackend: Backend {
    /// x and y `[N, d]` of one dtype, weight f32 `[d]`.
    #[fusion(meta = fusion::residual_norm)]
    fn residual_norm(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] reader: BackendReader<Self>,
        eps: f32,
    ) -> BackendNormed<Self>;

    /// What the reader, which is not [`BackendReader::None`], makes of the [`rms_norm`](crate::rms_norm) of a single row x `[1, d]`.
    #[fusion(meta = |x, _weight, _eps, reader| fusion::products(x, reader))]
    fn norm_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f32,
        #[extension_type] reader: BackendReader<Self>,
    ) -> BackendProducts<Self>;
}

#[cfg(all(feature = "fusion", feature = "_gpu"))]
pub(crate) mod fusion {
    use burn::backend::fusion::custom::TensorSpec;

    use super::{BackendNormedMetadata, BackendProductsMetadata, BackendReaderMetadata};
    use crate::ops::linear::fusion::linear;

    /// Of a residual stream like x.
    pub(crate) fn normed(x: &TensorSpec, reader: &BackendReaderMetadata) -> BackendNormedMetadata {
        BackendNormedMetadata { sum: x.clone(), normed: x.clone(), products: products(x, reader) }
    }

    /// Of rows like x.
    pub(super) fn products(x: &TensorSpec, reader: &BackendReaderMetadata) -> BackendProductsMetadata {
        match reader {
            BackendReaderMetadata::None => BackendProductsMetadata::None,
            BackendReaderMetadata::Linear(weight, ..) => BackendProductsMetadata::One(linear(x, weight)),
            BackendReaderMetadata::LinearPair(first, second, ..) => {
                BackendProductsMetadata::Two(linear(x, first), linear(x, second))
            }
        }
    }

    pub(super) fn residual_norm(
        x: &TensorSpec,
        _y: &TensorSpec,
        _weight: &TensorSpec,
        reader: &BackendReaderMetadata,
        _eps: &f32,
    ) -> BackendNormedMetadata {
        normed(x, reader)
    }
}

/// The reader by launches of its own.
#[cfg(any(feature = "flex", feature = "_gpu"))]
pub(crate) fn read<B: LinearBackend>(normed: &FloatTensor<B>, reader: BackendReader<B>) -> BackendProducts<B> {
    match reader {
        BackendReader::None => BackendProducts::None,
        BackendReader::Linear(weight, determinism) => {
            BackendProducts::One(<B as LinearBackend>::linear(normed.clone(), weight, determinism))
        }
        BackendReader::LinearPair(first, second, determinism) => {
            B::linear_each(normed.clone(), BackendWeights::Two(first, second), BackendNorm::None, determinism)
        }
    }
}

#[cfg(feature = "flex")]
impl ResidualNormBackend for burn::backend::Flex {
    fn residual_norm(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        reader: BackendReader<Self>,
        eps: f32,
    ) -> BackendNormed<Self> {
        use burn::tensor::Tensor;

        use crate::reference::{IntoFlex, tensor};
        let sum: Tensor<2> = tensor::<Tensor<2>>(x) + tensor::<Tensor<2>>(y);
        let normed = crate::ops::norm_rope::reference::rms_norm(sum.clone(), tensor(weight), eps);
        let normed = normed.into_flex();
        let products = read(&normed, reader);
        BackendNormed { sum: sum.into_flex(), normed, products }
    }

    fn norm_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f32,
        reader: BackendReader<Self>,
    ) -> BackendProducts<Self> {
        use crate::reference::{IntoFlex, tensor};
        let normed = crate::ops::norm_rope::reference::rms_norm(tensor(x), tensor(weight), eps);
        read(&normed.into_flex(), reader)
    }
}
