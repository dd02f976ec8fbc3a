use burn::module::Module;
use burn::tensor::Tensor;
use mla_ops::{Determinism, Rows, SharedExperts, Weight, swiglu};

use super::Linear;
use crate::Result;
use crate::parallel::Cut;
use crate::weights::WeightLoader;

/// Gated feed-forward: `down(silu(gate(x)) ⊙ up(x))`; the dense layers and the shared experts.
#[derive(Module, Debug)]
pub(crate) struct Mlp {
    /// `[2 · I, hidden]`, gate rows first.
    gate_up_proj: Weight,
    down_proj: Linear,
}

/// Names of the projections.
pub(crate) struct MlpNames {
    pub(crate) gate: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
}

impl Mlp {
    /// Loads `{name}.gate_proj`, `up_proj` and `down_proj`.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, hidden: usize, intermediate: usize) -> Self {
        let names = MlpNames { gate: "gate_proj", up: "up_proj", down: "down_proj" };
        Self::load_as(loader, name, names, [hidden, intermediate])
    }

    /// Loads the projections `{name}.{names}`.
    pub(crate) fn load_as(
        loader: &mut WeightLoader,
        name: &str,
        names: MlpNames,
        [hidden, intermediate]: [usize; 2],
    ) -> Self {
        let gate_up = [names.gate, names.up].map(|part| format!("{name}.{part}.weight"));
        Self {
            gate_up_proj: loader.joined(&gate_up, [2 * intermediate, hidden], Cut::Rows),
            down_proj: Linear::load(loader, &format!("{name}.{}", names.down), [hidden, intermediate], Cut::Columns),
        }
    }

    /// As experts that every token passes beside routed ones.
    pub(crate) fn weights(&self) -> SharedExperts {
        SharedExperts { gate_up: self.gate_up_proj.clone(), down: self.down_proj.weight().clone() }
    }

    /// `[N, hidden]` -> `[N, hidden]`.
    pub(crate) fn forward<'a, 'r: 'a>(
        &self,
        x: impl Into<Rows<'a, 'r>>,
        determinism: Determinism,
    ) -> Result<Tensor<2>> {
        let activations = swiglu(x, &self.gate_up_proj, None, determinism)?;
        self.down_proj.forward(activations, determinism)
    }
}
