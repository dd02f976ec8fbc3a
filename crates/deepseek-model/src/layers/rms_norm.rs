use burn::tensor::Tensor;
use mla_ops::{add_rms_norm, add_rms_norm_linear, rms_norm};

use crate::Result;
use crate::parallel::Cut;
use crate::weights::WeightLoader;

/// Root mean square norm: `x / sqrt(mean(x²) + eps) · weight`, in f32.
#[derive(Debug, Clone)]
pub(crate) struct RmsNorm {
    /// f32 `[width]`.
    pub(super) weight: Tensor<1>,
    pub(super) eps: f32,
}

impl RmsNorm {
    /// Loads `{name}.weight`.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, width: usize, eps: f64) -> Self {
        Self { weight: loader.tensor_f32(&format!("{name}.weight"), [width], Cut::Whole), eps: eps as f32 }
    }

    /// `[N, width]` -> `[N, width]`, in the dtype of x.
    pub(crate) fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        Ok(rms_norm(x, self.weight.clone(), self.eps)?)
    }

    /// The sum of the residual stream `[N, width]` and what a part of a layer computed, and its norm.
    pub(crate) fn forward_sum(&self, x: Tensor<2>, part: Tensor<2>) -> Result<(Tensor<2>, Tensor<2>)> {
        Ok(add_rms_norm(x, part, self.weight.clone(), self.eps)?)
    }

    /// The same, and the products f32 `[N, out]` of the norm with a weight f32 `[out, width]`.
    pub(crate) fn forward_sum_and_project(
        &self,
        x: Tensor<2>,
        part: Tensor<2>,
        weight: Tensor<2>,
    ) -> Result<(Tensor<2>, Tensor<2>, Tensor<2>)> {
        Ok(add_rms_norm_linear(x, part, self.weight.clone(), self.eps, weight)?)
    }
}

/// f32 `[N, width]` -> `[N, width]`: the norm without weight.
pub(crate) fn unit_rms(x: Tensor<2>, eps: f64) -> Tensor<2> {
    let variance = x.clone().square().mean_dim(1);
    x / variance.add_scalar(eps).sqrt()
}
