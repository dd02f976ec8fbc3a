//! [`linear`]: projections.

use burn::backend::Dispatch;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use burn::backend::DispatchDevice;
use burn::tensor::Tensor;

use super::matmul::matmul;
use crate::backend::MlaBackend;

/// Rows up to which the kernel is used; Burn's product of matrices is for more.
const FEW: usize = 64;

/// The product of `x [N, in]` and the transpose of `weight [out, in]`, of the same float dtype: `[N, out]`.
///
/// For a few rows on a GPU it is as fast as the weights come from the memory, and the output of a row does not depend on the
/// others; otherwise it is [`matmul`]. Sums are f32, but the CPU rounds those of f16 to f16 now and then.
///
/// # Panics
/// As [`Tensor::matmul`] does, where the shapes do not fit.
pub fn linear(x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    let ([rows, inputs], [outputs, columns]) = (x.dims(), weight.dims());
    let fits = inputs == columns && inputs * outputs > 0 && x.dtype() == weight.dtype();
    if fits && (1..=FEW).contains(&rows) && has_kernels(&x) {
        return Tensor::from_dispatch(<Dispatch as MlaBackend>::linear(x.into_dispatch(), weight.into_dispatch()));
    }
    matmul(x, weight.transpose())
}

/// Whether kernels compute on the tensor's device.
fn has_kernels(tensor: &Tensor<2>) -> bool {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if let DispatchDevice::Cube(_) = tensor.device().as_dispatch() {
        return true;
    }
    let _ = tensor;
    false
}
