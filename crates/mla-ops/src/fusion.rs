//! What deferred calls will compute.

use burn::backend::fusion::custom::TensorSpec;
use burn::tensor::{DType, Shape};

/// What an output will be.
pub(crate) fn spec<const D: usize>(shape: [usize; D], dtype: DType) -> TensorSpec {
    TensorSpec::new(Shape::new(shape), dtype)
}
