//! `sample` against plain f64 loops, and against exact probabilities.

use burn::tensor::{DType, Device, Tensor};
use mla_ops::{SampleArgs, SampleParams, SampleRows, Sampled, sample};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype, is_slow};
use crate::ops_fixture::{floats, int_values, ints, random, restrided, rng, rounded};

const GREEDY: SampleParams = SampleParams::GREEDY;

fn warm(temperature: f32) -> SampleParams {
    SampleParams { temperature, ..GREEDY }
}

/// The tokens of rows that have seen nothing.
fn tokens_of(logits: Tensor<2>, rows: &[SampleParams]) -> Vec<i32> {
    let rows = SampleRows::new(rows, &logits.device()).expect("legal");
    int_values(sample(SampleArgs { logits, rows: &rows, seen: None }).expect("legal").tokens)
}

fn f32_rows(rows: &[&[f32]], device: &Device) -> Tensor<2> {
    let values: Vec<f64> = rows.concat().into_iter().map(f64::from).collect();
    floats(&values, [rows.len(), rows[0].len()], DType::F32, device)
}

/// Tokens that may be drawn with their probabilities, the most probable first. A filter's border may fall on either side of tokens
/// that are this close to it.
struct Kept {
    tokens: Vec<(usize, f64)>,
}

/// From the definitions, in f64: the filters with borders moved by `slack`, outwards where it is positive.
fn kept(logits: &[f64], params: &SampleParams, slack: f64) -> Kept {
    let is_token = |logit: f64| !logit.is_nan() && logit > f64::NEG_INFINITY;
    let mut all: Vec<(usize, f64)> = Vec::new();
    for (token, &logit) in logits.iter().enumerate() {
        if is_token(logit) {
            all.push((token, logit.min(f64::from(f32::MAX))));
        }
    }
    all.sort_by(|a, b| b.1.partial_cmp(&a.1).expect("no NaN").then(a.0.cmp(&b.0)));
    let Some(&(_, largest)) = all.first() else { return Kept { tokens: Vec::new() } };
    let weight = |logit: f64| ((logit - largest) / f64::from(params.temperature)).exp();
    if params.top_k > 0 {
        let border = all[(params.top_k as usize).min(all.len()) - 1].1;
        all.retain(|&(_, logit)| logit >= border);
    }
    if params.top_p < 1.0 {
        let total: f64 = all.iter().map(|&(_, logit)| weight(logit)).sum();
        let enough = total * (f64::from(params.top_p) + slack);
        let (mut above, mut border) = (0.0, f64::INFINITY);
        for &(_, logit) in &all {
            if above >= enough && above > 0.0 {
                break;
            }
            border = logit;
            above += weight(logit);
        }
        all.retain(|&(_, logit)| logit >= border);
    }
    all.retain(|&(_, logit)| weight(logit) >= f64::from(params.min_p) * (1.0 - slack));
    let total: f64 = all.iter().map(|&(_, logit)| weight(logit)).sum();
    Kept { tokens: all.into_iter().map(|(token, logit)| (token, weight(logit) / total)).collect() }
}

/// Philox4x32-10 from its paper (Salmon et al., SC 2011): the first 64 bits as a number in 0 .. 1.
fn uniform(seed: u64, position: u32) -> f64 {
    let (mut x, mut k) = ([position, 0, 0, 0], [seed as u32, (seed >> 32) as u32]);
    for round in 0..10 {
        if round > 0 {
            k = [k[0].wrapping_add(0x9E3779B9), k[1].wrapping_add(0xBB67AE85)];
        }
        let (p, q) = (0xD2511F53u64 * u64::from(x[0]), 0xCD9E8D57u64 * u64::from(x[2]));
        x = [(q >> 32) as u32 ^ x[1] ^ k[0], q as u32, (p >> 32) as u32 ^ x[3] ^ k[1], p as u32];
    }
    (f64::from(x[0]) + f64::from(x[1]) / 2f64.powi(32)) / 2f64.powi(32)
}

/// Whether the token is the one at this part of the probability, as far as f32 tells.
fn is_at(kept: &Kept, token: i32, part: f64) -> bool {
    let mut before = 0.0;
    for &(id, probability) in &kept.tokens {
        if id as i32 == token {
            return part >= before - 1e-5 && part <= before + probability + 1e-5;
        }
        before += probability;
    }
    false
}

