//! How tensors lie in memory, and new ones.

use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;

/// The tensor in memory row by row.
pub(super) fn contiguous(tensor: CubeTensor) -> CubeTensor {
    // Burn's own test of strides does not take tensors without elements.
    if tensor.meta.shape().num_elements() == 0 { tensor } else { into_contiguous(tensor) }
}

/// The tensor, or a copy where its rows are not as [`row_stride`] wants them.
pub(super) fn evenly_spaced(tensor: CubeTensor) -> CubeTensor {
    if row_stride(&tensor).is_some() { tensor } else { contiguous(tensor) }
}

/// Elements from one row (along the last dimension) to the next, where all rows lie one after the other at that distance, and
/// as copies of 16 bytes need them.
pub(super) fn row_stride(tensor: &CubeTensor) -> Option<usize> {
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let (&width, outer) = shape.as_slice().split_last()?;
    let (&unit, outer_strides) = strides.split_last()?;
    let (mut rows, mut step) = (1, None);
    for (&len, &stride) in outer.iter().zip(outer_strides).rev().filter(|(len, _)| **len != 1) {
        if stride != rows * *step.get_or_insert(stride) {
            return None;
        }
        rows *= len;
    }
    let step = step.unwrap_or(width);
    let offset = tensor.handle.offset_start.unwrap_or(0);
    let aligned = (step * tensor.dtype.size()).is_multiple_of(16) && offset.is_multiple_of(16);
    (unit == 1 && step >= width && rows > 0 && aligned).then_some(step)
}

pub(super) fn dims<const D: usize>(tensor: &CubeTensor) -> [usize; D] {
    tensor.meta.shape().dims()
}

/// A contiguous tensor on the device of another.
pub(super) fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape.into(), dtype)
}

/// The tensor, or a copy where somebody else sees its buffer: it is about to be written. Copies are made of accumulators,
/// and under Fusion, which shows views of a buffer only now, of a cache that has one.
pub(super) fn own(tensor: CubeTensor) -> CubeTensor {
    if tensor.can_mut() { tensor } else { contiguous(tensor.copy()) }
}

/// Elements from one matrix to the next, where each is contiguous and begins at a multiple of 16 bytes.
pub(super) fn matrix_stride(weight: &CubeTensor) -> Option<usize> {
    let ([heads, outputs, inputs], strides) = (dims(weight), weight.meta.strides());
    let stride = if heads > 1 { strides[0] } else { outputs * inputs };
    let contiguous = (outputs == 1 || strides[1] == inputs) && (inputs == 1 || strides[2] == 1);
    let offset = weight.handle.offset_start.unwrap_or(0);
    let aligned = (stride * weight.dtype.size()).is_multiple_of(16) && offset.is_multiple_of(16);
    (contiguous && stride >= outputs * inputs && aligned).then_some(stride)
}
