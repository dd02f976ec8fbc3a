//! Scores of as many query tokens at a time as there is room for, and choices from so many keys that they are cut up; the rest
//! of the operation is tested through Burn.

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use mla_kernels::cache_rows::{CacheArg, Fp8Layout, Fp8Scales, RowFormat};
use mla_kernels::lightning_index::{LightningIndexArgs, LightningIndexError, LightningIndexSizes, check, launch};

use crate::support::{arg, for_each_client, read, skip, upload};

const SIZES: LightningIndexSizes = LightningIndexSizes {
    batch: 3,
    query_len: 2,
    heads: 1,
    width: 1,
    pages: 8,
    page_size: 32,
    max_pages: 5,
    k: 40,
    elem: ElemType::Float(FloatKind::F32),
    rows: RowFormat::Dense,
};
const VISIBLE: [i32; 6] = [160, 41, 40, 0, 131, 7];

/// With one channel and a query and weight of 1, scores are the keys. Sequence `b` has its pages from page `b` on.
fn indices(client: &Client, score_rows: usize) -> Vec<i32> {
    let (keys, visible) = (keys(), VISIBLE);
    let ones = vec![1.0_f32; 6];
    let table: Vec<i32> = (0..3).flat_map(|b| (0..5).map(move |page| (b + page) % 8)).collect();
    let scores = upload(client, &vec![u32::MAX; score_rows * SIZES.score_stride()]);
    let candidate_stride = SIZES.candidate_stride(client);
    let candidates = upload(client, &vec![u32::MAX; (score_rows * candidate_stride).max(1)]);
    let indices = upload(client, &[-7; 240]);
    let args = LightningIndexArgs {
        q: arg(&upload(client, &ones), 6),
        keys: CacheArg::Dense(arg(&upload(client, &keys), keys.len())),
        page_table: arg(&upload(client, &table), table.len()),
        head_weights: arg(&upload(client, &ones), 6),
        weights_elem: f32::cube_type(),
        visible: arg(&upload(client, &visible), 6),
        scores: arg(&scores, score_rows * SIZES.score_stride()),
        candidates: arg(&candidates, score_rows * candidate_stride),
        score_rows,
        indices: arg(&indices, 240),
        sizes: SIZES,
        scale: 1.0,
        slots: false,
    };
    launch(client, args).expect("legal");
    read(client, indices)
}

/// Of 8 pages of 32; few different ones.
fn keys() -> Vec<f32> {
    (0..256).map(|i| ((i * 37) % 29) as f32).collect()
}

#[test]
fn any_number_of_rows_at_a_time() {
    let expected: Vec<i32> = (0..6)
        .flat_map(|row| {
            let keys = keys();
            let key = |position: usize| keys[(row / 2 + position / 32) % 8 * 32 + position % 32];
            let mut order: Vec<usize> = (0..VISIBLE[row] as usize).collect();
            order.sort_by(|&a, &b| key(b).total_cmp(&key(a)).then(a.cmp(&b)));
            order.truncate(40);
            order.sort_unstable();
            let mut chosen: Vec<i32> = order.into_iter().map(|position| position as i32).collect();
            chosen.resize(40, -1);
            chosen
        })
        .collect();
    for_each_client(|client| {
        for score_rows in [1, 2, 4, 5, 6, 9] {
            assert_eq!(indices(client, score_rows), expected, "{score_rows} at a time");
        }
    });
}

