//! [`residual_norm`], and the residual stream of a model: [`Residual`], [`Normed`], [`Rows`].

mod backend;
#[cfg(feature = "_gpu")]
pub(crate) mod cube;
mod residual;
mod rows;

use burn::backend::Dispatch;
use burn::tensor::Tensor;

pub(crate) use self::backend::*;
pub use self::residual::{Addend, Normed, Residual};
pub(crate) use self::residual::{Pending, Summand};
pub use self::rows::Rows;
use super::norm_rope::checks::check_norm;
use crate::MlaError;
use crate::check::Check;

/// The sum of `x [N, d]` and `y [N, d]`, of the same dtype f32, f16 or bf16, and its [`rms_norm`](crate::rms_norm) with a weight
/// f32 `[d]`: both `[N, d]` of that dtype, in one pass over the memory. The norm is that of the sum as it was rounded.
///
/// A model keeps a [`Residual`], which calls this when a part of a layer reads the norm.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use mla_ops::residual_norm;
///
/// let device = Device::flex();
/// let ones = Tensor::<2>::ones([2, 8], &device);
/// let (sum, normed) = residual_norm(ones.clone(), ones, Tensor::ones([8], &device), 1e-6)?;
/// assert_eq!(sum.max().into_scalar::<f32>(), 2.0);
/// assert!((normed.max().into_scalar::<f32>() - 1.0).abs() < 1e-6);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes or devices, an epsilon that is negative or not finite, or more than the device can do: nothing is
/// launched.
pub fn residual_norm(
    x: Tensor<2>,
    y: Tensor<2>,
    weight: Tensor<1>,
    eps: f32,
) -> Result<(Tensor<2>, Tensor<2>), MlaError> {
    let check = Check::new("residual_norm", "x", &x)?;
    check.float("x", &x)?;
    check.float_as("y", &y, x.dtype(), "that of `x`")?;
    let [rows, width] = x.dims();
    check.dims("y", y.dims(), [Some(rows), Some(width)], || format!("[N, d] = [{rows}, {width}]"))?;
    check_norm(&check, "weight", &weight, width, eps)?;
    check.elements("x", &x)?;
    if x.shape().num_elements() == 0 {
        return Ok((x.clone(), x));
    }
    let [x, y] = [x, y].map(Tensor::into_dispatch);
    let BackendNormed { sum, normed, .. } =
        Dispatch::residual_norm(x, y, weight.into_dispatch(), BackendReader::None, eps);
    Ok((Tensor::from_dispatch(sum), Tensor::from_dispatch(normed)))
}
