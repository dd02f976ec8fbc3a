//! Wrong arguments of `route_experts`, `experts_mlp` and the projections; how they are compared: `refusals.rs`.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use mla_ops::Determinism::{self, Fast};
use mla_ops::{
    ExpertChoice, ExpertGroups, ExpertsMlpArgs, LocalExperts, Residual, RouteExpertsArgs, RouteExpertsOptions, Routing,
    SharedExperts, experts_mlp, linear, linear_by_head, linear_each, linear_each_normed, matmul, route_experts, swiglu,
};
use rstest::rstest;

use crate::devices::for_each_device;
use crate::ops_experts::{Inputs, limited, sum};
use crate::ops_fixture::ints;
use crate::ops_route_experts::PLAIN;
use crate::refusals::Kind::{DType as WrongType, Shape, Value};
use crate::refusals::{assert_refused, zeros};

#[test]
fn ops_errors_experts() {
    for_each_device(|device| {
        let args = || Inputs::new([4, 5, 2, 64, 32], DType::F32).args(device);
        experts_mlp(args(), &limited(None)).expect("legal before it is changed").materialise();
        let refuses = |kind, argument, change: fn(&mut ExpertsMlpArgs, &Device)| {
            let mut args = args();
            change(&mut args, device);
            assert_refused(experts_mlp(args, &limited(None)), kind, argument);
        };
        let (indices, weights) = Inputs::new([4, 5, 2, 64, 32], DType::F32).chosen(device);
        let given = |indices: &Tensor<2, Int>, weights| {
            let args = ExpertsMlpArgs { routing: Routing::given(indices.clone(), weights), ..args() };
            experts_mlp(args, &limited(None))
        };
        assert_refused(given(&indices.clone().narrow(0, 0, 3), weights.clone()), Shape, "indices");
        assert_refused(given(&indices, zeros([4, 3], device)), Shape, "weights");
        assert_refused(given(&indices, weights.cast(FloatDType::F16)), WrongType, "weights");
        refuses(Shape, "down", |it, device| it.down = zeros::<3>([5, 63, 32], device).into());
        refuses(Value, "down", |it, device| it.down = zeros::<3>([5, 64, 0], device).into());
        refuses(Shape, "gate_up", |it, device| it.gate_up = zeros::<3>([5, 63, 64], device).into());
        refuses(Shape, "gate_up", |it, device| it.gate_up = zeros::<3>([4, 64, 64], device).into());
        let refuses_shared = |kind, argument, change: fn(&mut SharedExperts, &Device)| {
            let mut args = args();
            change(args.shared.as_mut().expect("five experts have shared ones"), device);
            assert_refused(experts_mlp(args, &limited(None)), kind, argument);
        };
        refuses_shared(Shape, "shared.down", |it, device| it.down = zeros::<2>([63, 32], device).into());
        refuses_shared(Value, "shared.down", |it, device| it.down = zeros::<2>([64, 0], device).into());
        refuses_shared(Shape, "shared.gate_up", |it, device| it.gate_up = zeros::<2>([63, 64], device).into());
        refuses_shared(WrongType, "shared.gate_up", |it, _| {
            it.gate_up = it.gate_up.dense().cast(FloatDType::F16).into()
        });
        refuses_shared(WrongType, "shared.down", |it, _| it.down = it.down.dense().cast(FloatDType::F16).into());
        refuses(WrongType, "gate_up", |it, _| it.gate_up = it.gate_up.dense().cast(FloatDType::F16).into());
        assert_refused(experts_mlp(args(), &limited(Some(0.0))), Value, "limit");
        assert_refused(experts_mlp(args(), &limited(Some(f32::NAN))), Value, "limit");
    });
}

/// What is added to a residual stream, its norm, and what reads that.
#[test]
fn ops_errors_experts_residual() {
    for_each_device(|device| {
        let args = || Inputs::new([4, 5, 2, 64, 32], DType::F32).args(device);
        let norm = |args, residual: [usize; 2], width: usize, eps| {
            let mut residual = Residual::new(zeros(residual, device));
            residual.add(experts_mlp(args, &limited(None))?)?;
            residual.norm(&zeros([width], device), eps).map(|mut h| h.tensor())
        };
        norm(args(), [4, 64], 64, 0.0).expect("legal before it is changed");
        let other = ExpertsMlpArgs { x: zeros([3, 64], device), ..args() };
        assert_refused(norm(other, [4, 64], 64, 0.0), Shape, "indices");
        assert_refused(norm(args(), [4, 63], 64, 0.0), Shape, "addend");
        assert_refused(norm(args(), [4, 64], 63, 0.0), Shape, "weight");
        assert_refused(norm(args(), [4, 64], 64, f32::NAN), Value, "eps");
        let half = zeros::<2>([4, 64], device).cast(FloatDType::F16);
        assert_refused(Residual::new(half.clone()).add(sum(args())), WrongType, "addend");
        let pair = |first: Tensor<2>, second: Tensor<2>| {
            let mut residual = Residual::new(zeros([4, 64], device));
            residual.add(sum(args())).expect("legal");
            let mut h = residual.norm(&zeros([64], device), 0.0).expect("legal");
            linear_each(&mut h, [&first.into(), &second.into()], Fast)
        };
        let matrix = |width| zeros::<2>([8, width], device);
        pair(matrix(64), matrix(64)).expect("legal before it is changed");
        assert_refused(pair(matrix(63), matrix(64)), Shape, "weights");
        assert_refused(pair(matrix(64), matrix(63)), Shape, "weights");
        assert_refused(pair(matrix(64), half), WrongType, "weights");
    });
}

