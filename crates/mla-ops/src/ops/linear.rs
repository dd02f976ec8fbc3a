//! [`linear`]: projections.

use burn::backend::Dispatch;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use burn::backend::DispatchDevice;
use burn::tensor::Tensor;

use super::matmul::matmul;
use crate::MlaError;
use crate::backend::MlaBackend;
use crate::check::Check;

const OP: &str = "linear";

/// Rows from which on Burn's product of matrices is used.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
const FEW: usize = 64;

/// The product of `x [N, in]` and the transpose of `weight [out, in]`, both f32, f16 or bf16: `[N, out]`.
///
/// For a few rows on a GPU it is as fast as the weights come from the memory, and the output of a row does not depend on the
/// others; otherwise it is [`matmul`]. Sums are f32.
///
/// # Errors
/// Wrong shapes, dtypes or devices: nothing is launched.
pub fn linear(x: Tensor<2>, weight: Tensor<2>) -> Result<Tensor<2>, MlaError> {
    let check = Check::new(OP, "x", &x)?;
    check.float("x", &x)?;
    check.float_as("weight", &weight, x.dtype(), "that of `x`")?;
    let [_, inputs] = x.dims();
    check.dims("weight", weight.dims(), [None, Some(inputs)], || format!("[out, in] with in = {inputs}"))?;
    if !is_few(&x) {
        return Ok(matmul(x, weight.transpose()));
    }
    Ok(Tensor::from_dispatch(<Dispatch as MlaBackend>::linear(x.into_dispatch(), weight.into_dispatch())))
}

/// Whether the device has a kernel for so few rows.
fn is_few(x: &Tensor<2>) -> bool {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if let DispatchDevice::Cube(_) = x.device().as_dispatch() {
        let [rows, inputs] = x.dims();
        return (1..=FEW).contains(&rows) && inputs > 0;
    }
    let _ = x;
    false
}
