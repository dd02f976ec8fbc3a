//! `lightning_index` against scores in f64. Inputs are small integers: all sums are exact on every device and in every
//! dtype, equal scores are frequent, and the chosen keys must be exactly those of the definition.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use mla_ops::cache::{Pool, RowFormat};
use mla_ops::{IndexForm, LightningIndexArgs, LightningIndexOptions, lightning_index};
use proptest::prelude::{ProptestConfig, prop, proptest};
use rand::RngExt;
use rand::seq::SliceRandom;
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype, supports};
use crate::ops_fixture::{UNUSED_PAGE, floats, int_values, ints, restrided, rng, rounded};
use crate::ops_fp8_rows::{in_fp8, quantised};

/// Index queries, and keys on pages in random order.
#[derive(Debug, Clone)]
pub struct Case {
    /// Keys that each token sees, of each sequence.
    pub visible: Vec<Vec<usize>>,
    pub heads: usize,
    pub width: usize,
    pub page_size: usize,
    pub k: usize,
    pub scale: f32,
    pub dtype: DType,
    /// How the keys are stored.
    pub format: RowFormat,
    /// `[B, Sq, Hi, di]`.
    pub q: Vec<f64>,
    /// `[B, Sq, Hi]`.
    pub head_weights: Vec<f64>,
    /// Of each sequence `[keys, di]`, as far as a token sees them.
    pub keys: Vec<Vec<f64>>,
}

impl Case {
    /// Integers from -2 to 2, and weights from -3 to 3.
    pub fn new(visible: &[&[usize]], heads: usize, width: usize, k: usize, dtype: DType) -> Self {
        let mut rng = rng(71);
        let visible: Vec<Vec<usize>> = visible.iter().map(|tokens| tokens.to_vec()).collect();
        let rows = visible.concat().len();
        let mut integers =
            |n: usize, most: i32| -> Vec<f64> { (0..n).map(|_| f64::from(rng.random_range(-most..=most))).collect() };
        let (q, head_weights) = (integers(rows * heads * width, 2), integers(rows * heads, 3));
        let keys = visible.iter().map(|tokens| integers(longest(tokens) * width, 2)).collect();
        let (page_size, scale, format) = (16, 0.125, RowFormat::Dense);
        Self { visible, heads, width, page_size, k, scale, dtype, format, q, head_weights, keys }
    }

    /// With keys in FP8 of scales that are not all the same: what they are is exact.
    pub fn in_fp8(mut self) -> Self {
        for (key, numbers) in self.keys.iter_mut().flat_map(|keys| keys.chunks_exact_mut(self.width)).enumerate() {
            numbers.iter_mut().for_each(|number| *number *= [1.0, 0.25, 2.0, 4.0, 0.5][key % 5]);
        }
        Self { format: RowFormat::Fp8IndexKeys, ..self }
    }

    pub fn query_len(&self) -> usize {
        self.visible.first().map_or(0, Vec::len)
    }

    pub fn options(&self, form: IndexForm) -> LightningIndexOptions {
        LightningIndexOptions { k: self.k, scale: self.scale, form }
    }

