//! From logits to scores.

use cubecl::prelude::*;

use super::{RouteForm, Scoring};

/// The scores of a token's logits. Called by all of a cube's `units`, which have waited for each other then.
#[cube]
pub(crate) fn score(
    logits: &[f32],
    scores: &mut Shared<[f32]>,
    token: usize,
    #[comptime] form: RouteForm,
    #[comptime] units: usize,
) {
    let unit = UNIT_POS as usize;
    let mut expert = unit;
    while expert < form.experts {
        scores[expert] = logits[token * form.experts + expert];
        expert += units;
    }
    sync_cube();
    let mut sum = 0.0f32;
    if comptime!(form.scoring == Scoring::Softmax) {
        sum = exponentials(scores, form.experts, units);
    }
    let mut expert = unit;
    while expert < form.experts {
        let x = scores[expert];
        scores[expert] = match comptime!(form.scoring) {
            Scoring::Softmax => x / sum,
            Scoring::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Scoring::SqrtSoftplus => softplus(x).sqrt(),
        };
        expert += units;
    }
    sync_cube();
}

/// Replaces logits by their exponentials, the largest of which is 1; returns the sum to units that have a logit.
#[cube]
fn exponentials(scores: &mut Shared<[f32]>, #[comptime] experts: usize, #[comptime] units: usize) -> f32 {
    let unit = UNIT_POS as usize;
    let mut most = scores[0usize];
    let mut sum = 0.0f32;
    // Each unit by itself: a few hundred numbers, which it reads together with all others.
    if unit < experts {
        for expert in 1..experts {
            most = max(most, scores[expert]);
        }
    }
    sync_cube();
    let mut expert = unit;
    while expert < experts {
        let x = scores[expert];
        scores[expert] = (x - most).exp();
        expert += units;
    }
    sync_cube();
    if unit < experts {
        for expert in 0..experts {
            sum += scores[expert];
        }
    }
    sync_cube();
    sum
}

/// `ln(1 + e^x)` for any size of x.
#[cube]
fn softplus(x: f32) -> f32 {
    let small = (-x.abs()).exp();
    // The sum with 1 would lose what a small number has.
    let series = small * (1.0 - small * (0.5 - small * (1.0f32 / 3.0)));
    max(x, 0.0) + select(small < 1e-2, series, (1.0 + small).ln())
}
