use burn::tensor::{Tensor, activation::silu};

use super::Linear;
use crate::weights::WeightLoader;

/// Gated feed-forward: `down(silu(gate(x)) ⊙ up(x))`; the dense layers and the shared experts.
#[derive(Debug, Clone)]
pub(crate) struct Mlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl Mlp {
    /// Loads `{name}.gate_proj`, `up_proj` and `down_proj`.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, hidden: usize, intermediate: usize) -> Self {
        Self {
            gate_proj: Linear::load(loader, &format!("{name}.gate_proj"), intermediate, hidden),
            up_proj: Linear::load(loader, &format!("{name}.up_proj"), intermediate, hidden),
            down_proj: Linear::load(loader, &format!("{name}.down_proj"), hidden, intermediate),
        }
    }

    /// `[N, hidden]` -> `[N, hidden]`.
    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.down_proj.forward(silu(self.gate_proj.forward(x.clone())) * self.up_proj.forward(x))
    }
}
