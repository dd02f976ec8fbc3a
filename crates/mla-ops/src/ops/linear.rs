//! [`linear`], [`linear_pair`], [`swiglu`] and [`linear_by_head`]: projections.

use burn::backend::Dispatch;
use burn::tensor::{DType, FloatDType, Tensor, activation::silu};

use super::matmul::matmul;
use crate::backend::{LinearSpec, MlaBackend};
use crate::batch_invariant::is_batch_invariant;
use crate::device::has_kernels;

/// Rows up to which the kernel is used; Burn's product of matrices is for more, where it may be: its rows depend on how many
/// there are.
pub(super) const FEW: usize = 64;

fn are_for_the_kernel(rows: usize) -> bool {
    (1..=FEW).contains(&rows) || (rows > FEW && is_batch_invariant())
}

/// The product of `x [N, in]` and the transpose of `weight [out, in]`: `[N, out]` of the dtype of the weights, which is that of
/// `x`, or f32.
///
/// A few rows on a GPU, and inside of [`batch_invariant`](crate::batch_invariant()) any number, are computed by a kernel that reads
/// the weights once for every 64 rows, as fast as they come from the memory; there, the output of a row does not depend on the
/// others. Otherwise it is [`matmul`]. Sums are f32, but the CPU rounds those of f16 to f16 now and then.
///
/// # Panics
/// As [`Tensor::matmul`] does, where the shapes do not fit.
pub fn linear(x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    let spec = LinearSpec { gated: false, limit: None };
    match few_rows(&x, &weight, spec) {
        Some(out) => out,
        None if x.dtype() == weight.dtype() => matmul(x, weight.transpose()),
        None => matmul(x.cast(FloatDType::from(weight.dtype())), weight.transpose()),
    }
}

/// [`linear`] of `x [N, in]` with each of two weights `[out, in]` of its dtype: the bits are the same, but for a few rows on a
/// GPU it is one launch.
///
/// # Panics
/// As [`Tensor::matmul`] does, where the shapes do not fit.
pub fn linear_pair(x: Tensor<2>, first: Tensor<2>, second: Tensor<2>) -> (Tensor<2>, Tensor<2>) {
    if pair_has_kernel(&x, [&first, &second]) {
        let [x, first, second] = [x, first, second].map(Tensor::into_dispatch);
        let (first, second) = <Dispatch as MlaBackend>::linear_pair(x, first, second);
        return (Tensor::from_dispatch(first), Tensor::from_dispatch(second));
    }
    (linear(x.clone(), first), linear(x, second))
}

/// Whether a kernel computes both products of rows like these.
pub(super) fn pair_has_kernel(x: &Tensor<2>, weights: [&Tensor<2>; 2]) -> bool {
    let [rows, inputs] = x.dims();
    let fits = weights.into_iter().all(|weight| {
        let [outputs, columns] = weight.dims();
        columns == inputs && inputs * outputs > 0 && weight.dtype() == x.dtype()
    });
    fits && are_for_the_kernel(rows) && has_kernels(&x.device())
}

/// `silu(gate) ⊙ up`, where `gate_up [2 I, in]` projects `x [N, in]`, of the same float dtype, to both, the gate first: `[N, I]`.
///
/// A `limit` clamps `up` both ways and the gate from above, where silu grows (DeepSeek-V4). Of a few rows on a GPU it is one
/// kernel, which has the products in f32; otherwise they are rounded to the dtype, as those of [`linear`].
///
/// # Panics
/// As [`Tensor::matmul`] does, where the shapes do not fit; an odd number of rows of `gate_up`.
pub fn swiglu(x: Tensor<2>, gate_up: Tensor<2>, limit: Option<f32>) -> Tensor<2> {
    let [rows, _] = gate_up.dims();
    assert!(rows.is_multiple_of(2), "gate_up has {rows} rows, which are not as many for the gate as for `up`");
    if let Some(out) = few_rows(&x, &gate_up, LinearSpec { gated: true, limit }) {
        return out;
    }
    let both = matmul(x, gate_up.transpose());
    let [gate, up] = [0, rows / 2].map(|first| both.clone().narrow(1, first, rows / 2));
    match limit {
        None => silu(gate) * up,
        Some(limit) => silu(gate.clamp_max(limit)) * up.clamp(-limit, limit),
    }
}

/// The product of each head of `x [N, H, d]` with the transpose of its own matrix of `weight [H, out, in]`, of the same float
/// dtype, and behind it the head's channels past the first `in`, as they are: `[N, H, out + d - in]`.
///
/// MLA's absorbed projections: the query against the latents, with its rotary part carried over, and the values of attended
/// latents. As fast as [`linear`] for a few tokens on a GPU, where matrices may lie apart.
///
/// # Panics
/// As [`Tensor::matmul`] does, where the shapes do not fit.
pub fn linear_by_head(x: Tensor<3>, weight: Tensor<3>) -> Tensor<3> {
    let ([rows, heads, width], [matrices, outputs, inputs]) = (x.dims(), weight.dims());
    let fits = heads == matrices && inputs <= width && x.dtype() == weight.dtype();
    if fits && heads * inputs * outputs > 0 && are_for_the_kernel(rows) && has_kernels(&x.device()) {
        let [x, weight] = [x, weight].map(Tensor::into_dispatch);
        return Tensor::from_dispatch(<Dispatch as MlaBackend>::linear_by_head(x, weight));
    }
    let product = |x: Tensor<3>| matmul(x.swap_dims(0, 1), weight.swap_dims(1, 2)).swap_dims(0, 1);
    match width.saturating_sub(inputs) {
        0 => product(x),
        rest => {
            let carried = x.clone().narrow(2, inputs, rest);
            Tensor::cat(vec![product(x.narrow(2, 0, inputs)), carried], 2)
        }
    }
}

/// By the kernel, where there is one that is for so many rows.
fn few_rows(x: &Tensor<2>, weight: &Tensor<2>, spec: LinearSpec) -> Option<Tensor<2>> {
    let ([rows, inputs], [outputs, columns]) = (x.dims(), weight.dims());
    let dtypes = x.dtype() == weight.dtype() || (weight.dtype() == DType::F32 && !spec.gated);
    let fits = inputs == columns && inputs * outputs > 0 && dtypes;
    (fits && are_for_the_kernel(rows) && has_kernels(&x.device())).then(|| {
        let [x, weight] = [x, weight].map(|tensor| tensor.clone().into_dispatch());
        Tensor::from_dispatch(<Dispatch as MlaBackend>::linear(x, weight, spec))
    })
}
