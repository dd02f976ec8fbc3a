//! The operations on CubeCL devices: outputs are allocated here, `mla-kernels` computes them.

pub(crate) mod experts;

use burn::backend::cubecl::{dtype_to_elem_type, dtype_to_storage_type};
use burn::tensor::DType;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::{launch::launch_ref, multi_level};
use cubek::std::InputBinding;
use mla_kernels::linear::normed;
use mla_kernels::norm_rope;
use mla_kernels::residual_norm::{self, AddRmsNormArgs, Summand};

use crate::RouteExpertsOptions;
use crate::backend::{BackendRouting, ExpertsSpec, LinearSpec, MlaBackend, NormRopeSpec, RouteSpec};
use crate::tensors::{contiguous, dims, empty, launched};

impl MlaBackend for CubeBackend {
    fn linear(x: CubeTensor, weight: CubeTensor, spec: LinearSpec) -> CubeTensor {
        experts::linear(x, weight, &spec)
    }

    fn linear_pair(x: CubeTensor, first: CubeTensor, second: CubeTensor) -> (CubeTensor, CubeTensor) {
        experts::linear_pair(x, first, second)
    }

    fn linear_by_head(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
        experts::linear_by_head(x, weight)
    }

    fn choose_experts(logits: CubeTensor, bias: CubeTensor, route: RouteSpec) -> (CubeTensor, CubeTensor) {
        experts::choose(logits, bias, &route)
    }

    fn weigh_experts(logits: CubeTensor, given: CubeTensor, options: RouteExpertsOptions) -> (CubeTensor, CubeTensor) {
        experts::weigh(logits, given, &options)
    }

    fn experts_mlp(
        x: CubeTensor,
        indices: CubeTensor,
        weights: CubeTensor,
        gate_up: CubeTensor,
        down: CubeTensor,
        shared: CubeTensor,
        residual: CubeTensor,
        norm_weight: CubeTensor,
        spec: ExpertsSpec,
    ) -> (CubeTensor, CubeTensor) {
        let norm = spec.norm_eps.map(|eps| (residual, norm_weight, eps));
        experts::mlp(x, (indices, weights), [gate_up, down], shared, norm, &spec)
    }

    fn experts_mlp_of_token(
        x: CubeTensor,
        routing: BackendRouting<Self>,
        gate_up: CubeTensor,
        down: CubeTensor,
        shared_gate_up: CubeTensor,
        shared_down: CubeTensor,
        residual: CubeTensor,
        norm_weight: CubeTensor,
        first: CubeTensor,
        second: CubeTensor,
        spec: ExpertsSpec,
    ) -> (CubeTensor, CubeTensor, CubeTensor, CubeTensor) {
        let norm = spec.norm_eps.map(|eps| (residual, norm_weight, eps));
        let pair = spec.pair.then_some([first, second]);
        experts::mlp_of_token(x, routing, [gate_up, down], [shared_gate_up, shared_down], (norm, pair), &spec)
    }

    fn norm_rope(
        x: CubeTensor,
        weight: CubeTensor,
        cos: CubeTensor,
        sin: CubeTensor,
        spec: NormRopeSpec,
    ) -> CubeTensor {
        let [x, weight, cos, sin] = [x, weight, cos, sin].map(contiguous);
        let [tokens, heads, width] = dims(&x);
        let (out, elem, client) =
            (empty(&x, [tokens, heads, width], x.dtype), dtype_to_elem_type(x.dtype), x.client.clone());
        let args = norm_rope::NormRopeArgs {
            x: x.into_buffer_arg(),
            weight: weight.into_buffer_arg(),
            cos: cos.into_buffer_arg(),
            sin: sin.into_buffer_arg(),
            out: out.clone().into_buffer_arg(),
            tokens,
            heads,
            width,
            pairs: spec.pairs,
            norm: match (spec.norm_eps, spec.weighted) {
                (None, _) => norm_rope::Norm::None,
                (Some(_), false) => norm_rope::Norm::Plain,
                (Some(_), true) => norm_rope::Norm::Weighted,
            },
            norm_turned: spec.norm_turned,
            eps: spec.norm_eps.unwrap_or_default(),
            inverse: spec.inverse,
            elem,
        };
        norm_rope::launch(&client, args);
        out
    }

