//! `lightning_index` for many query tokens of a sequence, which Hopper scores together, in tiles; other devices one by one.

use burn::tensor::{DType, Device};
use mla_ops::{IndexForm, LightningIndexProblem, Path, explain_path, lightning_index};
use rand::RngExt;
use rstest::rstest;

use crate::devices::{for_each_device, is_hopper, supports};
use crate::ops_fixture::{int_values, rng};
use crate::ops_lightning_index::{Case, best};

/// On every device with the type. Hopper has to take its kernel for tiles, or not.
#[track_caller]
pub fn with_tiles(case: &Case, tiles: bool, check: impl Fn(&Device)) {
    for_each_device(|device| {
        if !supports(device, case.dtype) {
            return;
        }
        let &Case { heads, width, page_size, dtype, format: keys, .. } = case;
        let (batch, query_len) = (case.visible.len(), case.query_len());
        let problem = LightningIndexProblem { batch, query_len, heads, width, page_size, dtype, keys };
        if is_hopper(device) {
            let choice = explain_path(&problem, device);
            assert_eq!(choice.path == Path::Sm90, tiles, "{choice}");
        }
        check(device);
    });
}

/// What tokens of sequences see: any number of keys.
pub fn any_lens(sequences: usize, tokens: usize, most: usize) -> Vec<Vec<usize>> {
    let mut rng = rng(75);
    let lens = |_| (0..tokens).map(|_| rng.random_range(0..=most)).collect();
    (0..sequences).map(lens).collect()
}

/// The last tokens of sequences of so many keys: each sees one key more than the one before.
pub fn causal(tokens: usize, lens: &[usize]) -> Vec<Vec<usize>> {
    lens.iter().map(|&len| (len + 1 - tokens..=len).collect()).collect()
}

pub fn case(visible: &[Vec<usize>], [heads, width]: [usize; 2], page_size: usize, k: usize, dtype: DType) -> Case {
    let visible: Vec<&[usize]> = visible.iter().map(Vec::as_slice).collect();
    Case { page_size, ..Case::new(&visible, heads, width, k, dtype) }
}

/// As in DeepSeek-V3.2: tokens that fill tiles, one more and one fewer; of sequences that begin within this step, end with a block,
/// a page or anywhere.
#[rstest]
#[case(causal(8, &[128]), 64, 20)]
#[case(causal(9, &[300, 257, 9]), 64, 20)]
#[case(causal(17, &[17, 640, 129, 400]), 16, 30)]
#[case(causal(40, &[40]), 128, 3)]
fn ops_lightning_index_tokens(#[case] visible: Vec<Vec<usize>>, #[case] page_size: usize, #[case] k: usize) {
    let case = case(&visible, [64, 128], page_size, k, DType::BF16);
    with_tiles(&case, true, |device| case.check(device));
}

/// All numbers of heads and channels, pages shorter and longer than a block, both dtypes.
#[rstest]
#[case([16, 64], 8, 33, DType::F16)]
#[case([16, 128], 256, 32, DType::BF16)]
#[case([32, 64], 128, 19, DType::BF16)]
#[case([32, 128], 32, 16, DType::F16)]
#[case([64, 64], 16, 10, DType::F16)]
#[case([128, 64], 64, 7, DType::BF16)]
#[case([128, 128], 8, 4, DType::F16)]
fn ops_lightning_index_tokens_of_any_sizes(
    #[case] sizes: [usize; 2],
    #[case] page_size: usize,
    #[case] tokens: usize,
    #[case] dtype: DType,
) {
    let case = case(&any_lens(3, tokens, 700), sizes, page_size, 40, dtype);
    with_tiles(&case, true, |device| case.check(device));
}

/// Tokens that are scored beside others that see no more keys than are chosen, or none; sequences of only those.
#[rstest]
#[case(vec![vec![0, 9, 150, 8, 7, 0, 0, 0, 10, 0], vec![0; 10], vec![8; 10], vec![8, 8, 8, 8, 8, 8, 8, 8, 8, 131]])]
#[case(vec![vec![0; 16], vec![5; 16]])]
fn ops_lightning_index_tokens_of_few_keys(#[case] visible: Vec<Vec<usize>>) {
    let case = case(&visible, [64, 128], 8, 8, DType::BF16);
    with_tiles(&case, true, |device| case.check(device));
}

/// What tile loads do not take: fewer tokens, shorter pages, other numbers of heads and channels, f32.
#[rstest]
#[case([64, 128], 16, 7, DType::BF16)]
#[case([64, 128], 4, 9, DType::BF16)]
#[case([8, 64], 16, 64, DType::F16)]
#[case([48, 64], 16, 16, DType::F16)]
#[case([64, 32], 16, 8, DType::BF16)]
#[case([64, 128], 16, 8, DType::F32)]
fn ops_lightning_index_tokens_one_by_one(
    #[case] sizes: [usize; 2],
    #[case] page_size: usize,
    #[case] tokens: usize,
    #[case] dtype: DType,
) {
    let case = case(&any_lens(2, tokens, 90), sizes, page_size, 20, dtype);
    with_tiles(&case, false, |device| case.check(device));
}

