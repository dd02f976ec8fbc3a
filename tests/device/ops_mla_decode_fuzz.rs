//! `mla_decode` of random shapes against the oracle, and how exact it is.

use std::f64::consts::TAU;

use burn::tensor::DType;
use mla_ops::Splits;
use rand::RngExt;
use rand::seq::{IndexedRandom, index};
use rand_chacha::ChaCha8Rng;
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype, is_blackwell, is_cuda, is_hopper, is_simulated, skip};
use crate::ops_fixture::{DecodeCase, pick_rows, rng, values};

const WIDTHS: [(usize, usize); 2] = [(576, 512), (512, 512)];

/// Shapes in each of four parts: on Hopper and Blackwell, on simulated ones, and elsewhere, where they are small.
const LARGE_SHAPES: u64 = 50;
const SHORT_SHAPES: u64 = 10;
const SMALL_SHAPES: u64 = 3;
/// Rows times keys up to which all rows are compared.
const ALL_ROWS: usize = 1 << 16;
/// Rows that are compared otherwise, beside the first and last one of each sequence.
const SOME_ROWS: usize = 32;

/// The upper bounds of random shapes.
struct Bounds {
    batch: usize,
    heads: usize,
    /// Even.
    len: usize,
}

const LARGE: Bounds = Bounds { batch: 9, heads: 128, len: 3000 };
const SHORT: Bounds = Bounds { batch: 4, heads: 128, len: 300 };
const SMALL: Bounds = Bounds { batch: 3, heads: 9, len: 200 };

/// With the fastest kernel that there is, on Hopper and Blackwell their own.
#[rstest]
fn ops_decode_fuzz(#[values(0, 1, 2, 3)] part: u64) {
    for_each_device(|device| {
        let halves = [DType::F16, DType::BF16].into_iter().filter(|dtype| device.supports_dtype(*dtype));
        let mut dtypes: Vec<DType> = halves.collect();
        if dtypes.is_empty() {
            dtypes.push(DType::F32);
        }
        let (shapes, bounds) = match is_hopper(device) || is_blackwell(device) {
            true if is_simulated(device) => (SHORT_SHAPES, SHORT),
            true => (LARGE_SHAPES, LARGE),
            false => (SMALL_SHAPES, SMALL),
        };
        for seed in part * shapes..(part + 1) * shapes {
            let mut rng = rng(seed);
            let shape = shape(&mut rng, &bounds, &dtypes);
            let path = shape.paths(device).first().copied();
            let case = DecodeCase { path, ..shape };
            eprintln!("seed {seed}: {case:?}");
            case.inputs(seed).check_rows(device, &rows(&mut rng, &case));
        }
    });
}

fn shape(rng: &mut ChaCha8Rng, bounds: &Bounds, dtypes: &[DType]) -> DecodeCase {
    let batch = rng.random_range(1..=bounds.batch);
    let lens = (0..batch)
        .map(|_| match rng.random_range(0..8) {
            0 => rng.random_range(0..=64),
            1 => rng.random_range(0..=bounds.len),
            _ => rng.random_range(0..bounds.len) | 1,
        })
        .collect();
    let splits = match rng.random_range(0..3) {
        0 => Splits::Auto,
        1 => Splits::Count(rng.random_range(1..=9)),
        _ => Splits::Tokens(rng.random_range(1..=700)),
    };
    let widths = *WIDTHS.choose(rng).expect("some");
    DecodeCase {
        lens,
        query_len: rng.random_range(1..=4),
        heads: rng.random_range(1..=bounds.heads),
        page_size: 16 << rng.random_range(0..5),
        widths,
        causal: rng.random(),
        splits,
        dtype: *dtypes.choose(rng).expect("some"),
        parts: widths.0 > widths.1 && rng.random(),
        planned: rng.random(),
        ..Default::default()
    }
}

