//! Small problems that together reach all paths of Blackwell's decode kernels, for `tools/mutate.sh`; some come from sizes of
//! memory, for what is read past the end of a list to be outside. Device memory comes in units of 512 bytes.

use burn::tensor::DType;
use mla_ops::cache::RowFormat;
use mla_ops::{Determinism, Path, Splits};
use rstest::rstest;

use crate::devices::{for_each_device, is_blackwell};
use crate::ops_fixture::{DecodeCase, DecodeInputs};
use crate::ops_fp8_attention::check_sparse;
use crate::ops_fp8_rows::{behind_page, in_row};
use crate::ops_sparse_mla::Case as SparseCase;

/// Of one cube: one block; queries that see nothing; more pages than lanes; items with and without keys for each cube, with jumps
/// of the maximum, so that outputs are scaled; splits; rows past the end among the lower and the upper rows of a warp; blocks
/// that lack some keys; ends of rows at all keys of a block.
#[rstest]
#[case(DecodeCase { lens: vec![5], heads: 3, ..one_cube() })]
#[case(DecodeCase { lens: vec![300, 65], heads: 16, splits: Splits::Count(1), ..one_cube() })]
#[case(DecodeCase { lens: vec![2, 66], query_len: 4, heads: 5, page_size: 64, ..one_cube() })]
#[case(DecodeCase { lens: vec![1100], splits: Splits::Count(1), ..one_cube() })]
#[case(DecodeCase { lens: vec![70, 0, 0, 65, 1, 200, 3, 130, 0, 64], heads: 12, splits: Splits::Count(1), ..jumping() })]
#[case(DecodeCase { lens: vec![130, 0, 40], heads: 12, splits: Splits::Tokens(64), ..jumping() })]
#[case(DecodeCase { lens: vec![63, 56, 61, 52, 57, 54], splits: Splits::Count(1), ..one_cube() })]
#[case(DecodeCase { lens: vec![64, 72], query_len: 64, heads: 1, ..one_cube() })]
#[case(DecodeCase { lens: vec![1, 67], query_len: 4, heads: 16, ..one_cube() })]
fn ops_mutants_blackwell_one_cube(#[case] case: DecodeCase) {
    check(&case);
}

/// Of a pair of cubes: splits of half a block; pages of more keys than that, and of fewer; items of one to five halves and empty ones for each
/// pair, with jumps of the maximum; rows past the end in each eighth of a tile; ends of rows at all keys of a block, and a pair
/// without items; two pairs of row tiles, of which the first sees nothing, or nothing of an item before one of which it does;
/// no block at all.
#[rstest]
#[case(DecodeCase { lens: vec![140, 0, 1], query_len: 2, heads: 33, splits: Splits::Tokens(64), ..pair() })]
#[case(DecodeCase { lens: vec![130, 33], query_len: 2, page_size: 128, ..pair() })]
#[case(DecodeCase {
    lens: vec![70, 0, 129, 63, 300, 0, 64, 65],
    query_len: 2,
    heads: 33,
    page_size: 32,
    splits: Splits::Count(1),
    ..jumping()
})]
#[case(DecodeCase { lens: vec![130, 40], heads: 76, splits: Splits::Tokens(64), ..jumping() })]
#[case(DecodeCase { lens: vec![70, 5], heads: 85, splits: Splits::Tokens(64), ..jumping() })]
#[case(DecodeCase { lens: vec![70, 5], heads: 93, splits: Splits::Tokens(64), ..jumping() })]
#[case(DecodeCase { lens: vec![128, 190], query_len: 128, heads: 1, splits: Splits::Count(1), ..pair() })]
#[case(DecodeCase { lens: vec![1, 130], query_len: 4, ..pair() })]
#[case(DecodeCase { lens: vec![3, 300, 3, 300], query_len: 128, heads: 2, splits: Splits::Tokens(256), ..pair() })]
#[case(DecodeCase { lens: vec![257], query_len: 256, heads: 1, splits: Splits::Tokens(64), ..pair() })]
#[case(DecodeCase { lens: vec![0], query_len: 2, ..pair() })]
fn ops_mutants_blackwell_pair(#[case] case: DecodeCase) {
    check(&case);
}