    /// The arguments and, on the host, the page table `[B, maxP]`. Rows of no key hold NaN, in FP8 with a scale that is none; some
    /// pages are never used.
    pub fn args(&self, device: &Device) -> (LightningIndexArgs, Vec<i32>) {
        let (batch, query_len, (heads, width, page_size)) =
            (self.visible.len(), self.query_len(), (self.heads, self.width, self.page_size));
        let used: Vec<usize> = self.visible.iter().map(|tokens| longest(tokens).div_ceil(page_size)).collect();
        let (max_pages, pages) = (longest(&used) + 1, used.iter().sum::<usize>() + 2);
        let mut ids: Vec<i32> = (0..pages as i32).collect();
        ids.shuffle(&mut rng(72));
        let mut table = vec![UNUSED_PAGE; batch * max_pages];
        let mut pool = vec![f64::NAN; pages * page_size * width];
        for (b, keys) in self.keys.iter().enumerate() {
            for (p, tokens) in keys.chunks(page_size * width).enumerate() {
                let id = ids.pop().expect("enough pages");
                table[b * max_pages + p] = id;
                pool[id as usize * page_size * width..][..tokens.len()].copy_from_slice(tokens);
            }
        }
        let visible: Vec<i32> = self.visible.concat().iter().map(|&keys| keys as i32).collect();
        let dense = Pool::from(floats(&pool, [pages, page_size, width], self.dtype, device));
        let args = LightningIndexArgs {
            q: floats(&self.q, [batch, query_len, heads, width], self.dtype, device),
            keys: if self.format == RowFormat::Dense { dense } else { in_fp8(&dense, self.format) },
            page_table: ints(&table, [batch, max_pages], device),
            head_weights: floats(&self.head_weights, [batch, query_len, heads], DType::F32, device),
            visible: ints(&visible, [batch, query_len], device),
        };
        (args, table)
    }

    /// The scores of a token with all keys that it sees.
    pub fn scores(&self, b: usize, i: usize) -> Vec<f64> {
        let row = (b * self.query_len() + i) * self.heads;
        let dot = |head: usize, key: &[f64]| -> f64 {
            self.q[head * self.width..][..self.width].iter().zip(key).map(|(q, k)| q * k).sum()
        };
        let keys = self.keys[b].chunks_exact(self.width).take(self.visible[b][i]);
        let score = |key: &[f64]| -> f64 {
            let heads = row..row + self.heads;
            let sum: f64 = heads.map(|head| self.head_weights[head] * dot(head, key).max(0.0)).sum();
            f64::from(self.scale) * sum
        };
        keys.map(score).collect()
    }

    /// The chosen positions of all tokens.
    fn expected(&self) -> Vec<i32> {
        let tokens = (0..self.visible.len()).flat_map(|b| (0..self.query_len()).map(move |i| (b, i)));
        tokens.flat_map(|(b, i)| best(&self.scores(b, i), self.k)).collect()
    }

    /// Positions are those of the definition, and slots are the slots of these positions.
    #[track_caller]
    pub fn check(&self, device: &Device) {
        let (args, table) = self.args(device);
        let what = format!("{:?}, {} heads of {} on {device:?}", self.visible, self.heads, self.width);
        let run = |form| lightning_index(args.clone(), &self.options(form)).expect("legal");
        let positions = run(IndexForm::Positions);
        // Weights of the query's dtype are those numbers in f32. Others than before: scores that were not written would be those.
        let own = args.head_weights.clone().neg().cast(FloatDType::from(self.dtype));
        let [narrow, wide] = [own.clone(), own.cast(FloatDType::F32)].map(|head_weights| {
            let args = LightningIndexArgs { head_weights, ..args.clone() };
            lightning_index(args, &self.options(IndexForm::Positions)).expect("legal").into_data()
        });
        assert_eq!(narrow, wide, "{what}");
        assert_eq!(positions.dims(), [self.visible.len(), self.query_len(), self.k], "{what}");
        let positions = int_values(positions);
        assert_eq!(positions, self.expected(), "{what}, pages of {}", self.page_size);
        let max_pages = table.len() / self.visible.len().max(1);
        let slot = |(at, &position): (usize, &i32)| match usize::try_from(position) {
            Err(_) => -1,
            Ok(key) => {
                let b = at / (self.query_len() * self.k);
                table[b * max_pages + key / self.page_size] * self.page_size as i32 + (key % self.page_size) as i32
            }
        };
        let slots: Vec<i32> = positions.iter().enumerate().map(slot).collect();
        assert_eq!(int_values(run(IndexForm::Slots)), slots, "{what}, pages of {}", self.page_size);
    }

