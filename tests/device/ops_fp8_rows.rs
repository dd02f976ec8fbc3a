//! Caches of FP8 rows: what is written against a search among all numbers of the format, what is read against dense rows of the same
//! numbers.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use mla_ops::cache::{Pool, RowFormat, new_pool};
use mla_ops::{
    Determinism, MlaDecodeArgs, MlaDecodeProblem, MlaQuery, Path, RopeQuery, RopeWriteArgs, SparseMlaArgs,
    SparseMlaOptions, SparseMlaProblem, SparseScope, Splits, StackedWeight, WriteLatentArgs, available_paths,
    explain_path, mla_decode, rope_write, sparse_mla, sparse_mla_parts, write_latent,
};
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype, is_blackwell, is_hopper, is_slow, skip};
use crate::ops_fixture::{DecodeCase, DecodeInputs, assert_state, bits, floats, ints, random, rng, rounded, values};
use crate::ops_sparse_mla::Case;
use crate::ops_sparse_plan::plan_of;
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

/// Attention over FP8 rows is that over dense rows of the numbers that they stand for, to the bit where one kernel reads both.
fn check_decode(case: DecodeCase, format: RowFormat, device: &Device) {
    check_decode_of(case.inputs(92), format, device);
}

/// By all implementations, or by the one that the case asks for.
pub fn check_decode_of(inputs: DecodeInputs, format: RowFormat, device: &Device) {
    let case = inputs.case.clone();
    let MlaDecodeArgs { q, kv_cache, page_table, seq_lens } = inputs.args(device);
    let kv_cache = in_fp8(&kv_cache, format);
    let rows = kv_cache.format();
    let problem = MlaDecodeProblem {
        batch: case.lens.len(),
        query_len: case.query_len,
        heads: case.heads,
        key_width: case.widths.0,
        value_width: case.widths.1,
        page_size: case.page_size,
        dtype: case.dtype,
        rows,
    };
    let dense = kv_cache.dense();
    let cached = values(dense.clone()).into_iter().map(f64::from).collect();
    let expected = DecodeInputs { kv_cache: cached, ..inputs }.expected();
    for path in case.path.map_or_else(|| available_paths(&problem, device), |path| vec![path]) {
        let options = mla_ops::MlaDecodeOptions { path: Some(path), ..case.options() };
        let decode = |kv_cache: Pool| {
            let (q, page_table, seq_lens) = (q.clone(), page_table.clone(), seq_lens.clone());
            mla_decode(MlaDecodeArgs { q, kv_cache, page_table, seq_lens }, &options, None)
                .expect("legal")
                .materialise()
        };
        let (out, lse) = decode(kv_cache.clone());
        let what = format!("{path} {case:?} on {device:?}");
        if available_paths(&MlaDecodeProblem { rows: RowFormat::Dense, ..problem.clone() }, device).contains(&path)
            && !matches!(path, Path::Sm90 | Path::Sm100)
        {
            let (dense_out, dense_lse) = decode(dense.clone().into());
            assert!(bits(&dense_out) == bits(&out) && bits(&dense_lse) == bits(&lse), "{what}");
        }
        assert_state(&what, (out, lse), &expected);
    }
}

#[rstest]
fn ops_fp8_decode(
    #[values(1, 3, 65)] heads: usize,
    #[values(((576, 512), 64), ((512, 512), 64), ((132, 100), 4), ((12, 4), 8))] widths: ((usize, usize), usize),
    #[values(1, 16, 64)] page_size: usize,
    #[values(in_row, behind_page)] format: fn(usize) -> RowFormat,
) {
    let (widths, rope) = widths;
    for_each_dtype(|device, dtype| {
        if is_slow(device) && heads > 3 && widths.0 > 132 {
            skip(device, format_args!("{heads} heads of {widths:?}"));
            return;
        }
        let query_len = 1 + heads % 2;
        let lens = vec![0, 1, 63, 64, 130, 20];
        let case = DecodeCase { lens, heads, query_len, widths, page_size, dtype, ..Default::default() };
        check_decode(case, format(rope), device);
    });
}