#[track_caller]
fn assert_drawn(what: &str, logits: &[f64], params: &SampleParams, token: i32) {
    if params.temperature == 0.0 {
        let best = kept(logits, &SampleParams { temperature: 1.0, ..GREEDY }, 0.0).tokens;
        assert_eq!(token, best.first().map_or(-1, |best| best.0 as i32), "{what}");
        return;
    }
    let part = uniform(params.seed, params.position);
    let borders = [0.0, 1e-5, -1e-5].map(|slack| kept(logits, params, slack));
    if borders[0].tokens.is_empty() {
        assert_eq!(token, -1, "{what}");
        return;
    }
    let as_expected = borders.iter().any(|kept| is_at(kept, token, part));
    assert!(as_expected, "{what}: token {token} at {part}, {params:?}");
}

/// Filters alone, together, and none.
fn filters(rng: &mut ChaCha8Rng, row: usize) -> SampleParams {
    let base = SampleParams { temperature: rng.random_range(0.3..2.0), seed: rng.random(), ..GREEDY };
    let base = SampleParams { position: rng.random(), ..base };
    let (top_k, top_p, min_p) = (rng.random_range(1..60), rng.random_range(0.05..0.99), rng.random_range(0.01..0.5));
    match row % 8 {
        0 => base,
        1 => SampleParams { top_k, ..base },
        2 => SampleParams { top_p, ..base },
        3 => SampleParams { min_p, ..base },
        4 => SampleParams { top_k, top_p, ..base },
        5 => SampleParams { top_k, top_p, min_p, ..base },
        6 => SampleParams { temperature: 0.0, ..base },
        _ => SampleParams { top_p, min_p, temperature: 0.05, ..base },
    }
}

/// Logits of a spread at which a vocabulary has some tokens that matter, and a long tail.
fn logits(rng: &mut ChaCha8Rng, n: usize, dtype: DType) -> Vec<f64> {
    random(rng, n, DType::F32).into_iter().map(|x| rounded(x * 4.0 + x * x * x * 8.0, dtype)).collect()
}

#[rstest]
fn ops_sample(#[values(1, 2, 63, 1000, 129_280)] vocab: usize) {
    for_each_dtype(|device, dtype| {
        let rows = if vocab > 1000 { 8 } else { 24 };
        let rng = &mut rng(31);
        let values = logits(rng, rows * vocab, dtype);
        let params: Vec<_> = (0..rows).map(|row| filters(rng, row)).collect();
        let there = floats(&values, [rows, vocab], dtype, device);
        let tokens = tokens_of(there.clone(), &params);
        for (row, logits) in values.chunks(vocab).enumerate() {
            let what = format!("row {row} of {vocab} tokens, {dtype:?} on {device:?}");
            assert_drawn(&what, logits, &params[row], tokens[row]);
        }
        let view = restrided(there, 0, 1);
        assert_eq!(tokens_of(view, &params), tokens, "a view, {dtype:?} on {device:?}");
    });
}

/// A row's token depends on nothing but the row: not on its place, and not on rows of NaN beside it.
#[test]
fn ops_sample_of_a_row_is_independent_of_its_neighbours() {
    for_each_dtype(|device, dtype| {
        let (rows, vocab) = (9, 5000);
        let rng = &mut rng(32);
        let values = logits(rng, rows * vocab, dtype);
        let params: Vec<_> = (0..rows).map(|row| filters(rng, row)).collect();
        let all = tokens_of(floats(&values, [rows, vocab], dtype, device), &params);
        for row in 0..rows {
            let own = &values[row * vocab..][..vocab];
            let alone = tokens_of(floats(own, [1, vocab], dtype, device), &params[row..=row]);
            assert_eq!(alone[0], all[row], "row {row} alone, {dtype:?} on {device:?}");
            let padding = vec![f64::NAN; vocab];
            let beside = floats(&[&padding, own, &padding].concat(), [3, vocab], dtype, device);
            let beside = tokens_of(beside, &[warm(1.0), params[row], GREEDY]);
            assert_eq!(beside, [-1, all[row], -1], "row {row} beside padding, {dtype:?} on {device:?}");
        }
        let reversed: Vec<f64> = values.chunks(vocab).rev().flatten().copied().collect();
        let params: Vec<_> = params.into_iter().rev().collect();
        let mut tokens = tokens_of(floats(&reversed, [rows, vocab], dtype, device), &params);
        tokens.reverse();
        assert_eq!(tokens, all, "in the reverse order, {dtype:?} on {device:?}");
    });
}

