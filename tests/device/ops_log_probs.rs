//! `log_probs` against plain f64 loops.

use burn::tensor::DType;
use mla_ops::{LogProbs, log_probs};
use rand::RngExt;
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype};
use crate::ops_fixture::{floats, int_values, ints, random, rng, rounded, values};

/// Logarithms of probabilities, in f64, with ids: the best first, of equal ones the lowest id.
fn expected(logits: &[f64]) -> Vec<(i32, f64)> {
    let largest = f64::from(f32::MAX);
    let ids = (0..).zip(logits).filter(|(_, logit)| !logit.is_nan() && **logit > f64::NEG_INFINITY);
    let mut all: Vec<(i32, f64)> = ids.map(|(id, &logit)| (id, logit.min(largest))).collect();
    all.sort_by(|a, b| b.1.partial_cmp(&a.1).expect("no NaN").then(a.0.cmp(&b.0)));
    let max = all.first().map_or(0.0, |best| best.1);
    let lse = max + all.iter().map(|(_, logit)| (logit - max).exp()).sum::<f64>().ln();
    all.iter().map(|&(id, logit)| (id, logit - lse)).collect()
}

#[track_caller]
fn assert_row(what: &str, logits: &[f64], token: i32, actual: (f32, &[i32], &[f32])) {
    let expected = expected(logits);
    let (chosen, ids, values) = actual;
    // The logarithm of a sum, and a difference of numbers below 20.
    let is_close = |actual: f32, expected: f64| {
        (f64::from(actual) - expected).abs() < 1e-5 * expected.abs().max(1.0) || f64::from(actual) == expected
    };
    let own = expected.iter().find(|(id, _)| *id == token).map_or(f64::NEG_INFINITY, |own| own.1);
    assert!(is_close(chosen, own), "{what}: token {token} has {chosen}, expected {own}");
    for (place, (&id, &value)) in ids.iter().zip(values).enumerate() {
        let (expected_id, expected_value) = expected.get(place).copied().unwrap_or((-1, f64::NEG_INFINITY));
        assert_eq!(id, expected_id, "{what}, place {place}");
        assert!(is_close(value, expected_value), "{what}, place {place}: {value}, expected {expected_value}");
    }
}

#[rstest]
fn ops_log_probs(#[values(1, 2, 63, 1000, 129_280)] vocab: usize, #[values(1, 20)] top: usize) {
    for_each_dtype(|device, dtype| {
        let (rows, rng) = (3, &mut rng(34));
        let logits: Vec<f64> =
            random(rng, rows * vocab, DType::F32).into_iter().map(|x| rounded(x * 9.0, dtype)).collect();
        let tokens: Vec<i32> = (0..rows).map(|_| rng.random_range(0..vocab as i32)).collect();
        let there = floats(&logits, [rows, vocab], dtype, device);
        let LogProbs { chosen, ids, values: of_ids } =
            log_probs(there, ints(&tokens, [rows], device), top).expect("legal");
        let (chosen, ids, of_ids) = (values(chosen), int_values(ids), values(of_ids));
        for row in 0..rows {
            let actual = (chosen[row], &ids[row * top..][..top], &of_ids[row * top..][..top]);
            let what = format!("row {row} of {vocab} tokens, {dtype:?} on {device:?}");
            assert_row(&what, &logits[row * vocab..][..vocab], tokens[row], actual);
        }
    });
}

/// Logits that are no numbers or not finite, ties, and tokens that are none.
#[test]
fn ops_log_probs_of_nan_and_infinite_logits() {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let rows = [
        (vec![nan, -inf, 3.0, nan, 3.0], 4),
        (vec![nan, nan, -inf, nan, nan], 0),
        (vec![1.0, 0.0, -0.0, 0.0, nan], 4),
        (vec![1.0, 2.0, 1.0, 2.0, -inf], -1),
        (vec![1.0, 2.0, 1.0, 2.0, -inf], 5),
    ];
    for_each_device(|device| {
        let logits: Vec<f64> = rows.iter().flat_map(|row| row.0.clone()).collect();
        let tokens: Vec<i32> = rows.iter().map(|row| row.1).collect();
        let there = floats(&logits, [5, 5], DType::F32, device);
        let LogProbs { chosen, ids, values: of_ids } = log_probs(there, ints(&tokens, [5], device), 6).expect("legal");
        let (chosen, ids, of_ids) = (values(chosen), int_values(ids), values(of_ids));
        for (row, (logits, token)) in rows.iter().enumerate() {
            let actual = (chosen[row], &ids[row * 6..][..6], &of_ids[row * 6..][..6]);
            assert_row(&format!("row {row} on {device:?}"), logits, *token, actual);
        }
    });
}
