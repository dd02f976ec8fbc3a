//! Projections of rows that are in memory.

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use super::backend::LinearBackend;
use super::reference;
use crate::ops::small_batch;
use crate::{Determinism, Weight};

/// Checked x `[N, in]`: `[N, out]`.
pub(crate) fn linear(x: Tensor<2>, weight: &Weight, determinism: Determinism) -> Tensor<2> {
    if !has_kernel(&x, weight, determinism) && !small_batch::takes_many_rows(&x, weight, false) {
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
    let joint = |weight: &Weight| {
        let fast = determinism == Determinism::Fast && small_batch::takes_many_rows(&x, weight, false);
        has_kernel(&x, weight, determinism) && !fast
    };
    if ![first, second].into_iter().all(joint) {
        return [linear(x.clone(), first, determinism), linear(x, second, determinism)];
    }
    let [first, second] = [first, second].map(|weight| weight.clone().into_backend());
    let (first, second) = Dispatch::linear_pair(x.into_dispatch(), first, second);
    [first, second].map(Tensor::from_dispatch)
}

fn has_kernel(x: &Tensor<2>, weight: &Weight, determinism: Determinism) -> bool {
    let [rows, _] = x.dims();
    !weight.is_empty() && (small_batch::has_kernel(rows, &x.device(), determinism) || small_batch::is_router(x, weight))
}
