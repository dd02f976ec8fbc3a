//! `Determinism::BatchInvariant`: a row of a product has the same bits alone, and among any number of others, of any form.

use burn::tensor::{DType, Device, Tensor};
use burn_mla::ops::Determinism::{BatchInvariant, Fast};
use burn_mla::ops::{Residual, StackedWeight, Weight, linear, linear_by_head, linear_each, matmul, swiglu};
use rstest::rstest;

use crate::devices::for_each_dtype;
use crate::ops_fixture::{bits, floats, random, rng, tolerance};

/// More than a product of matrices needs to take another kernel.
const ROWS: usize = 130;

fn matrix<const D: usize>(seed: u64, shape: [usize; D], dtype: DType, device: &Device) -> Tensor<D> {
    floats(&random(&mut rng(seed), shape.iter().product(), dtype), shape, dtype, device)
}

/// The bits of each row of what is computed of rows `[n, depth]`, of all of them and of parts of them.
fn check(what: &str, x: &Tensor<2>, compute: impl Fn(Tensor<2>) -> Tensor<2>) {
    let device = x.device();
    BatchInvariant.check(&device).expect("a device that can");
    let rows = |x: Tensor<2>| {
        let out = compute(x);
        let ([n, _], bits) = (out.dims(), bits(&out));
        bits.chunks(bits.len() / n).map(<[u8]>::to_vec).collect::<Vec<_>>()
    };
    let all = rows(x.clone());
    assert!(all[0] != all[ROWS - 1], "{what}: rows that have nothing in common come out alike");
    for (first, n) in [(0, 1), (129, 1), (3, 7), (1, 64), (40, 65)] {
        let part = rows(x.clone().narrow(0, first, n));
        assert!(part == all[first..first + n], "{what}: {n} rows from {first}, {:?} on {device:?}", x.dtype());
    }
}

#[rstest]
fn ops_batch_invariant_products(#[values([192, 4], [576, 72], [33, 7], [64, 520])] widths: [usize; 2]) {
    let [depth, width] = widths;
    for_each_dtype(|device, dtype| {
        let x = matrix(1, [ROWS, depth], dtype, device);
        let weight = |seed| matrix(seed, [width, depth], dtype, device);
        let dense = |seed| Weight::from(weight(seed));
        check("linear", &x, |x| linear(x, &dense(2), BatchInvariant).expect("legal"));
        check("linear_each", &x, |x| linear_each(x, [&dense(2), &dense(3)], BatchInvariant).expect("legal")[1].clone());
        // Others than these outputs by far are not in the same launch.
        let other = Weight::from(matrix(6, [if width > 512 { 24 } else { 600 }, depth], dtype, device));
        let apart = |x| linear_each(x, [&dense(2), &other], BatchInvariant).expect("legal");
        check("linear_each, the first of two launches", &x, |x| apart(x)[0].clone());
        check("linear_each, the second of two launches", &x, |x| apart(x)[1].clone());
        let both = Weight::from(Tensor::cat(vec![weight(2), weight(3)], 0));
        check("swiglu", &x, |x| swiglu(x, &both, None, BatchInvariant).expect("legal"));
        check("matmul", &x, |x| matmul(x, weight(2).transpose(), BatchInvariant).expect("legal"));
        let router: Tensor<2> = matrix(4, [width, depth], DType::F32, device);
        let (norm, router) = (matrix(5, [depth], DType::F32, device), Weight::from(router));
        check("a router", &x, |x| linear(x, &router, BatchInvariant).expect("legal"));
        check("a router behind a residual sum", &x, |x| {
            let mut residual = Residual::new(x.clone());
            residual.add(x).expect("legal");
            linear(&mut residual.norm(&norm, 1e-6).expect("legal"), &router, BatchInvariant).expect("legal")
        });
    });
}

/// Of few outputs and many channels, which have more units than others.
#[test]
fn ops_batch_invariant_products_of_long_rows() {
    for_each_dtype(|device, dtype| {
        let x = matrix(1, [ROWS, 4099], dtype, device);
        let mixer = Weight::from(matrix::<2>(4, [2, 4099], DType::F32, device));
        check("a mixer", &x, |x| linear(x, &mixer, BatchInvariant).expect("legal"));
    });
}

#[rstest]
fn ops_batch_invariant_products_of_heads(#[values([3, 64, 16], [2, 7, 5])] sizes: [usize; 3]) {
    let [heads, depth, width] = sizes;
    for_each_dtype(|device, dtype| {
        let x = matrix(1, [ROWS, heads * depth], dtype, device);
        let weight = matrix(2, [heads, width, depth], dtype, device);
        let stacked = StackedWeight::from(weight.clone());
        let by_head = |x: Tensor<2>| x.clone().reshape([x.dims()[0], heads, depth]);
        let flat = |out: Tensor<3>| out.clone().reshape([out.dims()[0], heads * width]);
        check("linear_by_head", &x, |x| flat(linear_by_head(by_head(x), &stacked, BatchInvariant).expect("legal")));
        check("matmul", &x, |x| {
            let (x, weight) = (by_head(x).swap_dims(0, 1), weight.clone().swap_dims(1, 2));
            flat(matmul(x, weight, BatchInvariant).expect("legal").swap_dims(0, 1))
        });
        // Both are the same products.
        let (few, weight) = (by_head(x.narrow(0, 0, 5)).swap_dims(0, 1), weight.swap_dims(1, 2));
        let product = matmul(few.clone(), weight.clone(), BatchInvariant).expect("legal");
        let expected = matmul(few, weight, Fast).expect("legal");
        let (off, most) = ((product - expected.clone()).abs().max(), expected.abs().max());
        let bound = most.into_scalar::<f32>() * 2.0 * tolerance(dtype) as f32;
        assert!(off.into_scalar::<f32>() <= bound, "{sizes:?}, {dtype:?} on {device:?}");
    });
}
