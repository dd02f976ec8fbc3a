//! `sparse_mla_parts`: with `sparse_mla` it agrees by definition, so that the oracle of that one is the oracle here.

use burn::tensor::{DType, Device, Tensor};
use mla_ops::{SparseMlaArgs, SparseParts, sparse_mla_parts};
use proptest::prelude::{ProptestConfig, proptest};
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype};
use crate::ops_fixture::{assert_rows, ints, values};
use crate::ops_sparse_mla::{Case, Inputs, Pool};
use crate::refusals::{Kind, assert_refused, assert_values_refused, zeros};

/// What the weights of the rows are rounded to: tensor cores multiply numbers of the query's type.
fn weights_dtype(case: &Case, device: &Device) -> DType {
    case.own_kernel(device).map_or(DType::F32, |_| case.dtype)
}

/// Parts on the host.
struct Parts {
    acc: Vec<f32>,
    max: Vec<f32>,
    row_sum: Vec<f32>,
    width: usize,
}

impl Parts {
    fn new(args: SparseMlaArgs, case: &Case) -> Self {
        let SparseParts { acc, max, row_sum } = sparse_mla_parts(args, &case.options()).expect("legal");
        let ([batch, query_len, heads], [_, width]) = (case.shape, case.widths);
        assert_eq!(acc.dims(), [batch, query_len, heads, width]);
        assert_eq!([max.dims(), row_sum.dims()], [case.shape; 2]);
        assert_eq!([acc.dtype(), max.dtype(), row_sum.dtype()], [DType::F32; 3]);
        Self { acc: values(acc), max: values(max), row_sum: values(row_sum), width }
    }

    /// The parts over the rows of both.
    fn and(&self, other: &Self) -> Self {
        let max: Vec<f32> = self.max.iter().zip(&other.max).map(|(a, b)| a.max(*b)).collect();
        let weight = |part: &Self, row: usize| match part.max[row] {
            f32::NEG_INFINITY => 0.0,
            highest => (highest - max[row]).exp(),
        };
        let rows = 0..max.len();
        let sum = |row: usize, a: f32, b: f32| a * weight(self, row) + b * weight(other, row);
        Self {
            row_sum: rows.map(|row| sum(row, self.row_sum[row], other.row_sum[row])).collect(),
            acc: (0..self.acc.len()).map(|at| sum(at / self.width, self.acc[at], other.acc[at])).collect(),
            width: self.width,
            max,
        }
    }

    /// The quotients are output and lse of attention, the maxima those of all scores, and without rows there is nothing.
    fn check(&self, what: &str, weights: DType, inputs: &Inputs, maxima: &[f64]) {
        let quotient = |(at, acc): (usize, &f32)| match self.row_sum[at / self.width] {
            0.0 => *acc,
            row_sum => acc / row_sum,
        };
        let out: Vec<f32> = self.acc.iter().enumerate().map(quotient).collect();
        let lse: Vec<f32> = self.max.iter().zip(&self.row_sum).map(|(max, sum)| max + sum.ln()).collect();
        assert_rows(what, weights, &out, &lse, &inputs.expected());
        for (row, (&max, &expected)) in self.max.iter().zip(maxima).enumerate() {
            let close = f64::from(max) == expected || (f64::from(max) - expected).abs() <= 1e-4;
            assert!(close, "{what}: the maximum of row {row} is {max}, expected {expected}");
            assert_eq!(self.row_sum[row] == 0.0, expected == f64::NEG_INFINITY, "{what}: the sum of row {row}");
        }
    }
}

/// The largest score of each query token and head.
fn maxima(inputs: &Inputs, case: &Case) -> Vec<f64> {
    let ([batch, query_len, heads], [width, _]) = (case.shape, case.widths);
    let score = |row: usize, key: &[f64]| -> f64 {
        let query = &inputs.q[row * width..][..width];
        f64::from(case.options().softmax_scale) * query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>()
    };
    let highest = |row: usize| {
        let keys = inputs
            .scopes
            .iter()
            .flat_map(|scope| scope.slots(row / heads).into_iter().map(|slot| &scope.rows[slot * width..][..width]));
        keys.map(|key| score(row, key)).fold(f64::NEG_INFINITY, f64::max)
    };
    (0..batch * query_len * heads).map(highest).collect()
}

fn check_on(case: &Case, device: &Device) {
    let inputs = case.inputs();
    let parts = Parts::new(inputs.args(device), case);
    let what = format!("{case:?} on {device:?}");
    parts.check(&what, weights_dtype(case, device), &inputs, &maxima(&inputs, case));
}