    /// Of random numbers, from two sequences: no key that is left out is better than one that is chosen, but for rounding. Twice
    /// the same, and the second sequence alone.
    #[track_caller]
    pub fn check_random_numbers(mut self, device: &Device) {
        let (mut rng, dtype, k) = (rng(73), self.dtype, self.k);
        let mut number = |value: &mut f64| *value = rounded(rng.random_range(-1.0..1.0), dtype);
        self.q.iter_mut().for_each(&mut number);
        self.keys.iter_mut().flatten().for_each(&mut number);
        self.head_weights.iter_mut().for_each(&mut number);
        if self.format == RowFormat::Fp8IndexKeys {
            // The definition is of what the cache holds.
            for key in self.keys.iter_mut().flat_map(|keys| keys.chunks_exact_mut(self.width)) {
                key.copy_from_slice(&quantised(key, -22));
            }
        }
        let (args, tokens) = (self.args(device).0, self.query_len());
        let run = |args| int_values(lightning_index(args, &self.options(IndexForm::Positions)).expect("legal"));
        let actual = run(args.clone());
        assert_eq!(run(args.clone()), actual, "twice on {device:?}");
        for (row, chosen) in actual.chunks_exact(k).enumerate() {
            let scores = self.scores(row / tokens, row % tokens);
            let chosen: Vec<usize> = chosen.iter().filter_map(|&position| usize::try_from(position).ok()).collect();
            assert!(chosen.is_sorted_by(|a, b| a < b), "{chosen:?}");
            assert_eq!(chosen.len(), k.min(scores.len()));
            let lowest = chosen.iter().map(|&key| scores[key]).fold(f64::INFINITY, f64::min);
            let left_out = (0..scores.len()).filter(|key| !chosen.contains(key)).map(|key| scores[key]);
            let highest = left_out.fold(f64::NEG_INFINITY, f64::max);
            // Scores are sums of 64 terms of about 1 in f32.
            assert!(highest <= lowest + 1e-4, "{dtype:?} on {device:?}: {highest} left out, {lowest} chosen");
        }
        let second = LightningIndexArgs {
            q: args.q.narrow(0, 1, 1),
            keys: args.keys,
            page_table: args.page_table.narrow(0, 1, 1),
            head_weights: args.head_weights.narrow(0, 1, 1),
            visible: args.visible.narrow(0, 1, 1),
        };
        assert_eq!(run(second), actual[tokens * k..], "alone on {device:?}");
    }
}

fn longest(lens: &[usize]) -> usize {
    lens.iter().copied().max().unwrap_or(0)
}

/// The positions of the `k` greatest scores, ascending; of equal ones the first. -1 where there are fewer.
pub fn best(scores: &[f64], k: usize) -> Vec<i32> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].partial_cmp(&scores[a]).expect("numbers").then(a.cmp(&b)));
    order.truncate(k);
    order.sort_unstable();
    let mut row: Vec<i32> = order.into_iter().map(|position| position as i32).collect();
    row.resize(k, -1);
    row
}

#[rstest]
fn ops_lightning_index(#[values(1, 8, 64)] heads: usize, #[values(7, 32, 128)] width: usize) {
    for_each_dtype(|device, dtype| {
        for (page_size, visible) in [
            (1, &[&[1][..], &[0], &[20], &[21], &[300], &[64], &[65]][..]),
            (16, &[&[19, 20, 21], &[0, 0, 0], &[257, 3, 130], &[0, 1, 63]]),
            (64, &[&[64], &[65], &[128], &[129]]),
        ] {
            Case { page_size, ..Case::new(visible, heads, width, 20, dtype) }.check(device);
        }
    });
}

