use burn::module::Module;
use burn::tensor::Tensor;
use mla_ops::{Determinism, Rows, Weight, linear};

use crate::Result;
use crate::parallel::Cut;
use crate::weights::WeightLoader;

/// A projection without bias.
#[derive(Module, Debug)]
pub(crate) struct Linear {
    /// `[out, in]`.
    weight: Weight,
}

impl Linear {
    /// Loads what this rank has of `{name}.weight`, stored `[out, in]`.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, shape: [usize; 2], cut: Cut) -> Self {
        Self::new(loader.weight(&format!("{name}.weight"), shape, cut))
    }

    /// From a stored `[out, in]` weight.
    pub(crate) fn new(weight: impl Into<Weight>) -> Self {
        Self { weight: weight.into() }
    }

    /// `[out, in]`.
    pub(crate) fn weight(&self) -> &Weight {
        &self.weight
    }

    /// `[N, in]` -> `[N, out]`.
    pub(crate) fn forward<'a, 'r: 'a>(
        &self,
        x: impl Into<Rows<'a, 'r>>,
        determinism: Determinism,
    ) -> Result<Tensor<2>> {
        Ok(linear(x, &self.weight, determinism)?)
    }
}
