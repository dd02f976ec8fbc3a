//! `route_experts` against plain loops.

use burn::tensor::{DType, Device, Tensor};
use mla_ops::{
    Determinism, ExpertChoice, ExpertGroups, ExpertScoring, LocalExperts, RouteExpertsArgs, RouteExpertsOptions,
    RouterLogits, Weight, linear, route_experts,
};
use rstest::rstest;

use crate::devices::for_each_device;
use crate::ops_fixture::{bits, floats, int_values, ints, random, rng, values};

/// Softmax over all experts.
pub const PLAIN: RouteExpertsOptions =
    RouteExpertsOptions { scoring: ExpertScoring::Softmax, groups: None, normalise: false, scale: 1.0, local: None };

/// The first `count` places of the values in descending order; of equal ones the first first.
fn best(values: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
    order.truncate(count);
    order
}

/// Scores of a token's logits.
fn scores(logits: &[f64], scoring: ExpertScoring) -> Vec<f64> {
    let total: f64 = logits.iter().map(|x| x.exp()).sum();
    let score = |x: f64| match scoring {
        ExpertScoring::Softmax => x.exp() / total,
        ExpertScoring::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        ExpertScoring::SqrtSoftplus => (x.max(0.0) + (-x.abs()).exp().ln_1p()).sqrt(),
    };
    logits.iter().map(|&x| score(x)).collect()
}

/// What the choice goes by, the experts outside the best groups hidden.
fn ranked(scores: &[f64], bias: Option<&[f64]>, groups: Option<ExpertGroups>) -> Vec<f64> {
    let biased = |(e, score): (usize, &f64)| score + bias.map_or(0.0, |bias| bias[e]);
    let mut ranked: Vec<f64> = scores.iter().enumerate().map(biased).collect();
    if let Some(ExpertGroups { count, kept, best: of }) = groups {
        let size = ranked.len() / count;
        let group_scores: Vec<f64> =
            ranked.chunks(size).map(|group| best(group, of).iter().map(|&i| group[i]).sum()).collect();
        for &group in &best(&group_scores, count)[kept..] {
            ranked[group * size..][..size].fill(f64::NEG_INFINITY);
        }
    }
    ranked
}

/// What the choice goes by.
#[derive(Debug, Clone, Copy)]
pub enum How {
    Scores,
    Biased,
    Given,
    /// Given by a table.
    Table,
}

/// A table in which token `t` has row `2 t`, and its experts are those given; the rows between have others.
pub fn in_table(given: &[i32], top_k: usize, device: &Device) -> ExpertChoice {
    let tokens = given.len() / top_k;
    let table: Vec<i32> = given.chunks(top_k).flat_map(|row| [row.to_vec(), vec![0; top_k]]).flatten().collect();
    let rows: Vec<i32> = (0..tokens as i32).map(|token| 2 * token).collect();
    ExpertChoice::Table { experts: ints(&table, [2 * tokens, top_k], device), rows: ints(&rows, [tokens], device) }
}