/// So many keys of so few tokens that the cube which scores the last of them chooses: each number of loads, tokens that see fewer than are
/// chosen, none, and as many as there are.
#[rstest]
#[case(&[&[1000][..], &[5]], 7)]
#[case(&[&[1030][..], &[0], &[64], &[1024]], 64)]
#[case(&[&[4096, 2047][..]], 512)]
#[case(&[&[1500][..], &[1100]], 1000)]
fn ops_lightning_index_chooses_behind_scores(#[case] visible: &[&[usize]], #[case] k: usize) {
    for_each_device(|device| {
        if supports(device, DType::BF16) {
            Case { page_size: 64, ..Case::new(visible, 64, 128, k, DType::BF16) }.check(device);
        }
    });
}

/// As in DeepSeek-V3.2: small problems that together reach all paths of the kernel with matrix instructions. As many keys
/// as are chosen, one more; groups of keys that end with the table; three stages of groups and more.
#[rstest]
#[case(16, 4, &[&[33][..], &[5]])]
#[case(4, 16, &[&[300, 301][..]])]
#[case(64, 7, &[&[7][..], &[0], &[517]])]
#[case(16, 4, &[&[256][..], &[192], &[4], &[17], &[20]])]
fn ops_mutants_lightning_index(#[case] page_size: usize, #[case] k: usize, #[case] visible: &[&[usize]]) {
    for_each_device(|device| {
        if supports(device, DType::BF16) {
            Case { page_size, ..Case::new(visible, 64, 128, k, DType::BF16) }.check(device);
        }
    });
}

/// The same of keys in FP8, whose stages are twice as many: also of so many tokens that one cube has all keys of each, for more turns
/// than there are stages, and for as many.
#[rstest]
#[case(16, 4, &[&[33][..], &[5]])]
#[case(16, 16, &[&[600, 601][..]])]
#[case(16, 7, &[&[7][..], &[0], &[517]])]
#[case(16, 4, &[&[650, 0, 0, 4, 20, 0, 3, 0, 577][..]])]
#[case(16, 4, &[&[512, 0, 0, 4, 20, 0, 3, 0, 64][..]])]
fn ops_mutants_fp8_index_keys(#[case] page_size: usize, #[case] k: usize, #[case] visible: &[&[usize]]) {
    for_each_device(|device| {
        if supports(device, DType::BF16) {
            Case { page_size, ..Case::new(visible, 64, 128, k, DType::BF16) }.in_fp8().check(device);
        }
    });
}

/// Heads that fill no tile, and more than one tile of them.
#[rstest]
fn ops_lightning_index_heads(#[values(3, 17, 33, 65, 130)] heads: usize) {
    for_each_dtype(|device, dtype| Case::new(&[&[70, 33], &[1, 90]], heads, 40, 9, dtype).check(device));
}

/// As in DeepSeek-V3.2; k of 1; k of all keys, of one fewer, and of more than there are.
#[rstest]
fn ops_lightning_index_k(#[values(1, 2, 255, 256, 257, 2048, 4999, 5000, 5001, 9000)] k: usize) {
    for_each_device(|device| {
        Case { page_size: 64, ..Case::new(&[&[5000, 2048], &[2049, 1]], 2, 8, k, DType::F32) }.check(device);
    });
}

/// A score is one of few, so that the border goes through many equal ones; all scores are equal.
#[test]
fn ops_lightning_index_ties() {
    for_each_device(|device| {
        let mut case = Case::new(&[&[700, 1500], &[3000, 299]], 1, 1, 300, DType::F32);
        case.check(device);
        case.q.fill(0.0);
        case.check(device);
    });
}

/// So many tokens that few planes go over the keys of each, many times over.
#[test]
fn ops_lightning_index_of_many_tokens() {
    let keys = |b: usize| (0..300).map(|i| (7 * i + 300 * b) % 601).collect();
    let visible: Vec<Vec<usize>> = (0..2).map(keys).collect();
    let visible: Vec<&[usize]> = visible.iter().map(Vec::as_slice).collect();
    for_each_dtype(|device, dtype| Case::new(&visible, 8, 32, 20, dtype).check(device));
}

