//! `linear`, `linear_each`, `swiglu` and `linear_by_head` against plain loops.

use burn::tensor::{DType, Device, Tensor};
use mla_ops::Determinism::{BatchInvariant, Fast};
use mla_ops::{
    InverseRope, NormRopeArgs, NormRopeOptions, Weight, linear, linear_by_head, linear_each, norm_rope, swiglu,
};
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype};
use crate::ops_fixture::{bits, floats, random, rng, tolerance, values};
use crate::refusals::Kind::{Shape, Value};
use crate::refusals::{assert_refused, zeros};

/// Rows for the kernel of few, and for the product of matrices.
#[rstest]
fn ops_linear(
    #[values(1, 2, 8, 9, 64, 65)] rows: usize,
    #[values([64, 48], [2048, 16], [33, 7], [1, 1], [96, 1])] widths: [usize; 2],
) {
    let [inputs, outputs] = widths;
    for_each_dtype(|device, dtype| {
        let mut rng = rng(59);
        let (x, w) = (random(&mut rng, rows * inputs, dtype), random(&mut rng, outputs * inputs, dtype));
        let weight = Weight::from(floats::<2>(&w, [outputs, inputs], dtype, device));
        let out = linear(floats(&x, [rows, inputs], dtype, device), &weight, Fast).expect("legal");
        assert_eq!((out.dims(), out.dtype()), ([rows, outputs], dtype));
        let out = values(out);
        // The CPU rounds sums of f16 to f16 after every 512 terms.
        let panels = if dtype == DType::F16 && *device == Device::flex() { inputs.div_ceil(512) - 1 } else { 0 };
        for (row, x) in x.chunks(inputs).enumerate() {
            for (o, w) in w.chunks(inputs).enumerate() {
                let (mut expected, mut size, mut peak) = (0.0f64, 0.0, 0.0f64);
                for (a, b) in x.iter().zip(w) {
                    expected += a * b;
                    size += (a * b).abs();
                    peak = peak.max(expected.abs());
                }
                let off = (f64::from(out[row * outputs + o]) - expected).abs();
                let rounded = panels as f64 * 2f64.powi(-11) * peak;
                let allowed = tolerance(dtype) * expected.abs() + 1e-6 * size + rounded;
                assert!(off <= allowed, "{widths:?} {dtype:?} on {device:?}, row {row}: off by {off:e}");
            }
        }
    });
}

/// Two matrices in one launch or two, and rows for the product of matrices: the bits are those of each alone.
#[rstest]
fn ops_linear_pair(
    #[values(1, 2, 9, 64, 65)] rows: usize,
    #[values([64, 48, 16], [2048, 16, 600], [96, 520, 1000], [33, 7, 1], [4096, 1040, 24], [64, 12, 600])]
    widths: [usize; 3],
) {
    let [inputs, outputs, second_outputs] = widths;
    for_each_dtype(|device, dtype| {
        let mut rng = rng(62);
        let mut matrix = |rows: usize| floats(&random(&mut rng, rows * inputs, dtype), [rows, inputs], dtype, device);
        let x = matrix(rows);
        let [first, second] = [outputs, second_outputs].map(|rows| Weight::from(matrix(rows)));
        let [a, b] = linear_each(x.clone(), [&first, &second], Fast).expect("legal");
        let [c, d] = [first, second].map(|weight| linear(x.clone(), &weight, Fast).expect("legal"));
        assert_eq!((a.dims(), b.dims()), ([rows, outputs], [rows, second_outputs]));
        assert_eq!(values(a), values(c), "{widths:?} {dtype:?} on {device:?}");
        assert_eq!(values(b), values(d), "{widths:?} {dtype:?} on {device:?}");
    });
}

/// Several matrices: the bits are those of each alone.
#[rstest]
fn ops_linear_each(#[values(1, 3, 9, 65)] rows: usize, #[values(33, 96, 1056)] inputs: usize) {
    for_each_dtype(|device, dtype| {
        let mut rng = rng(64);
        let mut matrix = |rows: usize| floats(&random(&mut rng, rows * inputs, dtype), [rows, inputs], dtype, device);
        let x = matrix(rows);
        let [a, b, c, d] = [520, 16, 7, 600].map(|rows| Weight::from(matrix(rows)));
        let all = [&a, &b, &c, &d, &b];
        let products = linear_each(x.clone(), all, Fast).expect("legal");
        for (product, weight) in products.into_iter().zip(all) {
            let alone = linear(x.clone(), weight, Fast).expect("legal");
            assert_eq!(values(product), values(alone), "{rows} x {inputs}, {dtype:?} on {device:?}");
        }
    });
}

