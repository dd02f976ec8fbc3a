//! [`add_rms_norm_linear`]: residual sum, its norm, and a projection of that to a few outputs.

use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

use super::linear::{FEW, linear};
use super::norm_rope::{add_rms_norm, check_add_norm};
use crate::MlaError;
use crate::backend::MlaBackend;
use crate::device::has_kernels;

const OP: &str = "add_rms_norm_linear";

/// The sum of `x [N, d]` and `y [N, d]`, of the same dtype f32, f16 or bf16; its [`rms_norm`](crate::rms_norm) with a weight f32
/// `[d]`: both of that dtype; and the norm's products f32 `[N, out]` with a weight f32 `[out, d]`, as
/// [`linear`](crate::linear()) computes them. The bits are those of [`add_rms_norm`](crate::add_rms_norm) and then
/// [`linear`](crate::linear()); of a few rows with a few hundred outputs (the logits of a router), in one launch.
///
/// # Errors
/// Wrong shapes, dtypes or devices, or an epsilon that is negative or not finite: nothing is launched.
pub fn add_rms_norm_linear(
    x: Tensor<2>,
    y: Tensor<2>,
    norm_weight: Tensor<1>,
    eps: f32,
    weight: Tensor<2>,
) -> Result<(Tensor<2>, Tensor<2>, Tensor<2>), MlaError> {
    let check = check_add_norm(OP, [&x, &y], ("norm_weight", &norm_weight), eps)?;
    let [rows, width] = x.dims();
    check.float_as("weight", &weight, DType::F32, "always")?;
    check.dims("weight", weight.dims(), [None, Some(width)], || format!("[out, d] with d = {width}"))?;
    check.elements("weight", &weight)?;
    let [outputs, _] = weight.dims();
    if !(1..=FEW).contains(&rows) || width * outputs == 0 || !has_kernels(&x.device()) {
        let (sum, normed) = add_rms_norm(x, y, norm_weight, eps)?;
        return Ok((sum, normed.clone(), linear(normed, weight)));
    }
    let (sum, normed, out) = <Dispatch as MlaBackend>::add_rms_norm_linear(
        x.into_dispatch(),
        y.into_dispatch(),
        norm_weight.into_dispatch(),
        weight.into_dispatch(),
        eps,
    );
    let [sum, normed, out] = [sum, normed, out].map(Tensor::from_dispatch);
    Ok((sum, normed, out))
}