/// Tokens that are drawn of one row, many times.
fn draws(row: &[f32], params: SampleParams, n: usize, device: &Device) -> Vec<u32> {
    let rows: Vec<_> = (0..n as u32).map(|position| SampleParams { position, ..params }).collect();
    let logits = f32_rows(&[row], device).repeat_dim(0, n);
    let mut counts = vec![0; row.len()];
    for token in tokens_of(logits, &rows) {
        counts[usize::try_from(token).expect("a token")] += 1;
    }
    counts
}

/// The tokens that can be drawn of a row.
fn support(row: &[f32], params: SampleParams, device: &Device) -> Vec<usize> {
    let counts = draws(row, SampleParams { seed: 77, ..params }, 300, device);
    counts.iter().enumerate().filter(|(_, count)| **count > 0).map(|(token, _)| token).collect()
}

/// Probabilities 0.4, 0.3, 0.2 and 0.1: what each filter leaves, as transformers' processors do in this order.
#[test]
fn ops_sample_filters_literal_numbers() {
    let row = [0.1f32, 0.4, 0.2, 0.3].map(f32::ln);
    for_each_device(|device| {
        let left = |params: SampleParams| support(&row, params, device);
        let base = warm(1.0);
        assert_eq!(left(base), [0, 1, 2, 3]);
        assert_eq!(left(SampleParams { top_k: 2, ..base }), [1, 3]);
        assert_eq!(left(SampleParams { top_k: 9, ..base }), [0, 1, 2, 3]);
        assert_eq!(left(SampleParams { top_p: 0.69, ..base }), [1, 3]);
        assert_eq!(left(SampleParams { top_p: 0.71, ..base }), [1, 2, 3]);
        assert_eq!(left(SampleParams { top_p: 1e-9, ..base }), [1]);
        assert_eq!(left(SampleParams { min_p: 0.51, ..base }), [1, 3]);
        assert_eq!(left(SampleParams { min_p: 0.49, ..base }), [1, 2, 3]);
        assert_eq!(left(SampleParams { min_p: 1.0, ..base }), [1]);
        // Top-p is of what top-k leaves: 4/7 and 3/7.
        assert_eq!(left(SampleParams { top_k: 2, top_p: 0.56, ..base }), [1]);
        assert_eq!(left(SampleParams { top_k: 2, top_p: 0.58, ..base }), [1, 3]);
        // Min-p comes after top-p. Before it, as in vLLM, top-p would be of 0.4 and 0.3, and 0.57 of that is reached with the first.
        assert_eq!(left(SampleParams { top_p: 0.57, min_p: 0.6, ..base }), [1, 3]);
        // The temperature comes before top-p: squares 16, 9, 4 and 1 of 30.
        assert_eq!(left(SampleParams { temperature: 0.5, top_p: 0.53, ..base }), [1]);
        assert_eq!(left(SampleParams { temperature: 0.5, top_p: 0.54, ..base }), [1, 3]);
    });
}

/// Tokens that are as probable as the last one of a filter stay; of the most probable ones the first is greedy's.
#[test]
fn ops_sample_keeps_ties() {
    let row = [1.0f32, 2.0, 0.0, 1.0, 2.0, -0.0, 1.0];
    for_each_device(|device| {
        let left = |params: SampleParams| support(&row, params, device);
        assert_eq!(left(SampleParams { top_k: 1, ..warm(1.0) }), [1, 4]);
        assert_eq!(left(SampleParams { top_k: 3, ..warm(1.0) }), [0, 1, 3, 4, 6]);
        assert_eq!(left(SampleParams { top_k: 6, ..warm(1.0) }), [0, 1, 2, 3, 4, 5, 6], "0 is as large as -0");
        assert_eq!(left(SampleParams { top_p: 0.3, ..warm(1.0) }), [1, 4]);
        assert_eq!(left(SampleParams { top_p: 0.7, ..warm(1.0) }), [0, 1, 3, 4, 6]);
        assert_eq!(tokens_of(f32_rows(&[&row], device), &[GREEDY]), [1]);
    });
}