/// The first has few outputs of many channels, the second more: not in one launch, whose cubes are all of one size.
#[test]
fn ops_linear_pair_of_long_rows() {
    for_each_dtype(|device, dtype| {
        let mut rng = rng(63);
        let mut matrix = |rows: usize| floats::<2>(&random(&mut rng, rows * 4100, dtype), [rows, 4100], dtype, device);
        let x = matrix(2);
        let [first, second] = [3, 132].map(|rows| Weight::from(matrix(rows)));
        let [a, b] = linear_each(x.clone(), [&first, &second], Fast).expect("legal");
        let [c, d] = [first, second].map(|weight| linear(x.clone(), &weight, Fast).expect("legal"));
        assert!(values(a) == values(c) && values(b) == values(d), "{dtype:?} on {device:?}");
    });
}

/// A router: weights in f32 whatever the rows are, and products of these numbers as they are. Long rows of few outputs.
#[rstest]
fn ops_linear_with_weights_in_f32(
    #[values(1, 3, 65)] rows: usize,
    #[values([64, 48], [2048, 64], [33, 7], [16388, 2], [4099, 2])] widths: [usize; 2],
) {
    let [inputs, outputs] = widths;
    for_each_dtype(|device, dtype| {
        let mut rng = rng(60);
        let (x, w) = (random(&mut rng, rows * inputs, dtype), random(&mut rng, outputs * inputs, DType::F32));
        let weight = Weight::from(floats::<2>(&w, [outputs, inputs], DType::F32, device));
        let out = linear(floats(&x, [rows, inputs], dtype, device), &weight, Fast).expect("legal");
        assert_eq!((out.dims(), out.dtype()), ([rows, outputs], DType::F32));
        for (out, x) in values(out).chunks(outputs).zip(x.chunks(inputs)) {
            for (out, w) in out.iter().zip(w.chunks(inputs)) {
                let products = || x.iter().zip(w).map(|(a, b)| a * b);
                let (expected, size): (f64, f64) = (products().sum(), products().map(f64::abs).sum());
                let off = (f64::from(*out) - expected).abs();
                assert!(off <= 1e-6 * size, "{rows} {widths:?} {dtype:?} on {device:?}: off by {off:e}");
            }
        }
    });
}

/// Gated projections, with and without a limit.
#[rstest]
fn ops_swiglu(
    #[values(1, 9, 65)] rows: usize,
    #[values([64, 48], [33, 7], [2, 1])] widths: [usize; 2],
    #[values(None, Some(0.4))] limit: Option<f32>,
) {
    let [inputs, outputs] = widths;
    for_each_dtype(|device, dtype| {
        let mut rng = rng(61);
        let (x, w) = (random(&mut rng, rows * inputs, dtype), random(&mut rng, 2 * outputs * inputs, dtype));
        let (x_there, w_there) =
            (floats(&x, [rows, inputs], dtype, device), floats::<2>(&w, [2 * outputs, inputs], dtype, device));
        let out = swiglu(x_there, &Weight::from(w_there), limit, Fast).expect("legal");
        assert_eq!((out.dims(), out.dtype()), ([rows, outputs], dtype));
        let (out, bound) = (values(out), limit.map_or(f64::INFINITY, f64::from));
        // The CPU rounds the terms of f16 before it adds them.
        let of_sums = if dtype == DType::F16 && *device == Device::flex() { 2f64.powi(-11) } else { 1e-6 };
        for (row, x) in x.chunks(inputs).enumerate() {
            let products = |o: usize| x.iter().zip(&w[o * inputs..]).map(|(a, b)| a * b);
            let (dot, size) = (|o| products(o).sum::<f64>(), |o| products(o).map(f64::abs).sum::<f64>());
            for o in 0..outputs {
                let (gate, up) = (dot(o).min(bound), dot(outputs + o).clamp(-bound, bound));
                let expected = gate / (1.0 + (-gate).exp()) * up;
                let off = (f64::from(out[row * outputs + o]) - expected).abs();
                // Both products may have been rounded, and silu of the one.
                let sums = size(o) * (up.abs() + 1e-3) + size(outputs + o) * (gate.abs() + 1e-3);
                let allowed = 3.0 * tolerance(dtype) * expected.abs() + of_sums * sums;
                assert!(off <= allowed, "{widths:?} {dtype:?} on {device:?}: off by {off:e}, allowed {allowed:e}");
            }
        }
    });
}

