//! Caches of FP8 rows: what is written, against a search among all numbers of the format.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use mla_ops::cache::{Pool, RowFormat, new_pool};
use mla_ops::{
    Determinism, Path, RopeQuery, RopeWriteArgs, SparseMlaArgs, SparseMlaProblem, SparseScope, StackedWeight,
    WriteLatentArgs, explain_path, rope_write, sparse_mla_parts, write_latent,
};
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype};
use crate::ops_fixture::{bits, floats, ints, random, rng, rounded, values};
use crate::refusals::{Decode, Kind, assert_refused, zeros};

/// Every number of E4M3 that is not negative, in order.
fn numbers() -> Vec<f64> {
    let number = |code: i32| match (code >> 3, code & 7) {
        (0, fraction) => f64::from(fraction) * 2f64.powi(-9),
        (exponent, fraction) => f64::from(8 + fraction) * 2f64.powi(exponent - 10),
    };
    (0..0x7f).map(number).collect()
}

/// What stands in the cache for a block of numbers, whose scale is 2^`least` at least.
pub fn quantised(block: &[f64], least: i32) -> Vec<f64> {
    let numbers = numbers();
    let largest = block.iter().fold(0f64, |most, value| most.max(value.abs()));
    let scale =
        (least..200).map(|exponent| 2f64.powi(exponent)).find(|scale| largest <= 448.0 * scale).expect("finite");
    let nearest = |value: &f64| {
        let off = |at: &usize| (value.abs() / scale - numbers[*at]).abs();
        // Of two that are equally near the one with an even code.
        let best = (0..numbers.len()).min_by(|a, b| off(a).total_cmp(&off(b)).then((a % 2).cmp(&(b % 2))));
        numbers[best.expect("some")].copysign(*value) * scale
    };
    block.iter().map(nearest).collect()
}

/// Rows with scales of their own, and with scales behind their page.
pub fn in_row(rope: usize) -> RowFormat {
    RowFormat::Fp8 { rope }
}
pub fn behind_page(rope: usize) -> RowFormat {
    RowFormat::Fp8E8m0 { rope }
}

/// The rotary channels of a format, and the codes that share a scale.
fn parts(format: RowFormat) -> [usize; 2] {
    match format {
        RowFormat::Dense | RowFormat::Fp8IndexKeys => unreachable!("no test of such rows"),
        RowFormat::Fp8 { rope } => [rope, 128],
        RowFormat::Fp8E8m0 { rope } => [rope, 64],
    }
}

/// The same for a row.
fn quantised_row(row: &[f64], format: RowFormat, dtype: DType) -> Vec<f64> {
    let [rope, scaled] = parts(format);
    let (latent, rope) = row.split_at(row.len() - rope);
    let latent = latent.chunks(scaled).flat_map(|block| quantised(block, -13));
    latent.chain(rope.iter().map(|&value| rounded(value, DType::BF16))).map(|value| rounded(value, dtype)).collect()
}

pub fn pool(shape: [usize; 3], format: RowFormat, dtype: DType, device: &Device) -> Pool {
    Pool::new(shape, FloatDType::from(dtype), format, device).expect("small")
}

/// The rows of a cache, quantised; those that are no numbers too.
pub fn in_fp8(dense: &Pool, format: RowFormat) -> Pool {
    let ([pages, page_size, width], device) = (dense.dims(), &dense.device());
    let slots = ints(&(0..(pages * page_size) as i32).collect::<Vec<_>>(), [pages * page_size], device);
    let latent = dense.dense().reshape([pages * page_size, width]);
    let cache = pool(dense.dims(), format, dense.dtype(), device);
    write_latent(WriteLatentArgs { cache, slots, latent, rope: None }).expect("legal")
}

