//! Small problems that together reach all paths of the kernel that decodes few heads over FP8 rows, for `tools/mutate.sh`: tiles of 16
//! query rows and of 32.

use burn::tensor::DType;
use mla_ops::cache::RowFormat;
use mla_ops::{Path, Splits};
use rstest::rstest;

use crate::devices::{for_each_device, is_blackwell, is_hopper};
use crate::ops_fixture::{DecodeCase, DecodeInputs};
use crate::ops_fp8_attention::{check_decode_of, with_growing_scales};

/// One block of keys; an empty sequence and splits; queries that see nothing; ends of rows at many keys of a block; a second tile of
/// query rows that is not full, and a cube without one.
#[rstest]
#[case(DecodeCase { lens: vec![5], heads: 3, page_size: 32, ..rows() })]
#[case(DecodeCase { lens: vec![5], heads: 27, page_size: 32, ..rows() })]
#[case(DecodeCase { lens: vec![70, 0, 1, 5, 70, 0, 70], heads: 12, splits: Splits::Tokens(64), ..rows() })]
#[case(DecodeCase { lens: vec![70, 0, 1, 5, 70, 0, 70], heads: 20, splits: Splits::Tokens(64), ..rows() })]
#[case(DecodeCase { lens: vec![5], query_len: 3, heads: 13, ..rows() })]
#[case(DecodeCase { lens: vec![1, 66], query_len: 4, heads: 4, ..rows() })]
#[case(DecodeCase { lens: vec![1, 66], query_len: 4, heads: 15, ..rows() })]
#[case(DecodeCase { lens: vec![16, 65], query_len: 16, heads: 1, ..rows() })]
#[case(DecodeCase { lens: vec![32, 40], query_len: 32, heads: 1, ..rows() })]
fn ops_mutants_fp8_decode(#[case] case: DecodeCase) {
    check(&case, |inputs| inputs);
}

/// Pages of one row, of which lanes have two each, of some, and of more than a block has; blocks that lack some keys.
#[rstest]
#[case(1, vec![101, 62])]
#[case(2, vec![33, 63])]
#[case(16, vec![31, 32])]
#[case(128, vec![62])]
fn ops_mutants_fp8_decode_pages(#[case] page_size: usize, #[case] lens: Vec<usize>, #[values(5, 21)] heads: usize) {
    check(&DecodeCase { lens, heads, page_size, splits: Splits::Count(1), ..rows() }, |inputs| inputs);
}

/// Page tables without room to spare: none is read behind the last entry. The last sequence is opened as the first, among the first
/// blocks of a cube or behind them; its last block lacks more keys than pages of one row hide, and than lanes of larger ones do.
#[rstest]
#[case(1, vec![0, 0, 0, 0, 0, 0, 0, 16])]
#[case(1, vec![5, 0, 0, 0, 0, 0, 0, 16])]
#[case(1, vec![5, 5, 5, 5, 5, 0, 0, 16])]
#[case(1, vec![0, 0, 0, 96])]
#[case(1, vec![0, 0, 0, 288])]
#[case(8, vec![0, 0, 0, 256])]
#[case(8, vec![0, 512])]
fn ops_mutants_fp8_decode_page_table(#[case] page_size: usize, #[case] lens: Vec<usize>) {
    let most = lens.iter().max().map_or(0, |len| len.div_ceil(page_size));
    assert_eq!(lens.len() * most * 4 % 512, 0, "units of memory");
    let splits = Splits::Count(1);
    check(&DecodeCase { lens, heads: 2, page_size, splits, spare_pages: 0, ..rows() }, |inputs| inputs);
}

/// As many items as the plan has room for, the last of them without keys: none is read behind them.
#[rstest]
fn ops_mutants_fp8_decode_last_items(#[values(0, 1)] with_keys: usize) {
    let lens = (0..32).map(|i| if (24..24 + with_keys).contains(&i) { 5 } else { 0 }).collect();
    check(&DecodeCase { lens, heads: 2, splits: Splits::Count(1), ..rows() }, |inputs| inputs);
}