/// Query tokens that Hopper scores in tiles, which the blocks of rows cut anywhere. A score is the first channel of a key: the other
/// heads have no weight. Ranks beside those of a row stay as they were.
#[test]
fn any_number_of_rows_of_tiles_at_a_time() {
    let sizes = LightningIndexSizes {
        batch: 2,
        query_len: 35,
        heads: 16,
        width: 64,
        pages: 40,
        page_size: 8,
        max_pages: 20,
        k: 6,
        elem: ElemType::Float(FloatKind::F16),
        rows: RowFormat::Dense,
    };
    let rows = 70;
    let one = 0x3c00_u16;
    let firsts = |rows: usize, width: usize, value: &dyn Fn(usize) -> u16| -> Vec<u16> {
        (0..rows * width).map(|i| if i % width == 0 { value(i / width) } else { 0 }).collect()
    };
    // 1, 2, 3 and so on in f16 have bits in the order of the numbers.
    let number = |slot: usize| one + (slot * 37 % 29) as u16;
    let visible: Vec<i32> = (0..rows as i32).map(|row| row * 7 % 161).collect();
    let table: Vec<i32> = (0..40).map(|page| page * 3 % 40).collect();
    let expected = (0..rows).flat_map(|row| {
        let key = |position: usize| number(table[row / 35 * 20 + position / 8] as usize * 8 + position % 8);
        let mut order: Vec<usize> = (0..visible[row] as usize).collect();
        order.sort_by_key(|&position| (u16::MAX - key(position), position));
        order.truncate(sizes.k);
        order.sort_unstable();
        let mut chosen: Vec<i32> = order.into_iter().map(|position| position as i32).collect();
        chosen.resize(sizes.k, -1);
        chosen
    });
    let expected: Vec<i32> = expected.collect();
    for_each_client(|client| {
        if let Err(error) = check(client, &sizes) {
            skip(error);
            return;
        }
        for score_rows in [1, 31, 33, 36, 70] {
            let (stride, candidate_stride) = (sizes.score_stride(), sizes.candidate_stride(client));
            let weights: Vec<f32> = (0..rows * 16).map(|head| if head % 16 == 0 { 1.0 } else { 0.0 }).collect();
            let scores = upload(client, &vec![7_u32; score_rows * stride]);
            let indices = upload(client, &vec![-7; rows * sizes.k]);
            let args = LightningIndexArgs {
                q: arg(&upload(client, &firsts(rows * 16, 64, &|_| one)), rows * 16 * 64),
                keys: CacheArg::Dense(arg(&upload(client, &firsts(320, 64, &number)), 320 * 64)),
                page_table: arg(&upload(client, &table), 40),
                head_weights: arg(&upload(client, &weights), weights.len()),
                weights_elem: f32::cube_type(),
                visible: arg(&upload(client, &visible), rows),
                scores: arg(&scores, score_rows * stride),
                candidates: arg(
                    &upload(client, &vec![0_u32; (score_rows * candidate_stride).max(1)]),
                    candidate_stride,
                ),
                score_rows,
                indices: arg(&indices, rows * sizes.k),
                sizes,
                scale: 1.0,
                slots: false,
            };
            launch(client, args).expect("legal");
            assert_eq!(read::<i32>(client, indices), expected, "{score_rows} at a time");
            if score_rows == rows {
                let ranks: Vec<u32> = read(client, scores);
                for (row, ranks) in ranks.chunks_exact(stride).enumerate() {
                    let seen = Some(visible[row] as usize).filter(|&seen| seen > sizes.k).unwrap_or(0);
                    // A kernel may write those of a whole tile of 64.
                    let kept = ranks[seen.next_multiple_of(64).min(stride)..].iter().all(|&rank| rank == 7);
                    assert!(kept, "row {row} of {seen} keys");
                }
            }
        }
    });
}

/// Query tokens of one sequence with these keys, in pages of one in reverse order. Scores are the keys, which are not negative; NaN is chosen
/// last.
struct Many<'a> {
    keys: &'a [f32],
    visible: &'a [usize],
    k: usize,
}

impl Many<'_> {
    fn sizes(&self) -> LightningIndexSizes {
        let (query_len, pages) = (self.visible.len(), self.keys.len());
        LightningIndexSizes { batch: 1, query_len, pages, page_size: 1, max_pages: pages, k: self.k, ..SIZES }
    }

    fn indices(&self, client: &Client, slots: bool) -> Vec<i32> {
        let (sizes, rows, len) = (self.sizes(), self.visible.len(), self.keys.len());
        // Not all at a time, and what is between the rows is never chosen.
        let score_rows = rows.div_ceil(2);
        let strides = [sizes.score_stride(), sizes.candidate_stride(client)].map(|stride| score_rows * stride);
        let [scores, candidates] = strides.map(|stride| upload(client, &vec![u32::MAX; stride.max(1)]));
        let ones = vec![1.0_f32; rows];
        let visible: Vec<i32> = self.visible.iter().map(|&keys| keys as i32).collect();
        let reversed: Vec<f32> = self.keys.iter().rev().copied().collect();
        let table: Vec<i32> = (0..len as i32).rev().collect();
        let indices = upload(client, &vec![-7; rows * self.k]);
        let args = LightningIndexArgs {
            q: arg(&upload(client, &ones), rows),
            keys: CacheArg::Dense(arg(&upload(client, &reversed), len)),
            page_table: arg(&upload(client, &table), len),
            head_weights: arg(&upload(client, &ones), rows),
            weights_elem: f32::cube_type(),
            visible: arg(&upload(client, &visible), rows),
            scores: arg(&scores, strides[0]),
            candidates: arg(&candidates, strides[1]),
            score_rows,
            indices: arg(&indices, rows * self.k),
            sizes,
            scale: 1.0,
            slots,
        };
        launch(client, args).expect("legal");
        read(client, indices)
    }

    fn expected(&self, visible: usize) -> Vec<i32> {
        let score = |key: usize| if self.keys[key].is_nan() { f32::NEG_INFINITY } else { self.keys[key] };
        let mut order: Vec<usize> = (0..visible).collect();
        order.sort_by(|&a, &b| score(b).total_cmp(&score(a)).then(a.cmp(&b)));
        order.truncate(self.k);
        order.sort_unstable();
        let mut chosen: Vec<i32> = order.into_iter().map(|position| position as i32).collect();
        chosen.resize(self.k, -1);
        chosen
    }

    fn check(&self, client: &Client) {
        let last = self.keys.len() as i32 - 1;
        let [positions, slots] = [false, true].map(|slots| self.indices(client, slots));
        for (row, &visible) in self.visible.iter().enumerate() {
            let what = format!("{} of {visible}, room for {}", self.k, self.keys.len());
            let of_row = row * self.k..(row + 1) * self.k;
            let expected = self.expected(visible);
            let wrong = (0..self.k).find(|&i| positions[of_row.clone()][i] != expected[i]);
            assert!(wrong.is_none(), "{what}: {:?}", wrong.map(|i| (i, positions[of_row.start + i], expected[i])));
            let slot_of = |&position: &i32| if position < 0 { -1 } else { last - position };
            assert!(slots[of_row].iter().copied().eq(expected.iter().map(slot_of)), "slots of {what}");
        }
    }
}

