use burn::tensor::Tensor;
use mla_ops::{SharedExperts, swiglu};

use super::Linear;
use crate::parallel::Cut;
use crate::weights::WeightLoader;

/// Gated feed-forward: `down(silu(gate(x)) ⊙ up(x))`; the dense layers and the shared experts.
#[derive(Debug, Clone)]
pub(crate) struct Mlp {
    /// `[2 · I, hidden]`, gate rows first.
    gate_up_proj: Tensor<2>,
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
        let gate_up: Tensor<3> = loader.stacked(&gate_up, [2, intermediate, hidden], Cut::Rows);
        let local = loader.parallel().local(intermediate);
        Self {
            gate_up_proj: loader.reshape(gate_up, [2 * local, hidden]),
            down_proj: Linear::load(loader, &format!("{name}.{}", names.down), [hidden, intermediate], Cut::Columns),
        }
    }

    /// As experts that every token passes beside routed ones.
    pub(crate) fn weights(&self) -> SharedExperts {
        SharedExperts { gate_up: self.gate_up_proj.clone(), down: self.down_proj.weight() }
    }

    /// `[N, hidden]` -> `[N, hidden]`.
    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.down_proj.forward(swiglu(x, self.gate_up_proj.clone(), None))
    }
}