/// Of one token and of several, whose heads fill tiles of 16 rows or not.
#[rstest]
fn ops_fp8_decode_few_heads(
    #[values(15, 17, 32, 33)] heads: usize,
    #[values(1, 2, 3)] query_len: usize,
    #[values(2, 32, 128)] page_size: usize,
) {
    for_each_dtype(|device, dtype| {
        if is_slow(device) && heads * query_len > 32 {
            skip(device, format_args!("{heads} heads of {query_len} tokens"));
            return;
        }
        let (lens, widths) = (vec![193, 0, 1, 64, 70], (576, 512));
        let splits = if page_size == 32 { Splits::Tokens(64) } else { Splits::default() };
        let case = DecodeCase { lens, heads, query_len, widths, page_size, splits, dtype, ..Default::default() };
        check_decode(case, in_row(64), device);
    });
}

/// Of more heads than a tile of one token has with others, in one, two and four tiles of 64.
#[rstest]
fn ops_fp8_decode_many_heads(#[values(33, 65, 130)] heads: usize, #[values(1, 2)] query_len: usize) {
    for_each_dtype(|device, dtype| {
        if is_slow(device) && (tensor_path(device).is_none() || dtype != DType::BF16) {
            skip(device, format_args!("{heads} heads of {dtype:?}"));
            return;
        }
        let (lens, widths) = (vec![193, 0, 1, 70], (576, 512));
        let splits = if query_len == 2 { Splits::Tokens(64) } else { Splits::default() };
        let case = DecodeCase { lens, heads, query_len, widths, page_size: 32, splits, dtype, ..Default::default() };
        check_decode(case, in_row(64), device);
    });
}

/// Scales that grow from key to key, of each 128 channels by another factor, up to 2^30 times those that came before, and queries that
/// are as much smaller there: small ones and such as are larger than numbers of f16.
#[rstest]
fn ops_fp8_decode_of_scales_that_grow(#[values(8, 24)] heads: usize, #[values(-14, 0, 12)] query: i32) {
    for_each_dtype(|device, dtype| {
        if dtype == DType::F16 {
            // Some of these are no numbers of f16.
            return;
        }
        let (lens, widths) = (vec![200, 33], (576, 512));
        let case = DecodeCase { lens, heads, widths, page_size: 64, dtype, ..Default::default() };
        check_decode_of(with_growing_scales(case.inputs(93), query), in_row(64), device);
    });
}

/// In pages of 64 rows.
pub fn with_growing_scales(mut inputs: DecodeInputs, query: i32) -> DecodeInputs {
    let (widths, power) = (inputs.case.widths, |exponent: i32| 2f64.powi(exponent));
    for (row, numbers) in inputs.kv_cache.chunks_exact_mut(widths.0).enumerate() {
        let grown = |channel: usize| (row % 64 / 8 * channel / 128) as i32;
        (0..widths.1).for_each(|channel| numbers[channel] *= power(grown(channel) - 8 - query));
        (widths.1..widths.0).for_each(|channel| numbers[channel] *= power(-query));
    }
    for numbers in inputs.q.chunks_exact_mut(widths.0) {
        (0..widths.0).for_each(|channel| numbers[channel] *= power(query - 7 * (channel / 128) as i32));
    }
    inputs
}

/// Hopper's and Blackwell's kernel of few heads: the bits of a token are its own, whatever tokens come after it, of which it does not see
/// the keys.
#[rstest]
fn ops_fp8_decode_alone_as_before_others(#[values(8, 16)] heads: usize) {
    for_each_dtype(|device, dtype| {
        if dtype != DType::BF16 || !(is_hopper(device) || is_blackwell(device)) {
            return;
        }
        let (query_len, lens, widths) = (3, vec![66, 130, 195], (576, 512));
        let splits = Splits::Count(1);
        let case = DecodeCase { lens, heads, query_len, widths, page_size: 64, splits, dtype, ..Default::default() };
        let options = case.options();
        let args = with_growing_scales(case.inputs(94), 0).args(device);
        let MlaQuery::Whole(q) = args.q else { panic!("one part") };
        let (kv_cache, table, lens) = (in_fp8(&args.kv_cache, in_row(64)), args.page_table, args.seq_lens);
        let decode = |q: Tensor<4>, seq_lens: Tensor<1, Int>| {
            let (q, page_table) = (MlaQuery::Whole(q), table.clone());
            let args = MlaDecodeArgs { q, kv_cache: kv_cache.clone(), page_table, seq_lens };
            mla_decode(args, &options, None).expect("legal").materialise()
        };
        let (out, lse) = decode(q.clone(), lens.clone());
        for token in 0..query_len {
            let (own, own_lse) = decode(q.clone().narrow(1, token, 1), lens.clone() - (query_len - 1 - token) as i32);
            let same = bits(&out.clone().narrow(1, token, 1)) == bits(&own)
                && bits(&lse.clone().narrow(1, token, 1)) == bits(&own_lse);
            assert!(same, "token {token}, {case:?} on {device:?}");
        }
    });
}