/// Numbers from 0 on, `step` apart and smaller than `different`.
fn numbers(len: usize, step: usize, different: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * step) % different) as f32).collect()
}

/// As many keys as registers of a cube hold, of more and fewer units, and about as many.
#[test]
fn keys_that_fill_cubes() {
    for_each_client(|client| {
        for full in [1024, 4096, 8192, 32768, 65536] {
            for (len, k, different) in [(full - 1, 1000, 29), (full, 1, 977), (full + 1, 700, 65_521)] {
                let visible = [len, len - 3, full / 2 + 1, 701, 700, 3];
                Many { keys: &numbers(len, 48_271, different), visible: &visible, k }.check(client);
            }
        }
    });
}

/// One score that all have; one that all but a few have; the best keys all in one chunk; NaN but for a few keys.
#[test]
fn equal_scores_in_several_chunks() {
    let len = 70_001;
    let best_last: Vec<f32> = (0..len).map(|i| if i < 65_000 { 1.0 } else { 2.0 }).collect();
    let few_better: Vec<f32> = (0..len).map(|i| if i % 701 == 5 { 3.0 } else { 1.0 }).collect();
    let mostly_nan: Vec<f32> = (0..len).map(|i| if i % 701 == 5 { 3.0 } else { f32::NAN }).collect();
    for_each_client(|client| {
        for keys in [&vec![7.0; len], &best_last, &few_better, &mostly_nan] {
            for k in [1, 2000] {
                Many { keys, visible: &[len, 32_769, k + 1, 5], k }.check(client);
            }
        }
    });
}

/// Candidates of candidates: of chunks of 8192 keys, as on devices with cubes of few units, and of 32768.
#[test]
fn three_levels() {
    for_each_client(|client| {
        for (len, k) in [(40_003, 2048), (140_001, 8192)] {
            for different in [29, 131_071] {
                let visible = [len, 131_073.min(len), 32_768, 9000];
                Many { keys: &numbers(len, 48_271, different), visible: &visible, k }.check(client);
            }
        }
    });
}

/// So many are chosen that chunks would not make them fewer.
#[test]
fn more_chosen_than_a_cube_holds() {
    for_each_client(|client| {
        for (k, different) in [(8193, 131_071), (34_000, 29), (34_000, 1), (70_000, 29)] {
            let visible = [66_001, 34_001, 8195, 3];
            Many { keys: &numbers(66_001, 48_271, different), visible: &visible, k }.check(client);
        }
    });
}

