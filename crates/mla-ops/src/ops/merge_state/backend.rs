//! [`merge_state`](super::merge_state()) and its forms as a backend extension.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait MergeStateBackend: Backend {
    /// [`merge_state`](super::merge_state()): out, lse.
    #[fusion(meta = |out_a, lse_a, _out_b, _lse_b| (out_a.clone(), lse_a.clone()))]
    fn merge_state(
        out_a: FloatTensor<Self>,
        lse_a: FloatTensor<Self>,
        out_b: FloatTensor<Self>,
        lse_b: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// [`merge_states`](super::merge_states): out, lse.
    #[fusion(meta = |outs, lses| {
        let [tokens, _, heads, width] = outs.shape.dims();
        (crate::fusion::spec([tokens, heads, width], outs.dtype), crate::fusion::spec([tokens, heads], lses.dtype))
    })]
    fn merge_states(outs: FloatTensor<Self>, lses: FloatTensor<Self>) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// [`Accumulator::merge`](super::Accumulator::merge): out, lse of the accumulator.
    #[fusion(meta = |acc_out, acc_lse, _out, _lse| (acc_out.clone(), acc_lse.clone()))]
    fn merge_state_into(
        acc_out: FloatTensor<Self>,
        acc_lse: FloatTensor<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}