/// One score that all keys have: the first ones are chosen. Scores below zero, and a negative scale.
#[rstest]
fn ops_lightning_index_tokens_ties(#[values(0.0, -0.5)] scale: f32) {
    let mut case = Case { scale, ..case(&any_lens(2, 9, 300), [64, 128], 16, 25, DType::BF16) };
    case.head_weights.iter_mut().for_each(|weight| *weight = weight.abs());
    with_tiles(&case, true, |device| case.check(device));
    case.q.fill(0.0);
    with_tiles(&case, true, |device| case.check(device));
}

#[rstest]
fn ops_lightning_index_tokens_of_random_numbers(#[values(DType::F16, DType::BF16)] dtype: DType) {
    let case = case(&any_lens(2, 11, 900), [64, 128], 16, 100, dtype);
    with_tiles(&case, true, |device| case.clone().check_random_numbers(device));
}

/// Scores of any size, in their order: the score of a number is the number, the sum of its positive or negative parts. NaN comes
/// last.
#[test]
fn ops_lightning_index_tokens_of_any_scores() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let values = [nan, -inf, -3e38, -2.0, -1.0078125, -1.0, -1e-30, 0.0, 1e-30, 1.0, 1.0078125, 2.0, 3e38, inf];
    let mut rng = rng(76);
    // In bf16 but for the last bits of the great and the small.
    let keys: Vec<f64> = (0..150).map(|_| values[rng.random_range(0..values.len())]).collect();
    let rank = |&key: &f64| match key {
        key if key.is_nan() => -inf,
        key if key == -inf => f64::MIN,
        key => key,
    };
    let ranks: Vec<f64> = keys.iter().map(rank).collect();
    for k in [1, 11, 40, 75, 110, 139, 149] {
        let visible = vec![(keys.len() - 31..=keys.len()).collect()];
        let mut case = Case { scale: 1.0, ..case(&visible, [16, 64], 16, k, DType::BF16) };
        for (head, query) in case.q.chunks_exact_mut(64).enumerate() {
            query.fill(0.0);
            query[0] = if head % 2 == 0 { 1.0 } else { -1.0 };
        }
        // Eight heads give each part.
        (0..)
            .zip(&mut case.head_weights)
            .for_each(|(head, weight)| *weight = if head % 2 == 0 { 0.125 } else { -0.125 });
        for (key, &value) in case.keys[0].chunks_exact_mut(64).zip(&keys) {
            key.fill(0.0);
            key[0] = value;
        }
        with_tiles(&case, true, |device| {
            let actual = lightning_index(case.args(device).0, &case.options(IndexForm::Positions)).expect("legal");
            let expected: Vec<i32> = case.visible[0].iter().flat_map(|&seen| best(&ranks[..seen], k)).collect();
            assert_eq!(int_values(actual), expected, "{k} of {keys:?} on {device:?}");
        });
    }
}

/// More tiles than a cube has units, most of them without a key that is scored.
#[test]
fn ops_lightning_index_tokens_of_many_tiles() {
    let seen = |i: usize| (0..32).map(move |token| if i % 7 == 3 && token == i % 32 { 150 + i % 60 } else { i % 4 });
    let visible: Vec<Vec<usize>> = (0..500).map(|i| seen(i).collect()).collect();
    let case = case(&visible, [16, 64], 16, 3, DType::F16);
    with_tiles(&case, true, |device| case.check(device));
}

/// Small problems that together reach all of the kernel with wgmma, all with the same code: rounds of the ring of keys, tiles of one
/// token, tiles and tokens that are not scored, each token of a tile as the one that sees most.
#[rstest]
#[case(causal(9, &[1000, 140]), 7)]
#[case(any_lens(3, 10, 300), 12)]
#[case(vec![vec![0, 3, 260, 2, 1, 0, 0, 0, 129, 0], vec![3; 10], vec![0, 0, 0, 0, 0, 0, 0, 0, 0, 131]], 3)]
#[case(vec![(0..64).map(|token| if token % 9 == 0 { 132 + token } else { token % 4 }).collect()], 3)]
#[case(causal(9, &[300, 140]), 7)]
#[case(vec![vec![0, 0, 0, 0, 0, 0, 0, 0, 0, 131]], 3)]
fn ops_mutants_index_tiles(#[case] visible: Vec<Vec<usize>>, #[case] k: usize) {
    let case = case(&visible, [64, 128], 16, k, DType::BF16);
    with_tiles(&case, true, |device| case.check(device));
}
