//! One block of attention: softmax over the keys of the block, and its log-sum-exp.

use burn::tensor::Tensor;

/// `scores [.., rows, keys]`, `values [.., keys, Dv]`, both f32 -> `out [.., rows, Dv]` and `lse [.., rows, 1]`.
///
/// A score of -inf is a key that the row may not see. A row that sees none gives 0 and -inf.
pub(super) fn softmax_values<const D: usize>(scores: Tensor<D>, values: Tensor<D>) -> (Tensor<D>, Tensor<D>) {
    // The lowest finite number stands in for the maximum of a row of -inf, whose exponentials then are 0, not NaN.
    let max = scores.clone().max_dim(D - 1).clamp_min(f32::MIN);
    let p = (scores - max.clone()).exp();
    let sum = p.clone().sum_dim(D - 1);
    let out = p.matmul(values) / sum.clone().clamp_min(f32::MIN_POSITIVE);
    (out, max + sum.log())
}
