//! The choice of experts and their weights, against plain loops in f64.

use mla_kernels::route_experts::{self as route, Choice, Groups, LocalExperts, RouteArgs, RouteForm, Scoring};
use rstest::rstest;

use super::support::{arg, for_each_client, random, read, upload};

/// The experts and weights of a token, as the docs say.
fn routed(logits: &[f32], bias: &[f32], given: &[i32], form: RouteForm, scale: f64) -> (Vec<i32>, Vec<f64>) {
    let logits: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
    let total: f64 = logits.iter().map(|x| x.exp()).sum();
    let score = |x: f64| match form.scoring {
        Scoring::Softmax => x.exp() / total,
        Scoring::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Scoring::SqrtSoftplus => (x.max(0.0) + (-x.abs()).exp().ln_1p()).sqrt(),
    };
    let scores: Vec<f64> = logits.iter().map(|&x| score(x)).collect();
    let chosen = if matches!(form.choice, Choice::Given | Choice::Table) {
        given.to_vec()
    } else {
        let biased = form.choice == Choice::BiasedScores;
        let mut ranked: Vec<f64> =
            scores.iter().zip(bias).map(|(s, &b)| if biased { s + f64::from(b) } else { *s }).collect();
        let descending = |values: &[f64]| {
            let mut order: Vec<usize> = (0..values.len()).collect();
            order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
            order
        };
        if let Some(groups) = form.groups {
            let size = form.experts / groups.count;
            let best = |group: &[f64]| descending(group)[..groups.best].iter().map(|&i| group[i]).sum::<f64>();
            let group_scores: Vec<f64> = ranked.chunks(size).map(best).collect();
            for &group in &descending(&group_scores)[groups.kept..] {
                ranked[group * size..][..size].fill(f64::NEG_INFINITY);
            }
        }
        descending(&ranked)[..form.top_k].iter().map(|&e| e as i32).collect()
    };
    let mut weights: Vec<f64> = chosen.iter().map(|&e| scores[e as usize]).collect();
    let sum = if form.normalise { weights.iter().sum::<f64>() + 1e-20 } else { 1.0 };
    weights.iter_mut().for_each(|w| *w = *w / sum * scale);
    let local = |expert: i32| match form.local {
        Some(LocalExperts { first, count }) if (0..count as i32).contains(&(expert - first as i32)) => {
            expert - first as i32
        }
        Some(_) => -1,
        None => expert,
    };
    (chosen.into_iter().map(local).collect(), weights)
}

const LITE: RouteForm = RouteForm {
    experts: 64,
    top_k: 6,
    scoring: Scoring::Softmax,
    choice: Choice::Scores,
    groups: None,
    normalise: false,
    local: None,
    padded: false,
};
const V3: RouteForm = RouteForm {
    experts: 256,
    top_k: 8,
    scoring: Scoring::Sigmoid,
    choice: Choice::BiasedScores,
    groups: Some(Groups { count: 8, kept: 4, best: 2 }),
    normalise: true,
    local: None,
    padded: false,
};

#[rstest]
#[case::v2_lite(LITE)]
#[case::v2(RouteForm { experts: 160, groups: Some(Groups { count: 8, kept: 3, best: 1 }), ..LITE })]
#[case::v3(V3)]
#[case::v4(RouteForm { scoring: Scoring::SqrtSoftplus, groups: None, ..V3 })]
#[case::v4_table(RouteForm { scoring: Scoring::SqrtSoftplus, choice: Choice::Given, groups: None, ..V3 })]
#[case::v4_rows(RouteForm { scoring: Scoring::SqrtSoftplus, choice: Choice::Table, groups: None, ..V3 })]
#[case::v3_local(RouteForm { local: Some(LocalExperts { first: 192, count: 64 }), ..V3 })]
#[case::v4_table_local(RouteForm { choice: Choice::Given, groups: None, local: Some(LocalExperts { first: 0, count: 100 }), ..V3 })]
#[case::v4_padded(RouteForm { scoring: Scoring::SqrtSoftplus, choice: Choice::Table, groups: None, padded: true, ..V3 })]
#[case::few(RouteForm { experts: 5, top_k: 5, ..LITE })]
#[case::many(RouteForm { experts: 1000, top_k: 3, ..LITE })]
fn experts_route(#[case] form: RouteForm) {
    const TOKENS: usize = 37;
    for_each_client(|client| {
        let (experts, top_k) = (form.experts, form.top_k);
        // From far below zero to far above, no two too close for f32.
        let logits: Vec<f32> = random(7, TOKENS * experts).iter().map(|x| 8.0 * x).collect();
        let bias = random(8, experts);
        let given: Vec<i32> = (0..TOKENS * top_k).map(|i| (i * 31 % experts) as i32).collect();
        // Of a table these are rows in another order.
        let rows: Vec<i32> = match form.choice {
            Choice::Table => (0..TOKENS).map(|token| (token * 5 % TOKENS) as i32).collect(),
            _ => (0..TOKENS as i32).collect(),
        };
        // Every third token is none.
        let slots: Vec<i32> = (0..TOKENS as i32).map(|token| if token % 3 == 1 { -1 } else { 5 * token }).collect();
        let (indices, weights) = (client.empty(4 * given.len()), client.empty(4 * given.len()));
        let args = RouteArgs {
            logits: arg(&upload(client, &logits), logits.len()),
            product: None,
            bias: arg(&upload(client, &bias), experts),
            given: arg(&upload(client, &given), given.len()),
            rows: arg(&upload(client, &rows), TOKENS),
            table_rows: TOKENS,
            slots: arg(&upload(client, &slots), TOKENS),
            indices: arg(&indices, given.len()),
            weights: arg(&weights, given.len()),
            tokens: TOKENS,
            scale: 2.5,
            form,
        };
        route::launch(client, args);
        let (indices, weights) = (read::<i32>(client, indices), read::<f32>(client, weights));
        for (token, logits) in logits.chunks(experts).enumerate() {
            let given = &given[rows[token] as usize * top_k..][..top_k];
            let (mut chosen, expected) = routed(logits, &bias, given, form, 2.5);
            if form.padded && slots[token] < 0 {
                chosen.fill(-1);
            }
            assert_eq!(indices[token * top_k..][..top_k], chosen, "token {token}");
            for (weight, expected) in weights[token * top_k..].iter().zip(expected) {
                let error = (f64::from(*weight) - expected).abs();
                assert!(error <= 4e-6 * expected.abs() + 1e-12, "token {token}: {weight}, expected {expected}");
            }
        }
    });
}

/// Ties, and what is not a number: every place is taken once, by experts in their own order.
#[test]
fn experts_route_ties() {
    for_each_client(|client| {
        let form = RouteForm { experts: 40, top_k: 40, ..LITE };
        let mut logits = vec![1.0f32; 80];
        logits[40..].fill(f32::NAN);
        let (indices, weights) = (client.empty(4 * 80), client.empty(4 * 80));
        let unused = upload(client, &[0i32]);
        let args = RouteArgs {
            logits: arg(&upload(client, &logits), 80),
            product: None,
            bias: arg(&unused, 1),
            given: arg(&unused, 1),
            rows: arg(&unused, 1),
            table_rows: 0,
            slots: arg(&unused, 1),
            indices: arg(&indices, 80),
            weights: arg(&weights, 80),
            tokens: 2,
            scale: 1.0,
            form,
        };
        route::launch(client, args);
        let all: Vec<i32> = (0..40).collect();
        assert_eq!(read::<i32>(client, indices), [all.clone(), all].concat());
    });
}