    fn add_rms_norm(x: CubeTensor, y: CubeTensor, weight: CubeTensor, eps: f32) -> (CubeTensor, CubeTensor) {
        add_norm(x, Summand::Rows(contiguous(y).into_buffer_arg()), weight, eps)
    }

    fn add_rms_norm_linear(
        x: CubeTensor,
        y: CubeTensor,
        norm_weight: CubeTensor,
        weight: CubeTensor,
        eps: f32,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        let ([rows, width], [outputs, _]) = (dims(&x), dims(&weight));
        let (elem, client) = (dtype_to_elem_type(x.dtype), x.client.clone());
        if !normed::supported(&client, rows, width, outputs, elem) {
            let (sum, normed) = Self::add_rms_norm(x, y, norm_weight, eps);
            return (sum, normed.clone(), Self::linear(normed, weight, LinearSpec { gated: false, limit: None }));
        }
        let [x, y, norm_weight, weight] = [x, y, norm_weight, weight].map(contiguous);
        let [sum, normed] = [(); 2].map(|()| empty(&x, [rows, width], x.dtype));
        let out = empty(&x, [rows, outputs], DType::F32);
        let args = normed::NormLinearArgs {
            x: x.into_buffer_arg(),
            y: y.into_buffer_arg(),
            norm_weight: norm_weight.into_buffer_arg(),
            weight: weight.into_buffer_arg(),
            sum: sum.clone().into_buffer_arg(),
            normed: normed.clone().into_buffer_arg(),
            out: out.clone().into_buffer_arg(),
            rows,
            width,
            outputs,
            eps,
            elem,
        };
        normed::launch(&client, args);
        (sum, normed, out)
    }

    fn matmul(lhs: CubeTensor, rhs: CubeTensor) -> CubeTensor {
        let (out_dtype, rank) = (lhs.dtype, lhs.meta.shape().num_dims());
        let mut shape = lhs.meta.shape().clone();
        shape[rank - 1] = rhs.meta.shape()[rank - 1];
        let out = empty(&lhs, shape, out_dtype);
        let elem = dtype_to_storage_type(out_dtype);
        let input = |tensor: CubeTensor| InputBinding::new(tensor.binding(), elem);
        let mut elems = MatmulElems::from_globals(&MatmulGlobalElems { lhs: elem, rhs: elem, out: elem });
        let (client, lhs, rhs) = (out.client.clone(), input(lhs), input(rhs));
        // The kernel without matrix units, for those know no f32.
        let unit = multi_level::Strategy::SimpleUnit(Default::default()).into();
        let result = launch_ref(&unit, &client, lhs.clone(), rhs.clone(), out.clone().binding(), &mut elems);
        if result.is_err() {
            let naive = multi_level::Strategy::Naive.into();
            launched(launch_ref(&naive, &client, lhs, rhs, out.clone().binding(), &mut elems));
        }
        out
    }
}

/// The sum of x `[N, d]` and y, and its norm.
fn add_norm(x: CubeTensor, y: Summand, weight: CubeTensor, eps: f32) -> (CubeTensor, CubeTensor) {
    let client = x.client.clone();
    let (args, outs) = add_norm_args(x, y, weight, eps);
    residual_norm::launch(&client, args);
    outs
}

/// What [`add_norm`] launches, and what that writes.
fn add_norm_args(
    x: CubeTensor,
    y: Summand,
    weight: CubeTensor,
    eps: f32,
) -> (AddRmsNormArgs, (CubeTensor, CubeTensor)) {
    let [x, weight] = [x, weight].map(contiguous);
    let [rows, width] = dims(&x);
    let [sum, normed] = [(); 2].map(|()| empty(&x, [rows, width], x.dtype));
    let elem = dtype_to_elem_type(x.dtype);
    let args = AddRmsNormArgs {
        x: x.into_buffer_arg(),
        y,
        weight: weight.into_buffer_arg(),
        sum: sum.clone().into_buffer_arg(),
        normed: normed.clone().into_buffer_arg(),
        rows,
        width,
        eps,
        elem,
    };
    (args, (sum, normed))
}