#[test]
fn ops_sample_of_nan_and_infinite_logits() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for_each_device(|device| {
        for temperature in [0.0, 1e-30, 1.0, 1e30] {
            let rows: [&[f32]; 6] = [
                &[nan, -inf, 3.0, nan],
                &[1.0, inf, nan, 3.0],
                &[nan, nan, nan, nan],
                &[-inf, -inf, -inf, -inf],
                &[f32::MIN, -inf, nan, -inf],
                &[-inf, f32::MIN, inf, nan],
            ];
            let tokens = tokens_of(f32_rows(&rows, device), &[warm(temperature); 6]);
            // Whatever is finite is as probable at a temperature of 1e30, but for the largest numbers.
            let first = if temperature == 1e30 { tokens[1] } else { 1 };
            assert!([0, 1, 3].contains(&first));
            assert_eq!(tokens, [2, first, -1, -1, 0, 2], "temperature {temperature} on {device:?}");
        }
    });
}

/// Extreme temperatures: neither underflow nor overflow.
#[test]
fn ops_sample_at_extreme_temperatures() {
    for_each_device(|device| {
        for temperature in [1e-44, 1e-37, 1e-30] {
            assert_eq!(support(&[1.0, 1.5, -3.0], warm(temperature), device), [1], "{temperature}");
        }
        for temperature in [1e30, 3e38] {
            assert_eq!(support(&[1.0, 1.5, -3.0], warm(temperature), device), [0, 1, 2], "{temperature}");
        }
        assert_eq!(support(&[f32::MAX, f32::MIN, 0.0], warm(1.0), device), [0]);
    });
}

/// The penalty of logits 2, 1, -1 and 0.5, and the tokens chosen in the mask.
#[test]
fn ops_sample_penalises_tokens_seen() {
    for_each_device(|device| {
        let row: &[f32] = &[2.0, 1.0, -1.0, 0.5];
        let params = SampleParams { repetition_penalty: 4.0, seen_row: Some(1), ..GREEDY };
        // Of 3 rows of tokens seen one belongs to the first row of logits, one to the third. Bit 2 is set in the first one.
        let mut seen = ints(&[7, 4, 0], [3, 1], device);
        let rows = [params, GREEDY, SampleParams { seen_row: Some(2), ..GREEDY }];
        let rows = SampleRows::new(&rows, device).expect("legal");
        // 2, then 1, as 2 / 4 and 0.5 are equal then, the first of three.
        for (chosen, after) in [(0, 0b101), (1, 0b111), (0, 0b111)] {
            let logits = f32_rows(&[row, row, row], device);
            let sampled = sample(SampleArgs { logits, rows: &rows, seen: Some(seen) }).expect("legal");
            assert_eq!(int_values(sampled.tokens), [chosen, 0, 0], "on {device:?}");
            seen = sampled.seen.expect("it was given");
            assert_eq!(int_values(seen.clone()), [7, after, 1], "on {device:?}");
            seen = ints(&[7, after, 1], [3, 1], device);
        }
        // Negative ones become smaller, too: -1 is -1.75 then.
        let params = SampleParams { repetition_penalty: 1.75, seen_row: Some(0), ..GREEDY };
        let rows = SampleRows::new(&[params], device).expect("legal");
        let (logits, seen) = (f32_rows(&[&[-1.0, -3.0, -1.5]], device), Some(ints(&[1], [1, 1], device)));
        let sampled = sample(SampleArgs { logits, rows: &rows, seen }).expect("legal");
        assert_eq!(int_values(sampled.tokens), [2], "on {device:?}");
    });
}

