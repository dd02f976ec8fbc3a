//! [`norm_rope`]: norm of heads, and rotation of their last channels.

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
    /// f32 `[d]`: the weight of the norm, if there is a norm that has one.
    pub weight: Option<Tensor<1>>,
    /// f32 `[N, dr / 2]`: how the last `dr` channels of each token's heads turn, in pairs of neighbours.
    pub cos: Tensor<2>,
    /// f32 `[N, dr / 2]`, as `cos`.
    pub sin: Tensor<2>,
}

/// Options of [`norm_rope`].
#[derive(Debug, Clone)]
pub struct NormRopeOptions {
    /// Added to the mean square in the norm; none for no norm.
    pub norm_eps: Option<f32>,
    /// Turn back: by the opposite angles.
    pub inverse: bool,
}

/// Root mean square norm of each head, and rotation of its last channels, in one pass over the memory (DeepSeek-V4: queries,
/// keys, and the outputs of attention, which turn back).
///
/// Returns `[N, H, d]` of the dtype of `x`. Norm first, `x / sqrt(mean(x²) + eps) · weight`; then the pairs `(u, v)` of the last
/// `dr` channels become `(u cos - v sin, v cos + u sin)`. All in f32.
///
/// # Errors
/// Wrong shapes, dtypes or devices, a weight without a norm, an epsilon that is negative or not finite, or more than the device
/// can do ([`MlaError::DeviceLimit`]): nothing is launched.
pub fn norm_rope(args: NormRopeArgs, options: &NormRopeOptions) -> Result<Tensor<3>, MlaError> {
    let check = args.check(options)?;
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    crate::limits::elements(&check, "x", &args.x)?;
    let _ = check;
    if args.x.shape().num_elements() == 0 {
        return Ok(args.x);
    }
    let spec = NormRopeSpec { norm_eps: options.norm_eps, weighted: args.weight.is_some(), inverse: options.inverse };
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
        if let Some(weight) = &self.weight {
            check.float_as("weight", weight, DType::F32, "always")?;
            check.dims("weight", weight.dims(), [Some(width)], || format!("[d] = [{width}]"))?;
            check.value("weight", options.norm_eps.is_some(), "a weight", || "none, without `norm_eps`".into())?;
        }
        if let Some(eps) = options.norm_eps {
            let holds = eps.is_finite() && eps >= 0.0;
            check.value("norm_eps", holds, eps, || "a finite number of at least 0".into())?;
        }
        for (name, table) in [("cos", &self.cos), ("sin", &self.sin)] {
            check.float_as(name, table, DType::F32, "always")?;
            let words = || format!("[N, dr / 2] with N = {tokens}");
            check.dims(name, table.dims(), [Some(tokens), None], words)?;
        }
        let ([_, pairs], [_, sines]) = (self.cos.dims(), self.sin.dims());
        check.value("cos", 2 * pairs <= width, format!("{pairs} pairs"), || {
            format!("at most {}, of the {width} channels of a head", width / 2)
        })?;
        check.value("sin", sines == pairs, format!("{sines} pairs"), || format!("{pairs}, as in `cos`"))?;
        Ok(check)
    }
}
