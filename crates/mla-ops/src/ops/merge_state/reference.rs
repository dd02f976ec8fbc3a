use burn::backend::{Flex, tensor::FloatTensor};
use burn::tensor::{FloatDType, Tensor};

use super::backend::MergeStateBackend;
use crate::reference::{IntoFlex, tensor};

impl MergeStateBackend for Flex {
    fn merge_state(
        out_a: FloatTensor<Self>,
        lse_a: FloatTensor<Self>,
        out_b: FloatTensor<Self>,
        lse_b: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        merge_state(tensor(out_a), tensor(lse_a), tensor(out_b), tensor(lse_b)).into_flex()
    }

    fn merge_states(outs: FloatTensor<Self>, lses: FloatTensor<Self>) -> (FloatTensor<Self>, FloatTensor<Self>) {
        merge_states(tensor(outs), tensor(lses)).into_flex()
    }

    fn merge_state_into(
        acc_out: FloatTensor<Self>,
        acc_lse: FloatTensor<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        // The accumulator is f32, and a merge has the dtype of its first state.
        Self::merge_state(acc_out, acc_lse, out, lse)
    }
}

/// out `[T, H, Dv]` in the dtype of `out_a`, lse f32 `[T, H]`.
pub(crate) fn merge_state(
    out_a: Tensor<3>,
    lse_a: Tensor<2>,
    out_b: Tensor<3>,
    lse_b: Tensor<2>,
) -> (Tensor<3>, Tensor<2>) {
    let [tokens, heads, width] = out_a.dims();
    let dtype = FloatDType::from(out_a.dtype());
    // Burn's `stack` refuses empty tensors.
    if tokens * heads == 0 {
        return (out_a, lse_a);
    }
    let outs = match width {
        0 => Tensor::zeros([tokens, 2, heads, 0], (&out_a.device(), out_a.dtype())),
        _ => Tensor::stack(vec![out_a.cast(FloatDType::F32), out_b.cast(FloatDType::F32)], 1),
    };
    let (out, lse) = merge_states(outs, Tensor::stack(vec![lse_a, lse_b], 1));
    (out.cast(dtype), lse)
}

/// outs `[T, n, H, Dv]`, lses f32 `[T, n, H]` -> out `[T, H, Dv]` in the dtype of `outs`, lse f32 `[T, H]`.
pub(crate) fn merge_states(outs: Tensor<4>, lses: Tensor<3>) -> (Tensor<3>, Tensor<2>) {
    let [tokens, states, heads, width] = outs.dims();
    let (dtype, device) = (FloatDType::from(outs.dtype()), outs.device());
    if states == 0 || tokens * heads == 0 {
        let lse = Tensor::full([tokens, heads], f32::NEG_INFINITY, (&device, lses.dtype()));
        return (Tensor::zeros([tokens, heads, width], (&device, outs.dtype())), lse);
    }
    let lses = lses.clone().mask_fill(lses.equal_scalar(f32::INFINITY), f32::NEG_INFINITY);
    // The lowest finite number stands in for the maximum of states that are all empty.
    let max = lses.clone().max_dim(1).clamp_min(f32::MIN);
    let weights = (lses - max.clone()).exp();
    let sum = weights.clone().sum_dim(1);
    let lse = (max + sum.clone().log()).squeeze_dim(1);
    if width == 0 {
        return (Tensor::zeros([tokens, heads, width], (&device, outs.dtype())), lse);
    }

    // What an empty state holds may be NaN: its weight of 0 does not keep it out of the sum.
    let empty = weights.clone().equal_scalar(0.0).unsqueeze_dim::<4>(3).expand([tokens, states, heads, width]);
    let outs = outs.cast(FloatDType::F32).mask_fill(empty, 0.0);
    let weighted = (outs * weights.unsqueeze_dim::<4>(3)).sum_dim(1).squeeze_dim::<3>(1);
    let out = weighted / sum.clamp_min(f32::MIN_POSITIVE).squeeze_dim::<2>(1).unsqueeze_dim::<3>(2);
    (out.cast(dtype), lse)
}
