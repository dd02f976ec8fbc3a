//! Index keys in FP8: what is written against a search among all numbers of the format, what is chosen against scores in f64 over the
//! numbers that are stored.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use mla_ops::cache::{Pool, RowFormat};
use mla_ops::{
    IndexForm, LightningIndexArgs, LightningIndexOptions, LightningIndexProblem, Path, WriteLatentArgs, explain_path,
    lightning_index, write_latent,
};
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype, is_hopper, is_slow, skip, supports};
use crate::ops_fixture::{floats, int_values, ints, random, rng, rounded, values};
use crate::ops_fp8_rows::{pool, quantised};
use crate::ops_lightning_index::{Case, best};
use crate::ops_lightning_index_tokens::{any_lens, case, causal, with_tiles};
use crate::refusals::{Kind, assert_refused, assert_values_refused, zeros};

const KEYS: RowFormat = RowFormat::Fp8IndexKeys;
/// The least exponent of a scale.
const LEAST: i32 = -22;

/// Keys as large as 2^8 and as small as 2^-26, and of zeros; in pages as they are, and in pages of one row.
#[rstest]
fn ops_fp8_index_keys_hold_the_nearest_numbers(
    #[values(4, 12, 64, 128, 132, 512)] width: usize,
    #[values([12, 1], [6, 2], [3, 4], [1, 16])] pages: [usize; 2],
    #[values(false, true)] in_parts: bool,
) {
    let ([pages, page_size], slots) = (pages, [7, -1, 2, 11, 0, -1, 5]);
    for_each_dtype(|device, dtype| {
        let mut rng = rng(96);
        let sizes = [256.0, 1.0, 1e-3, 1e-5, 0.0, 1e-8, 1.0];
        let row = |token: usize| -> Vec<f64> {
            random(&mut rng, width, dtype).into_iter().map(|value| rounded(value * sizes[token], dtype)).collect()
        };
        let rows: Vec<Vec<f64>> = (0..slots.len()).map(row).collect();
        let part = |from: usize, to: usize| {
            let values: Vec<f64> = rows.iter().flat_map(|row| row[from..to].to_vec()).collect();
            floats(&values, [rows.len(), to - from], dtype, device)
        };
        let split = if in_parts { width / 4 * 3 } else { width };
        let args = WriteLatentArgs {
            cache: pool([pages, page_size, width], KEYS, dtype, device),
            slots: ints(&slots, [slots.len()], device),
            latent: part(0, split),
            rope: in_parts.then(|| part(split, width)),
        };
        let cache = write_latent(args).expect("legal");
        assert_eq!((cache.dims(), cache.dtype(), cache.format()), ([pages, page_size, width], dtype, KEYS));
        assert_eq!(cache.bytes() as usize, pages * page_size * (width + 4));
        let mut expected = vec![0.0; pages * page_size * width];
        for (row, slot) in rows.iter().zip(slots) {
            if let Ok(slot) = usize::try_from(slot) {
                let row: Vec<f64> = quantised(row, LEAST).into_iter().map(|value| rounded(value, dtype)).collect();
                expected[slot * width..][..width].copy_from_slice(&row);
            }
        }
        let actual: Vec<f64> = values(cache.dense()).into_iter().map(f64::from).collect();
        let what = format!("{width} channels of {dtype:?} in pages of {page_size} on {device:?}");
        assert!(actual == expected, "{what}");
        let named = values(cache.read(ints(&[11, 2, 11], [3], device)));
        let rows = [11, 2, 11].map(|slot: usize| &expected[slot * width..][..width]).concat();
        assert!(named.into_iter().map(f64::from).eq(rows), "{what}");
    });
}

/// All widths and pages that kernels with matrix instructions take, and others.
#[rstest]
fn ops_fp8_index_keys(#[values(1, 8, 64)] heads: usize, #[values(8, 64, 100, 128)] width: usize) {
    for_each_dtype(|device, dtype| {
        for (page_size, visible) in [
            (1, &[&[1][..], &[0], &[20], &[21], &[300], &[64], &[65]][..]),
            (2, &[&[70], &[3]]),
            (4, &[&[19, 20, 21], &[0, 0, 0], &[257, 3, 130], &[0, 1, 63]]),
            (16, &[&[500], &[40]]),
            (64, &[&[64], &[65], &[128], &[129], &[700]]),
        ] {
            Case { page_size, ..Case::new(visible, heads, width, 20, dtype) }.in_fp8().check(device);
        }
    });
}

