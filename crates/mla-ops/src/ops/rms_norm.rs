//! [`rms_norm`]: root mean square norm of rows.

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use super::norm_rope::checks::check_norm;
use super::norm_rope::{BackendNorm, BackendRope, NormRopeBackend};
use crate::MlaError;
use crate::check::Check;

/// Root mean square norm of each row of `x [N, d]`, f32, f16 or bf16: `x / sqrt(mean(x²) + eps) · weight`, in f32, with a weight
/// f32 `[d]`. Returns `[N, d]` of the dtype of `x`.
///
/// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use mla_ops::rms_norm;
///
/// let device = Device::flex();
/// let x = Tensor::<2>::from_data([[3.0, 4.0, 0.0, 0.0]], &device);
/// let normed = rms_norm(x, Tensor::ones([4], &device), 0.0)?; // the root of the mean square is 2.5
/// assert!((normed.max().into_scalar::<f32>() - 1.6).abs() < 1e-6);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes or devices, an epsilon that is negative or not finite, or more than the device can do: nothing is
/// launched.
pub fn rms_norm(x: Tensor<2>, weight: Tensor<1>, eps: f32) -> Result<Tensor<2>, MlaError> {
    let check = Check::new("rms_norm", "x", &x)?;
    check.float("x", &x)?;
    let [_, width] = x.dims();
    check_norm(&check, "weight", &weight, width, eps)?;
    check.elements("x", &x)?;
    Ok(in_memory(x, weight, eps))
}

/// Checked x `[N, d]`, weight f32 `[d]`: `[N, d]`.
pub(crate) fn in_memory(x: Tensor<2>, weight: Tensor<1>, eps: f32) -> Tensor<2> {
    if x.shape().num_elements() == 0 {
        return x;
    }
    let (x, norm) = (x.unsqueeze_dim::<3>(1).into_dispatch(), BackendNorm::Weighted(weight.into_dispatch(), eps));
    let out = <Dispatch as NormRopeBackend>::norm_rope(x, norm, BackendRope::None, true);
    Tensor::<3>::from_dispatch(out).squeeze_dim(1)
}