/// Experts that are chosen where they are used, and the choice alone.
#[test]
fn ops_errors_routing() {
    for_each_device(|device| {
        let args = || Inputs::new([4, 5, 2, 64, 32], DType::F32).args(device);
        let routed = |logits: [usize; 2], choice, local| {
            let route = RouteExpertsArgs { logits: zeros(logits, device).into(), choice, slots: None };
            let routing = route_experts(route, &RouteExpertsOptions { local, ..PLAIN })?;
            experts_mlp(ExpertsMlpArgs { routing, ..args() }, &limited(None))
        };
        let scored = |logits, choice| routed(logits, choice, None);
        scored([4, 5], ExpertChoice::Scores(2)).expect("legal before it is changed").materialise();
        assert_refused(scored([3, 5], ExpertChoice::Scores(2)), Shape, "logits");
        assert_refused(scored([4, 6], ExpertChoice::Scores(2)), Shape, "logits");
        assert_refused(scored([4, 5], ExpertChoice::Scores(6)), Value, "choice");
        assert_refused(scored([4, 5], ExpertChoice::BiasedScores(2, zeros([4], device))), Shape, "choice");
        // Five of nine experts are here.
        let local = |logits, first, count| routed(logits, ExpertChoice::Scores(2), Some(LocalExperts { first, count }));
        local([4, 9], 4, 5).expect("legal before it is changed").materialise();
        assert_refused(local([3, 9], 4, 5), Shape, "logits");
        assert_refused(local([4, 9], 4, 4), Value, "local");
        assert_refused(local([4, 9], 5, 5), Value, "local");
        assert_refused(local([4, 9], 4, 0), Value, "local");
        assert_refused(local([4, 9], usize::MAX, 5), Value, "local");

        let route = |choice, options: RouteExpertsOptions| {
            route_experts(RouteExpertsArgs { logits: zeros([3, 8], device).into(), choice, slots: None }, &options)
        };
        let grouped =
            |count, kept, best| RouteExpertsOptions { groups: Some(ExpertGroups { count, kept, best }), ..PLAIN };
        route(ExpertChoice::Scores(4), grouped(4, 2, 2)).expect("legal before it is changed").materialise();
        for scale in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let options = RouteExpertsOptions { scale, ..PLAIN };
            assert_refused(route(ExpertChoice::Scores(4), options), Value, "scale");
        }
        assert_refused(route(ExpertChoice::Scores(0), PLAIN), Value, "choice");
        assert_refused(route(ExpertChoice::Scores(9), PLAIN), Value, "choice");
        assert_refused(route(ExpertChoice::Scores(5), grouped(4, 2, 2)), Value, "choice");
        assert_refused(route(ExpertChoice::Scores(1), grouped(3, 2, 2)), Value, "groups.count");
        assert_refused(route(ExpertChoice::Scores(1), grouped(0, 0, 1)), Value, "groups.count");
        assert_refused(route(ExpertChoice::Scores(1), grouped(4, 5, 2)), Value, "groups.kept");
        assert_refused(route(ExpertChoice::Scores(1), grouped(8, 2, 2)), Value, "groups.best");
        assert_refused(route(ExpertChoice::BiasedScores(2, zeros([7], device)), PLAIN), Shape, "choice");
        let table = |[count, top_k]: [usize; 2], rows| {
            let experts = ints(&vec![0; count * top_k], [count, top_k], device);
            route(ExpertChoice::Table { experts, rows: ints(&vec![0; rows], [rows], device) }, PLAIN)
        };
        table([5, 2], 3).expect("legal before it is changed").materialise();
        assert_refused(table([5, 2], 4), Shape, "choice.rows");
        assert_refused(table([5, 0], 3), Value, "choice");
        assert_refused(table([0, 2], 3), Value, "choice.experts");
        let slots = Some(ints(&[0; 4], [4], device));
        let padded = RouteExpertsArgs { logits: zeros([3, 8], device).into(), choice: ExpertChoice::Scores(2), slots };
        assert_refused(route_experts(padded, &PLAIN), Shape, "slots");
        let logits: Tensor<2> = zeros([3, 1025], device);
        let many = RouteExpertsArgs { logits: logits.into(), choice: ExpertChoice::Scores(2), slots: None };
        assert_refused(route_experts(many, &PLAIN), Value, "logits");
    });
}