/// More blocks than stages, of several items of one cube, in pages of one row. Blocks that lack some keys, where zeros come instead: of
/// each number of steps, where what lies behind is being computed. All keys of a stage come to where zeros were.
#[rstest]
fn ops_mutants_fp8_decode_ring(#[values(2, 22)] heads: usize) {
    let lens = vec![5, 192, 62, 63, 1, 61, 128];
    check(&DecodeCase { lens, heads, page_size: 1, splits: Splits::Count(1), ..rows() }, |inputs| inputs);
}

/// What was added before is scaled down: for scales that grow; for one key in each block whose scales are the largest by far, another
/// one of each 128 channels, and queries with one such channel; not for scales that stay as they are; for a last key with the highest score, of queries some of which
/// have nothing but rotary channels, or next to nothing.
#[rstest]
fn ops_mutants_fp8_decode_rescaling(#[values(12, 28)] heads: usize) {
    let case = DecodeCase { lens: vec![40, 130], heads, splits: Splits::Count(1), ..rows() };
    check(&case, |inputs| with_growing_scales(inputs, 12));
    check(&DecodeCase { lens: vec![125], ..case.clone() }, with_outliers);
    check(&DecodeCase { lens: vec![200], ..case.clone() }, with_scales_of_groups);
    check(&DecodeCase { lens: vec![100, 1], sharpness: 1.5, ..case }, |inputs| {
        let mut inputs = inputs.with_last_key_as_queries();
        let queries = inputs.q.chunks_exact_mut(576).step_by(3);
        queries.enumerate().for_each(|(i, query)| query[..512].fill(if i == 0 { 0.0 } else { 2f64.powi(-112) }));
        inputs
    });
}

/// Each 128 channels have scales of their own size, which do not grow from block to block.
fn with_scales_of_groups(mut inputs: DecodeInputs) -> DecodeInputs {
    let power = |channel: usize| 2f64.powi(4 * (channel / 128) as i32 - 8);
    for numbers in inputs.kv_cache.chunks_exact_mut(576) {
        (0..512).for_each(|channel| numbers[channel] *= power(channel));
    }
    for numbers in inputs.q.chunks_exact_mut(576) {
        (0..512).for_each(|channel| numbers[channel] /= power(channel));
    }
    inputs
}

/// Of pages of a block each. Lanes differ by each of their bits in which has the largest number.
fn with_outliers(mut inputs: DecodeInputs) -> DecodeInputs {
    for (block, &page) in inputs.page_table.iter().take(2).enumerate() {
        let keys = inputs.kv_cache[page as usize * 64 * 576..][..64 * 576].chunks_exact_mut(576);
        for (key, numbers) in keys.enumerate() {
            for (group, numbers) in numbers[..512].chunks_exact_mut(128).enumerate() {
                let largest = key == 13 * group + 3;
                let factor = [[0.125, 1.0], [0.125, 64.0]][block][usize::from(largest)];
                numbers.iter_mut().for_each(|number| *number *= factor);
            }
        }
    }
    for (row, query) in inputs.q.chunks_exact_mut(576).enumerate() {
        let lane = [1, 2, 4, 8, 16, 3, 21, 31][(row + row / 4) % 8];
        query[..512].iter_mut().for_each(|number| *number *= 0.0625);
        query[128 * (row % 4) + 4 * lane + row / 8] = 1.0;
    }
    inputs
}

fn rows() -> DecodeCase {
    DecodeCase { widths: (576, 512), page_size: 64, dtype: DType::BF16, ..Default::default() }
}

/// Checks a case on GPUs that have the kernel.
fn check(case: &DecodeCase, alter: impl Fn(DecodeInputs) -> DecodeInputs) {
    for_each_device(|device| {
        let path = if is_blackwell(device) { Path::Sm100 } else { Path::Sm90 };
        if is_hopper(device) || is_blackwell(device) {
            let case = DecodeCase { path: Some(path), ..case.clone() };
            check_decode_of(alter(case.inputs(94)), RowFormat::Fp8 { rope: 64 }, device);
        }
    });
}