/// The same of many tokens, by loops.
#[test]
fn ops_sample_penalises_as_loops_do() {
    for_each_dtype(|device, dtype| {
        let (rows, vocab) = (4, 3001);
        let (rng, words) = (&mut rng(33), 3001usize.div_ceil(32));
        let values = logits(rng, rows * vocab, dtype);
        let bits: Vec<i32> = (0..rows * words).map(|_| rng.random()).collect();
        let with = |row| SampleParams { repetition_penalty: 1.7, seen_row: Some(row as u32), ..filters(rng, row) };
        let params: Vec<_> = (0..rows).map(with).collect();
        let on_device = SampleRows::new(&params, device).expect("legal");
        let seen = Some(ints(&bits, [rows, words], device));
        let logits = floats(&values, [rows, vocab], dtype, device);
        let Sampled { tokens, seen } = sample(SampleArgs { logits, rows: &on_device, seen }).expect("legal");
        let (tokens, seen) = (int_values(tokens), int_values(seen.expect("it was given")));
        for row in 0..rows {
            let is_seen = |token: usize| (bits[row * words + token / 32] >> (token % 32)) & 1 == 1;
            let penalised = |(token, &logit): (usize, &f64)| match logit < 0.0 {
                _ if !is_seen(token) => logit,
                true => f64::from(logit as f32 * 1.7),
                false => f64::from(logit as f32 / 1.7),
            };
            let own: Vec<f64> = values[row * vocab..][..vocab].iter().enumerate().map(penalised).collect();
            assert_drawn(&format!("row {row}, {dtype:?} on {device:?}"), &own, &params[row], tokens[row]);
            let mut expected = bits[row * words..][..words].to_vec();
            expected[tokens[row] as usize / 32] |= 1 << (tokens[row] % 32);
            assert_eq!(seen[row * words..][..words], expected, "row {row}, {dtype:?} on {device:?}");
        }
    });
}

/// Chi-square of draws against exact probabilities, with as many degrees of freedom as tokens but one. The bound is that which one
/// of 10^6 right samplers would exceed, by Wilson and Hilferty's approximation.
#[rstest]
#[case::temperature(warm(0.8))]
#[case::top_k(SampleParams { top_k: 7, ..warm(1.0) })]
#[case::top_p(SampleParams { top_p: 0.8, ..warm(1.2) })]
#[case::min_p(SampleParams { min_p: 0.1, ..warm(1.0) })]
#[case::top_k_and_top_p(SampleParams { top_k: 12, top_p: 0.7, ..warm(1.0) })]
#[case::top_k_and_min_p(SampleParams { top_k: 12, min_p: 0.05, ..warm(1.5) })]
#[case::top_p_and_min_p(SampleParams { top_p: 0.9, min_p: 0.08, ..warm(1.0) })]
#[case::all(SampleParams { top_k: 15, top_p: 0.95, min_p: 0.03, ..warm(0.9) })]
fn ops_sample_draws_by_probability(#[case] params: SampleParams) {
    let row: Vec<f32> = (0..20).map(|token| ((token * 7) % 20) as f32 * 0.23 - (token % 3) as f32).collect();
    let exact = kept(&row.iter().map(|&x| f64::from(x)).collect::<Vec<_>>(), &params, 0.0).tokens;
    assert!(exact.len() > 2);
    for_each_device(|device| {
        let n = if is_slow(device) { 20_000 } else { 100_000 };
        let counts = draws(&row, SampleParams { seed: 0x1234_5678_9abc_def0, ..params }, n, device);
        let mut chi_square = 0.0;
        let mut others: u32 = counts.iter().sum();
        for &(token, probability) in &exact {
            let expected = probability * n as f64;
            chi_square += (f64::from(counts[token]) - expected).powi(2) / expected;
            others -= counts[token];
        }
        assert_eq!(others, 0, "tokens that the filters leave out were drawn on {device:?}");
        let degrees = (exact.len() - 1) as f64;
        let spread = 2.0 / (9.0 * degrees);
        let bound = degrees * (1.0 - spread + 4.75 * spread.sqrt()).powi(3);
        assert!(chi_square < bound, "chi-square {chi_square:.1} of {degrees} degrees, bound {bound:.1}, on {device:?}");
    });
}

/// Seeds differ in both words, positions too.
#[test]
fn ops_sample_by_seed_and_position() {
    for_each_device(|device| {
        let row = vec![0.0f32; 1 << 16];
        let one = |seed, position| SampleParams { seed, position, ..warm(1.0) };
        let params = [one(1, 0), one(1, 0), one(2, 0), one(1 << 32 | 1, 0), one(1, 1), one(0, 0)];
        let tokens = tokens_of(f32_rows(&[&row[..]; 6], device), &params);
        for (params, &token) in params.iter().zip(&tokens) {
            // All are as probable: the lowest id comes first.
            let expected = (uniform(params.seed, params.position) * 65536.0) as i32;
            assert_eq!(token, expected, "{params:?} on {device:?}");
        }
        assert_eq!(tokens[0], tokens[1]);
        assert_eq!(tokens[1..].iter().collect::<std::collections::HashSet<_>>().len(), 5);
    });
}
