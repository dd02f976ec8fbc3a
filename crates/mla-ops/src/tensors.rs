//! Tensors of CubeCL devices: how they lie in memory, new ones, and the buffers that launchers take.

use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;

/// `buffers!(x, out => Args { x, out, rows })`: the arguments of a launcher, in which the names before the arrow are the buffers
/// of the tensors of these names.
macro_rules! buffers {
    ($($tensor:ident),+ => $args:expr) => {{
        $(let $tensor = $tensor.clone().into_buffer_arg();)+
        $args
    }};
}
pub(crate) use buffers;

/// The tensor in memory row by row.
pub(crate) fn contiguous(tensor: CubeTensor) -> CubeTensor {
    // Burn's own test of strides does not take tensors without elements.
    if tensor.meta.shape().num_elements() == 0 { tensor } else { into_contiguous(tensor) }
}

/// The tensor, or a copy where its rows are not as [`row_stride`] wants them.
pub(crate) fn evenly_spaced(tensor: CubeTensor) -> CubeTensor {
    if row_stride(&tensor).is_some() { tensor } else { contiguous(tensor) }
}

/// Elements from one row (along the last dimension) to the next, where all rows lie one after the other at that distance, and
/// as copies of 16 bytes need them.
pub(crate) fn row_stride(tensor: &CubeTensor) -> Option<usize> {
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

/// The shape.
pub(crate) fn dims<const D: usize>(tensor: &CubeTensor) -> [usize; D] {
    tensor.meta.shape().dims()
}

/// The dtype, as kernels name it.
pub(crate) fn elem(tensor: &CubeTensor) -> ElemType {
    dtype_to_elem_type(tensor.dtype)
}

/// A contiguous tensor on the device of another.
pub(crate) fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape.into(), dtype)
}

/// The tensor, or a copy where somebody else sees its buffer: it is about to be written. Copies are made of accumulators,
/// and under Fusion, which shows views of a buffer only now, of a cache that has one.
pub(crate) fn own(tensor: CubeTensor) -> CubeTensor {
    if tensor.can_mut() { tensor } else { contiguous(tensor.copy()) }
}

/// Elements from one matrix to the next, where each is contiguous and begins at a multiple of 16 bytes.
pub(crate) fn matrix_stride(weight: &CubeTensor) -> Option<usize> {
    let ([heads, outputs, inputs], strides) = (dims(weight), weight.meta.strides());
    let stride = if heads > 1 { strides[0] } else { outputs * inputs };
    let contiguous = (outputs == 1 || strides[1] == inputs) && (inputs == 1 || strides[2] == 1);
    let offset = weight.handle.offset_start.unwrap_or(0);
    let aligned = (stride * weight.dtype.size()).is_multiple_of(16) && offset.is_multiple_of(16);
    (contiguous && stride >= outputs * inputs && aligned).then_some(stride)
}

/// What a launcher refuses, the public functions have refused before, by the same checks (`Check::client`).
pub(crate) fn launched<E: std::fmt::Display>(result: Result<(), E>) {
    if let Err(error) = result {
        panic!("launched without the checks of the public functions: {error}");
    }
}
