//! [`norm_rope`]: norm of heads, and RoPE of their last channels.

mod backend;
pub(crate) mod checks;
#[cfg(feature = "_gpu")]
mod cube;
#[cfg(feature = "flex")]
pub(crate) mod reference;

use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

pub(crate) use self::backend::*;
use self::checks::{check_eps, check_tables};
use crate::MlaError;
use crate::check::Check;
use crate::dispatch::tensors;

/// Arguments of [`norm_rope`].
#[derive(Debug, Clone)]
pub struct NormRopeArgs {
    /// Heads `[N, H, d]`, f32, f16 or bf16.
    pub x: Tensor<3>,
    /// f32 `[d]`, or `[d - dr]` where the norm leaves out the channels of RoPE: the weight of the norm, if there is one that has it.
    pub weight: Option<Tensor<1>>,
    /// f32 `[N, dr / 2]`: the cosines of RoPE for the last `dr` channels of each token's heads, in pairs of neighbours.
    pub cos: Tensor<2>,
    /// f32 `[N, dr / 2]`: the sines.
    pub sin: Tensor<2>,
}

/// Options of [`norm_rope`]. The default is RoPE alone.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct NormRopeOptions {
    /// Added to the mean square in the norm; none for no norm.
    pub norm_eps: Option<f32>,
    /// Whether the norm is that of the whole head; otherwise it is of the first `d - dr` channels, and the others only get RoPE.
    pub norm_whole_head: bool,
    /// Apply inverse RoPE: by the opposite angles.
    pub inverse: bool,
}

/// Root mean square norm of each head, and RoPE of its last channels, in one pass over the memory (DeepSeek-V4: queries, keys, and
/// the outputs of attention, which get inverse RoPE; DeepSeek-V3: queries, and latents with their rotary key).
///
/// Returns `[N, H, d]` of the dtype of `x`. Norm first, `x / sqrt(mean(x²) + eps) · weight`; then the pairs `(u, v)` of the last
/// `dr` channels become `(u cos - v sin, v cos + u sin)`. All in f32.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use mla_ops::{NormRopeArgs, NormRopeOptions, norm_rope};
///
/// let device = Device::flex();
/// // RoPE alone, by a right angle: the pair (3, 4) of the last two channels becomes (-4, 3).
/// let x = Tensor::<3>::from_data([[[1.0, 2.0, 3.0, 4.0]]], &device);
/// let (cos, sin) = (Tensor::zeros([1, 1], &device), Tensor::ones([1, 1], &device));
/// let turned = norm_rope(NormRopeArgs { x, weight: None, cos, sin }, &NormRopeOptions::default())?;
/// assert_eq!(turned.into_data(), TensorData::from([[[1.0f32, 2.0, -4.0, 3.0]]]));
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes or devices, a weight without a norm, an epsilon that is negative or not finite, or more than the device
/// can do ([`MlaError::DeviceLimit`]): nothing is launched.
pub fn norm_rope(args: NormRopeArgs, options: &NormRopeOptions) -> Result<Tensor<3>, MlaError> {
    args.check(options)?;
    if args.x.shape().num_elements() == 0 {
        return Ok(args.x);
    }
    let NormRopeOptions { norm_eps, norm_whole_head, inverse } = *options;
    let norm = match (norm_eps, args.weight) {
        (None, _) => BackendNorm::None,
        (Some(eps), None) => BackendNorm::Plain(eps),
        (Some(eps), Some(weight)) => BackendNorm::Weighted(weight.into_dispatch(), eps),
    };
    let [cos, sin] = [args.cos, args.sin].map(Tensor::into_dispatch);
    let rope = BackendRope::Tables { cos, sin, inverse };
    Ok(tensors(<Dispatch as NormRopeBackend>::norm_rope(args.x.into_dispatch(), norm, rope, norm_whole_head)))
}

impl NormRopeArgs {
    fn check(&self, options: &NormRopeOptions) -> Result<(), MlaError> {
        let check = Check::new("norm_rope", "x", &self.x)?;
        check.float("x", &self.x)?;
        let [tokens, _, width] = self.x.dims();
        if let Some(eps) = options.norm_eps {
            check_eps(&check, "norm_eps", eps)?;
        }
        let pairs = check_tables(&check, [&self.cos, &self.sin], tokens, width)?;
        if let Some(weight) = &self.weight {
            check.float_as("weight", weight, DType::F32, "always")?;
            let (normed, name) = if options.norm_whole_head { (width, "d") } else { (width - 2 * pairs, "d - dr") };
            check.dims("weight", weight.dims(), [Some(normed)], || format!("[{name}] = [{normed}]"))?;
            check.value("weight", options.norm_eps.is_some(), "a weight", || "none, without `norm_eps`".into())?;
        }
        check.elements("x", &self.x)
    }
}