/// The rows of `[B, Sq, H]` to compare.
fn rows(rng: &mut ChaCha8Rng, case: &DecodeCase) -> Vec<usize> {
    let (count, of_sequence) = (case.rows(), case.query_len * case.heads);
    if of_sequence * case.lens.iter().sum::<usize>() <= ALL_ROWS {
        return (0..count).collect();
    }
    let ends = (0..case.lens.len()).flat_map(|b| [b * of_sequence, (b + 1) * of_sequence - 1]);
    index::sample(rng, count, SOME_ROWS.min(count)).into_iter().chain(ends).collect()
}

const LENS: [usize; 7] = [2, 64, 65, 1000, 3333, 129, 2048];
/// Heads that are compared: one is as good as another.
const SOME_HEADS: usize = 16;
const LSE_ERROR: f64 = 2e-5;

/// The root mean square of the error of `out`, relative to that of `out`. The result and, before matrix units, the weights are
/// rounded to the dtype: by up to 2^-8 and 2^-11 of themselves in bf16 and f16, each rounding 1.6e-3 and 2.0e-4 in the mean.
fn relative_error(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2.5e-3,
        DType::F16 => 4e-4,
        _ => 1e-5,
    }
}

/// Values as a model's are: normal, with the usual factor of the scores. 16-bit types on CUDA, with each kernel; of f32 a part.
/// Not on a simulated GPU, which has arithmetic of its own.
#[rstest]
fn ops_decode_accuracy(
    #[values(16, 64, 128)] heads: usize,
    #[values((1, false), (2, true), (2, false))] tokens_and_mask: (usize, bool),
) {
    let (query_len, causal) = tokens_and_mask;
    for_each_dtype(|device, dtype| {
        if is_simulated(device) {
            skip(device, "the accuracy of a simulated GPU");
            return;
        }
        let lens = match dtype {
            DType::F32 if heads == 16 => &LENS[..4],
            DType::F16 | DType::BF16 if is_cuda(device) => &LENS[..],
            _ => return,
        };
        let (lens, page_size, widths, sharpness) = (lens.to_vec(), 64, WIDTHS[0], 1.0);
        let case =
            DecodeCase { lens, query_len, heads, page_size, widths, causal, dtype, sharpness, ..Default::default() };
        let tokens = case.lens.len() * query_len;
        let some_heads = index::sample(&mut rng(72), heads, SOME_HEADS).into_vec();
        let rows: Vec<usize> =
            (0..tokens).flat_map(|token| some_heads.iter().map(move |h| token * heads + h)).collect();
        let mut inputs = case.inputs_of(71, normal);
        let expected = inputs.expected_rows(rows.iter().copied());
        let mut outs: Vec<Vec<f32>> = Vec::new();
        for path in case.paths(device) {
            inputs.case.path = Some(path);
            inputs.case.assert_path(device);
            let (out, lse) = inputs.run(device);
            let (out, lse) = pick_rows(&values(out), &values(lse), &rows);
            let square = |sum: f64, x: f64| sum + x * x;
            let error = out.iter().zip(&expected.out).map(|(&x, y)| f64::from(x) - y).fold(0.0, square);
            let relative = (error / expected.out.iter().copied().fold(0.0, square)).sqrt();
            let mut lse_errors = lse.iter().zip(&expected.lse).map(|(&x, y)| (f64::from(x) - y).abs());
            let lse_error = lse_errors.clone().fold(0.0, f64::max);
            let what = format!("{path}, {dtype:?}, H = {heads}, Sq = {query_len}, causal {causal} on {device:?}");
            eprintln!("{what}: error {relative:.2e} of out, {lse_error:.1e} of lse");
            assert!(relative < relative_error(dtype), "{what}: out errs by {relative:.2e}");
            assert!(lse_errors.all(|error| error < LSE_ERROR), "{what}: lse errs by {lse_error:.1e}");
            // Kernels differ in how they round: the same bits come of the same kernel.
            assert!(!outs.contains(&out), "{what}: another path has run");
            outs.push(out);
        }
    });
}

/// A number of the standard normal distribution (Box-Muller).
fn normal(rng: &mut ChaCha8Rng) -> f64 {
    let (a, b): (f64, f64) = (1.0 - rng.random::<f64>(), rng.random());
    (-2.0 * a.ln()).sqrt() * (TAU * b).cos()
}
