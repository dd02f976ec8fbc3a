//! [`matmul`]: matrix products in the precision of their dtype.

use burn::backend::Dispatch;
#[cfg(feature = "_gpu")]
use burn::backend::DispatchDevice;
#[cfg(feature = "_gpu")]
use burn::tensor::DType;
use burn::tensor::Tensor;
#[cfg(feature = "_gpu")]
use cubecl::ir::{ElemType, FloatKind};

use super::linear::linear_by_head;
use crate::backend::MlaBackend;
use crate::batch_invariant::{is_batch_invariant, matmul_in_blocks};
use crate::device::has_kernels;

/// The product of `lhs [.., M, K]` and `rhs [.., K, N]`, whose leading dimensions are equal: `[.., M, N]`.
///
/// As [`Tensor::matmul`], but f32 is f32: on NVIDIA GPUs, Burn's own product rounds both sides to TF32, 10 bits of
/// fraction. That is too coarse for a router, whose scores decide which experts run, and for logits that are compared with
/// those of other programs. Inside of [`batch_invariant`](crate::batch_invariant()), a row of the result depends on no other.
///
/// # Panics
/// As [`Tensor::matmul`] does, where the shapes do not fit.
pub fn matmul<const D: usize>(lhs: Tensor<D>, rhs: Tensor<D>) -> Tensor<D> {
    let (l, r) = (lhs.dims(), rhs.dims());
    if is_batch_invariant() && l[..D - 2] == r[..D - 2] && l.iter().chain(&r).all(|&len| len > 0) {
        match D {
            _ if has_kernels(&lhs.device()) && l[D - 1] == r[D - 2] => return matmul_by_kernel(lhs, rhs),
            2 => return matmul_in_blocks::<D, 3>(lhs, rhs),
            3 => return matmul_in_blocks::<D, 4>(lhs, rhs),
            _ => {}
        }
    }
    if rounds(&lhs) && l[..D - 2] == r[..D - 2] && l[D - 1] == r[D - 2] {
        return Tensor::from_dispatch(<Dispatch as MlaBackend>::matmul(lhs.into_dispatch(), rhs.into_dispatch()));
    }
    lhs.matmul(rhs)
}

/// The same by the kernel for projections, whose rows do not depend on one another. There is no dimension of length 0.
fn matmul_by_kernel<const D: usize>(lhs: Tensor<D>, rhs: Tensor<D>) -> Tensor<D> {
    let (mut shape, [depth, width]) = (lhs.dims(), [D - 2, D - 1].map(|dim| rhs.dims()[dim]));
    let (products, rows) = (shape[..D - 2].iter().product(), shape[D - 2]);
    shape[D - 1] = width;
    let lhs: Tensor<3> = lhs.reshape([products, rows, depth]).swap_dims(0, 1);
    let rhs: Tensor<3> = rhs.reshape([products, depth, width]).swap_dims(1, 2);
    linear_by_head(lhs, rhs).swap_dims(0, 1).reshape(shape)
}

/// Whether Burn would round the factors.
fn rounds<const D: usize>(tensor: &Tensor<D>) -> bool {
    #[cfg(feature = "_gpu")]
    if let DispatchDevice::Cube(device) = tensor.device().as_dispatch() {
        return tensor.dtype() == DType::F32
            && tensor.shape().num_elements() > 0
            && device.client().properties().supports_type(ElemType::Float(FloatKind::TF32));
    }
    let _ = tensor;
    false
}
