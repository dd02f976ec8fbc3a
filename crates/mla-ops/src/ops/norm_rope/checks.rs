//! Checks that norms and RoPE share.

use burn::tensor::{DType, Tensor};

use crate::MlaError;
use crate::check::Check;

/// Cosines and sines of so many tokens, whose heads have so many channels: how many pairs RoPE applies to.
pub(crate) fn check_tables(
    check: &Check,
    [cos, sin]: [&Tensor<2>; 2],
    tokens: usize,
    width: usize,
) -> Result<usize, MlaError> {
    for (name, table) in [("cos", cos), ("sin", sin)] {
        check.float_as(name, table, DType::F32, "always")?;
        check.dims(name, table.dims(), [Some(tokens), None], || format!("[N, dr / 2] with N = {tokens}"))?;
    }
    let ([_, pairs], [_, sines]) = (cos.dims(), sin.dims());
    check.value("cos", 2 * pairs <= width, format!("{pairs} pairs"), || {
        format!("at most {}, of the {width} channels of a head", width / 2)
    })?;
    check.value("sin", sines == pairs, format!("{sines} pairs"), || format!("{pairs}, as in `cos`"))?;
    Ok(pairs)
}

/// Weight and epsilon of the norm of rows.
pub(crate) fn check_norm(
    check: &Check,
    name: &'static str,
    weight: &Tensor<1>,
    width: usize,
    eps: f32,
) -> Result<(), MlaError> {
    check.float_as(name, weight, DType::F32, "always")?;
    check.dims(name, weight.dims(), [Some(width)], || format!("[d] = [{width}]"))?;
    check_eps(check, "eps", eps)
}

pub(crate) fn check_eps(check: &Check, name: &'static str, eps: f32) -> Result<(), MlaError> {
    let holds = eps.is_finite() && eps >= 0.0;
    check.value(name, holds, eps, || "a finite number of at least 0".into())
}
