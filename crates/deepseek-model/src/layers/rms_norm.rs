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
        let weight = loader.tensor_f32(&format!("{name}.weight"), [width]);
        Self { weight: weight.unsqueeze(), eps }
    }

    /// `[N, width]` -> `[N, width]`, in the dtype of x.
    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let dtype = FloatDType::from(x.dtype());
        let x = x.cast(FloatDType::F32);
        let variance = x.clone().square().mean_dim(1);
        let normed = x / variance.add_scalar(self.eps).sqrt();
        (normed * self.weight.clone()).cast(dtype)
    }
}
