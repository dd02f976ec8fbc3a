//! The experts of each token and their weights.
//!
//! A cube has a token. An expert's place among the others is the number of those that are better: all units count at the same
//! time, and every place is taken once whatever the scores are. A projection behind the choice can make it by itself
//! (`linear/choice.rs`).

use cubecl::prelude::*;

use crate::common::launch::{address_type, or_dummy};

/// Units of a cube at most. Every runtime has this many.
const MAX_UNITS: usize = 256;
/// Experts at most: their scores lie in shared memory, with room for those of the groups.
pub const MAX_EXPERTS: usize = 1024;
/// What hides an expert: not more than any score. (WGSL has no infinity.)
const HIDDEN: f32 = f32::MIN;
/// Added to the sum that weights are divided by.
const EPSILON: f32 = 1e-20;

/// How a logit becomes a score.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scoring {
    /// The softmax over all experts (DeepSeek-V2).
    Softmax,
    /// `1 / (1 + exp(-x))` (DeepSeek-V3).
    Sigmoid,
    /// `sqrt(ln(1 + exp(x)))` (DeepSeek-V4).
    SqrtSoftplus,
}

/// Choice among the experts of the best groups only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Groups {
    /// Groups of experts with consecutive numbers, all of one size.
    pub count: usize,
    /// Groups that are kept.
    pub kept: usize,
    /// A group scores the sum of so many of its best experts, 1 or 2.
    pub best: usize,
}

/// Of all experts, those whose weights are in memory; the others are on other devices (expert parallelism).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LocalExperts {
    /// The number of the first one.
    pub first: usize,
    /// How many there are.
    pub count: usize,
}

/// Where the experts come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Choice {
    /// The best scores.
    Scores,
    /// The best scores, with a bias that counts for the choice only.
    BiasedScores,
    /// They are given; the scores only weigh them.
    Given,
}

/// Arguments of [`launch`].
pub struct RouteArgs {
    /// f32 `[tokens, experts]`.
    pub logits: BufferArg,
    /// f32 `[experts]`, if the choice is [`Choice::BiasedScores`]; otherwise anything.
    pub bias: BufferArg,
    /// i32 `[tokens, top_k]`, if the choice is [`Choice::Given`]; otherwise anything.
    pub given: BufferArg,
    /// i32 `[tokens, top_k]`, written: the chosen experts, the best first; see [`RouteForm::local`].
    pub indices: BufferArg,
    /// f32 `[tokens, top_k]`, written.
    pub weights: BufferArg,
    /// Tokens.
    pub tokens: usize,
    /// Factor of the weights.
    pub scale: f32,
    /// The rest.
    pub form: RouteForm,
}

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RouteForm {
    /// Experts, at most [`MAX_EXPERTS`].
    pub experts: usize,
    /// Experts of a token, at most as many as are kept.
    pub top_k: usize,
    /// How a logit becomes a score.
    pub scoring: Scoring,
    /// Where the experts come from.
    pub choice: Choice,
    /// Choice among the best groups only.
    pub groups: Option<Groups>,
    /// Whether the weights of a token are divided by their sum.
    pub normalise: bool,
    /// The written numbers are counted from the first of these, and -1 of all others; otherwise they are those of all experts.
    /// Choice and weights are the same.
    pub local: Option<LocalExperts>,
}

impl RouteForm {
    /// Units of a cube.
    fn units(&self) -> usize {
        self.experts.next_power_of_two().clamp(32, MAX_UNITS)
    }
}

/// Writes `indices` and `weights`. Without tokens nothing is launched.
pub fn launch(client: &Client, args: RouteArgs) {
    let RouteForm { experts, top_k, choice, .. } = args.form;
    if args.tokens * top_k == 0 {
        return;
    }
    route_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, args.tokens, CubeDim::new_single()),
        CubeDim::new_1d(args.form.units() as u32),
        address_type(client, &[&args.logits]),
        args.logits,
        or_dummy(client, args.bias, if choice == Choice::BiasedScores { experts } else { 0 }),
        or_dummy(client, args.given, if choice == Choice::Given { top_k } else { 0 }),
        args.indices,
        args.weights,
        args.tokens,
        args.scale,
        args.form,
    );
}

