use burn::tensor::{Tensor, activation::silu};

use super::Linear;
use crate::weights::WeightLoader;

/// Gated feed-forward: `down(silu(gate(x)) ⊙ up(x))`; the dense layers and the shared experts.
#[derive(Debug, Clone)]
pub(crate) struct Mlp {
    /// Gate rows first, then up rows, so that one matmul computes both.
    gate_up_proj: Linear,
    down_proj: Linear,
}

impl Mlp {
    /// Loads `{name}.gate_proj`, `up_proj` and `down_proj`.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, hidden: usize, intermediate: usize) -> Self {
        let names = ["gate_proj", "up_proj"].map(|part| format!("{name}.{part}.weight"));
        let gate_up: Tensor<3> = loader.stacked(&names, [2, intermediate, hidden]);
        Self {
            gate_up_proj: Linear::new(gate_up.reshape([2 * intermediate, hidden])),
            down_proj: Linear::load(loader, &format!("{name}.down_proj"), hidden, intermediate),
        }
    }

    /// `[N, hidden]` -> `[N, hidden]`.
    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.down_proj.forward(swiglu(self.gate_up_proj.forward(x)))
    }
}

/// `[N, 2 · I]`, gate channels first -> `silu(gate) ⊙ up [N, I]`.
pub(super) fn swiglu(gate_up: Tensor<2>) -> Tensor<2> {
    let [_, width] = gate_up.dims();
    let gate = gate_up.clone().narrow(1, 0, width / 2);
    silu(gate) * gate_up.narrow(1, width / 2, width / 2)
}