#[test]
fn ops_lightning_index_of_no_visible_key() {
    for_each_dtype(|device, dtype| Case::new(&[&[0, 0], &[0, 0]], 8, 32, 5, dtype).check(device));
}

/// Scores below zero, and of a negative scale: what is 0 is then -0 or +0, and these are equal.
#[rstest]
fn ops_lightning_index_signs(#[values(-0.5, 0.0, -0.0, 2.0)] scale: f32, #[values(-1.0, 1.0)] sign: f64) {
    for_each_device(|device| {
        let mut case = Case { scale, ..Case::new(&[&[400, 37], &[90, 222]], 3, 4, 40, DType::F32) };
        case.head_weights.iter_mut().for_each(|weight| *weight = sign * weight.abs());
        case.check(device);
    });
}

/// Scores of any size, in their order: the score of a number is the number. NaN comes last.
#[test]
fn ops_lightning_index_of_any_scores() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let values = [nan, -inf, -3e38, -2.0, -1.0 - 1e-7, -1.0, -1e-30, -0.0, 0.0, 1e-30, 1.0, 1.0 + 2e-7, 2.0, 3e38, inf];
    let mut keys = values.repeat(3);
    keys.shuffle(&mut rng(74));
    // What the definition compares.
    let rank = |&key: &f64| match key {
        key if key.is_nan() => -inf,
        key if key == -inf => f64::MIN,
        key => f64::from(key as f32),
    };
    let ranks: Vec<f64> = keys.iter().map(rank).collect();
    for_each_device(|device| {
        for k in 1..keys.len() {
            let mut case = Case::new(&[&[keys.len()]], 2, 1, k, DType::F32);
            (case.scale, case.q, case.head_weights) = (1.0, vec![1.0, -1.0], vec![1.0, -1.0]);
            case.keys = vec![keys.clone()];
            let actual = lightning_index(case.args(device).0, &case.options(IndexForm::Positions)).expect("legal");
            assert_eq!(int_values(actual), best(&ranks, k), "{k} of {keys:?} on {device:?}");
        }
    });
}

/// Numbers that are no integers: no key that is left out is better than one that is chosen, but for rounding. Twice the
/// same, and the same whatever else is in the batch.
#[test]
fn ops_lightning_index_of_random_numbers() {
    for_each_dtype(|device, dtype| {
        Case::new(&[&[900, 130], &[40, 2000]], 64, 128, 100, dtype).check_random_numbers(device);
    });
}

#[test]
fn ops_lightning_index_strided() {
    for_each_dtype(|device, dtype| {
        let case = Case::new(&[&[70, 33, 50], &[1, 90, 20]], 5, 24, 9, dtype);
        let args = case.args(device).0;
        let transposed = |tensor: Tensor<2, Int>| {
            let [rows, columns] = tensor.dims();
            ints(&int_values(tensor.transpose()), [columns, rows], device).transpose()
        };
        let strided = LightningIndexArgs {
            q: restrided(args.q, 1, 2),
            keys: restrided(args.keys.dense(), 0, 1).into(),
            page_table: transposed(args.page_table),
            head_weights: restrided(args.head_weights, 0, 2),
            visible: transposed(args.visible),
        };
        let actual = lightning_index(strided, &case.options(IndexForm::Positions)).expect("legal");
        assert_eq!(int_values(actual), case.expected(), "{dtype:?} on {device:?}");
    });
}