/// The routers of DeepSeek-V2-Lite, V2, V3 and V4, and odd sizes.
#[rstest]
#[case::v2_lite([9, 64, 6], How::Scores, PLAIN)]
#[case::v2([9, 160, 6], How::Scores, RouteExpertsOptions { groups: Some(ExpertGroups { count: 8, kept: 3, best: 1 }), scale: 16.0, ..PLAIN })]
#[case::v3([9, 256, 8], How::Biased, RouteExpertsOptions { scoring: ExpertScoring::Sigmoid, groups: Some(ExpertGroups { count: 8, kept: 4, best: 2 }), normalise: true, scale: 2.5, local: None })]
#[case::v4([9, 256, 6], How::Biased, RouteExpertsOptions { scoring: ExpertScoring::SqrtSoftplus, normalise: true, scale: 1.5, ..PLAIN })]
#[case::v4_table([9, 256, 6], How::Given, RouteExpertsOptions { scoring: ExpertScoring::SqrtSoftplus, normalise: true, scale: 1.5, ..PLAIN })]
#[case::v4_rows([9, 256, 6], How::Table, RouteExpertsOptions { scoring: ExpertScoring::SqrtSoftplus, normalise: true, scale: 1.5, ..PLAIN })]
#[case::one_expert([3, 1, 1], How::Scores, PLAIN)]
#[case::all([70, 7, 7], How::Biased, PLAIN)]
fn ops_route_experts(#[case] sizes: [usize; 3], #[case] how: How, #[case] options: RouteExpertsOptions) {
    let ([tokens, experts, top_k], mut rng) = (sizes, rng(47));
    let logits: Vec<f64> = random(&mut rng, tokens * experts, DType::F32).iter().map(|x| 4.0 * x).collect();
    let bias = random(&mut rng, experts, DType::F32);
    // Among those that are given, some that there are not.
    let given: Vec<i32> = (0..tokens * top_k).map(|i| (i * 37 % (experts + 2)) as i32 - 1).collect();
    for_each_device(|device| {
        let choice = match how {
            How::Scores => ExpertChoice::Scores(top_k),
            How::Biased => ExpertChoice::BiasedScores(top_k, floats(&bias, [experts], DType::F32, device)),
            How::Given => ExpertChoice::Given(ints(&given, [tokens, top_k], device)),
            How::Table => in_table(&given, top_k, device),
        };
        let args = RouteExpertsArgs {
            logits: floats(&logits, [tokens, experts], DType::F32, device).into(),
            choice,
            slots: None,
        };
        let (indices, weights) = route_experts(args, &options).expect("legal").materialise();
        let (indices, weights) = (int_values(indices), values(weights));
        for (token, logits) in logits.chunks(experts).enumerate() {
            let scores = scores(logits, options.scoring);
            let places = token * top_k..(token + 1) * top_k;
            let chosen: Vec<i32> = match how {
                How::Given | How::Table => given[places.clone()].to_vec(),
                _ => {
                    let bias = matches!(how, How::Biased).then_some(bias.as_slice());
                    best(&ranked(&scores, bias, options.groups), top_k).iter().map(|&e| e as i32).collect()
                }
            };
            assert_eq!(indices[places.clone()], chosen, "token {token} on {device:?}");
            let score = |e: &i32| usize::try_from(*e).ok().and_then(|e| scores.get(e)).copied().unwrap_or(0.0);
            let sum = if options.normalise { chosen.iter().map(score).sum::<f64>() + 1e-20 } else { 1.0 };
            for (actual, expert) in weights[places].iter().zip(&chosen) {
                let expected = score(expert) / sum * f64::from(options.scale);
                let off = (f64::from(*actual) - expected).abs();
                assert!(off <= 1e-5 * expected.abs() + 1e-9, "token {token}: {actual}, expected {expected}");
            }
        }
    });
}

/// Local experts are numbered from 0, all others are -1, whichever they are; the choice and its weights are those among all.
#[rstest]
fn ops_route_experts_local(
    #[values(How::Scores, How::Biased, How::Given, How::Table)] how: How,
    #[values([0, 6], [6, 5], [10, 1], [0, 11])] own: [usize; 2],
) {
    let ([tokens, experts, top_k], [first, count], mut rng) = ([9, 11, 6], own, rng(48));
    let logits = random(&mut rng, tokens * experts, DType::F32);
    let bias = random(&mut rng, experts, DType::F32);
    let mut given: Vec<i32> = (0..tokens * top_k).map(|i| (i * 37 % (experts + 2)) as i32 - 1).collect();
    given[..2].copy_from_slice(&[i32::MIN, i32::MAX]);
    for_each_device(|device| {
        let route = |local| {
            let choice = match how {
                How::Scores => ExpertChoice::Scores(top_k),
                How::Biased => ExpertChoice::BiasedScores(top_k, floats(&bias, [experts], DType::F32, device)),
                How::Given => ExpertChoice::Given(ints(&given, [tokens, top_k], device)),
                How::Table => in_table(&given, top_k, device),
            };
            let args = RouteExpertsArgs {
                logits: floats(&logits, [tokens, experts], DType::F32, device).into(),
                choice,
                slots: None,
            };
            let options = RouteExpertsOptions { normalise: true, local, ..PLAIN };
            let (indices, weights) = route_experts(args, &options).expect("legal").materialise();
            (int_values(indices), bits(&weights))
        };
        let (all, weights) = route(None);
        let (local, local_weights) = route(Some(LocalExperts { first, count }));
        let number = |&expert: &i32| match (first as i32..(first + count) as i32).contains(&expert) {
            true => expert - first as i32,
            false => -1,
        };
        assert_eq!(local, all.iter().map(number).collect::<Vec<_>>(), "{how:?} on {device:?}");
        assert!(local.iter().any(|&expert| expert >= 0), "some are chosen");
        assert!(local_weights == weights, "{how:?} on {device:?}");
    });
}