#[rstest]
fn ops_fp8_decode_splits(#[values(Splits::Tokens(64), Splits::Count(3))] splits: Splits) {
    for_each_dtype(|device, dtype| {
        let (lens, widths) = (vec![300, 0, 65], (576, 512));
        let case = DecodeCase { lens, heads: 16, widths, splits, page_size: 32, dtype, ..Default::default() };
        check_decode(case, in_row(64), device);
    });
}

#[rstest]
fn ops_fp8_sparse(
    #[values(3, 64, 128)] heads: usize,
    #[values(([576, 512], in_row(64)), ([512, 512], behind_page(64)), ([512, 512], in_row(64)), ([80, 64], in_row(16)))]
    rows: ([usize; 2], RowFormat),
    #[values(0, 5, 130, 300)] most: usize,
    #[values(false, true)] two: bool,
) {
    let (widths, format) = rows;
    for_each_dtype(|device, dtype| {
        if is_slow(device) && heads > 3 && widths[0] > 80 {
            skip(device, format_args!("{heads} heads of {widths:?}"));
            return;
        }
        let pools = if two { vec![[9, 16, most], [5, 32, 70]] } else { vec![[9, 16, most]] };
        let sink = two.then(|| (0..heads).map(|head| head as f32 / 9.0 - 2.0).collect());
        let shape = [1, 1 + heads % 2, heads];
        let case = Case { shape, widths, pools, lengths: two, sink, dtype };
        check_sparse(&case, [format; 2], (Determinism::Fast, false), device);
    });
}

/// A scope of dense rows and one of FP8 rows, either first, in lists that are split, that are not, and that a plan divides.
#[rstest]
fn ops_fp8_sparse_beside_dense_rows(
    #[values(3, 64, 128)] heads: usize,
    #[values(([512, 512], behind_page(64)), ([576, 512], in_row(64)))] rows: ([usize; 2], RowFormat),
    #[values(false, true)] dense_first: bool,
    #[values((Determinism::Fast, false), (Determinism::BatchInvariant, false), (Determinism::Fast, true))] how: (
        Determinism,
        bool,
    ),
) {
    let (widths, format) = rows;
    for_each_dtype(|device, dtype| {
        if is_slow(device) && (heads > 3 || !dense_first) && tensor_path(device).is_none() {
            skip(device, format_args!("{heads} heads of {widths:?}"));
            return;
        }
        let formats = if dense_first { [RowFormat::Dense, format] } else { [format, RowFormat::Dense] };
        let sink = (0..heads).map(|head| head as f32 / 9.0 - 2.0).collect();
        let pools = vec![[20, 16, 200], [40, 32, 700]];
        let case = Case { shape: [2, 1, heads], widths, pools, lengths: true, sink: Some(sink), dtype };
        check_sparse(&case, formats, how, device);
    });
}

