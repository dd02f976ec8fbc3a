//! The gated activation of rows that are in memory.

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use super::backend::SwigluBackend;
use super::reference;
use crate::ops::products::LinearProblem;
use crate::{Determinism, Weight};

/// Checked x `[N, in]`: `[N, I]`.
pub(crate) fn swiglu(x: Tensor<2>, gate_up: &Weight, limit: Option<f32>, determinism: Determinism) -> Tensor<2> {
    let ([rows, _], [outputs, _]) = (x.dims(), gate_up.dims());
    if rows * outputs == 0 {
        // Burn's functions of numbers take no tensors without elements on a GPU.
        return Tensor::empty([rows, outputs / 2], (&x.device(), x.dtype()));
    }
    let (problem, device) = (LinearProblem::of_gated_rows(&x, gate_up, determinism), x.device());
    if problem.dequantises(&device) {
        return swiglu(x, &gate_up.dense().into(), limit, determinism);
    }
    if !problem.has_kernel(&device) {
        return reference::swiglu(x, gate_up, limit, determinism);
    }
    Tensor::from_dispatch(Dispatch::swiglu(x.into_dispatch(), gate_up.clone().into_backend(), limit, determinism))
}
