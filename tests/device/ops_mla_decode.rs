//! `mla_decode` and `mla_plan` against the oracle.

use burn::tensor::{DType, Tensor};
use mla_ops::{Determinism::Fast, MlaDecodeArgs, MlaQuery, Splits, linear_by_head, mla_decode};
use rstest::rstest;

use crate::devices::{FLOATS, for_each_device, for_each_dtype, is_cuda, is_simulated, supports};
use crate::ops_fixture::{DecodeCase, UNUSED_PAGE, bits, floats, ints, random, restrided, rng};

const WIDTHS: [(usize, usize); 4] = [(576, 512), (512, 512), (80, 64), (7, 5)];
const HEADS: [usize; 8] = [1, 3, 9, 16, 63, 64, 127, 128];

/// Lengths on both sides of the end of a page, in one batch.
fn lens_around(page_size: usize) -> Vec<usize> {
    vec![0, 1, page_size - 1, page_size, page_size + 1, 20, 140]
}

#[rstest]
fn ops_decode_lengths_around_pages(
    #[values(1, 16, 64, 128)] page_size: usize,
    #[values(1, 2, 4)] query_len: usize,
    #[values(false, true)] causal: bool,
) {
    for_each_dtype(|device, dtype| {
        // Every page size meets all widths over the query lengths and masks.
        let widths = WIDTHS[(query_len + usize::from(causal) + page_size.ilog2() as usize) % 4];
        let lens = lens_around(page_size);
        let case = DecodeCase { lens, query_len, page_size, widths, causal, dtype, ..Default::default() };
        case.and_specialised(device).iter().for_each(|case| case.inputs(1).check(device));
    });
}

#[rstest]
fn ops_decode_heads_and_widths(#[values(0, 1, 2, 3)] widths: usize, #[values(false, true)] causal: bool) {
    for_each_device(|device| {
        for (i, heads) in HEADS.into_iter().enumerate() {
            let dtype = FLOATS[(i + widths) % 3];
            if !supports(device, dtype) {
                continue;
            }
            let lens = [vec![65], vec![20, 140], vec![1, 64, 0, 20, 33]][i % 3].clone();
            let (query_len, page_size) = ([1, 2, 4][(i / 3 + widths) % 3], [16, 64][i % 2]);
            let (widths, parts) = (WIDTHS[widths], i % 2 == 1 && WIDTHS[widths].0 > WIDTHS[widths].1);
            let case =
                DecodeCase { lens, query_len, heads, page_size, widths, causal, dtype, parts, ..Default::default() };
            case.and_specialised(device).iter().for_each(|case| case.inputs(2).check(device));
        }
    });
}

#[rstest]
fn ops_decode_splits(
    #[values(
        Splits::Auto,
        Splits::Count(1),
        Splits::Count(3),
        Splits::Count(50),
        Splits::Count(usize::MAX),
        Splits::Tokens(64),
        Splits::Tokens(1),
        Splits::Tokens(usize::MAX)
    )]
    splits: Splits,
    #[values(false, true)] planned: bool,
) {
    for_each_dtype(|device, dtype| {
        // Splits are cut at multiples of 64 keys: between pages, and inside those of 128 and 512.
        let shapes = [(1, true, false, 16), (2, false, true, 128), (4, true, true, 512), (2, true, false, 1)];
        for (query_len, causal, parts, page_size) in shapes {
            // The last split of the sequence of 65 holds one key, which the first three of four queries may not see.
            let lens = vec![0, 1, 63, 64, 65, 140, 300];
            let case =
                DecodeCase { lens, query_len, page_size, causal, splits, dtype, parts, planned, ..Default::default() };
            case.and_specialised(device).iter().for_each(|case| case.inputs(3).check(device));
        }
    });
}

#[rstest]
fn ops_decode_long(#[values(1, 9)] heads: usize, #[values(Splits::Auto, Splits::Count(7))] splits: Splits) {
    for_each_dtype(|device, dtype| {
        let (lens, widths) = (vec![4096, 4001], WIDTHS[0]);
        let case = DecodeCase { lens, heads, page_size: 64, widths, splits, dtype, ..Default::default() };
        case.and_specialised(device).iter().for_each(|case| case.inputs(5).check(device));
    });
}

/// Lengths below the number of query tokens: the first ones see nothing.
#[rstest]
fn ops_decode_queries_that_see_nothing(#[values(Splits::Auto, Splits::Tokens(1))] splits: Splits) {
    for_each_dtype(|device, dtype| {
        let case = DecodeCase { lens: vec![0, 1, 2, 3, 4], query_len: 4, splits, dtype, ..Default::default() };
        for case in case.and_specialised(device) {
            let inputs = case.inputs(6);
            let blind = inputs.expected().lse.iter().filter(|lse| **lse == f64::NEG_INFINITY).count();
            assert_eq!(blind, (4 + 3 + 2 + 1) * case.heads, "what the case is about");
            inputs.check(device);
        }
    });
}

