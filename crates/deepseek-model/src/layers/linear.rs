use burn::tensor::Tensor;
use mla_ops::linear;

use crate::parallel::Cut;
use crate::weights::WeightLoader;

/// A projection without bias.
#[derive(Debug, Clone)]
pub(crate) struct Linear {
    /// `[out, in]`.
    weight: Tensor<2>,
}

impl Linear {
    /// Loads what this rank has of `{name}.weight`, stored `[out, in]`.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, shape: [usize; 2], cut: Cut) -> Self {
        Self::new(loader.tensor(&format!("{name}.weight"), shape, cut))
    }

    /// From a stored `[out, in]` weight.
    pub(crate) fn new(weight: Tensor<2>) -> Self {
        Self { weight }
    }

    /// `[out, in]`.
    pub(crate) fn weight(&self) -> Tensor<2> {
        self.weight.clone()
    }

    /// `[N, in]` -> `[N, out]`.
    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        linear(x, self.weight.clone())
    }
}