/// Keys that are no pool, as they come and transposed. What is behind the last key that is seen is NaN.
#[rstest]
fn ops_lightning_index_dense(#[values(1, 2, 37, 300)] len: usize) {
    for_each_dtype(|device, dtype| {
        let case = Case::new(&[&[len, 0, len / 2], &[1, len - 1, len / 3]], 5, 24, 9, dtype);
        let args = case.args(device).0;
        let mut keys = case.keys.clone();
        keys.iter_mut().for_each(|keys| keys.resize(len * case.width, f64::NAN));
        let keys = floats(&keys.concat(), [2, len, case.width], dtype, device);
        for keys in [keys.clone(), restrided(keys, 0, 1)] {
            let dense =
                LightningIndexArgs::dense(args.q.clone(), keys, args.head_weights.clone(), args.visible.clone());
            let dense = dense.expect("legal");
            let run = |form| int_values(lightning_index(dense.clone(), &case.options(form)).expect("legal"));
            let positions = run(IndexForm::Positions);
            assert_eq!(positions, case.expected(), "{len} keys of {dtype:?} on {device:?}");
            let sequence = |at: usize| (at / (case.query_len() * case.k) * len) as i32;
            let slot = |(at, &position): (usize, &i32)| if position < 0 { -1 } else { sequence(at) + position };
            let slots: Vec<i32> = positions.iter().enumerate().map(slot).collect();
            assert_eq!(run(IndexForm::Slots), slots, "{len} keys of {dtype:?} on {device:?}");
        }
    });
}

#[test]
fn ops_lightning_index_dense_of_nothing() {
    for_each_device(|device| {
        for [batch, query_len, len] in [[2, 3, 0], [0, 3, 4], [2, 0, 4], [0, 0, 0]] {
            let zeros = |shape| Tensor::<3>::zeros(shape, (device, DType::F32));
            let q = Tensor::zeros([batch, query_len, 2, 8], (device, DType::F32));
            let visible = Tensor::zeros([batch, query_len], (device, DType::I32));
            let (keys, weights) = (zeros([batch, len, 8]), zeros([batch, query_len, 2]));
            let args = LightningIndexArgs::dense(q, keys, weights, visible).expect("legal");
            let options = LightningIndexOptions { k: 3, scale: 1.0, form: IndexForm::Slots };
            let indices = lightning_index(args, &options).expect("legal");
            assert_eq!(indices.dims(), [batch, query_len, 3], "{device:?}");
            assert!(int_values(indices).iter().all(|&index| index == -1), "{device:?}");
        }
    });
}

#[test]
fn ops_lightning_index_of_nothing() {
    for_each_device(|device| {
        let run = |[batch, query_len]: [usize; 2], [pages, max_pages]: [usize; 2]| {
            let args = LightningIndexArgs {
                q: Tensor::zeros([batch, query_len, 2, 8], (device, DType::F32)),
                keys: Tensor::<3>::zeros([pages, 4, 8], (device, DType::F32)).into(),
                page_table: Tensor::zeros([batch, max_pages], (device, DType::I32)),
                head_weights: Tensor::zeros([batch, query_len, 2], (device, DType::F32)),
                visible: Tensor::zeros([batch, query_len], (device, DType::I32)),
            };
            let options = LightningIndexOptions { k: 3, scale: 1.0, form: IndexForm::Slots };
            let indices = lightning_index(args, &options).expect("legal");
            assert_eq!(indices.dims(), [batch, query_len, 3], "{device:?}");
            assert!(int_values(indices).iter().all(|&index| index == -1), "{device:?}");
        };
        run([0, 3], [2, 2]);
        run([2, 0], [2, 2]);
        run([2, 3], [2, 0]);
        run([2, 3], [0, 0]);
        run([2, 3], [0, 2]);
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ops_lightning_index_of_any_sizes(
        visible in prop::collection::vec(prop::collection::vec(0..400_usize, 2), 1..4),
        (heads, width) in (1..20_usize, 1..40_usize),
        k in 1..300_usize,
        page_bits in 0..7_u32,
    ) {
        for_each_device(|device| {
            let visible: Vec<&[usize]> = visible.iter().map(Vec::as_slice).collect();
            let case = Case::new(&visible, heads, width, k, DType::F32);
            Case { page_size: 1 << page_bits, ..case }.check(device);
        });
    }
}
