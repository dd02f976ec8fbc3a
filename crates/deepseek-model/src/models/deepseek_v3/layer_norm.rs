use burn::module::{Module, Param};
use burn::tensor::{FloatDType, Tensor};

use crate::layers::param;
use crate::parallel::Cut;
use crate::weights::WeightLoader;

/// Layer norm: `(x - mean(x)) / sqrt(var(x) + eps) · weight + bias`, in f32.
#[derive(Module, Debug)]
pub(crate) struct LayerNorm {
    /// f32 `[1, width]`.
    weight: Param<Tensor<2>>,
    /// f32 `[1, width]`.
    bias: Param<Tensor<2>>,
    eps: f64,
}

impl LayerNorm {
    /// Loads `{name}.weight` and `{name}.bias`.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, width: usize, eps: f64) -> Self {
        let weight = loader.tensor_f32(&format!("{name}.weight"), [width], Cut::Whole).unsqueeze();
        let bias = loader.tensor_f32(&format!("{name}.bias"), [width], Cut::Whole).unsqueeze();
        Self { weight: param(weight), bias: param(bias), eps }
    }

    /// `[N, width]` -> `[N, width]`, in the dtype of x.
    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let dtype = FloatDType::from(x.dtype());
        let x = x.cast(FloatDType::F32);
        let centred = x.clone() - x.mean_dim(1);
        let variance = centred.clone().square().mean_dim(1);
        let normed = centred / variance.add_scalar(self.eps).sqrt();
        (normed * self.weight.val() + self.bias.val()).cast(dtype)
    }
}