/// Tokens without a slot are padding, and get no expert, whichever way the others get theirs; the weights are those of tokens.
#[rstest]
fn ops_route_experts_padding(
    #[values(How::Scores, How::Biased, How::Given, How::Table)] how: How,
    #[values(None, Some(LocalExperts { first: 3, count: 4 }))] local: Option<LocalExperts>,
) {
    let ([tokens, experts, top_k], mut rng) = ([9, 11, 6], rng(49));
    let logits = random(&mut rng, tokens * experts, DType::F32);
    let bias = random(&mut rng, experts, DType::F32);
    let given: Vec<i32> = (0..tokens * top_k).map(|i| (i * 37 % experts) as i32).collect();
    let slots = [7, -1, 0, -1, -5, i32::MIN, i32::MAX, 3, -1];
    for_each_device(|device| {
        let route = |slots| {
            let choice = match how {
                How::Scores => ExpertChoice::Scores(top_k),
                How::Biased => ExpertChoice::BiasedScores(top_k, floats(&bias, [experts], DType::F32, device)),
                How::Given => ExpertChoice::Given(ints(&given, [tokens, top_k], device)),
                How::Table => in_table(&given, top_k, device),
            };
            let args = RouteExpertsArgs {
                logits: floats(&logits, [tokens, experts], DType::F32, device).into(),
                choice,
                slots,
            };
            let (indices, weights) =
                route_experts(args, &RouteExpertsOptions { local, ..PLAIN }).expect("legal").materialise();
            (int_values(indices), bits(&weights))
        };
        let (mut expected, weights) = route(None);
        for (experts, slot) in expected.chunks_mut(top_k).zip(slots) {
            if slot < 0 {
                experts.fill(-1);
            }
        }
        let padded = route(Some(ints(&slots, [tokens], device)));
        assert!(padded == (expected, weights), "{how:?} {local:?} on {device:?}");
    });
}

/// A row that the table does not have: no expert, and nothing is read.
#[test]
fn ops_route_experts_rows_that_there_are_not() {
    let options = RouteExpertsOptions { normalise: true, ..PLAIN };
    for_each_device(|device| {
        let rows = ints(&[1, -1, 2, i32::MAX, i32::MIN], [5], device);
        let choice = ExpertChoice::Table { experts: ints(&[3, 0, 2, 1], [2, 2], device), rows };
        let args =
            RouteExpertsArgs { logits: floats(&[0.5; 20], [5, 4], DType::F32, device).into(), choice, slots: None };
        let (indices, weights) = route_experts(args, &options).expect("legal").materialise();
        assert_eq!(int_values(indices), [2, 1, -1, -1, -1, -1, -1, -1, -1, -1], "{device:?}");
        let weights = values(weights);
        let (own, others) = weights.split_at(2);
        assert!(own.iter().all(|weight| (weight - 0.5).abs() < 1e-6), "{own:?} on {device:?}");
        assert!(others.iter().all(|weight| *weight == 0.0), "{others:?} on {device:?}");
    });
}

