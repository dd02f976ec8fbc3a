//! `argmax` against plain loops.

use burn::tensor::{DType, Tensor, TensorData};
use mla_ops::argmax;
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype};
use crate::ops_fixture::{floats, int_values, random, restrided, rng};
use crate::refusals::Kind::Value;
use crate::refusals::{assert_refused, zeros};

fn expected(row: &[f64]) -> i32 {
    let mut best = (-1, f64::NEG_INFINITY);
    for (place, &value) in (0..).zip(row) {
        if value > best.1 {
            best = (place, value);
        }
    }
    best.0
}

/// Vocabularies of odd and of published sizes; in f16 and bf16 many numbers are equal.
#[rstest]
fn ops_argmax(#[values([1, 102400], [3, 129280], [70, 257], [2, 7], [5, 1], [0, 8])] sizes: [usize; 2]) {
    let [rows, width] = sizes;
    for_each_dtype(|device, dtype| {
        let x = random(&mut rng(71), rows * width, dtype);
        let there = floats(&x, sizes, dtype, device);
        let places: Vec<i32> = x.chunks(width).map(expected).collect();
        assert_eq!(int_values(argmax(there.clone()).expect("legal")), places, "{sizes:?} {dtype:?} on {device:?}");
        if rows > 1 {
            let view = restrided(there, 0, 1);
            assert_eq!(int_values(argmax(view).expect("legal")), places, "a view, {sizes:?} {dtype:?} on {device:?}");
        }
    });
}

/// Equal numbers, and such that are none, at the borders between units and between their iterations.
#[test]
fn ops_argmax_of_ties_and_of_what_is_no_number() {
    // Few units and many.
    [5000, 70000].into_iter().for_each(ties_and_what_is_no_number);
}

fn ties_and_what_is_no_number(width: usize) {
    let (nan, inf, least) = (f32::NAN, f32::INFINITY, f32::MIN);
    let row = |values: &[(usize, f32)], rest: f32| {
        let mut row = vec![rest; width];
        values.iter().for_each(|&(place, value)| row[place] = value);
        row
    };
    let rows = [
        (row(&[(4999, 2.0), (1024, 2.0), (1025, 2.0)], -1.0), 1024),
        (row(&[(0, nan), (7, 3.0), (4000, nan)], -inf), 7),
        (row(&[(2048, inf), (2047, f32::MAX)], nan), 2047),
        (row(&[(300, inf), (301, inf)], 1.0), 300),
        (row(&[(4998, least)], -inf), 4998),
        (row(&[], 0.0), 0),
        (row(&[], -inf), -1),
        (row(&[(9, -inf)], nan), -1),
    ];
    for_each_device(|device| {
        for (number, (row, place)) in rows.iter().enumerate() {
            let data = TensorData::new(row.clone(), [1, width]);
            let x = Tensor::<2>::from_data(data, (device, DType::F32));
            assert_eq!(int_values(argmax(x).expect("legal")), [*place], "row {number} on {device:?}");
        }
    });
}

#[test]
fn ops_errors_argmax() {
    for_each_device(|device| {
        assert_refused(argmax(zeros([3, 0], device)), Value, "x");
    });
}
