use burn::module::{Module, Param};
use burn::tensor::Tensor;
use mla_ops::{Normed, Residual, rms_norm};

use super::param;
use crate::Result;
use crate::parallel::Cut;
use crate::weights::WeightLoader;

/// Root mean square norm: `x / sqrt(mean(x²) + eps) · weight`, in f32.
#[derive(Module, Debug)]
pub(crate) struct RmsNorm {
    /// f32 `[width]`.
    pub(crate) weight: Param<Tensor<1>>,
    pub(crate) eps: f32,
}

impl RmsNorm {
    /// Loads `{name}.weight`.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, width: usize, eps: f64) -> Self {
        let weight = param(loader.tensor_f32(&format!("{name}.weight"), [width], Cut::Whole));
        Self { weight, eps: eps as f32 }
    }

    /// The norm `[N, width]` of the residual stream, computed where it is read.
    pub(crate) fn forward<'r>(&self, residual: &'r mut Residual) -> Result<Normed<'r>> {
        Ok(residual.norm(&self.weight, self.eps)?)
    }

    /// `[N, width]` -> `[N, width]`, in the dtype of x.
    pub(crate) fn apply(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        Ok(rms_norm(x, self.weight.val(), self.eps)?)
    }
}