/// Blocks of numbers as large as 2^8 and as small as 2^-20, of zeros, and with a part of the last block missing.
#[rstest]
fn ops_fp8_rows_hold_the_nearest_numbers(
    #[values([512, 64], [448, 64], [128, 0], [640, 2], [260, 8], [4, 2])] widths: [usize; 2],
    #[values(in_row, behind_page)] format: fn(usize) -> RowFormat,
    #[values(false, true)] with_rope: bool,
) {
    let ([codes, rope], width, slots) = (widths, widths[0] + widths[1], [7, -1, 2, 11, 0, -1, 5]);
    let (split, format) = (if with_rope { codes } else { width }, format(rope));
    let bytes = match format {
        RowFormat::Fp8E8m0 { .. } => {
            let (row, scales) = (codes + 2 * rope, codes.div_ceil(64).next_multiple_of(8));
            3 * (4 * (row + scales)).next_multiple_of(row)
        }
        _ => 12 * (codes + 4 * codes.div_ceil(128) + 2 * rope),
    };
    for_each_dtype(|device, dtype| {
        let mut rng = rng(91);
        let row = |token: usize| -> Vec<f64> {
            let row = random(&mut rng, width, dtype).into_iter().enumerate();
            // 0 where a block is small for f16, too.
            row.map(|(i, value)| rounded(value * [256.0, 1.0, 1e-3, 1e-6, 0.0][(token + i / 64) % 5], dtype)).collect()
        };
        let rows: Vec<Vec<f64>> = (0..slots.len()).map(row).collect();
        let part = |from: usize, to: usize| {
            let values: Vec<f64> = rows.iter().flat_map(|row| row[from..to].to_vec()).collect();
            floats(&values, [rows.len(), to - from], dtype, device)
        };
        let args = WriteLatentArgs {
            cache: pool([3, 4, width], format, dtype, device),
            slots: ints(&slots, [slots.len()], device),
            latent: part(0, split),
            rope: (split < width).then(|| part(split, width)),
        };
        let cache = write_latent(args).expect("legal");
        assert_eq!((cache.dims(), cache.dtype(), cache.format()), ([3, 4, width], dtype, format));
        assert_eq!(cache.bytes() as usize, bytes);
        let mut expected = vec![0.0; 12 * width];
        for (row, slot) in rows.iter().zip(slots) {
            if let Ok(slot) = usize::try_from(slot) {
                expected[slot * width..][..width].copy_from_slice(&quantised_row(row, format, dtype));
            }
        }
        let actual: Vec<f64> = values(cache.dense()).into_iter().map(f64::from).collect();
        assert!(actual == expected, "{widths:?} {format:?} {dtype:?} on {device:?}");
        let named = values(cache.read(ints(&[11, 2, 11], [3], device)));
        let rows = [11, 2, 11].map(|slot: usize| &expected[slot * width..][..width]).concat();
        assert!(named.into_iter().map(f64::from).eq(rows), "{widths:?} {dtype:?} on {device:?}");
    });
}

/// Where a channel is no number, none of those with its scale is; infinity becomes large.
#[rstest]
fn ops_fp8_rows_of_no_numbers(#[values(in_row(4), behind_page(4))] format: RowFormat) {
    let [_, scaled] = parts(format);
    for_each_device(|device| {
        let mut row = [1.0; 260];
        (row[3], row[259]) = (f64::NAN, f64::NAN);
        let mut infinite = [0.5; 260];
        infinite[0] = f64::NEG_INFINITY;
        let args = WriteLatentArgs {
            cache: pool([1, 2, 260], format, DType::F32, device),
            slots: ints(&[0, 1], [2], device),
            latent: floats(&[row, infinite].concat(), [2, 260], DType::F32, device),
            rope: None,
        };
        let read = values(write_latent(args).expect("legal").dense());
        let is_none = |i: usize| i < scaled || i == 259;
        assert!((0..260).all(|i| if is_none(i) { read[i].is_nan() } else { read[i] == 1.0 }), "{device:?}: {read:?}");
        assert!(read[260] < -1e30 && read[261..].iter().all(|value| value.abs() < 1.0), "{device:?}: {read:?}");
    });
}