/// Long lists that nobody splits, of heads that two cubes share out.
#[rstest]
fn ops_fp8_sparse_of_many_heads(
    #[values(65, 128)] heads: usize,
    #[values(false, true)] two: bool,
    #[values((576, in_row(64)), (512, behind_page(64)))] rows: (usize, RowFormat),
) {
    let (width, format) = rows;
    for_each_dtype(|device, dtype| {
        if is_slow(device) && tensor_path(device).is_none() {
            skip(device, format_args!("{heads} heads"));
            return;
        }
        let pools = if two { vec![[40, 16, 450], [5, 32, 130]] } else { vec![[40, 16, 600]] };
        let case = Case { shape: [1, 2, heads], widths: [width, 512], pools, lengths: true, sink: None, dtype };
        check_sparse(&case, [format; 2], (Determinism::BatchInvariant, false), device);
    });
}

/// A plan divides the lists: of 64 heads and fewer, and of those that two cubes share out.
#[rstest]
fn ops_fp8_sparse_planned(#[values(9, 65, 128)] heads: usize, #[values(false, true)] two: bool) {
    for_each_dtype(|device, dtype| {
        if is_slow(device) && tensor_path(device).is_none() {
            skip(device, format_args!("{heads} heads"));
            return;
        }
        let pools = if two { vec![[40, 16, 70], [9, 32, 330]] } else { vec![[40, 16, 450]] };
        let sink = two.then(|| (0..heads).map(|head| head as f32 / 9.0 - 2.0).collect());
        let case = Case { shape: [3, 1, heads], widths: [576, 512], pools, lengths: true, sink, dtype };
        check_sparse(&case, [in_row(64); 2], (Determinism::Fast, true), device);
    });
}

/// The kernel that multiplies tiles of FP8 rows on the tensor cores of a generation, if the device has one.
fn tensor_path(device: &Device) -> Option<Path> {
    let of_generations = [(is_hopper(device), Path::Sm90), (is_blackwell(device), Path::Sm100)];
    of_generations.into_iter().find_map(|(is, path)| is.then_some(path))
}

/// It runs where queries are bf16 and rows are DeepSeek's, in either scope.
fn assert_path(case: &Case, formats: [RowFormat; 2], device: &Device) {
    let &Case { shape: [batch, query_len, heads], widths: [key_width, value_width], dtype, .. } = case;
    let second_rows = (case.pools.len() > 1).then_some(formats[1]);
    let rows = formats[0];
    let problem = SparseMlaProblem { batch, query_len, heads, key_width, value_width, dtype, rows, second_rows };
    let takes = |format| match format {
        RowFormat::Dense => true,
        RowFormat::Fp8 { rope } => (rope, key_width) == (64, 576),
        RowFormat::Fp8E8m0 { rope } => (rope, key_width) == (64, 512),
        RowFormat::Fp8IndexKeys => false,
    };
    if let Some(made) = tensor_path(device).filter(|_| heads > 32) {
        let expected = dtype == DType::BF16 && value_width == 512 && takes(rows) && second_rows.is_none_or(takes);
        let path = explain_path(&problem, device).path;
        assert_eq!(path == made, expected, "{case:?}, {formats:?} on {device:?}: {path}");
    }
}

/// Against the definition over the rows as they are read back; of either scope in its format.
pub fn check_sparse(
    case: &Case,
    formats: [RowFormat; 2],
    (determinism, planned): (Determinism, bool),
    device: &Device,
) {
    assert_path(case, formats, device);
    let mut inputs = case.inputs();
    let dense = inputs.args(device);
    let quantise = |scope: SparseScope, format| match format {
        RowFormat::Dense => scope,
        _ => SparseScope { rows: in_fp8(&scope.rows, format), ..scope },
    };
    let scope = quantise(dense.scope.clone(), formats[0]);
    let second = dense.second.clone().map(|second| quantise(second, formats[1]));
    let mut args = SparseMlaArgs { scope, second, ..dense };
    args.plan = planned.then(|| plan_of(&args));
    let read = [Some(&args.scope), args.second.as_ref()].into_iter().flatten();
    for (scope, read) in inputs.scopes.iter_mut().zip(read) {
        scope.rows = values(read.rows.dense()).into_iter().map(f64::from).collect();
    }
    let what = format!("{case:?}, {formats:?}, {determinism:?}, on {device:?}");
    let options = SparseMlaOptions { determinism, ..case.options() };
    assert_state(&what, sparse_mla(args, &options).expect("legal"), &inputs.expected());
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
