//! One block of attention: softmax over the keys of the block, and its log-sum-exp.

use burn::tensor::{Tensor, activation::softmax};

/// `scores [.., rows, keys]`, `values [.., keys, Dv]`, both f32 -> `out [.., rows, Dv]` and `lse [.., rows, 1]`.
///
/// A score of -inf is a key that the row may not see. Every row must see one.
pub(crate) fn softmax_values<const D: usize>(scores: Tensor<D>, values: Tensor<D>) -> (Tensor<D>, Tensor<D>) {
    let max = scores.clone().max_dim(D - 1);
    let p = softmax(scores, D - 1);
    // The best key has probability exp(0) / sum, so that its logarithm is minus that of the sum.
    let lse = max - p.clone().max_dim(D - 1).log();
    (p.matmul(values), lse)
}
