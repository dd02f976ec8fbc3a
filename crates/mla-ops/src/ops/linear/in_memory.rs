//! Projections of rows that are in memory.

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use super::backend::{BackendWeights, LinearBackend, MOST_WEIGHTS};
use super::reference;
use crate::ops::norm_rope::BackendNorm;
use crate::ops::products::LinearProblem;
use crate::ops::rms_norm;
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

/// Checked x `[N, in]`: a product for each weight. Those that a small-batch kernel computes share its launches.
pub(crate) fn linear_each(x: &Tensor<2>, weights: &[&Weight], determinism: Determinism) -> Vec<Tensor<2>> {
    let joint = |weight: &Weight| is_joint(x, weight, determinism);
    let alone = |&(place, weight): &(usize, &Weight)| (place, linear(x.clone(), weight, determinism));
    let numbered = weights.iter().copied().enumerate();
    let (together, apart): (Vec<_>, Vec<_>) = numbered.partition(|(_, weight)| joint(weight));
    let mut products = Vec::from_iter(apart.iter().map(alone));
    for some in together.chunks(MOST_WEIGHTS) {
        match BackendWeights::new(some.iter().map(|(_, weight)| (*weight).clone().into_backend())) {
            Some(several) => {
                let of_some = Dispatch::linear_each(x.clone().into_dispatch(), several, BackendNorm::None, determinism)
                    .into_vec();
                let of_some = of_some.into_iter().map(Tensor::from_dispatch);
                products.extend(some.iter().map(|&(place, _)| place).zip(of_some));
            }
            None => products.extend(some.iter().map(alone)),
        }
    }
    products.sort_by_key(|&(place, _)| place);
    products.into_iter().map(|(_, product)| product).collect()
}

/// The same with the norm of the first product in its place: one launch, if that has all of them.
pub(crate) fn linear_each_normed(
    x: Tensor<2>,
    weights: &[&Weight],
    (norm_weight, eps): (Tensor<1>, f32),
    determinism: Determinism,
) -> Vec<Tensor<2>> {
    let leads = |weight: &Weight| weight.format().is_dense() || !weights[0].format().is_dense();
    let together = weights.iter().all(|weight| is_joint(&x, weight, determinism) && leads(weight));
    let several = BackendWeights::new(weights.iter().map(|weight| (*weight).clone().into_backend()));
    if let Some(several) = several.filter(|_| together) {
        let norm = BackendNorm::Weighted(norm_weight.into_dispatch(), eps);
        let products = Dispatch::linear_each(x.into_dispatch(), several, norm, determinism);
        return products.into_vec().into_iter().map(Tensor::from_dispatch).collect();
    }
    let mut products = linear_each(&x, weights, determinism);
    if let Some(first) = products.first_mut() {
        *first = rms_norm::in_memory(first.clone(), norm_weight, eps);
    }
    products
}

/// Whether a small-batch kernel computes the product.
fn is_joint(x: &Tensor<2>, weight: &Weight, determinism: Determinism) -> bool {
    let (problem, device) = (LinearProblem::of_rows(x, weight, determinism), x.device());
    problem.has_small_batch_kernel(&device) && !problem.has_many_rows_kernel(&device)
}