/// As the same launch with a dense cache, whose rows are quantised afterwards; a few tokens and many.
#[rstest]
fn ops_fp8_rope_write(
    #[values(1, 3, 40)] tokens: usize,
    #[values(false, true)] absorbed: bool,
    #[values(in_row(16), behind_page(16), RowFormat::Fp8IndexKeys)] format: RowFormat,
) {
    for_each_dtype(|device, dtype| {
        let (heads, [latent, rope, still, rank]) = (4, [160, 16, 24, 160]);
        let width = latent + rope;
        let mut rng = rng(93);
        let mut draw = |len, dtype| random(&mut rng, len, dtype);
        let slots: Vec<i32> = (0..tokens as i32).map(|token| if token % 7 == 2 { -1 } else { 2 * token + 1 }).collect();
        let q = floats(&draw(tokens * heads * (still + rope), dtype), [tokens, heads, still + rope], dtype, device);
        let weight = floats(&draw(heads * rank * still, dtype), [heads, rank, still], dtype, device);
        let table = floats(&draw(tokens * rope / 2, DType::F32), [tokens, rope / 2], DType::F32, device);
        let new = floats(&draw(tokens * width, dtype), [tokens, width], dtype, device);
        let norm_weight = floats(&draw(latent, DType::F32), [latent], DType::F32, device);
        let write = |cache: Pool| {
            let args = RopeWriteArgs {
                query: match absorbed {
                    false => RopeQuery::Heads(q.clone()),
                    true => RopeQuery::Absorbed {
                        q: q.clone(),
                        weight: StackedWeight::from(weight.clone()),
                        determinism: Determinism::Fast,
                    },
                },
                latent: new.clone(),
                norm_weight: norm_weight.clone(),
                norm_eps: 1e-6,
                q_norm_eps: None,
                index_q: None,
                cos: table.clone(),
                sin: table.clone(),
                cache,
                slots: ints(&slots, [tokens], device),
                compressors: vec![],
            };
            let written = rope_write(args).expect("legal");
            (bits(&written.q), written.latent.map(|latent| bits(&latent)), written.cache)
        };
        let dense = new_pool([6, 16, width], FloatDType::from(dtype), device).expect("small");
        let (q_dense, latent_dense, dense) = write(dense.into());
        let (q_fp8, latent_fp8, cache) = write(pool([6, 16, width], format, dtype, device));
        let what = format!("{tokens} tokens, {dtype:?} on {device:?}");
        assert!(q_dense == q_fp8 && latent_dense == latent_fp8, "{what}");
        assert!(bits(&cache.dense()) == bits(&in_fp8(&dense, format).dense()), "{what}");
    });
}

#[test]
fn ops_fp8_errors() {
    for_each_device(|device| {
        let refused = |format, shape| {
            assert_refused(Pool::new(shape, FloatDType::F32, format, device), Kind::Value, "format");
        };
        for (rope, width) in [(3, 11), (2, 12), (8, 8), (10, 8)] {
            refused(in_row(rope), [1, 2, width]);
            refused(behind_page(rope), [1, 2, width]);
        }
        refused(behind_page(4), [2, 3, 8]);
        // Rows of f16 for queries of f32, and of another width.
        let mut decode = Decode::new(device);
        decode.args.kv_cache = pool([4, 4, 8], in_row(4), DType::F32, device);
        assert_refused(decode.call(), Kind::Shape, "kv_cache");
        if *device == Device::flex() {
            let mut decode = Decode::new(device);
            decode.args.kv_cache = pool([4, 4, 8], in_row(4), DType::F16, device);
            assert_refused(decode.call(), Kind::DType, "kv_cache");
        }
        let cache = pool([1, 4, 8], in_row(4), DType::F32, device);
        let other = cache.clone();
        let args = WriteLatentArgs { cache, slots: ints(&[0], [1], device), latent: zeros([1, 8], device), rope: None };
        let refused = write_latent(args).expect_err("another handle is alive");
        assert!(matches!(refused.error, mla_ops::MlaError::CacheShared { .. }), "{refused}");
        drop(other);
        let args = WriteLatentArgs {
            cache: refused.cache,
            slots: ints(&[0], [1], device),
            latent: zeros([1, 8], device),
            rope: None,
        };
        write_latent(args).expect("the only handle");
        // Parts where there is no kernel for them.
        let indices: Tensor<3, Int> = ints(&[0], [1, 1, 1], device);
        let scope = |rows: Pool| SparseScope::new(rows, indices.clone());
        let fp8 = || pool([1, 4, 8], in_row(4), DType::F32, device);
        let args = SparseMlaArgs::new(zeros([1, 1, 2, 8], device), scope(fp8()));
        let options = mla_ops::SparseMlaOptions::new(4, 1.0);
        let problem = SparseMlaProblem {
            batch: 1,
            query_len: 1,
            heads: 2,
            key_width: 8,
            value_width: 4,
            dtype: DType::F32,
            rows: RowFormat::Fp8 { rope: 4 },
            second_rows: None,
        };
        match explain_path(&problem, device).path {
            Path::Reference => drop(sparse_mla_parts(args, &options).expect("legal")),
            _ => assert_refused(sparse_mla_parts(args, &options), Kind::Value, "scope.rows"),
        }
    });
}
