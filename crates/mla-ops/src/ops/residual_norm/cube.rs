//! The norm of a residual sum by kernels.

use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::linear::normed::{self as norm_linear, NormLinearArgs, NormLinearSizes};
use mla_kernels::linear::{self, LinearForm};
use mla_kernels::norm_rope::{self, Norm, NormRopeArgs};
use mla_kernels::residual_norm::{self, AddRmsNormArgs, Summand};

use super::backend::{BackendNormed, BackendProducts, BackendReader, ResidualNormBackend, read};
use crate::ops::linear::cube::{joins, pair_args, rows_args};
use crate::tensors::{buffers, contiguous, dims, empty};
use crate::weight::BackendWeight;

impl ResidualNormBackend for CubeBackend {
    fn residual_norm(
        x: CubeTensor,
        y: CubeTensor,
        weight: CubeTensor,
        reader: BackendReader<Self>,
        eps: f32,
    ) -> BackendNormed<Self> {
        let ([rows, width], elem) = (dims(&x), dtype_to_elem_type(x.dtype));
        let in_one = |matrix: &BackendWeight<Self>| {
            let [outputs, _] = matrix.dims();
            norm_linear::supported(&x.client, &NormLinearSizes { rows, width, outputs, elem })
        };
        match reader {
            BackendReader::Linear(matrix, _) if in_one(&matrix) => with_linear([x, y], (weight, eps), matrix),
            reader => launch(x, Summand::Rows(contiguous(y).into_buffer_arg()), (weight, eps), reader),
        }
    }

    /// The launch of the products computes the norm, where it can.
    fn norm_linear(x: CubeTensor, weight: CubeTensor, eps: f32, reader: BackendReader<Self>) -> BackendProducts<Self> {
        let [x, weight] = [x, weight].map(contiguous);
        let ([rows, width], client) = (dims(&x), x.client.clone());
        let normed = empty(&x, [rows, width], x.dtype);
        let norm = rms_norm_args(&x, &weight, &normed, eps);
        match reader {
            BackendReader::Linear(matrix, determinism) => {
                let ([outputs, _], form) = (matrix.dims(), (LinearForm::default(), 0.0));
                let (args, out) = rows_args(normed, matrix, outputs, form, determinism);
                linear::launch_norm_roped(&client, norm, args);
                BackendProducts::One(out)
            }
            BackendReader::LinearPair(first, second, determinism) if joins(&first, &second) => {
                let (args, [first, second]) = pair_args(normed, first, second, determinism);
                linear::launch_norm_roped(&client, norm, args);
                BackendProducts::Two(first, second)
            }
            reader => {
                norm_rope::launch(&client, norm);
                read(&normed, reader)
            }
        }
    }
}

/// The norm of rows as [`rms_norm`](crate::rms_norm) computes it.
pub(crate) fn rms_norm_args(x: &CubeTensor, weight: &CubeTensor, out: &CubeTensor, eps: f32) -> NormRopeArgs {
    let ([tokens, width], elem) = (dims(x), dtype_to_elem_type(x.dtype));
    let (heads, pairs, norm, norm_whole_head, inverse) = (1, 0, Norm::Weighted, true, false);
    let (cos, sin) = (weight, weight);
    buffers!(x, weight, cos, sin, out => NormRopeArgs {
        x, weight, cos, sin, out, tokens, heads, width, pairs, norm, norm_whole_head, eps, inverse, elem,
    })
}

/// Sum, norm and products of a few rows with a small f32 matrix, in one launch.
fn with_linear(
    [x, y]: [CubeTensor; 2],
    (norm_weight, eps): (CubeTensor, f32),
    matrix: BackendWeight<CubeBackend>,
) -> BackendNormed<CubeBackend> {
    let ([rows, width], [outputs, _]) = (dims(&x), matrix.dims());
    let [x, y, norm_weight] = [x, y, norm_weight].map(contiguous);
    let [sum, normed] = [(); 2].map(|()| empty(&x, [rows, width], x.dtype));
    let out = empty(&x, [rows, outputs], DType::F32);
    let (client, elem) = (x.client.clone(), dtype_to_elem_type(x.dtype));
    let args = NormLinearArgs {
        x: x.into_buffer_arg(),
        y: y.into_buffer_arg(),
        norm_weight: norm_weight.into_buffer_arg(),
        weight: matrix.into_arg(),
        sum: sum.clone().into_buffer_arg(),
        normed: normed.clone().into_buffer_arg(),
        out: out.clone().into_buffer_arg(),
        rows,
        width,
        outputs,
        eps,
        elem,
    };
    norm_linear::launch(&client, args);
    BackendNormed { sum, normed, products: BackendProducts::One(out) }
}

/// The sum of x `[N, d]` and a summand, and its norm; the reader has launches of its own.
pub(crate) fn launch(
    x: CubeTensor,
    y: Summand,
    norm: (CubeTensor, f32),
    reader: BackendReader<CubeBackend>,
) -> BackendNormed<CubeBackend> {
    let client = x.client.clone();
    let (args, [sum, normed]) = launch_args(x, y, norm);
    residual_norm::launch(&client, args);
    let products = read(&normed, reader);
    BackendNormed { sum, normed, products }
}

/// What the kernel takes, and the sum and norm that it writes.
pub(crate) fn launch_args(
    x: CubeTensor,
    y: Summand,
    (weight, eps): (CubeTensor, f32),
) -> (AddRmsNormArgs, [CubeTensor; 2]) {
    let [x, weight] = [x, weight].map(contiguous);
    let [rows, width] = dims(&x);
    let outs = [(); 2].map(|()| empty(&x, [rows, width], x.dtype));
    let elem = dtype_to_elem_type(x.dtype);
    let args = AddRmsNormArgs {
        x: x.into_buffer_arg(),
        y,
        weight: weight.into_buffer_arg(),
        sum: outs[0].clone().into_buffer_arg(),
        normed: outs[1].clone().into_buffer_arg(),
        rows,
        width,
        eps,
        elem,
    };
    (args, outs)
}
