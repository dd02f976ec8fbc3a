//! The choice of experts as ordinary tensor operations.

use burn::tensor::{DType, Int, Tensor, TensorData, activation};

use super::args::{ExpertGroups, ExpertScoring, LocalExperts, RouteExpertsOptions};

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
pub(super) fn choose_experts(
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
pub(super) fn weigh_experts(
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

/// The rows of a table i32 `[T, k]` with these numbers `[N]`; -1 where there is none.
pub(super) fn in_table(experts: Tensor<2, Int>, rows: Tensor<1, Int>) -> Tensor<2, Int> {
    let [count, top_k] = experts.dims();
    let ([tokens], last) = (rows.dims(), count as i64 - 1);
    if tokens == 0 {
        return Tensor::empty([0, top_k], (&experts.device(), DType::I32));
    }
    let absent = rows.clone().lower_elem(0).bool_or(rows.clone().greater_elem(last));
    let absent = absent.unsqueeze_dim::<2>(1).expand([tokens, top_k]);
    experts.select(0, rows.clamp(0, last)).mask_fill(absent, -1)
}

/// Experts by their numbers among the local ones; -1 for all others.
pub(super) fn local_numbers(indices: Tensor<2, Int>, local: Option<LocalExperts>) -> Tensor<2, Int> {
    let Some(LocalExperts { first, count }) = local else { return indices };
    let (first, end) = (first as i64, (first + count) as i64);
    let others = indices.clone().lower_elem(first).bool_or(indices.clone().greater_equal_elem(end));
    (indices - first).mask_fill(others, -1)
}

/// Experts `[N, k]`; -1 of tokens with a slot below 0, `[N]`.
pub(super) fn without_padding(indices: Tensor<2, Int>, slots: Tensor<1, Int>) -> Tensor<2, Int> {
    if indices.dims().contains(&0) {
        return indices;
    }
    let padding = slots.lower_elem(0).unsqueeze_dim::<2>(1).expand(indices.dims());
    indices.mask_fill(padding, -1)
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
    // No tensor is expanded to nothing.
    if tokens == 0 {
        return choice;
    }
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
