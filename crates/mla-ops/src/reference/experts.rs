//! Mixture of experts in tensor operations, one pair of matmuls for each expert in use.

use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData, activation};

use crate::independent::map_independent;
use crate::{ExpertGroups, ExpertScoring, RouteExpertsOptions, matmul, swiglu};

/// Scores `[N, E]` of logits.
fn scores(logits: Tensor<2>, scoring: ExpertScoring) -> Tensor<2> {
    match scoring {
        ExpertScoring::Softmax => activation::softmax(logits, 1),
        ExpertScoring::Sigmoid => activation::sigmoid(logits),
        ExpertScoring::SqrtSoftplus => softplus(logits).sqrt(),
    }
}

/// `ln(1 + e^x)`, for any size of x.
fn softplus(x: Tensor<2>) -> Tensor<2> {
    activation::relu(x.clone()) + (-x.abs()).exp().log1p()
}

/// The best experts `[N, k]` and their weights; a bias `[E]` counts for the choice only.
pub(crate) fn choose_experts(
    logits: Tensor<2>,
    bias: Option<Tensor<1>>,
    top_k: usize,
    options: &RouteExpertsOptions,
) -> (Tensor<2, Int>, Tensor<2>) {
    let scores = scores(logits, options.scoring);
    let mut choice = match bias {
        Some(bias) => scores.clone() + bias.unsqueeze(),
        None => scores.clone(),
    };
    if let Some(groups) = options.groups {
        choice = keep_best_groups(choice, groups);
    }
    let indices = best(choice, top_k);
    let weights = weights(scores.gather(1, indices.clone()), options);
    (indices, weights)
}

/// The weights of given experts; 0 of those that there are not.
pub(crate) fn weigh_experts(
    logits: Tensor<2>,
    given: Tensor<2, Int>,
    options: &RouteExpertsOptions,
) -> (Tensor<2, Int>, Tensor<2>) {
    let [_, experts] = logits.dims();
    let last = experts as i64 - 1;
    let absent = given.clone().lower_elem(0).bool_or(given.clone().greater_elem(last));
    let scores = scores(logits, options.scoring).gather(1, given.clone().clamp(0, last)).mask_fill(absent, 0.0);
    (given, weights(scores, options))
}

fn weights(scores: Tensor<2>, options: &RouteExpertsOptions) -> Tensor<2> {
    let scores = if options.normalise { scores.clone() / (scores.sum_dim(1) + 1e-20) } else { scores };
    scores * options.scale
}

/// The `k` largest of each row, the largest first: i32 `[N, k]`. Of two that are equal the first; what is no number is the least.
fn best(scores: Tensor<2>, k: usize) -> Tensor<2, Int> {
    let ([rows, columns], device) = (scores.dims(), scores.device());
    let scores: Vec<f32> = scores.try_into_vec_as().expect("computed on the CPU");
    let key = |score: f32| if score > f32::MIN { score } else { f32::MIN };
    let mut indices = Vec::with_capacity(rows * k);
    for row in scores.chunks_exact(columns) {
        let mut order: Vec<i32> = (0..columns as i32).collect();
        order.sort_by(|&a, &b| key(row[b as usize]).total_cmp(&key(row[a as usize])));
        indices.extend_from_slice(&order[..k]);
    }
    Tensor::from_data(TensorData::new(indices, [rows, k]), (&device, DType::I32))
}

/// Hides the experts outside the best groups.
fn keep_best_groups(choice: Tensor<2>, groups: ExpertGroups) -> Tensor<2> {
    let ExpertGroups { count, kept, best } = groups;
    let [tokens, experts] = choice.dims();
    let grouped = choice.reshape([tokens, count, experts / count]);
    let group_scores = grouped.clone().topk(best, 2).sum_dim(2);
    let best = self::best(group_scores.reshape([tokens, count]), kept);
    let numbers = Tensor::<1, Int>::arange(0..count as i64, (&best.device(), best.dtype()));
    let shape = [tokens, kept, count];
    let is_best = best
        .unsqueeze_dim::<3>(2)
        .expand(shape)
        .equal(numbers.reshape([1, 1, count]).expand(shape))
        .any_dim(1)
        .reshape([tokens, count, 1]);
    let hidden = is_best.bool_not().expand([tokens, count, experts / count]);
    grouped.mask_fill(hidden, f32::NEG_INFINITY).reshape([tokens, experts])
}

/// x `[N, hidden]`, indices `[N, k]`, weights f32 `[N, k]`, gate and up `[E, 2 I, hidden]`, down `[E, hidden, I]`, shared
/// `[N, hidden]`: `[N, hidden]`.
///
/// The pairs of token and expert are sorted by expert: each expert in use is one pair of matmuls over neighbouring rows.
pub(crate) fn experts_mlp(
    x: Tensor<2>,
    (indices, weights): (Tensor<2, Int>, Tensor<2>),
    gate_up: Tensor<3>,
    down: Tensor<3>,
    shared: Option<Tensor<2>>,
    limit: Option<f32>,
) -> Tensor<2> {
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
        let weight = |stacked: &Tensor<3>| stacked.clone().narrow(0, expert, 1).squeeze_dim::<2>(0);
        let activations = swiglu(sorted.clone().narrow(0, first, len), weight(&gate_up), limit);
        matmul(activations, weight(&down).transpose())
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
