//! Projections by kernels.

use burn::backend::cubecl::dtype_to_elem_type;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::linear::{self, LinearArgs, LinearForm, LinearSizes, SecondMatrix, Work};

use super::backend::LinearBackend;
use crate::Determinism;
use crate::tensors::{contiguous, dims, empty};
use crate::weight::BackendWeight;

impl LinearBackend for CubeBackend {
    fn linear(x: CubeTensor, weight: BackendWeight<Self>, determinism: Determinism) -> CubeTensor {
        let [outputs, _] = weight.dims();
        rows(x, weight, outputs, (LinearForm::default(), 0.0), determinism)
    }

    fn linear_pair(
        x: CubeTensor,
        first: BackendWeight<Self>,
        second: BackendWeight<Self>,
        determinism: Determinism,
    ) -> (CubeTensor, CubeTensor) {
        if !joins(&first, &second) {
            let [first, second] = [(x.clone(), first), (x, second)]
                .map(|(x, weight)| <Self as LinearBackend>::linear(x, weight, determinism));
            return (first, second);
        }
        let client = x.client.clone();
        let (args, outs) = pair_args(contiguous(x), first, second, determinism);
        linear::launch(&client, args);
        outs
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
        work: Work::Dense { rows, second: None },
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

/// Whether one launch has both products.
pub(crate) fn joins(first: &BackendWeight<CubeBackend>, second: &BackendWeight<CubeBackend>) -> bool {
    let ([outputs, inputs], [second_outputs, _]) = (first.dims(), second.dims());
    let elem = dtype_to_elem_type(first.dtype());
    // Each format has its own kernels, with their order of sums.
    let alike = first.format().is_dense() == second.format().is_dense();
    let sizes = LinearSizes::dense([1, inputs, outputs], LinearForm::default(), [elem; 2], first.format().into());
    alike && linear::joins(first.client(), &sizes, second_outputs)
}

/// What one launch takes for both products of contiguous x, and what it writes.
pub(crate) fn pair_args(
    x: CubeTensor,
    first: BackendWeight<CubeBackend>,
    second: BackendWeight<CubeBackend>,
    determinism: Determinism,
) -> (LinearArgs, (CubeTensor, CubeTensor)) {
    let ([rows, inputs], [outputs, _], [second_outputs, _]) = (dims(&x), first.dims(), second.dims());
    let elem = dtype_to_elem_type(x.dtype);
    let outs = [outputs, second_outputs].map(|outputs| empty(&x, [rows, outputs], x.dtype));
    let second =
        SecondMatrix { weight: second.into_arg(), out: outs[1].clone().into_buffer_arg(), outputs: second_outputs };
    let args = LinearArgs {
        x: x.into_buffer_arg(),
        weight: first.into_arg(),
        out: outs[0].clone().into_buffer_arg(),
        work: Work::Dense { rows, second: Some(second) },
        inputs,
        outputs,
        limit: 0.0,
        form: LinearForm::default(),
        x_elem: elem,
        elem,
        batch_invariant: determinism.is_batch_invariant(),
    };
    (args, outs.into())
}
