//! [`new_pool`]: memory for rows.

use burn::tensor::{DType, Device, FloatDType, Tensor};

use crate::MlaError;
use crate::check::Check;
use crate::check_written::check_written;

/// A cache tensor `[P, S, D]` of zeros as [`write_latent`](crate::write_latent) wants it: row after row in memory. Some
/// devices pad the rows of what `Tensor::zeros` makes.
///
/// ```
/// use burn::tensor::{Device, FloatDType};
/// use mla_ops::cache::new_pool;
///
/// let pool = new_pool([16, 64, 576], FloatDType::BF16, &Device::flex())?;
/// assert_eq!(pool.dims(), [16, 64, 576]);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// [`MlaError::UnsupportedDevice`], also for an autodiff device; [`MlaError::DType`] for another type than f32, f16 or bf16, or
/// one that the device cannot compute with; [`MlaError::DeviceLimit`] for a shape that the device has no memory for: nothing is
/// allocated. [`MlaError::Read`] if a GPU turns out to have no memory for it.
pub fn new_pool(shape: [usize; 3], dtype: FloatDType, device: &Device) -> Result<Tensor<3>, MlaError> {
    let (check, dtype) = (Check::on("new_pool", device)?, DType::from(dtype));
    check.float_type("dtype", dtype)?;
    check.allocation("shape", dtype, shape)?;
    let pool = zeros(shape, dtype, device);
    check_written("shape", &pool)?;
    Ok(pool)
}

/// [`new_pool`] of a checked shape.
pub(super) fn zeros(shape: [usize; 3], dtype: DType, device: &Device) -> Tensor<3> {
    if shape.contains(&0) {
        return Tensor::empty(shape, (device, dtype));
    }
    Tensor::<1>::zeros([shape.iter().product::<usize>()], (device, dtype)).reshape(shape)
}
