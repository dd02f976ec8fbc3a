//! `add_rms_norm_linear` against the operations that it joins.

use burn::tensor::{DType, FloatDType};
use mla_ops::{add_rms_norm, add_rms_norm_linear, linear};
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype};
use crate::ops_errors::Kind::{DType as WrongType, Shape, Value};
use crate::ops_errors::{assert_refused, zeros};
use crate::ops_fixture::{bits, floats, random, restrided, rng};

/// N, d, outputs: the routers of DeepSeek-V2-Lite and V3, odd sizes, many rows or outputs, nothing.
#[rstest]
fn ops_norm_linear(
    #[values([1, 2048, 64], [2, 7168, 256], [3, 70, 5], [8, 7, 1], [9, 64, 8], [2, 96, 600], [0, 8, 4], [2, 8, 0])]
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
        let weight = draw([outputs, width], DType::F32);
        let (sum, normed) = add_rms_norm(x.clone(), y.clone(), norm_weight.clone(), 1e-6).expect("legal");
        let out = if outputs > 0 { bits(&linear(normed.clone(), weight.clone())) } else { Vec::new() };
        let joined = add_rms_norm_linear(x, y, norm_weight, 1e-6, weight).expect("legal");
        assert_eq!((joined.2.dims(), joined.2.dtype()), ([rows, outputs], DType::F32));
        let expected = [bits(&sum), bits(&normed), out];
        let actual = [joined.0, joined.1, joined.2].map(|tensor| bits(&tensor));
        assert!(actual == expected, "{sizes:?} {dtype:?} on {device:?}");
    });
}

#[test]
fn ops_errors_norm_linear() {
    for_each_device(|device| {
        let call = |y: [usize; 2], norm_weight, eps, weight: [usize; 2]| {
            add_rms_norm_linear(
                zeros([3, 8], device),
                zeros(y, device),
                zeros([norm_weight], device),
                eps,
                zeros(weight, device),
            )
        };
        call([3, 8], 8, 0.0, [4, 8]).expect("legal before it is changed");
        assert_refused(call([2, 8], 8, 0.0, [4, 8]), Shape, "y");
        assert_refused(call([3, 8], 7, 0.0, [4, 8]), Shape, "norm_weight");
        assert_refused(call([3, 8], 8, f32::NAN, [4, 8]), Value, "eps");
        assert_refused(call([3, 8], 8, 0.0, [4, 7]), Shape, "weight");
        let (x, half) = (|| zeros::<2>([3, 8], device), zeros::<2>([4, 8], device).cast(FloatDType::F16));
        assert_refused(add_rms_norm_linear(x(), x(), zeros::<1>([8], device), 0.0, half), WrongType, "weight");
    });
}
