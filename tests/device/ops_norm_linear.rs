//! A small projection of the norm of a residual sum against the operations that it joins.

use burn::tensor::{DType, FloatDType};
use mla_ops::Determinism::{self, BatchInvariant, Fast};
use mla_ops::{Residual, Weight, linear, linear_each, residual_norm, rms_norm};
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype};
use crate::ops_fixture::{bits, floats, random, restrided, rng};
use crate::refusals::Kind::{DType as WrongType, Shape, Value};
use crate::refusals::{assert_refused, zeros};

/// N, d, outputs: the routers of DeepSeek-V2-Lite and V3, odd sizes, many rows or outputs, long rows of few outputs,
/// nothing.
#[rstest]
fn ops_norm_linear(
    #[values([1, 2048, 64], [2, 7168, 256], [3, 70, 5], [8, 7, 1], [9, 64, 8], [2, 96, 600], [2, 4100, 3], [0, 8, 4], [2, 8, 0])]
    sizes: [usize; 3],
) {
    let [rows, width, outputs] = sizes;
    for_each_dtype(|device, dtype| {
        let mut rng = rng(61);
        let mut draw = |shape: [usize; 2], dtype| {
            let tensor = floats(&random(&mut rng, shape[0] * shape[1], dtype), shape, dtype, device);
            if shape[0] > 1 { restrided(tensor, 0, 1) } else { tensor }
        };
        let [x, y] = [(); 2].map(|()| draw([rows, width], dtype));
        let norm_weight = draw([1, width], DType::F32).squeeze_dim::<1>(0);
        let weight = Weight::from(draw([outputs, width], DType::F32));
        let (sum, normed) = residual_norm(x.clone(), y.clone(), norm_weight.clone(), 1e-6).expect("legal");
        let product = |x| linear(x, &weight, Fast).expect("legal");
        let out = if outputs > 0 { bits(&product(normed.clone())) } else { Vec::new() };
        let mut residual = Residual::new(x);
        residual.add(y).expect("legal");
        let mut h = residual.norm(&norm_weight, 1e-6).expect("legal");
        let joined = linear(&mut h, &weight, Fast).expect("legal");
        assert_eq!((joined.dims(), joined.dtype()), ([rows, outputs], DType::F32));
        let expected = [bits(&sum), bits(&normed), out];
        let its_norm = h.tensor();
        let actual = [residual.tensor(), its_norm, joined].map(|tensor| bits(&tensor));
        assert!(actual == expected, "{sizes:?} {dtype:?} on {device:?}");
    });
}

/// A projection or two of the norm of rows to which nothing was added: DeepSeek-V4's query, odd sizes, several rows, matrices that are
/// not in one launch, long rows, whose norm has a launch of its own.
#[rstest]
fn ops_norm_linear_without_a_sum(
    #[values(0, 1, 2)] rows: usize,
    #[values([1024, 600, 520], [1536, 48, 40], [70, 5, 600], [64, 16, 24], [33, 1, 3], [20480, 16, 24], [64, 8, 0])]
    sizes: [usize; 3],
    #[values(Fast, BatchInvariant)] determinism: Determinism,
) {
    let [width, outputs, second_outputs] = sizes;
    for_each_dtype(|device, dtype| {
        let mut rng = rng(65);
        let mut draw =
            |shape: [usize; 2], dtype| floats(&random(&mut rng, shape[0] * shape[1], dtype), shape, dtype, device);
        let (x, norm_weight) = (draw([rows, width], dtype), draw([1, width], DType::F32).squeeze_dim::<1>(0));
        let [first, second] = [outputs, second_outputs].map(|outputs| Weight::from(draw([outputs, width], dtype)));
        let router = Weight::from(draw([outputs, width], DType::F32));
        let normed = rms_norm(x.clone(), norm_weight.clone(), 1e-6).expect("legal");
        let product = |weight| linear(normed.clone(), weight, determinism).expect("legal");
        let mut residual = Residual::new(x);
        let mut h = residual.norm(&norm_weight, 1e-6).expect("legal");
        let alone = linear(&mut h, &first, determinism).expect("legal");
        let [a, b] = linear_each(&mut h, [&first, &second], determinism).expect("legal");
        let logits = linear(&mut h, &router, determinism).expect("legal");
        let what = format!("{rows} x {sizes:?} {dtype:?} {determinism:?} on {device:?}");
        assert_eq!((a.dims(), b.dims()), ([rows, outputs], [rows, second_outputs]), "{what}");
        for (actual, weight) in [(alone, &first), (a, &first), (b, &second), (logits, &router)] {
            let expected = product(weight);
            assert_eq!((actual.dims(), actual.dtype()), (expected.dims(), expected.dtype()), "{what}");
            let is_empty = expected.shape().num_elements() == 0;
            assert!(is_empty || bits(&actual) == bits(&expected), "{what}");
        }
        assert!(rows == 0 || bits(&h.tensor()) == bits(&normed), "{what}");
    });
}

#[test]
fn ops_errors_norm_linear() {
    for_each_device(|device| {
        let call = |y: [usize; 2], norm_weight: usize, eps, weight: [usize; 2]| {
            let mut residual = Residual::new(zeros([3, 8], device));
            residual.add(zeros::<2>(y, device))?;
            let mut h = residual.norm(&zeros([norm_weight], device), eps)?;
            linear(&mut h, &zeros::<2>(weight, device).into(), Fast)
        };
        call([3, 8], 8, 0.0, [4, 8]).expect("legal before it is changed");
        assert_refused(call([2, 8], 8, 0.0, [4, 8]), Shape, "addend");
        assert_refused(call([3, 8], 7, 0.0, [4, 8]), Shape, "weight");
        assert_refused(call([3, 8], 8, f32::NAN, [4, 8]), Value, "eps");
        assert_refused(call([3, 8], 8, 0.0, [4, 7]), Shape, "weight");
        let half = zeros::<2>([4, 8], device).cast(FloatDType::F16);
        let mut residual = Residual::new(zeros([3, 8], device));
        assert_refused(residual.add(half.clone()), WrongType, "addend");
        let mut h = residual.norm(&zeros([8], device), 0.0).expect("legal");
        assert_refused(linear(&mut h, &half.into(), Fast), WrongType, "weight");
    });
}
