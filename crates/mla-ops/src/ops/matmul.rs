//! [`matmul`]: matrix products in the precision of their dtype.

use burn::tensor::Tensor;

/// The product of `lhs [.., M, K]` and `rhs [.., K, N]`, whose leading dimensions are equal: `[.., M, N]`.
///
/// As [`Tensor::matmul`], but f32 is f32: on NVIDIA GPUs, Burn's own product rounds both sides to TF32, 10 bits of
/// fraction. That is too coarse for a router, whose scores decide which experts run, and for logits that are compared with
/// those of other programs.
///
/// # Panics
/// As [`Tensor::matmul`] does, where the shapes do not fit.
pub fn matmul<const D: usize>(lhs: Tensor<D>, rhs: Tensor<D>) -> Tensor<D> {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if rounds(&lhs) && lhs.dims()[..D - 2] == rhs.dims()[..D - 2] && lhs.dims()[D - 1] == rhs.dims()[D - 2] {
        use burn::backend::Dispatch;
        let out = <Dispatch as crate::backend::MlaBackend>::matmul(lhs.into_dispatch(), rhs.into_dispatch());
        return Tensor::from_dispatch(out);
    }
    lhs.matmul(rhs)
}

/// Whether Burn would round the factors.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn rounds<const D: usize>(tensor: &Tensor<D>) -> bool {
    use burn::backend::DispatchDevice;
    use burn::tensor::DType;
    use cubecl::ir::{ElemType, FloatKind};

    match tensor.device().as_dispatch() {
        DispatchDevice::Cube(device) if tensor.dtype() == DType::F32 && tensor.shape().num_elements() > 0 => {
            device.client().properties().supports_type(ElemType::Float(FloatKind::TF32))
        }
        _ => false,
    }
}