/// Heads with channels that are carried over; matrices that are the second half of larger ones.
#[rstest]
fn ops_linear_by_head(
    #[values(1, 9, 65)] rows: usize,
    #[values([16, 128, 48, 64], [3, 33, 7, 0], [2, 64, 8, 5])] sizes: [usize; 4],
    #[values(false, true)] halves: bool,
) {
    let [heads, inputs, outputs, carried] = sizes;
    for_each_dtype(|device, dtype| {
        let (width, mut rng) = (inputs + carried, rng(67));
        let x = random(&mut rng, rows * heads * width, dtype);
        let w = random(&mut rng, heads * 2 * outputs * inputs, dtype);
        let both = floats(&w, [heads, 2 * outputs, inputs], dtype, device);
        let half = both.narrow(1, outputs, outputs);
        let weight = if halves { half } else { half.clone().mul_scalar(1.0) };
        let x_there = floats(&x, [rows, heads, width], dtype, device);
        let out = linear_by_head(x_there, &weight.into(), Fast).expect("legal");
        assert_eq!((out.dims(), out.dtype()), ([rows, heads, outputs + carried], dtype));
        for (row, (out, x)) in values(out).chunks(outputs + carried).zip(x.chunks(width)).enumerate() {
            let matrix = &w[(row % heads * 2 + 1) * outputs * inputs..][..outputs * inputs];
            for (out, w) in out.iter().zip(matrix.chunks(inputs)) {
                let products = || x.iter().zip(w).map(|(a, b)| a * b);
                let (expected, size): (f64, f64) = (products().sum(), products().map(f64::abs).sum());
                let off = (f64::from(*out) - expected).abs();
                assert!(off <= tolerance(dtype) * expected.abs() + 1e-6 * size, "{sizes:?} {dtype:?} on {device:?}");
            }
            let rest = out[outputs..].iter().map(|&value| f64::from(value));
            assert!(rest.eq(x[inputs..].iter().copied()), "{sizes:?} {dtype:?} on {device:?}");
        }
    });
}

/// Heads that get inverse RoPE and are projected in groups: the bits are those of one after the other. DeepSeek-V4's sizes, odd
/// ones, RoPE of all channels or none, a group for each head, nothing.
#[rstest]
fn ops_linear_by_head_after_inverse_rope(
    #[values(0, 1, 2, 70)] tokens: usize,
    #[values([16, 512, 32, 2, 40], [8, 64, 16, 4, 24], [3, 40, 4, 1, 9], [6, 7, 3, 2, 5], [4, 8, 0, 2, 3], [2, 96, 48, 2, 16], [4, 8, 2, 2, 0])]
    sizes: [usize; 5],
) {
    let [heads, width, pairs, groups, outputs] = sizes;
    for_each_dtype(|device, dtype| {
        let mut rng = rng(64);
        let mut draw = |len, dtype| random(&mut rng, len, dtype);
        let x: Tensor<3> = floats(&draw(tokens * heads * width, dtype), [tokens, heads, width], dtype, device);
        let [cos, sin] =
            [(); 2].map(|()| floats(&draw(tokens * pairs, DType::F32), [tokens, pairs], DType::F32, device));
        let inputs = heads / groups * width;
        let weight = floats(&draw(groups * outputs * inputs, dtype), [groups, outputs, inputs], dtype, device).into();
        let rows = InverseRope { x: x.clone(), cos: cos.clone(), sin: sin.clone() };
        for determinism in [Fast, BatchInvariant] {
            let out = linear_by_head(rows.clone(), &weight, determinism).expect("legal");
            assert_eq!((out.dims(), out.dtype()), ([tokens, groups, outputs], dtype));
            if tokens * outputs == 0 {
                continue;
            }
            let options = NormRopeOptions { norm_eps: None, norm_whole_head: true, inverse: true };
            let args = NormRopeArgs { x: x.clone(), weight: None, cos: cos.clone(), sin: sin.clone() };
            let rotated = norm_rope(args, &options).expect("legal").reshape([tokens, groups, inputs]);
            let expected = linear_by_head(rotated, &weight, determinism).expect("legal");
            assert_eq!(bits(&out), bits(&expected), "{tokens} {sizes:?} {dtype:?} {determinism:?} on {device:?}");
        }
    });
}

#[test]
fn ops_errors_linear_by_head_after_inverse_rope() {
    for_each_device(|device| {
        let call = |angles: [[usize; 2]; 2], weight: [usize; 3]| {
            let [cos, sin] = angles.map(|shape| zeros(shape, device));
            let rows = InverseRope { x: zeros([3, 4, 6], device), cos, sin };
            linear_by_head(rows, &zeros::<3>(weight, device).into(), Fast)
        };
        call([[3, 2]; 2], [2, 5, 12]).expect("legal before it is changed");
        assert_refused(call([[3, 2]; 2], [2, 5, 6]), Shape, "weight");
        // Groups of half heads.
        assert_refused(call([[3, 2]; 2], [8, 5, 3]), Shape, "weight");
        assert_refused(call([[2, 2], [3, 2]], [2, 5, 12]), Shape, "cos");
        assert_refused(call([[3, 4]; 2], [2, 5, 12]), Value, "cos");
        assert_refused(call([[3, 2], [3, 1]], [2, 5, 12]), Value, "sin");
    });
}
