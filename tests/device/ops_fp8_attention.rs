//! Attention over caches of FP8 rows, against dense rows of the numbers that they stand for.

use burn::tensor::{DType, Device, Int, Tensor};
use mla_ops::cache::{Pool, RowFormat};
use mla_ops::{
    Determinism, MlaDecodeArgs, MlaDecodeProblem, MlaQuery, Path, SparseMlaArgs, SparseMlaOptions, SparseMlaProblem,
    SparseScope, Splits, available_paths, explain_path, mla_decode, sparse_mla,
};
use rstest::rstest;

use crate::devices::{for_each_dtype, is_blackwell, is_hopper, is_slow, skip};
use crate::ops_fixture::{DecodeCase, DecodeInputs, assert_state, bits, values};
use crate::ops_fp8_rows::{behind_page, in_fp8, in_row};
use crate::ops_sparse_mla::Case;
use crate::ops_sparse_plan::plan_of;

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
