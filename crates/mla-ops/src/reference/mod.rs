//! The operations as ordinary tensor operations, registered for the CPU: they say what the kernels must compute. But for
//! those whose inner loops are too small for tensor operations (`rows.rs`), nothing in them is particular to a backend.
//!
//! Inputs are validated by the public functions. Lengths and page lists are read back to the host, so that only the
//! pages in use are touched; each sequence is computed on its own, so that its result does not depend on its neighbours.

#[cfg(feature = "flex")]
pub(crate) mod blocks;
pub(crate) mod fp8_rows;
pub(crate) mod rows;
mod softmax;

pub(crate) use softmax::softmax_values;

use burn::backend::{Flex, tensor::FloatTensor};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// Query tokens that are computed together at most.
pub(crate) const QUERY_TILE: usize = 64;
/// Scores that exist at a time, all heads together: 8 MB of f32.
pub(crate) const SCORES: usize = 1 << 20;

/// The values of an i32 tensor, on the host.
pub(crate) fn host<const D: usize>(tensor: Tensor<D, Int>) -> Vec<i32> {
    // A failed read means that an earlier kernel faulted: there is no value to go on with, and the trait of the backend
    // extension has no error to return.
    tensor.try_into_vec_as::<i32>().expect("reading back from a device that has failed")
}

/// An i32 tensor of these values.
pub(crate) fn device_i32<const D: usize>(values: Vec<i32>, shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(values, shape), (device, DType::I32))
}

/// A primitive of the CPU's backend; those of floats and of integers are of one type.
type FlexTensor = FloatTensor<Flex>;

/// The tensor of a primitive.
pub(crate) fn tensor<T: FromFlex>(primitive: FlexTensor) -> T {
    T::from_flex(primitive)
}

/// What [`tensor`] gives.
pub(crate) trait FromFlex {
    /// The tensor of a primitive.
    fn from_flex(primitive: FlexTensor) -> Self;
}

/// One or several tensors of the CPU, as an operation gives them back to Burn.
pub(crate) trait IntoFlex {
    /// Primitives.
    type Primitives;
    /// The primitives of these tensors.
    fn into_flex(self) -> Self::Primitives;
}

impl<const D: usize> FromFlex for Tensor<D> {
    fn from_flex(primitive: FlexTensor) -> Self {
        Self::from_primitive::<Flex>(primitive)
    }
}

impl<const D: usize> FromFlex for Tensor<D, Int> {
    fn from_flex(primitive: FlexTensor) -> Self {
        Self::from_primitive::<Flex>(primitive)
    }
}

impl<const D: usize> IntoFlex for Tensor<D> {
    type Primitives = FlexTensor;
    fn into_flex(self) -> FlexTensor {
        self.try_into_primitive::<Flex>().expect("computed from tensors of this backend")
    }
}

impl<const D: usize> IntoFlex for Tensor<D, Int> {
    type Primitives = FlexTensor;
    fn into_flex(self) -> FlexTensor {
        self.try_into_primitive::<Flex>().expect("computed from tensors of this backend")
    }
}

/// Tuples, by the names of their elements.
macro_rules! tuples_into_flex {
    ($(($($element:ident),+))+) => {$(
        impl<$($element: IntoFlex),+> IntoFlex for ($($element,)+) {
            type Primitives = ($($element::Primitives,)+);
            #[allow(non_snake_case, reason = "elements have the names of their types")]
            fn into_flex(self) -> Self::Primitives {
                let ($($element,)+) = self;
                ($($element.into_flex(),)+)
            }
        }
    )+};
}
tuples_into_flex! { (A, B) (A, B, C) (A, B, C, D) }