/// Page tables without room to spare. The last sequence is the first or a later one of its cube, and its last page the last of 32
/// lanes or not.
#[rstest]
#[case(DecodeCase { lens: lens(1, 31, 4 * 32), splits: Splits::Count(1), ..one_cube() })]
#[case(DecodeCase { lens: lens(0, 31, 4 * 32), heads: 3, splits: Splits::Count(1), ..one_cube() })]
#[case(DecodeCase { lens: lens(0, 31, 32 * 32), heads: 3, splits: Splits::Count(1), ..one_cube() })]
#[case(DecodeCase { lens: lens(65, 31, 32 * 32), splits: Splits::Count(1), ..one_cube() })]
#[case(DecodeCase { lens: lens(0, 1, 64 * 32), splits: Splits::Count(1), ..one_cube() })]
#[case(DecodeCase { lens: lens(0, 7, 16 * 64), heads: 65, splits: Splits::Count(1), ..pair() })]
#[case(DecodeCase { lens: lens(0, 7, 16 * 64), heads: 65, splits: Splits::Tokens(960), ..pair() })]
fn ops_mutants_blackwell_page_table(#[case] case: DecodeCase) {
    let most = case.lens.iter().max().map_or(0, |len| len.div_ceil(case.page_size));
    assert_eq!(case.lens.len() * most * 4 % 512, 0, "{case:?}");
    check(&DecodeCase { spare_pages: 0, ..case });
}

/// As many items as the plan has room for. The last cube has no keys at all, or an empty item at the end.
#[rstest]
#[case(vec![0; 32])]
#[case([vec![0; 30], vec![5, 0]].concat())]
fn ops_mutants_blackwell_items(#[case] lens: Vec<usize>) {
    check(&DecodeCase { lens, splits: Splits::Count(1), ..one_cube() });
}

/// The last block of keys has by far the highest score, for every row of a warp: one cube, and a pair.
#[rstest]
#[case(DecodeCase { lens: vec![66], heads: 16, splits: Splits::Count(1), sharpness: 1.5, ..one_cube() })]
#[case(DecodeCase { lens: vec![130], heads: 72, splits: Splits::Count(1), sharpness: 1.5, ..pair() })]
fn ops_mutants_blackwell_rescaling(#[case] case: DecodeCase) {
    check_of(&case, DecodeInputs::with_last_key_as_queries);
}

/// So many times the same length, and another one.
fn lens(length: usize, times: usize, last: usize) -> Vec<usize> {
    std::iter::repeat_n(length, times).chain([last]).collect()
}

/// FP8 rows, of up to 64 heads and of more: a list of DeepSeek-V3's; two of DeepSeek-V4's, that have lengths, with a sink; one beside a
/// list of dense rows, by a plan.
#[rstest]
#[case([3, 1], [576, 512], vec![[40, 16, 200]], [in_row(64); 2], false)]
#[case([2, 1], [576, 512], vec![[9, 16, 3]], [in_row(64); 2], false)]
#[case([5, 1], [512, 512], vec![[20, 16, 330], [9, 32, 150]], [behind_page(64); 2], false)]
#[case([4, 1], [576, 512], vec![[9, 16, 130], [40, 32, 300]], [RowFormat::Dense, in_row(64)], true)]
fn ops_mutants_sparse_codes(
    #[case] tokens: [usize; 2],
    #[case] widths: [usize; 2],
    #[case] pools: Vec<[usize; 3]>,
    #[case] formats: [RowFormat; 2],
    #[case] planned: bool,
    #[values(33, 64, 65, 128)] heads: usize,
) {
    let (shape, lengths) = ([tokens[0], tokens[1], heads], pools.len() > 1);
    let sink = lengths.then(|| (0..heads).map(|head| head as f32 / 9.0 - 2.0).collect());
    let case = SparseCase { shape, widths, pools, lengths, sink, dtype: DType::BF16 };
    for_each_device(|device| {
        if is_blackwell(device) {
            check_sparse(&case, formats, (Determinism::Fast, planned), device);
        }
    });
}

fn check(case: &DecodeCase) {
    check_of(case, |inputs| inputs);
}

/// The same of altered inputs.
fn check_of(case: &DecodeCase, alter: impl Fn(DecodeInputs) -> DecodeInputs) {
    for_each_device(|device| {
        if case.paths(device)[0] == Path::Sm100 {
            alter(DecodeCase { path: Some(Path::Sm100), ..case.clone() }.inputs(21)).check(device);
        }
    });
}

fn one_cube() -> DecodeCase {
    DecodeCase { widths: (576, 512), dtype: DType::BF16, heads: 2, page_size: 32, ..Default::default() }
}

fn pair() -> DecodeCase {
    DecodeCase { heads: 64, page_size: 64, ..one_cube() }
}

/// Scores of which one sometimes exceeds all before by more than the output's scale bears.
fn jumping() -> DecodeCase {
    DecodeCase { sharpness: 24.0, ..pair() }
}
