//! [`norm_rope`]: norm of heads, and rotation of their last channels. [`rms_norm`]: the norm alone. [`add_rms_norm`]: that of a
//! sum.

use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

use crate::MlaError;
use crate::backend::{MlaBackend, NormRopeSpec};
use crate::check::Check;

const OP: &str = "norm_rope";

/// Arguments of [`norm_rope`].
#[derive(Debug, Clone)]
pub struct NormRopeArgs {
    /// Heads `[N, H, d]`, f32, f16 or bf16.
    pub x: Tensor<3>,
    /// f32 `[d]`, or `[d - dr]` where the norm leaves out what turns: the weight of the norm, if there is one that has it.
    pub weight: Option<Tensor<1>>,
    /// f32 `[N, dr / 2]`: how the last `dr` channels of each token's heads turn, in pairs of neighbours.
    pub cos: Tensor<2>,
    /// f32 `[N, dr / 2]`, as `cos`.
    pub sin: Tensor<2>,
}

/// Options of [`norm_rope`].
#[derive(Debug, Clone, PartialEq)]
pub struct NormRopeOptions {
    /// Added to the mean square in the norm; none for no norm.
    pub norm_eps: Option<f32>,
    /// Whether the norm is that of the whole head; otherwise it is of the first `d - dr` channels, and the others only turn.
    pub norm_turned: bool,
    /// Turn back: by the opposite angles.
    pub inverse: bool,
}

/// Root mean square norm of each head, and rotation of its last channels, in one pass over the memory (DeepSeek-V4: queries,
/// keys, and the outputs of attention, which turn back; DeepSeek-V3: queries, and latents with their rotary key).
///
/// Returns `[N, H, d]` of the dtype of `x`. Norm first, `x / sqrt(mean(x²) + eps) · weight`; then the pairs `(u, v)` of the last
/// `dr` channels become `(u cos - v sin, v cos + u sin)`. All in f32.
///
/// # Errors
/// Wrong shapes, dtypes or devices, a weight without a norm, an epsilon that is negative or not finite, or more than the device
/// can do ([`MlaError::DeviceLimit`]): nothing is launched.
pub fn norm_rope(args: NormRopeArgs, options: &NormRopeOptions) -> Result<Tensor<3>, MlaError> {
    let check = args.check(options)?;
    check.elements("x", &args.x)?;
    let _ = check;
    if args.x.shape().num_elements() == 0 {
        return Ok(args.x);
    }
    let NormRopeOptions { norm_eps, norm_turned, inverse } = *options;
    let ([_, pairs], weighted) = (args.cos.dims(), args.weight.is_some());
    let spec = NormRopeSpec { norm_eps, norm_turned, weighted, pairs, inverse };
    // Where there is no weight, any tensor does.
    let weight = args.weight.map_or_else(|| args.cos.clone().into_dispatch(), Tensor::into_dispatch);
    Ok(Tensor::from_dispatch(<Dispatch as MlaBackend>::norm_rope(
        args.x.into_dispatch(),
        weight,
        args.cos.into_dispatch(),
        args.sin.into_dispatch(),
        spec,
    )))
}

impl NormRopeArgs {
    fn check(&self, options: &NormRopeOptions) -> Result<Check, MlaError> {
        let check = Check::new(OP, "x", &self.x)?;
        check.float("x", &self.x)?;
        let [tokens, _, width] = self.x.dims();
        if let Some(eps) = options.norm_eps {
            check_eps(&check, "norm_eps", eps)?;
        }
        let pairs = check_tables(&check, [&self.cos, &self.sin], tokens, width)?;
        if let Some(weight) = &self.weight {
            check.float_as("weight", weight, DType::F32, "always")?;
            let (normed, name) = if options.norm_turned { (width, "d") } else { (width - 2 * pairs, "d - dr") };
            check.dims("weight", weight.dims(), [Some(normed)], || format!("[{name}] = [{normed}]"))?;
            check.value("weight", options.norm_eps.is_some(), "a weight", || "none, without `norm_eps`".into())?;
        }
        Ok(check)
    }
}

/// Root mean square norm of each row of `x [N, d]`, f32, f16 or bf16: `x / sqrt(mean(x²) + eps) · weight`, in f32, with a weight
/// f32 `[d]`. Returns `[N, d]` of the dtype of `x`.
///
/// # Errors
/// As [`norm_rope`].
pub fn rms_norm(x: Tensor<2>, weight: Tensor<1>, eps: f32) -> Result<Tensor<2>, MlaError> {
    let check = Check::new("rms_norm", "x", &x)?;
    check.float("x", &x)?;
    let [_, width] = x.dims();
    check_norm(&check, "weight", &weight, width, eps)?;
    check.elements("x", &x)?;
    if x.shape().num_elements() == 0 {
        return Ok(x);
    }
    let spec = NormRopeSpec { norm_eps: Some(eps), norm_turned: true, weighted: true, pairs: 0, inverse: false };
    // Nothing turns: any tensor does for the tables.
    let weight = weight.into_dispatch();
    let [cos, sin] = [weight.clone(), weight.clone()];
    let x = x.unsqueeze_dim::<3>(1).into_dispatch();
    let out = <Dispatch as MlaBackend>::norm_rope(x, weight, cos, sin, spec);
    Ok(Tensor::<3>::from_dispatch(out).squeeze_dim(1))
}

/// The sum of `x [N, d]` and `y [N, d]`, of the same dtype f32, f16 or bf16, and its [`rms_norm`]: both `[N, d]` of that dtype. In
/// one pass over the memory: what stands between two parts of a layer.
///
/// # Errors
/// As [`norm_rope`].
pub fn add_rms_norm(
    x: Tensor<2>,
    y: Tensor<2>,
    weight: Tensor<1>,
    eps: f32,
) -> Result<(Tensor<2>, Tensor<2>), MlaError> {
    check_add_norm("add_rms_norm", [&x, &y], ("weight", &weight), eps)?;
    if x.shape().num_elements() == 0 {
        return Ok((x.clone(), x));
    }
    let [x, y] = [x, y].map(Tensor::into_dispatch);
    let (sum, normed) = <Dispatch as MlaBackend>::add_rms_norm(x, y, weight.into_dispatch(), eps);
    Ok((Tensor::from_dispatch(sum), Tensor::from_dispatch(normed)))
}

/// Two summands, and the norm of their sum.
pub(super) fn check_add_norm(
    op: &'static str,
    [x, y]: [&Tensor<2>; 2],
    (name, weight): (&'static str, &Tensor<1>),
    eps: f32,
) -> Result<Check, MlaError> {
    let check = Check::new(op, "x", x)?;
    check.float("x", x)?;
    check.float_as("y", y, x.dtype(), "that of `x`")?;
    let [rows, width] = x.dims();
    check.dims("y", y.dims(), [Some(rows), Some(width)], || format!("[N, d] = [{rows}, {width}]"))?;
    check_norm(&check, name, weight, width, eps)?;
    check.elements("x", x)?;
    Ok(check)
}

/// Cosines and sines of so many tokens, whose heads have so many channels: how many pairs turn.
pub(super) fn check_tables(
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
pub(super) fn check_norm(
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

pub(super) fn check_eps(check: &Check, name: &'static str, eps: f32) -> Result<(), MlaError> {
    let holds = eps.is_finite() && eps >= 0.0;
    check.value(name, holds, eps, || "a finite number of at least 0".into())
}
