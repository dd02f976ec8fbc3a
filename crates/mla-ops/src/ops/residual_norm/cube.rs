//! The norm of a residual sum by kernels.

use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::linear::normed::{self as norm_linear, NormLinearArgs, NormLinearSizes};
use mla_kernels::residual_norm::{self, AddRmsNormArgs, Summand};

use super::backend::{BackendNormed, BackendProducts, BackendReader, ResidualNormBackend, read};
use crate::tensors::{contiguous, dims, empty};
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
            BackendReader::Linear(matrix) if in_one(&matrix) => with_linear([x, y], (weight, eps), matrix),
            reader => launch(x, Summand::Rows(contiguous(y).into_buffer_arg()), (weight, eps), reader),
        }
    }
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