#[test]
fn ops_errors_projections() {
    for_each_device(|device| {
        let half = |shape: [usize; 2]| zeros::<2>(shape, device).cast(FloatDType::F16);
        let project = |weight: Tensor<2>| linear(zeros::<2>([3, 8], device), &weight.into(), Fast);
        project(zeros([4, 8], device)).expect("legal before it is changed");
        assert_refused(project(zeros([4, 7], device)), Shape, "weight");
        assert_refused(project(half([4, 8])), WrongType, "weight");
        // Weights in f32 are for rows of any dtype.
        linear(half([3, 8]), &zeros::<2>([4, 8], device).into(), Fast).expect("legal");
        let pair = |first: Tensor<2>, second: Tensor<2>| {
            linear_each(zeros::<2>([3, 8], device), [&first.into(), &second.into()], Fast)
        };
        assert_refused(pair(zeros([4, 7], device), zeros([4, 8], device)), Shape, "weights");
        assert_refused(pair(zeros([4, 8], device), half([4, 8])), WrongType, "weights");
        let normed = |width, eps| {
            let weight = zeros::<2>([4, 8], device).into();
            linear_each_normed(zeros([3, 8], device), [&weight], (zeros([width], device), eps), Fast)
        };
        normed(4, 0.0).expect("legal before it is changed");
        assert_refused(normed(8, 0.0), Shape, "norm");
        assert_refused(normed(4, f32::NAN), Value, "eps");
        let gated = |gate_up: Tensor<2>, limit| swiglu(zeros::<2>([3, 8], device), &gate_up.into(), limit, Fast);
        gated(zeros([4, 8], device), Some(1.0)).expect("legal before it is changed");
        assert_refused(gated(zeros([4, 7], device), None), Shape, "gate_up");
        assert_refused(gated(zeros([3, 8], device), None), Value, "gate_up");
        assert_refused(gated(half([4, 8]), None), WrongType, "gate_up");
        assert_refused(gated(zeros([4, 8], device), Some(0.0)), Value, "limit");
        let product = |lhs: [usize; 3], rhs| matmul(zeros::<3>(lhs, device), rhs, Fast);
        product([2, 3, 8], zeros([2, 8, 4], device)).expect("legal before it is changed");
        assert_refused(product([2, 3, 8], zeros([2, 7, 4], device)), Shape, "rhs");
        assert_refused(product([2, 3, 8], zeros([1, 8, 4], device)), Shape, "rhs");
        assert_refused(product([2, 3, 8], zeros::<3>([2, 8, 4], device).cast(FloatDType::F16)), WrongType, "rhs");
        assert_refused(matmul(zeros::<1>([8], device), zeros::<1>([8], device), Fast), Value, "lhs");
    });
}

/// Sizes of 0 and of 1, of rows and of both sides of a weight: a result of that shape, and no panic.
#[rstest]
fn ops_errors_projections_of_nothing(
    #[values(0, 1, 3)] rows: usize,
    #[values(0, 1, 8)] inputs: usize,
    #[values(0, 1, 4)] outputs: usize,
    #[values(Fast, Determinism::BatchInvariant)] determinism: Determinism,
) {
    for_each_device(|device| {
        let x = || zeros::<2>([rows, inputs], device);
        let weight = |outputs| zeros::<2>([outputs, inputs], device).into();
        let out = linear(x(), &weight(outputs), determinism).expect("legal");
        assert_eq!(out.dims(), [rows, outputs]);
        let [first, second] = linear_each(x(), [&weight(outputs), &weight(2)], determinism).expect("legal");
        assert_eq!((first.dims(), second.dims()), ([rows, outputs], [rows, 2]));
        let gated = swiglu(x(), &weight(2 * outputs), None, determinism).expect("legal");
        assert_eq!(gated.dims(), [rows, outputs]);
        for heads in [0, 2] {
            let stacked = zeros::<3>([heads, outputs, inputs], device).into();
            for carried in [0, 1] {
                let x = zeros::<3>([rows, heads, inputs + carried], device);
                let out = linear_by_head(x, &stacked, determinism).expect("legal");
                assert_eq!(out.dims(), [rows, heads, outputs + carried]);
            }
            let (lhs, rhs) = (zeros::<3>([heads, rows, inputs], device), zeros([heads, inputs, outputs], device));
            assert_eq!(matmul(lhs, rhs, determinism).expect("legal").dims(), [heads, rows, outputs]);
        }
    });
}
