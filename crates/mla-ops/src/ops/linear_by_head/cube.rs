//! [`linear_by_head`](super::linear_by_head) by the small-batch kernels.

use burn::backend::cubecl::dtype_to_elem_type;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::linear::{self, LinearArgs, LinearForm, Work};

use super::backend::LinearByHeadBackend;
use crate::tensors::{contiguous, dims, empty, matrix_stride};

impl LinearByHeadBackend for CubeBackend {
    fn linear_by_head(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
        let x = contiguous(x);
        let ([rows, heads, width], [_, outputs, inputs]) = (dims(&x), dims(&weight));
        let out = empty(&x, [rows, heads, outputs + width - inputs], x.dtype);
        linear::launch(&x.client, by_head_args(&x, weight, &out, [rows, heads, width]));
        out
    }
}

/// Contiguous x of `[N, H, d]` elements, weight `[H, out, in]`.
pub(crate) fn by_head_args(
    x: &CubeTensor,
    weight: CubeTensor,
    out: &CubeTensor,
    [rows, heads, width]: [usize; 3],
) -> LinearArgs {
    let [_, outputs, inputs] = dims(&weight);
    // Half of a projection's matrices may lie between the other halves.
    let (weight, matrix_stride) = match matrix_stride(&weight) {
        Some(stride) => (weight, stride),
        None => (contiguous(weight), outputs * inputs),
    };
    let elem = dtype_to_elem_type(x.dtype);
    LinearArgs {
        x: x.clone().into_buffer_arg(),
        weight: weight.into_buffer_arg(),
        out: out.clone().into_buffer_arg(),
        work: Work::Heads { rows, heads, carried: width - inputs, matrix_stride },
        inputs,
        outputs,
        limit: 0.0,
        form: LinearForm::default(),
        x_elem: elem,
        elem,
    }
}