#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn route_kernel(
    logits: &[f32],
    bias: &[f32],
    given: &[i32],
    indices: &mut [i32],
    weights: &mut [f32],
    tokens: usize,
    scale: f32,
    #[comptime] form: RouteForm,
) {
    let token = CUBE_POS;
    if token < tokens {
        let units = comptime!(form.units());
        let mut scores = Shared::<[f32]>::new_slice(form.experts);
        let mut chosen = Shared::<[i32]>::new_slice(form.top_k);
        score(logits, &mut scores, token, form, units);
        let first = token * form.top_k;
        if comptime!(form.choice == Choice::Given) {
            let mut place = UNIT_POS as usize;
            while place < form.top_k {
                chosen[place] = given[first + place];
                place += units;
            }
            sync_cube();
        } else {
            choose(bias, &scores, &mut chosen, form, units);
        }
        write(&scores, &chosen, indices, weights, first, scale, form, units);
    }
}

/// The scores of a token's logits. Called by all of a cube's `units`, which have waited for each other then.
#[cube]
pub(super) fn score(
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

/// The experts with the best scores, the best first. Called by all of a cube's `units`, which have waited for each other then.
#[cube]
pub(super) fn choose(
    bias: &[f32],
    scores: &[f32],
    chosen: &mut Shared<[i32]>,
    #[comptime] form: RouteForm,
    #[comptime] units: usize,
) {
    let unit = UNIT_POS as usize;
    // What the choice goes by: of two experts with the same, the first one is better.
    let mut ranked = Shared::<[f32]>::new_slice(form.experts);
    let mut expert = unit;
    while expert < form.experts {
        let mut value = scores[expert];
        if comptime!(form.choice == Choice::BiasedScores) {
            value += bias[expert];
        }
        // What is not a number is the worst.
        ranked[expert] = select(value > HIDDEN, value, HIDDEN);
        expert += units;
    }
    sync_cube();
    if comptime!(form.groups.is_some()) {
        keep_best_groups(&mut ranked, comptime!(form.groups.unwrap()), form.experts, units);
    }
    let mut expert = unit;
    while expert < form.experts {
        let place = place_of(&ranked, expert, form.experts);
        if place < form.top_k {
            chosen[place] = expert as i32;
        }
        expert += units;
    }
    sync_cube();
}

/// `ln(1 + e^x)` for any size of x.
#[cube]
fn softplus(x: f32) -> f32 {
    let small = (-x.abs()).exp();
    // The sum with 1 would lose what a small number has.
    let series = small * (1.0 - small * (0.5 - small * (1.0f32 / 3.0)));
    max(x, 0.0) + select(small < 1e-2, series, (1.0 + small).ln())
}

/// How many experts are better than this one.
#[allow(clippy::needless_range_loop, reason = "kernels have no iterators of slices")]
#[cube]
fn place_of(ranked: &[f32], expert: usize, #[comptime] experts: usize) -> usize {
    let own = ranked[expert];
    let mut place = 0usize.runtime();
    for other in 0..experts {
        let value = ranked[other];
        place += usize::cast_from(value > own || (value == own && other < expert));
    }
    place
}

/// Hides the experts outside the best groups. Called by all units of a cube.
#[cube]
fn keep_best_groups(
    ranked: &mut Shared<[f32]>,
    #[comptime] groups: Groups,
    #[comptime] experts: usize,
    #[comptime] units: usize,
) {
    let unit = UNIT_POS as usize;
    let size = comptime!(experts / groups.count);
    let mut group_scores = Shared::<[f32]>::new_slice(groups.count);
    let mut group = unit;
    while group < groups.count {
        let mut best = HIDDEN.runtime();
        let mut second = HIDDEN.runtime();
        for i in 0..size {
            let value = ranked[group * size + i];
            second = max(second, min(best, value));
            best = max(best, value);
        }
        if comptime!(groups.best == 2) {
            best += second;
        }
        group_scores[group] = best;
        group += units;
    }
    sync_cube();
    let mut expert = unit;
    while expert < experts {
        if place_of(&group_scores, expert / size, groups.count) >= groups.kept {
            ranked[expert] = HIDDEN;
        }
        expert += units;
    }
    sync_cube();
}

/// Writes a token's experts and weights. Called by all of a cube's `units`.
#[allow(clippy::needless_range_loop, reason = "kernels have no iterators of slices")]
#[allow(clippy::too_many_arguments)]
#[cube]
pub(super) fn write(
    scores: &[f32],
    chosen: &[i32],
    indices: &mut [i32],
    weights: &mut [f32],
    first: usize,
    scale: f32,
    #[comptime] form: RouteForm,
    #[comptime] units: usize,
) {
    let mut place = UNIT_POS as usize;
    while place < form.top_k {
        let mut weight = score_of(scores, chosen[place], form.experts);
        if comptime!(form.normalise) {
            let mut sum = EPSILON.runtime();
            for other in 0..form.top_k {
                sum += score_of(scores, chosen[other], form.experts);
            }
            weight /= sum;
        }
        indices[first + place] = local_number(chosen[place], form);
        weights[first + place] = weight * scale;
        place += units;
    }
}

/// The number that an expert is known by: see [`RouteForm::local`].
#[cube]
pub(super) fn local_number(expert: i32, #[comptime] form: RouteForm) -> i32 {
    if comptime!(form.local.is_some()) {
        let LocalExperts { first, count } = comptime!(form.local.unwrap());
        let is_local = expert >= comptime!(first as i32) && expert < comptime!((first + count) as i32);
        select(is_local, expert - comptime!(first as i32), -1)
    } else {
        expert
    }
}

/// The score of an expert; 0 of one that there is not.
#[cube]
fn score_of(scores: &[f32], expert: i32, #[comptime] experts: usize) -> f32 {
    let mut score = 0.0f32;
    if expert >= 0 {
        let expert = usize::cast_from(expert);
        if expert < experts {
            score = scores[expert];
        }
    }
    score
}

/// DeepSeek-V3's router.
#[cfg(feature = "offline")]
pub(crate) const V3: RouteForm = RouteForm {
    experts: 256,
    top_k: 8,
    scoring: Scoring::Sigmoid,
    choice: Choice::BiasedScores,
    groups: Some(Groups { count: 8, kept: 4, best: 2 }),
    normalise: true,
    local: None,
};
/// DeepSeek-V2-Lite's.
#[cfg(feature = "offline")]
pub(crate) const V2_LITE: RouteForm = RouteForm {
    experts: 64,
    top_k: 6,
    scoring: Scoring::Softmax,
    choice: Choice::Scores,
    groups: None,
    normalise: false,
    local: None,
};

/// DeepSeek-V2-Lite, V3 and V4.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, form};
    let entry = |name, form: RouteForm| {
        let dim = CubeDim::new_1d(form.units() as u32);
        Entry::new(name, form!(route_kernel, dim, [AddressType::U32, _, _, _, _, _, 1, 1.0, form]))
    };
    let given = RouteForm { scoring: Scoring::SqrtSoftplus, choice: Choice::Given, groups: None, ..V3 };
    let local = RouteForm { local: Some(LocalExperts { first: 32, count: 32 }), ..V3 };
    let [v3, local] = [entry("route_experts.v3", V3), entry("route_experts.local", local)];
    vec![v3, local, entry("route_experts.v2_lite", V2_LITE), entry("route_experts.given", given)]
}
