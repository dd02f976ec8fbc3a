//! Mixture of experts in tensor operations, one pair of products for each expert in use.

use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};

use super::args::ExpertsMlpOptions;
use crate::StackedWeight;
use crate::independent::map_independent;
use crate::ops::{linear, swiglu};

/// x `[N, hidden]`, indices `[N, k]`, weights f32 `[N, k]`, gate and up `[E, 2 I, hidden]`, down `[E, hidden, I]`, shared
/// `[N, hidden]`: `[N, hidden]`.
///
/// The pairs of token and expert are sorted by expert: each expert in use is one pair of matmuls over neighbouring rows.
pub(super) fn experts_mlp(
    x: Tensor<2>,
    (indices, weights): (Tensor<2, Int>, Tensor<2>),
    [gate_up, down]: [StackedWeight; 2],
    shared: Option<Tensor<2>>,
    options: &ExpertsMlpOptions,
) -> Tensor<2> {
    let ExpertsMlpOptions { limit, determinism } = *options;
    let ([tokens, top_k], [_, hidden], [experts, _, width]) = (indices.dims(), x.dims(), down.dims());
    let (device, dtype) = (x.device(), FloatDType::from(x.dtype()));
    let chosen: Vec<i32> = indices.try_into_vec_as().expect("computed on the CPU");
    let mut pairs: Vec<usize> = (0..chosen.len()).filter(|&pair| (0..experts as i32).contains(&chosen[pair])).collect();
    pairs.sort_by_key(|&pair| chosen[pair]);
    if pairs.is_empty() {
        return shared.unwrap_or_else(|| Tensor::zeros([tokens, hidden], (&device, DType::from(dtype))));
    }

    let index = |values: Vec<i32>| {
        let n = values.len();
        Tensor::<1, Int>::from_data(TensorData::new(values, [n]), (&device, DType::I32))
    };
    let sorted = x.select(0, index(pairs.iter().map(|&pair| (pair / top_k) as i32).collect()));
    let mut groups = Vec::new();
    let mut first = 0;
    for group in pairs.chunk_by(|&a, &b| chosen[a] == chosen[b]) {
        groups.push((chosen[group[0]] as usize, first, group.len()));
        first += group.len();
    }
    let work = pairs.len() * 3 * hidden * width;
    let outputs = map_independent(&device, work, groups, |(expert, first, len)| {
        let rows = sorted.clone().narrow(0, first, len);
        let activations = swiglu::reference::swiglu(rows, &gate_up.get(expert), limit, determinism);
        linear::reference::linear(activations, &down.get(expert), determinism)
    });
    // A row of zeros behind the others, for pairs that are left out.
    let mut outputs = Tensor::cat(outputs, 0);
    let mut place = vec![pairs.len() as i32; chosen.len()];
    for (row, &pair) in pairs.iter().enumerate() {
        place[pair] = row as i32;
    }
    if pairs.len() < chosen.len() {
        outputs = Tensor::cat(vec![outputs, Tensor::zeros([1, hidden], (&device, DType::from(dtype)))], 0);
    }
    let outputs = outputs.select(0, index(place)).reshape([tokens, top_k, hidden]);
    let weighted = outputs.cast(FloatDType::F32) * weights.unsqueeze_dim::<3>(2);
    let sum = weighted.sum_dim(1).reshape([tokens, hidden]);
    match shared {
        Some(shared) => (sum + shared.cast(FloatDType::F32)).cast(dtype),
        None => sum.cast(dtype),
    }
}
