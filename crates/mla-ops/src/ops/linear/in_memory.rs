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

/// Checked x `[N, in]`: a product for each weight, or in place of the first one its norm. Those that a small-batch kernel computes share its
/// launches.
pub(crate) fn linear_each(
    x: &Tensor<2>,
    weights: &[&Weight],
    mut norm: Option<(Tensor<1>, f32)>,
    determinism: Determinism,
) -> Vec<Tensor<2>> {
    let device = x.device();
    let joint = |weight: &Weight| {
        let problem = LinearProblem::of_rows(x, weight, determinism);
        problem.has_small_batch_kernel(&device) && !problem.has_many_rows_kernel(&device)
    };
    let alone = |&(place, weight): &(usize, &Weight)| (place, linear(x.clone(), weight, determinism));
    let numbered = weights.iter().copied().enumerate();
    let (together, apart): (Vec<_>, Vec<_>) = numbered.partition(|(_, weight)| joint(weight));
    let mut products = Vec::from_iter(apart.iter().map(alone));
    for some in together.chunks(MOST_WEIGHTS) {
        match BackendWeights::new(some.iter().map(|(_, weight)| (*weight).clone().into_backend())) {
            Some(several) => {
                let norm = match norm.take_if(|_| some[0].0 == 0) {
                    Some((weight, eps)) => BackendNorm::Weighted(weight.into_dispatch(), eps),
                    None => BackendNorm::None,
                };
                let of_some = Dispatch::linear_each(x.clone().into_dispatch(), several, norm, determinism).into_vec();
                let of_some = of_some.into_iter().map(Tensor::from_dispatch);
                products.extend(some.iter().map(|&(place, _)| place).zip(of_some));
            }
            None => products.extend(some.iter().map(alone)),
        }
    }
    products.sort_by_key(|&(place, _)| place);
    let mut products = Vec::from_iter(products.into_iter().map(|(_, product)| product));
    if let (Some((weight, eps)), Some(first)) = (norm, products.first_mut()) {
        *first = rms_norm::in_memory(first.clone(), weight, eps);
    }
    products
}
