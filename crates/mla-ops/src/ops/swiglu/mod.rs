//! [`swiglu`]: gate and up projection, and the gated activation.

mod backend;
pub(crate) mod in_memory;
pub(crate) mod reference;

use burn::tensor::Tensor;

#[cfg(feature = "_gpu")]
pub(crate) use self::backend::SwigluBackend;
use super::residual_norm::Rows;
use crate::check::Check;
use crate::{Determinism, MlaError, Weight};

/// `silu(gate) ⊙ up`, where `gate_up [2 I, in]` projects `x [N, in]`, of the same float dtype, to both, the gate first: `[N, I]`.
///
/// A `limit` clamps `up` both ways and the gate from above, where silu grows (DeepSeek-V4). Of a few rows on a GPU it is one
/// kernel, which has the products in f32; otherwise they are rounded to the dtype, as those of [`linear`](crate::linear()).
/// [`explain_path`](crate::explain_path) says what runs for [`LinearProblem::gated`](crate::LinearProblem::gated).
///
/// Source: Shazeer, "GLU Variants Improve Transformer" (2020).
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use mla_ops::{Determinism, Weight, swiglu};
///
/// let device = Device::flex();
/// let gate_up = Weight::from(Tensor::<2>::ones([2 * 6, 4], &device)); // the gate rows, then those of `up`
/// let y = swiglu(Tensor::<2>::ones([3, 4], &device), &gate_up, None, Determinism::Fast)?;
/// // Gate and up are 4 each: 4 sigmoid(4) times 4.
/// assert_eq!(y.dims(), [3, 6]);
/// assert!((y.max().into_scalar::<f32>() - 15.712).abs() < 1e-3);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes or devices; an odd number of rows of `gate_up`; a limit that is not above 0; more than the device can do:
/// nothing is launched.
pub fn swiglu<'a, 'r: 'a>(
    x: impl Into<Rows<'a, 'r>>,
    gate_up: &Weight,
    limit: Option<f32>,
    determinism: Determinism,
) -> Result<Tensor<2>, MlaError> {
    let x = x.into();
    let check = x.check("swiglu")?;
    gate_up.check(&check, "gate_up", x.dtype(), "that of `x`")?;
    let ([_, inputs], [rows, _]) = (x.dims(), gate_up.dims());
    let words = || format!("[2 I, in] with in = {inputs}");
    check.dims("gate_up", gate_up.dims(), [None, Some(inputs)], words)?;
    check.value("gate_up", rows.is_multiple_of(2), format!("{rows} rows"), || {
        "as many rows for the gate as for `up`".into()
    })?;
    check_limit(&check, limit)?;
    Ok(in_memory::swiglu(x.tensor(), gate_up, limit, determinism))
}

/// The bound of activations.
pub(crate) fn check_limit(check: &Check, limit: Option<f32>) -> Result<(), MlaError> {
    limit.map_or(Ok(()), |limit| check.value("limit", limit > 0.0, limit, || "a number above 0".into()))
}
