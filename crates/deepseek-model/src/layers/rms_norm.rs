use burn::tensor::{FloatDType, Tensor};

use crate::weights::WeightLoader;

/// Root mean square norm: `x / sqrt(mean(x²) + eps) · weight`, in f32.
#[derive(Debug, Clone)]
pub(crate) struct RmsNorm {
    /// f32 `[1, width]`.
    weight: Tensor<2>,
    eps: f64,
}

impl RmsNorm {
    /// Loads `{name}.weight`.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, width: usize, eps: f64) -> Self {
        Self::new(loader.tensor_f32(&format!("{name}.weight"), [width]).unsqueeze(), eps)
    }

    /// From a weight f32 `[1, width]`.
    pub(crate) fn new(weight: Tensor<2>, eps: f64) -> Self {
        Self { weight, eps }
    }

    /// `[N, width]` -> `[N, width]`, in the dtype of x.
    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let dtype = FloatDType::from(x.dtype());
        (unit_rms(x.cast(FloatDType::F32), self.eps) * self.weight.clone()).cast(dtype)
    }
}

/// f32 `[N, width]` -> `[N, width]`: the norm without weight.
pub(crate) fn unit_rms(x: Tensor<2>, eps: f64) -> Tensor<2> {
    let variance = x.clone().square().mean_dim(1);
    x / variance.add_scalar(eps).sqrt()
}