#[test]
fn ops_route_experts_of_no_tokens() {
    let groups = Some(ExpertGroups { count: 2, kept: 1, best: 2 });
    for_each_device(|device| {
        for choice in [
            ExpertChoice::Scores(2),
            ExpertChoice::BiasedScores(2, floats(&[0.0; 8], [8], DType::F32, device)),
            ExpertChoice::Given(ints(&[], [0, 2], device)),
            ExpertChoice::Table { experts: ints(&[0, 1], [1, 2], device), rows: ints(&[], [0], device) },
        ] {
            let (logits, slots) = (floats(&[], [0, 8], DType::F32, device), Some(ints(&[], [0], device)));
            let args = RouteExpertsArgs { logits: logits.into(), choice, slots };
            let options = RouteExpertsOptions { groups, normalise: true, ..PLAIN };
            let (indices, weights) = route_experts(args, &options).expect("legal").materialise();
            assert_eq!((indices.dims(), weights.dims()), ([0, 2], [0, 2]), "on {device:?}");
        }
    });
}

/// Of equal scores the first counts more, and what is no number less than all others.
#[test]
fn ops_route_experts_ties() {
    let mut logits: Vec<f64> = (0..64).map(|expert| f64::from(1 - expert % 2)).collect();
    logits.extend((0..64).map(|expert| if [5, 9].contains(&expert) { f64::NAN } else { 0.0 }));
    let expected = [
        (0..64).step_by(2).chain((1..16).step_by(2)).collect::<Vec<i32>>(),
        (0..42).filter(|expert| ![5, 9].contains(expert)).collect(),
    ];
    let options = RouteExpertsOptions { scoring: ExpertScoring::Sigmoid, ..PLAIN };
    for_each_device(|device| {
        let logits = floats(&logits, [2, 64], DType::F32, device);
        let (indices, _) = route_experts(
            RouteExpertsArgs { logits: logits.into(), choice: ExpertChoice::Scores(40), slots: None },
            &options,
        )
        .expect("legal")
        .materialise();
        assert_eq!(int_values(indices), expected.concat(), "on {device:?}");
    });
}

/// Logits that are not there yet: the bits of a product, and of a choice by it, whether or not one launch has both; twice, since cubes
/// that count leave their counter as it was. Padding, a table, groups, local experts, and rows that are more than one.
#[rstest]
fn ops_route_experts_by_a_product(
    #[values([1, 64, 256, 6], [1, 40, 20, 3], [1, 7168, 256, 8], [3, 64, 40, 4])] sizes: [usize; 4],
    #[values(How::Biased, How::Table)] how: How,
    #[values(None, Some(LocalExperts { first: 4, count: 8 }))] local: Option<LocalExperts>,
) {
    let ([tokens, hidden, experts, top_k], mut rng) = (sizes, rng(53));
    let [x, weight] = [tokens, experts].map(|rows| random(&mut rng, rows * hidden, DType::F16));
    let bias = random(&mut rng, experts, DType::F32);
    let given: Vec<i32> = (0..tokens * top_k).map(|i| (i * 7 % (experts + 2)) as i32 - 1).collect();
    let groups = (experts == 256).then_some(ExpertGroups { count: 8, kept: 4, best: 2 });
    let options = RouteExpertsOptions { scoring: ExpertScoring::Sigmoid, groups, normalise: true, local, ..PLAIN };
    for_each_device(|device| {
        let x: Tensor<2> = floats(&x, [tokens, hidden], DType::F16, device);
        let weight = Weight::from(floats::<2>(&weight, [experts, hidden], DType::F32, device));
        let route = |logits: RouterLogits, padded: bool| {
            let choice = match how {
                How::Table => in_table(&given, top_k, device),
                _ => ExpertChoice::BiasedScores(top_k, floats(&bias, [experts], DType::F32, device)),
            };
            let slots = padded.then(|| ints(&vec![-1; tokens], [tokens], device));
            let args = RouteExpertsArgs { logits, choice, slots };
            let (indices, weights) = route_experts(args, &options).expect("legal").materialise();
            (int_values(indices), bits(&weights))
        };
        for padded in [false, true, false] {
            let logits = linear(x.clone(), &weight, Determinism::Fast).expect("legal");
            let product = RouterLogits::product(x.clone(), &weight, Determinism::Fast).expect("legal");
            assert_eq!(product.dims(), [tokens, experts]);
            assert!(route(product, padded) == route(logits.into(), padded), "padded {padded} on {device:?}");
        }
    });
}