/// A score is one of few, so that the border goes through many equal ones; all scores are equal; scores below zero.
#[rstest]
fn ops_fp8_index_keys_ties(#[values(-0.5, 0.0, 2.0)] scale: f32) {
    for_each_dtype(|device, dtype| {
        let mut case = Case { scale, ..Case::new(&[&[700, 500], &[300, 299]], 8, 64, 90, dtype) }.in_fp8();
        case.head_weights.iter_mut().for_each(|weight| *weight = weight.signum());
        case.check(device);
        case.q.fill(0.0);
        case.check(device);
    });
}

/// As many tokens of a sequence as Hopper scores in tiles: of FP8 keys, dequantised ones.
#[rstest]
#[case(causal(8, &[128]), [64, 128], 64, DType::BF16)]
#[case(causal(17, &[17, 640, 129, 400]), [64, 128], 16, DType::BF16)]
#[case(any_lens(3, 33, 700), [16, 64], 8, DType::F16)]
#[case(vec![vec![0; 16], vec![5; 16]], [64, 128], 16, DType::BF16)]
fn ops_fp8_index_keys_of_many_tokens(
    #[case] visible: Vec<Vec<usize>>,
    #[case] sizes: [usize; 2],
    #[case] page_size: usize,
    #[case] dtype: DType,
) {
    let case = case(&visible, sizes, page_size, 20, dtype).in_fp8();
    with_tiles(&case, true, |device| case.check(device));
}

#[rstest]
fn ops_fp8_index_keys_of_random_numbers(
    #[values(&[&[900, 130][..], &[40, 2000]], &[&[1; 11][..], &[400; 11]])] visible: &[&[usize]],
) {
    for_each_dtype(|device, dtype| {
        if is_slow(device) && !is_hopper(device) && visible[0].len() > 2 {
            skip(device, "many tokens");
            return;
        }
        let case = Case { format: KEYS, ..Case::new(visible, 64, 128, 100, dtype) };
        case.check_random_numbers(device);
    });
}

/// A score is the channel that all heads look at. A key of which a channel is no number comes last; an infinite one is large.
#[test]
fn ops_fp8_index_keys_of_no_numbers() {
    for_each_dtype(|device, dtype| {
        let mut case = Case { scale: 1.0, format: KEYS, ..Case::new(&[&[40]], 8, 64, 0, dtype) };
        case.q.fill(0.0);
        case.q.chunks_exact_mut(64).for_each(|query| query[5] = 1.0);
        case.head_weights.fill(0.125);
        case.keys[0].fill(0.0);
        let scores: Vec<f64> = (0..40).map(|key| f64::from(key * 7 % 40)).collect();
        for (key, (numbers, &score)) in case.keys[0].chunks_exact_mut(64).zip(&scores).enumerate() {
            numbers[5] = score;
            match key {
                11 | 30 => numbers[63] = f64::NAN,
                21 => numbers[5] = f64::INFINITY,
                _ => (),
            }
        }
        // In this order, as numbers are rounded.
        let rank = |key: usize| match key {
            11 | 30 => -1.0,
            21 => 1e9,
            _ => quantised(&[scores[key]], LEAST)[0],
        };
        let ranks: Vec<f64> = (0..40).map(rank).collect();
        for k in [1, 2, 20, 38, 39] {
            let case = Case { k, ..case.clone() };
            let actual = lightning_index(case.args(device).0, &case.options(IndexForm::Positions)).expect("legal");
            assert_eq!(int_values(actual), best(&ranks, k), "{k} of {dtype:?} on {device:?}");
        }
    });
}

