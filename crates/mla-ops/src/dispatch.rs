//! Tensors from the primitives of Burn's dispatching backend.

use burn::tensor::{DispatchTensor, Tensor, kind::Basic};

/// The tensors that an operation of `Dispatch` has given: `tensors(<Dispatch as ArgmaxBackend>::argmax(..))`.
pub(crate) fn tensors<T: FromDispatch>(primitives: T::Primitives) -> T {
    T::from_dispatch(primitives)
}

/// What [`tensors`] gives: one or several tensors.
pub(crate) trait FromDispatch {
    /// Primitives.
    type Primitives;
    /// The tensors of these primitives.
    fn from_dispatch(primitives: Self::Primitives) -> Self;
}

impl<const D: usize, K: Basic> FromDispatch for Tensor<D, K> {
    type Primitives = DispatchTensor;
    fn from_dispatch(primitive: DispatchTensor) -> Self {
        Tensor::from_dispatch(primitive)
    }
}

/// Tuples, by the names of their elements.
macro_rules! tuples_from_dispatch {
    ($(($($element:ident),+))+) => {$(
        impl<$($element: FromDispatch),+> FromDispatch for ($($element,)+) {
            type Primitives = ($($element::Primitives,)+);
            #[allow(non_snake_case, reason = "elements have the names of their types")]
            fn from_dispatch(($($element,)+): Self::Primitives) -> Self {
                ($(tensors($element),)+)
            }
        }
    )+};
}
tuples_from_dispatch! { (A, B) (A, B, C) (A, B, C, D) }
