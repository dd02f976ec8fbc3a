//! [`linear_by_head`](super::linear_by_head()) by kernels.

use burn::backend::cubecl::dtype_to_elem_type;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::linear::{self, LinearArgs, LinearForm, Work};
use mla_kernels::mla_decode;
use mla_kernels::norm_rope::{Norm, NormRopeArgs};

use super::backend::{BackendHeadRows, LinearByHeadBackend};
use crate::Determinism;
use crate::ops::mla_decode::backend::BackendDecode;
use crate::ops::mla_decode::cube::Launch;
use crate::tensors::{buffers, contiguous, dims, elem, empty, launched};
use crate::weight::BackendWeight;

impl LinearByHeadBackend for CubeBackend {
    fn linear_by_head(x: BackendHeadRows<Self>, weight: BackendWeight<Self>, determinism: Determinism) -> CubeTensor {
        match x {
            BackendHeadRows::InMemory(x) => in_memory(x, weight, determinism),
            BackendHeadRows::Decoded(step) => decoded(step, weight, determinism),
            BackendHeadRows::InverseRope { x, cos, sin } => by_group(x, [cos, sin], weight, determinism),
        }
    }
}

fn in_memory(x: CubeTensor, weight: BackendWeight<CubeBackend>, determinism: Determinism) -> CubeTensor {
    let x = contiguous(x);
    let ([rows, heads, width], [_, outputs, inputs]) = (dims(&x), weight.dims());
    let out = empty(&x, [rows, heads, outputs + width - inputs], x.dtype);
    linear::launch(&x.client, by_head_args(&x, weight, &out, [rows, heads, width], determinism));
    out
}

/// The projection merges the splits of the decode step, where it can.
fn decoded(
    step: BackendDecode<CubeBackend>,
    weight: BackendWeight<CubeBackend>,
    determinism: Determinism,
) -> CubeTensor {
    let ([batch, query_len, heads, _], [_, outputs, inputs]) = (dims(&step.q), weight.dims());
    let (rows, width) = (batch * query_len, step.spec.value_width);
    let out = empty(&step.q, [rows, heads, outputs + width - inputs], step.q.dtype);
    let decode = Launch::new(step);
    let projection = by_head_args(&decode.out, weight, &out, [rows, heads, width], determinism);
    launched(mla_decode::launch_projected(&out.client, decode.args, decode.kernel, projection));
    out
}

/// The projection applies inverse RoPE, where it can.
fn by_group(
    x: CubeTensor,
    tables: [CubeTensor; 2],
    weight: BackendWeight<CubeBackend>,
    determinism: Determinism,
) -> CubeTensor {
    let (x, [cos, sin]) = (contiguous(x), tables.map(contiguous));
    let ([tokens, heads, width], [_, pairs]) = (dims(&x), dims(&cos));
    let ([groups, outputs, inputs], elem) = (weight.dims(), elem(&x));
    let rotated = empty(&x, [tokens, heads, width], x.dtype);
    let out = empty(&x, [tokens, groups, outputs], x.dtype);
    let projection = by_head_args(&rotated, weight, &out, [tokens, groups, inputs], determinism);
    let (weight, norm, eps) = (cos.clone(), Norm::None, 0.0);
    let (norm_whole_head, inverse) = (true, true);
    let args = buffers!(x, weight, cos, sin, rotated => NormRopeArgs {
        x, weight, cos, sin, out: rotated, tokens, heads, width, pairs, norm, norm_whole_head, eps, inverse, elem,
    });
    linear::launch_norm_roped(&out.client, args, projection);
    out
}

/// Contiguous x of `[N, H, d]` elements, weight `[H, out, in]`.
pub(crate) fn by_head_args(
    x: &CubeTensor,
    weight: BackendWeight<CubeBackend>,
    out: &CubeTensor,
    [rows, heads, width]: [usize; 3],
    determinism: Determinism,
) -> LinearArgs {
    let [_, outputs, inputs] = weight.dims();
    let (weight, matrix_stride) = weight.into_stack_arg();
    let elem = dtype_to_elem_type(x.dtype);
    LinearArgs {
        x: x.clone().into_buffer_arg(),
        weight,
        out: out.clone().into_buffer_arg(),
        work: Work::Heads { rows, heads, carried: width - inputs, matrix_stride },
        inputs,
        outputs,
        limit: 0.0,
        form: LinearForm::default(),
        x_elem: elem,
        elem,
        batch_invariant: determinism.is_batch_invariant(),
    }
}