#[rstest]
fn ops_sparse_parts(
    #[values(1, 4, 9, 63)] heads: usize,
    #[values([576, 512], [80, 64], [33, 7], [130, 129], [1, 1])] widths: [usize; 2],
) {
    for_each_dtype(|device, dtype| {
        check_on(&Case { shape: [2, 1, heads], widths, dtype, ..Default::default() }, device)
    });
}

#[rstest]
fn ops_sparse_parts_entries(#[values(0, 1, 127, 128, 129, 300)] most: usize, #[values(false, true)] lengths: bool) {
    for_each_dtype(|device, dtype| {
        let pools = vec![[25, 16, most]];
        check_on(&Case { shape: [3, 2, 5], pools, lengths, dtype, ..Default::default() }, device);
    });
}

/// Both scopes at once, and each on its own, put together here.
#[rstest]
fn ops_sparse_parts_of_two_scopes(#[values(0, 3, 100)] first: usize, #[values(0, 3, 100)] second: usize) {
    for_each_dtype(|device, dtype| {
        for lengths in [false, true] {
            let case = Case { pools: vec![[4, 32, first], [50, 4, second]], lengths, dtype, ..Default::default() };
            check_on(&case, device);
            let inputs = case.inputs();
            let args = inputs.args(device);
            let [first, second] = [args.scope.clone(), args.second.clone().expect("two scopes")]
                .map(|scope| Parts::new(SparseMlaArgs { scope, second: None, ..args.clone() }, &case));
            let what = format!("by hand: {case:?}");
            first.and(&second).check(&what, weights_dtype(&case, device), &inputs, &maxima(&inputs, &case));
        }
    });
}

/// Rows of DeepSeek's widths, in lists of several blocks.
#[rstest]
#[case([1, 2, 65], [576, 512], vec![[20, 16, 130]])]
#[case([2, 1, 16], [512, 512], vec![[9, 16, 128], [3, 64, 150]])]
#[case([2, 1, 16], [512, 512], vec![[9, 16, 0], [3, 64, 70]])]
#[case([2, 1, 127], [512, 512], vec![[9, 16, 128], [3, 64, 250]])]
fn ops_sparse_parts_of_tiles(
    #[case] shape: [usize; 3],
    #[case] widths: [usize; 2],
    #[case] pools: Vec<Pool>,
    #[values(false, true)] lengths: bool,
) {
    for_each_dtype(|device, dtype| {
        check_on(&Case { shape, widths, pools: pools.clone(), lengths, sink: None, dtype }, device);
    });
}

#[rstest]
#[case([0, 1, 3])]
#[case([2, 0, 3])]
fn ops_sparse_parts_of_nothing(#[case] shape: [usize; 3]) {
    for_each_dtype(|device, dtype| check_on(&Case { shape, dtype, ..Default::default() }, device));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ops_sparse_parts_of_any_sizes(
        shape in [1..4_usize, 1..4, 1..12],
        (width, cut) in (1..150_usize, 0.0..1.0),
        first in [1..12_usize, 1..40, 0..300],
        second in [1..12_usize, 1..40, 0..300],
        lengths: bool,
    ) {
        let widths = [width, 1 + ((width - 1) as f64 * cut) as usize];
        for_each_dtype(|device, dtype| {
            check_on(&Case { shape, widths, pools: vec![first, second], lengths, dtype, sink: None }, device);
        });
    }
}

#[test]
fn ops_errors_sparse_parts() {
    for_each_device(|device| {
        let case = Case::default();
        let good = || case.inputs().args(device);
        let refused = |args, kind, argument: &str| {
            let error = sparse_mla_parts(args, &case.options());
            assert!(error.as_ref().is_err_and(|error| error.to_string().contains("sparse_mla_parts")), "{error:?}");
            assert_refused(error, kind, argument);
        };
        refused(SparseMlaArgs { sink: Some(Tensor::zeros([9], (device, DType::F32))), ..good() }, Kind::Value, "sink");
        refused(SparseMlaArgs { q: zeros([2, 2, 9, 81], device), ..good() }, Kind::Shape, "scope.rows");
        let mut args = good();
        args.scope.indices = ints(&[144; 4], [2, 2, 1], device);
        let validated = args.validate_device_inputs();
        assert_values_refused(device, validated, || sparse_mla_parts(args, &case.options()), "scope.indices");
    });
}
