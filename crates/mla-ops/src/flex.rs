//! The operations on the CPU: the tensor reference.

use burn::backend::{
    Flex,
    ops::FloatTensorOps,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{Int, Tensor};

use crate::backend::{BackendRouting, ExpertsSpec, LinearSpec, MlaBackend, NormRopeSpec, RouteSpec};
use crate::{RouteExpertsOptions, linear, linear_by_head, linear_pair, reference, swiglu};

impl MlaBackend for Flex {
    fn linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, spec: LinearSpec) -> FloatTensor<Self> {
        let (x, weight) = (float(x), float(weight));
        float_primitive(if spec.gated { swiglu(x, weight, spec.limit) } else { linear(x, weight) })
    }

    fn linear_pair(
        x: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (first, second) = linear_pair(float(x), float(first), float(second));
        (float_primitive(first), float_primitive(second))
    }

    fn linear_by_head(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        float_primitive(linear_by_head(float(x), float(weight)))
    }

    fn choose_experts(
        logits: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        route: RouteSpec,
    ) -> (IntTensor<Self>, FloatTensor<Self>) {
        let bias = route.biased.then(|| float(bias));
        let (indices, weights) = reference::choose_experts(float(logits), bias, route.top_k, &route.options);
        (int_primitive(indices), float_primitive(weights))
    }

    fn weigh_experts(
        logits: FloatTensor<Self>,
        given: IntTensor<Self>,
        options: RouteExpertsOptions,
    ) -> (IntTensor<Self>, FloatTensor<Self>) {
        let (indices, weights) = reference::weigh_experts(float(logits), int(given), &options);
        (int_primitive(indices), float_primitive(weights))
    }

    fn experts_mlp(
        x: FloatTensor<Self>,
        indices: IntTensor<Self>,
        weights: FloatTensor<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        shared: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        norm_weight: FloatTensor<Self>,
        spec: ExpertsSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let routing = (int(indices), float(weights));
        let shared = spec.shared.then(|| float(shared));
        let sum = reference::experts_mlp(float(x), routing, float(gate_up), float(down), shared, spec.limit);
        match spec.norm_eps {
            Some(eps) => Self::add_rms_norm(residual, float_primitive(sum), norm_weight, eps),
            None => (float_primitive(sum.clone()), float_primitive(sum)),
        }
    }

    fn experts_mlp_of_token(
        x: FloatTensor<Self>,
        routing: BackendRouting<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        shared_gate_up: FloatTensor<Self>,
        shared_down: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        norm_weight: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        spec: ExpertsSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let shared = linear(swiglu(float(x.clone()), float(shared_gate_up), spec.limit), float(shared_down));
        let ((indices, weights), shared, pair) = (routing.chosen(), float_primitive(shared), spec.pair);
        let (sum, normed) = Self::experts_mlp(x, indices, weights, gate_up, down, shared, residual, norm_weight, spec);
        let (first, second) =
            if pair { Self::linear_pair(normed.clone(), first, second) } else { (sum.clone(), sum.clone()) };
        (sum, normed, first, second)
    }

    fn norm_rope(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        spec: NormRopeSpec,
    ) -> FloatTensor<Self> {
        let weight = spec.weighted.then(|| float(weight));
        let tables = (spec.pairs > 0).then(|| [float(cos), float(sin)]);
        float_primitive(reference::norm_rope(float(x), weight, tables, &spec))
    }

    fn add_rms_norm(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let sum: Tensor<2> = float(x) + float(y);
        let spec = NormRopeSpec { norm_eps: Some(eps), norm_turned: true, weighted: true, pairs: 0, inverse: false };
        let normed = reference::norm_rope(sum.clone().unsqueeze_dim(1), Some(float(weight)), None, &spec);
        (float_primitive(sum), float_primitive(normed.squeeze_dim::<2>(1)))
    }

    fn add_rms_norm_linear(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        norm_weight: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let (sum, normed) = Self::add_rms_norm(x, y, norm_weight, eps);
        let out = linear(float(normed.clone()), float(weight));
        (sum, normed, float_primitive(out))
    }

    fn matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_matmul(lhs, rhs)
    }
}

fn float<const D: usize>(primitive: FloatTensor<Flex>) -> Tensor<D> {
    Tensor::from_primitive::<Flex>(primitive)
}

fn int<const D: usize>(primitive: IntTensor<Flex>) -> Tensor<D, Int> {
    Tensor::from_primitive::<Flex>(primitive)
}

fn float_primitive<const D: usize>(tensor: Tensor<D>) -> FloatTensor<Flex> {
    tensor.try_into_primitive::<Flex>().expect("computed from tensors of this backend")
}

fn int_primitive<const D: usize>(tensor: Tensor<D, Int>) -> IntTensor<Flex> {
    tensor.try_into_primitive::<Flex>().expect("computed from tensors of this backend")
}
