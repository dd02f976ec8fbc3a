//! Projections by kernels.

use burn::backend::cubecl::dtype_to_elem_type;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::linear::{self, LinearArgs, LinearForm, LinearSizes, OtherMatrix, Work};

use super::backend::{BackendWeights, LinearBackend};
use crate::Determinism;
use crate::ops::norm_rope::BackendNorm;
use crate::ops::residual_norm::BackendProducts;
use crate::ops::residual_norm::cube::rms_norm_args;
use crate::tensors::{contiguous, dims, empty};
use crate::weight::BackendWeight;

impl LinearBackend for CubeBackend {
    fn linear(x: CubeTensor, weight: BackendWeight<Self>, determinism: Determinism) -> CubeTensor {
        let [outputs, _] = weight.dims();
        rows(x, weight, outputs, (LinearForm::default(), 0.0), determinism)
    }

    fn linear_each(
        x: CubeTensor,
        weights: BackendWeights<Self>,
        norm: BackendNorm<Self>,
        determinism: Determinism,
    ) -> BackendProducts<Self> {
        let (x, mut weights) = (contiguous(x), Vec::from_iter(weights.into_vec().into_iter().enumerate()));
        // As a launch takes them; what is normed is the first of one.
        let normed = matches!(norm, BackendNorm::Weighted(..));
        weights.sort_by_key(|&(place, ref weight)| !(normed && place == 0) && weight.format().is_dense());
        let mut products = Vec::with_capacity(weights.len());
        while !weights.is_empty() {
            let sizes = Vec::from_iter(weights.iter().map(|(_, weight)| sizes_of_row(weight)));
            let count = linear::joined(&x.client, &sizes);
            let (places, joined): (Vec<usize>, Vec<_>) = weights.drain(..count).unzip();
            let (args, mut outs) = each_args(x.clone(), joined, determinism);
            match &norm {
                BackendNorm::Weighted(weight, eps) if places[0] == 0 => {
                    let normed = empty(&x, dims::<2>(&outs[0]), x.dtype);
                    let norm = rms_norm_args(&outs[0], &contiguous(weight.clone()), &normed, *eps);
                    linear::launch_then_norm(&x.client, args, norm);
                    outs[0] = normed;
                }
                _ => linear::launch(&x.client, args),
            }
            products.extend(places.into_iter().zip(outs));
        }
        products.sort_by_key(|&(place, _)| place);
        BackendProducts::new(products.into_iter().map(|(_, product)| product))
    }
}

/// x `[N, in]`: `[N, outputs]`, with the bound of the activations where the form has one.
pub(crate) fn rows(
    x: CubeTensor,
    weight: BackendWeight<CubeBackend>,
    outputs: usize,
    form: (LinearForm, f32),
    determinism: Determinism,
) -> CubeTensor {
    let client = x.client.clone();
    let (args, out) = rows_args(contiguous(x), weight, outputs, form, determinism);
    linear::launch(&client, args);
    out
}

/// What a launch takes for the product of contiguous x, and what it writes.
pub(crate) fn rows_args(
    x: CubeTensor,
    weight: BackendWeight<CubeBackend>,
    outputs: usize,
    (form, limit): (LinearForm, f32),
    determinism: Determinism,
) -> (LinearArgs, CubeTensor) {
    let [rows, inputs] = dims(&x);
    let [x_elem, elem] = [x.dtype, weight.dtype()].map(dtype_to_elem_type);
    let out = empty(&x, [rows, outputs], weight.dtype());
    let args = LinearArgs {
        x: x.into_buffer_arg(),
        weight: weight.into_arg(),
        out: out.clone().into_buffer_arg(),
        work: Work::Dense { rows, others: Vec::new() },
        inputs,
        outputs,
        limit,
        form,
        x_elem,
        elem,
        batch_invariant: determinism.is_batch_invariant(),
    };
    (args, out)
}

/// What the launch of a row depends on.
fn sizes_of_row(weight: &BackendWeight<CubeBackend>) -> LinearSizes {
    let ([outputs, inputs], elem) = (weight.dims(), dtype_to_elem_type(weight.dtype()));
    LinearSizes::dense([1, inputs, outputs], LinearForm::default(), [elem; 2], weight.format().into())
}

/// Whether one launch has both products, and may do something before them.
pub(crate) fn joins(first: &BackendWeight<CubeBackend>, second: &BackendWeight<CubeBackend>) -> bool {
    let alike = first.format().is_dense() == second.format().is_dense();
    alike && linear::joined(first.client(), &[first, second].map(sizes_of_row)) == 2
}

/// What one launch takes for both products of contiguous x, and what it writes.
pub(crate) fn pair_args(
    x: CubeTensor,
    first: BackendWeight<CubeBackend>,
    second: BackendWeight<CubeBackend>,
    determinism: Determinism,
) -> (LinearArgs, [CubeTensor; 2]) {
    let (args, outs) = each_args(x, vec![first, second], determinism);
    (args, <[CubeTensor; 2]>::try_from(outs).expect("one for each weight"))
}

/// The same for some, at least one: see [`Work::Dense`].
fn each_args(
    x: CubeTensor,
    weights: Vec<BackendWeight<CubeBackend>>,
    determinism: Determinism,
) -> (LinearArgs, Vec<CubeTensor>) {
    let [rows, inputs] = dims(&x);
    let elem = dtype_to_elem_type(x.dtype);
    let mut outs = Vec::with_capacity(weights.len());
    let matrix = |weight: BackendWeight<CubeBackend>| {
        let [outputs, _] = weight.dims();
        let out = empty(&x, [rows, outputs], x.dtype);
        outs.push(out.clone());
        OtherMatrix { weight: weight.into_arg(), out: out.into_buffer_arg(), outputs }
    };
    let mut others = Vec::from_iter(weights.into_iter().map(matrix));
    let OtherMatrix { weight, out, outputs } = others.remove(0);
    let args = LinearArgs {
        x: x.into_buffer_arg(),
        weight,
        out,
        work: Work::Dense { rows, others },
        inputs,
        outputs,
        limit: 0.0,
        form: LinearForm::default(),
        x_elem: elem,
        elem,
        batch_invariant: determinism.is_batch_invariant(),
    };
    (args, outs)
}
