//! Projections of rows that are in memory.

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use super::backend::LinearBackend;
use super::reference;
use crate::ops::products::LinearProblem;
use crate::{Determinism, Weight};

/// Checked x `[N, in]`: `[N, out]`.
pub(crate) fn linear(x: Tensor<2>, weight: &Weight, determinism: Determinism) -> Tensor<2> {
    let (problem, device) = (LinearProblem::of_rows(&x, weight, determinism), x.device());
    if problem.dequantises(&device) {
        return linear(x, &weight.dense().into(), determinism);
    }
    if !problem.has_kernel(&device) {
        return reference::linear(x, weight, determinism);
    }
    Tensor::from_dispatch(<Dispatch as LinearBackend>::linear(
        x.into_dispatch(),
        weight.clone().into_backend(),
        determinism,
    ))
}

/// Checked x `[N, in]`: both products.
pub(crate) fn linear_pair(x: Tensor<2>, [first, second]: [&Weight; 2], determinism: Determinism) -> [Tensor<2>; 2] {
    let device = x.device();
    let joint = |weight: &Weight| {
        let problem = LinearProblem::of_rows(&x, weight, determinism);
        problem.has_small_batch_kernel(&device) && !problem.has_many_rows_kernel(&device)
    };
    if ![first, second].into_iter().all(joint) {
        return [linear(x.clone(), first, determinism), linear(x, second, determinism)];
    }
    let [first, second] = [first, second].map(|weight| weight.clone().into_backend());
    let (first, second) = Dispatch::linear_pair(x.into_dispatch(), first, second, determinism);
    [first, second].map(Tensor::from_dispatch)
}
