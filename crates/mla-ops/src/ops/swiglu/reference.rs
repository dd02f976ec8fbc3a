//! The gated activation behind a product of matrices.

use burn::tensor::{Tensor, activation::silu};

use crate::ops::linear::reference::times;
use crate::{Determinism, Weight};

/// x `[N, in]`, gate and up `[2 I, in]`: `[N, I]`.
pub(crate) fn swiglu(x: Tensor<2>, gate_up: &Weight, limit: Option<f32>, determinism: Determinism) -> Tensor<2> {
    let [rows, _] = gate_up.dims();
    let both = times(x, gate_up, determinism);
    if rows == 0 {
        return both;
    }
    let [gate, up] = [0, rows / 2].map(|first| both.clone().narrow(1, first, rows / 2));
    match limit {
        None => silu(gate) * up,
        Some(limit) => silu(gate.clamp_max(limit)) * up.clamp(-limit, limit),
    }
}
