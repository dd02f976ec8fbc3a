//! Shapes and dtypes of the operations' outputs, for calls that are deferred.

use burn::backend::fusion::custom::TensorSpec;
use burn::tensor::{DType, Shape};

use crate::RouteExpertsOptions;
use crate::backend::{BackendRoutingMetadata, ExpertsSpec, LinearSpec, NormRopeSpec, RouteSpec};

/// What an output will be.
pub(crate) fn spec<const D: usize>(shape: [usize; D], dtype: DType) -> TensorSpec {
    TensorSpec::new(Shape::new(shape), dtype)
}

pub(crate) fn linear(x: &TensorSpec, weight: &TensorSpec, linear: &LinearSpec) -> TensorSpec {
    let ([rows, _], [outputs, _]) = (x.shape.dims(), weight.shape.dims());
    spec([rows, if linear.gated { outputs / 2 } else { outputs }], weight.dtype)
}

pub(crate) fn linear_pair(x: &TensorSpec, first: &TensorSpec, second: &TensorSpec) -> (TensorSpec, TensorSpec) {
    let ([rows, _], [outputs, _], [second_outputs, _]) = (x.shape.dims(), first.shape.dims(), second.shape.dims());
    (spec([rows, outputs], x.dtype), spec([rows, second_outputs], x.dtype))
}

pub(crate) fn linear_by_head(x: &TensorSpec, weight: &TensorSpec) -> TensorSpec {
    let ([rows, heads, width], [_, outputs, inputs]) = (x.shape.dims(), weight.shape.dims());
    spec([rows, heads, outputs + width - inputs], x.dtype)
}

pub(crate) fn choose_experts(logits: &TensorSpec, _bias: &TensorSpec, route: &RouteSpec) -> (TensorSpec, TensorSpec) {
    let [tokens, _] = logits.shape.dims();
    (spec([tokens, route.top_k], DType::I32), spec([tokens, route.top_k], DType::F32))
}

pub(crate) fn weigh_experts(
    _logits: &TensorSpec,
    given: &TensorSpec,
    _options: &RouteExpertsOptions,
) -> (TensorSpec, TensorSpec) {
    let [tokens, top_k] = given.shape.dims();
    (given.clone(), spec([tokens, top_k], DType::F32))
}

#[allow(clippy::too_many_arguments)]
pub(crate) fn experts_mlp(
    x: &TensorSpec,
    _indices: &TensorSpec,
    _weights: &TensorSpec,
    _gate_up: &TensorSpec,
    _down: &TensorSpec,
    _shared: &TensorSpec,
    _residual: &TensorSpec,
    _norm_weight: &TensorSpec,
    _spec: &ExpertsSpec,
) -> (TensorSpec, TensorSpec) {
    (x.clone(), x.clone())
}

#[allow(clippy::too_many_arguments)]
pub(crate) fn experts_mlp_of_token(
    x: &TensorSpec,
    _routing: &BackendRoutingMetadata,
    _gate_up: &TensorSpec,
    _down: &TensorSpec,
    _shared_gate_up: &TensorSpec,
    _shared_down: &TensorSpec,
    _residual: &TensorSpec,
    _norm_weight: &TensorSpec,
    first: &TensorSpec,
    second: &TensorSpec,
    spec: &ExpertsSpec,
) -> (TensorSpec, TensorSpec, TensorSpec, TensorSpec) {
    let (first, second) = if spec.pair { linear_pair(x, first, second) } else { (x.clone(), x.clone()) };
    (x.clone(), x.clone(), first, second)
}

pub(crate) fn norm_rope(
    x: &TensorSpec,
    _weight: &TensorSpec,
    _cos: &TensorSpec,
    _sin: &TensorSpec,
    _spec: &NormRopeSpec,
) -> TensorSpec {
    x.clone()
}

pub(crate) fn add_rms_norm(
    x: &TensorSpec,
    _y: &TensorSpec,
    _weight: &TensorSpec,
    _eps: &f32,
) -> (TensorSpec, TensorSpec) {
    (x.clone(), x.clone())
}

pub(crate) fn add_rms_norm_linear(
    x: &TensorSpec,
    _y: &TensorSpec,
    _norm_weight: &TensorSpec,
    weight: &TensorSpec,
    _eps: &f32,
) -> (TensorSpec, TensorSpec, TensorSpec) {
    let ([rows, _], [outputs, _]) = (x.shape.dims(), weight.shape.dims());
    (x.clone(), x.clone(), spec([rows, outputs], DType::F32))
}

pub(crate) fn matmul(lhs: &TensorSpec, rhs: &TensorSpec) -> TensorSpec {
    let mut out = lhs.clone();
    let last = out.shape.num_dims() - 1;
    out.shape[last] = rhs.shape[last];
    out
}