#[test]
fn ops_decode_empty_batches_and_queries() {
    for_each_dtype(|device, dtype| {
        for planned in [false, true] {
            let none = DecodeCase { lens: vec![], planned, dtype, ..Default::default() };
            let (out, lse) = none.inputs(7).run(device);
            assert_eq!((out.dims(), lse.dims()), ([0, 1, 3, 64], [0, 1, 3]));
            let no_query = DecodeCase { query_len: 0, planned, dtype, ..Default::default() };
            let (out, lse) = no_query.inputs(7).run(device);
            assert_eq!((out.dims(), lse.dims()), ([3, 0, 3, 64], [3, 0, 3]));
            assert_eq!((out.dtype(), lse.dtype()), (dtype, DType::F32));
        }
    });
}

/// No key at all: neither a page nor a column of the table.
#[test]
fn ops_decode_without_pages() {
    for_each_dtype(|device, dtype| {
        for case in (DecodeCase { lens: vec![0, 0], dtype, ..Default::default() }).and_specialised(device) {
            let mut inputs = case.inputs(8);
            (inputs.pages, inputs.max_pages) = (0, 0);
            inputs.kv_cache.clear();
            inputs.page_table.clear();
            inputs.check(device);
        }
    });
}

#[test]
fn ops_decode_strided_inputs() {
    for_each_dtype(|device, dtype| {
        for case in (DecodeCase { query_len: 2, dtype, ..Default::default() }).and_specialised(device) {
            let inputs = case.inputs(9);
            let args = inputs.args(device);
            let (batch, max_pages, (width, _)) = (case.lens.len(), inputs.max_pages, case.widths);
            let (out, lse) = inputs.run(device);

            let mut strided = args.clone();
            let MlaQuery::Whole(q) = args.q else { unreachable!("the case says whole") };
            // The same values through other strides: heads before tokens, and a window of wider rows.
            let wide = Tensor::full([batch, 2, 3, width + 9], f32::NAN, (device, dtype));
            let wide = wide.slice_assign([0..batch, 0..2, 0..3, 4..4 + width], q);
            strided.q = MlaQuery::Whole(restrided(wide, 1, 2).narrow(3, 4, width));
            let table = ints(&vec![UNUSED_PAGE; (max_pages + 3) * batch], [max_pages + 3, batch], device);
            let table = table.slice_assign([2..2 + max_pages, 0..batch], args.page_table.transpose());
            strided.page_table = table.narrow(0, 2, max_pages).transpose();
            strided.kv_cache = restrided(args.kv_cache.dense(), 0, 1).into();

            let (strided_out, strided_lse) = mla_decode(strided, &case.options(), None).expect("legal").materialise();
            assert_eq!(bits(&strided_out), bits(&out));
            assert_eq!(bits(&strided_lse), bits(&lse));
        }
    });
}

/// Windows of wider rows that start where a device's tile loads can: no copy is made of them where the kernel takes strides.
#[test]
fn ops_decode_of_rows_that_lie_apart() {
    for_each_dtype(|device, dtype| {
        for case in (DecodeCase { query_len: 2, dtype, ..Default::default() }).and_specialised(device) {
            let inputs = case.inputs(10);
            let MlaDecodeArgs { q, kv_cache, page_table, seq_lens } = inputs.args(device);
            let MlaQuery::Whole(q) = q else { unreachable!("the case says whole") };
            let (out, lse) = inputs.run(device);
            let width = case.widths.0;
            let [batch, query_len, heads, _] = q.dims();
            let wide = Tensor::full([batch, query_len, heads, width + 384], f32::NAN, (device, dtype));
            let wide = wide.slice_assign([0..batch, 0..query_len, 0..heads, 128..128 + width], q);
            let q = MlaQuery::Whole(wide.narrow(3, 128, width));
            let [pages, page_size, _] = kv_cache.dims();
            let wide = Tensor::full([pages, page_size, width + 384], f32::NAN, (device, dtype));
            let wide = wide.slice_assign([0..pages, 0..page_size, 256..256 + width], kv_cache.dense());
            let args = MlaDecodeArgs { q, kv_cache: wide.narrow(2, 256, width).into(), page_table, seq_lens };
            let (apart_out, apart_lse) = mla_decode(args, &case.options(), None).expect("legal").materialise();
            assert_eq!(bits(&apart_out), bits(&out));
            assert_eq!(bits(&apart_lse), bits(&lse));
        }
    });
}