/// Which kernel it is that GPUs decode with.
#[test]
fn ops_fp8_index_keys_have_matrix_instructions() {
    for_each_device(|device| {
        if !supports(device, DType::BF16) {
            return;
        }
        let [fp8, dense] = [KEYS, RowFormat::Dense].map(|keys| {
            let (heads, width, page_size, dtype) = (64, 128, 64, DType::BF16);
            let problem = LightningIndexProblem { batch: 4, query_len: 1, heads, width, page_size, dtype, keys };
            explain_path(&problem, device)
        });
        assert_eq!(fp8.path, dense.path, "{fp8}");
        assert!(!is_hopper(device) || fp8.path == Path::PortableMma, "{fp8}");
    });
}

#[test]
fn ops_fp8_index_keys_errors() {
    for_each_device(|device| {
        for shape in [[1, 2, 6], [1, 2, 516], [1, 2, 0], [2, 3, 8]] {
            assert_refused(Pool::new(shape, FloatDType::F32, KEYS, device), Kind::Value, "format");
        }
        // 4 pages of 8 keys of 12 channels, of which a sequence has 2.
        let args = |keys: Pool| LightningIndexArgs {
            q: zeros([2, 1, 3, 12], device),
            keys,
            page_table: ints(&[3, 0, 2, 1], [2, 2], device),
            head_weights: zeros([2, 1, 3], device),
            visible: ints(&[16, 9], [2, 1], device),
        };
        let keys = |width: usize| pool([4, 8, width], KEYS, DType::F32, device);
        let options = LightningIndexOptions::new(2, 1.0);
        lightning_index(args(keys(12)), &options).expect("legal before it is changed");
        args(keys(12)).validate_device_inputs().expect("legal");
        assert_refused(lightning_index(args(keys(16)), &options), Kind::Shape, "keys");
        let latents = pool([4, 8, 12], RowFormat::Fp8 { rope: 0 }, DType::F32, device);
        assert_refused(lightning_index(args(latents), &options), Kind::Value, "keys");
        let other = LightningIndexArgs { page_table: ints(&[3, 0, 2, 4], [2, 2], device), ..args(keys(12)) };
        assert_values_refused(
            device,
            other.validate_device_inputs(),
            || lightning_index(other, &options),
            "page_table",
        );
        if *device == Device::flex() {
            let half = pool([4, 8, 12], KEYS, DType::F16, device);
            assert_refused(lightning_index(args(half), &options), Kind::DType, "keys");
        }
        let cache = keys(12);
        let handle = cache.clone();
        let args =
            WriteLatentArgs { cache, slots: ints(&[0], [1], device), latent: zeros([1, 12], device), rope: None };
        let refused = write_latent(args).expect_err("another handle is alive");
        assert!(matches!(refused.error, mla_ops::MlaError::CacheShared { .. }), "{refused}");
        drop(handle);
        let args = WriteLatentArgs {
            latent: Tensor::<2>::zeros([1, 8], device),
            ..WriteLatentArgs {
                cache: refused.cache,
                slots: ints(&[0], [1], device),
                latent: zeros([1, 12], device),
                rope: None,
            }
        };
        assert_refused(write_latent(args).map_err(mla_ops::MlaError::from), Kind::Shape, "latent");
    });
}

/// Nothing to score, and nothing to choose from.
#[test]
fn ops_fp8_index_keys_of_nothing() {
    for_each_device(|device| {
        for (batch, pages, max_pages) in [(0, 3, 2), (2, 3, 0), (2, 0, 0)] {
            let args = LightningIndexArgs {
                q: zeros([batch, 1, 8, 64], device),
                keys: pool([pages, 4, 64], KEYS, DType::F32, device),
                page_table: ints(&vec![0; batch * max_pages], [batch, max_pages], device),
                head_weights: zeros([batch, 1, 8], device),
                visible: ints(&vec![0; batch], [batch, 1], device),
            };
            let indices = lightning_index(args, &LightningIndexOptions::new(3, 1.0)).expect("legal");
            assert_eq!(indices.dims(), [batch, 1, 3], "{device:?}");
            assert!(int_values(indices).iter().all(|&index| index == -1), "{device:?}");
        }
    });
}