/// Numbers without a pattern: those of a linear congruential generator.
fn random(len: usize) -> impl Iterator<Item = f32> {
    let next = |state: &u32| Some(state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
    std::iter::successors(Some(1), next).skip(1).take(len).map(|state| (state >> 8) as f32 / (1 << 24) as f32)
}

/// Numbers with many magnitudes, close together, of few values, rising, falling, and in the order of their last bits, for one
/// key, about half and all but one.
#[test]
fn scores_of_any_distribution() {
    let len = 20_003;
    let exponential = random(len).map(|number| -number.max(1e-9).ln()).collect();
    let magnitudes = random(len).map(|number| (number + 0.5) * f32::powi(2.0, ((number * 5e6) as i32) % 200 - 100));
    let close = random(len).map(|number| 1.0 + number * 2e-4).collect();
    let coarse = random(len).map(|number| (number * 64.0).round() / 64.0).collect();
    let rising = (0..len).map(|i| i as f32).collect();
    let falling = (0..len).map(|i| (len - i) as f32).collect();
    let bits = (0..len as u32).map(|i| f32::from_bits(0x3f80_0000 + (i * 48_271 % 20_011))).collect();
    let with_nan = random(len).map(|number| if number < 0.7 { f32::NAN } else { number }).collect();
    let lists: [Vec<f32>; 8] = [exponential, magnitudes.collect(), close, coarse, rising, falling, bits, with_nan];
    for_each_client(|client| {
        for keys in &lists {
            for k in [1, 2048, 7001, len - 1] {
                Many { keys, visible: &[len, 16_385, 8192, 2049], k }.check(client);
            }
        }
    });
}

/// The best keys are where no guess looks at, or only there: a few in each stretch of 32, or in one part of the list.
#[test]
fn scores_that_mislead() {
    let len = 32_768;
    let noise: Vec<f32> = random(len).collect();
    let list = |better: &dyn Fn(usize) -> bool| -> Vec<f32> {
        (0..len).map(|i| if better(i) { 2.0 + noise[i] } else { noise[i] }).collect()
    };
    // What is looked at: a key of each 32, at this place, by cubes of 1024 units; and of as many by cubes of 256.
    let looked_at = |i: usize| [32, 128].iter().any(|step| (((i / step * 40_503) & 0xffff) >> 5) % step == i % step);
    let lists = [
        list(&looked_at),
        list(&|i| !looked_at(i)),
        list(&|i| !looked_at(i) && i % 7 == 0),
        list(&|i| i < 3000),
        list(&|i| i >= len - 1500),
        list(&|i| i % 32 == 5),
    ];
    for_each_client(|client| {
        for keys in &lists {
            for k in [1, 1024, 2048, 4500] {
                Many { keys, visible: &[len, len - 31], k }.check(client);
            }
        }
    });
}

/// Two scores, the better one of as many keys as are chosen, one fewer or one more; and where shared memory is about full.
#[test]
fn two_scores_around_the_border() {
    for_each_client(|client| {
        for (len, k) in [(32_768, 2048), (5000, 512), (2049, 2047), (513, 512)] {
            for better in [k - 1, k, k + 1] {
                for stride in [1, 3] {
                    // `stride` and `len` have no common divisor or the better ones are at one end.
                    let keys: Vec<f32> = (0..len).map(|i| if i * stride % len < better { 1.5 } else { 0.5 }).collect();
                    Many { keys: &keys, visible: &[len, len - 1], k }.check(client);
                }
            }
        }
        for len in [511, 512, 513, 2047, 2048, 2049, 4095, 4097] {
            Many { keys: &random(len).collect::<Vec<f32>>(), visible: &[len], k: len - 1 }.check(client);
            Many { keys: &random(len).collect::<Vec<f32>>(), visible: &[len], k: 300 }.check(client);
        }
    });
}

/// A table with room for more keys than a buffer has for their scores.
#[test]
fn what_a_device_lacks() {
    for_each_client(|client| {
        assert_eq!(SIZES.score_rows(client), 6);
        let wide = LightningIndexSizes { max_pages: 1 << 40, ..SIZES };
        assert_eq!(wide.score_rows(client), 1);
        let most = client.properties().memory.max_page_size;
        match check(client, &wide) {
            Err(LightningIndexError::Scores { available, .. }) => assert_eq!(available, most),
            other => assert!(4 * wide.score_stride() as u64 <= most, "{other:?}"),
        }
        let slots = LightningIndexSizes { pages: 1 << 30, ..SIZES };
        assert_eq!(check(client, &slots), Err(LightningIndexError::Slots(1 << 35)));
        let layout = |codes, page_rows| Fp8Layout { codes, rope: 0, scales: Fp8Scales::F32BehindPage { page_rows } };
        for layout in [layout(8, 32), layout(4, 16), Fp8Layout { scales: Fp8Scales::F32InRow, ..layout(4, 32) }] {
            let other = LightningIndexSizes { width: 4, rows: RowFormat::Fp8(layout), ..SIZES };
            assert_eq!(check(client, &other), Err(LightningIndexError::Rows(other.rows)));
        }
        let double = LightningIndexSizes { elem: ElemType::Float(FloatKind::F64), ..SIZES };
        assert!(matches!(check(client, &double), Err(LightningIndexError::Device(_))));
        // Nothing to do is legal, whatever the sizes.
        check(client, &LightningIndexSizes { batch: 0, ..wide }).expect("no query token");
    });
}