#[rstest]
fn ops_decode_twice_gives_the_same_bits(
    #[values(Splits::Auto, Splits::Count(3), Splits::Tokens(64))] splits: Splits,
    #[values(false, true)] planned: bool,
) {
    for_each_dtype(|device, dtype| {
        let base = DecodeCase { query_len: 2, heads: 64, splits, planned, dtype, ..Default::default() };
        let mut cases = vec![base.clone(), DecodeCase { heads: 9, widths: WIDTHS[0], ..base.clone() }];
        if is_cuda(device) {
            // A simulated GPU would take a quarter of an hour for the longer ones.
            let simulated = is_simulated(device);
            let (lens, widths) = (if simulated { vec![100, 0, 65] } else { vec![1000, 0, 3333, 65] }, WIDTHS[0]);
            cases.push(DecodeCase { lens, heads: 128, page_size: 64, widths, ..base.clone() });
            let lens = if simulated { vec![99; 5] } else { vec![999; 70] };
            cases.push(DecodeCase { lens, query_len: 1, heads: 16, widths: WIDTHS[1], ..base });
        }
        for case in cases {
            let mut inputs = case.inputs(10);
            for path in case.paths(device) {
                inputs.case.path = Some(path);
                inputs.case.assert_path(device);
                let (args, plan) = (inputs.args(device), inputs.case.planned.then(|| inputs.plan(device)));
                let run =
                    || mla_decode(args.clone(), &inputs.case.options(), plan.as_ref()).expect("legal").materialise();
                let (out, lse) = run();
                for _ in 0..3 {
                    let (again, lse_again) = run();
                    let same = (bits(&again), bits(&lse_again)) == (bits(&out), bits(&lse));
                    assert!(same, "{:?} on {device:?}", inputs.case);
                }
            }
        }
    });
}

/// A plan of one's own and the plan that the call makes are the same.
#[test]
fn ops_decode_plan_changes_nothing() {
    for_each_dtype(|device, dtype| {
        let case = DecodeCase { splits: Splits::Tokens(64), dtype, ..Default::default() };
        for case in case.and_specialised(device) {
            let planned = DecodeCase { planned: true, ..case.clone() };
            let (own, shared) = (case.inputs(11).run(device), planned.inputs(11).run(device));
            assert_eq!((bits(&own.0), bits(&own.1)), (bits(&shared.0), bits(&shared.1)));
        }
    });
}

/// With splits of a fixed size a sequence gives the same bits alone and in any company.
#[rstest]
fn ops_decode_token_splits_ignore_neighbours(#[values(1, 64, 100)] tokens: usize, #[values(9, 128)] heads: usize) {
    for_each_dtype(|device, dtype| {
        let base = DecodeCase { heads, splits: Splits::Tokens(tokens), dtype, ..Default::default() };
        for base in base.and_specialised(device) {
            let case = |lens| DecodeCase { lens, ..base.clone() };
            let mut alone = case(vec![300]).inputs(12);
            // Room in the cache for the neighbours' pages.
            let crowd = case(vec![1, 500, 300, 0, 129]).inputs(13);
            let row = heads * base.widths.0;
            alone.q = crowd.q[2 * row..3 * row].to_vec();
            alone.page_table = crowd.page_table[2 * crowd.max_pages..3 * crowd.max_pages].to_vec();
            (alone.max_pages, alone.pages, alone.kv_cache) = (crowd.max_pages, crowd.pages, crowd.kv_cache.clone());

            let (out, lse) = alone.run(device);
            let (crowd_out, crowd_lse) = crowd.run(device);
            assert_eq!(bits(&out), bits(&crowd_out.narrow(0, 2, 1)));
            assert_eq!(bits(&lse), bits(&crowd_lse.narrow(0, 2, 1)));
        }
    });
}

/// With its projection a step has the bits of both one after the other: of a single token with no key, with one split and with
/// several; of more tokens; with widths that no vector divides. The matrices are halves of larger ones.
#[rstest]
#[case::no_key(vec![0], 1)]
#[case::one_key(vec![1], 1)]
#[case::one_split(vec![63], 1)]
#[case::few_splits(vec![400], 1)]
#[case::many_splits(vec![2100], 1)]
#[case::two_tokens(vec![140], 2)]
#[case::two_sequences(vec![65, 140], 1)]
fn ops_decode_project(#[case] lens: Vec<usize>, #[case] query_len: usize) {
    for_each_dtype(|device, dtype| {
        for (widths, heads, outputs) in [((80, 64), 3, 24), ((576, 512), 2, 40), ((7, 5), 3, 2)] {
            let splits = Splits::Tokens(64);
            let case = DecodeCase { lens: lens.clone(), query_len, heads, widths, splits, dtype, ..Default::default() };
            let (mut inputs, rank) = (case.inputs(14), widths.1);
            let both = random(&mut rng(15), heads * 2 * outputs * rank, dtype);
            let value_proj =
                floats(&both, [heads, 2 * outputs, rank], dtype, device).narrow(1, outputs, outputs).into();
            for path in case.paths(device) {
                inputs.case.path = Some(path);
                let (args, options) = (inputs.args(device), inputs.case.options());
                let step = mla_decode(args, &options, None).expect("legal");
                let projected = linear_by_head(step.clone(), &value_proj, Fast).expect("legal");
                let (out, _) = step.materialise();
                let tokens = lens.len() * query_len;
                let expected = linear_by_head(out.reshape([tokens, heads, rank]), &value_proj, Fast).expect("legal");
                assert_eq!(projected.dims(), [tokens, heads, outputs]);
                assert_eq!(bits(&projected), bits(&expected), "{:?} on {device:?}", inputs.case);
            }
        }
    });
}
