//! Projections by the product of matrices: what the CPU computes, and a GPU for many rows.

use burn::tensor::{FloatDType, Tensor};

use crate::ops::matmul::product;
use crate::{Determinism, Weight};

/// x `[N, in]`, whose dtype may differ from that of the weight: `[N, out]`.
pub(crate) fn linear(x: Tensor<2>, weight: &Weight, determinism: Determinism) -> Tensor<2> {
    let x = if x.dtype() == weight.dtype() { x } else { x.cast(FloatDType::from(weight.dtype())) };
    times(x, weight, determinism)
}

/// x `[N, in]` of the dtype of the weight: `[N, out]`.
pub(crate) fn times(x: Tensor<2>, weight: &Weight, determinism: Determinism) -> Tensor<2> {
    #[cfg(feature = "flex")]
    if let Some(blocks) = weight.blocks()
        && crate::independent::is_flex(&x.device())
    {
        return crate::reference::blocks::matmul(x, blocks, determinism);
    }
    product(x, weight.dense().transpose(), determinism)
}
