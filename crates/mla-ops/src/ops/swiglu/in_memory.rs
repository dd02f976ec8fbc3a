//! The gated activation of rows that are in memory.

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use super::backend::SwigluBackend;
use super::reference;
use crate::ops::small_batch;
use crate::{Determinism, Weight};

/// Checked x `[N, in]`: `[N, I]`.
pub(crate) fn swiglu(x: Tensor<2>, gate_up: &Weight, limit: Option<f32>, determinism: Determinism) -> Tensor<2> {
    let [rows, _] = x.dims();
    let small = !gate_up.is_empty() && small_batch::has_kernel(rows, &x.device(), determinism);
    if !small && !small_batch::takes_many_rows(&x, gate_up, true) {
        return reference::swiglu(x, gate_up, limit, determinism);
    }
    Tensor::from_dispatch(Dispatch::swiglu(x.into_dispatch(), gate_up.clone().into_backend(), limit, determinism))
}
