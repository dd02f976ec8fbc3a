//! The experts of each token and their weights.
//!
//! A cube has a token. An expert's place among the others is the number of those that are better: all units count at the same
//! time, and every place is taken once whatever the scores are. A projection behind the choice can make it by itself
//! (`linear/choice.rs`).

mod choice;
mod scores;
mod select;

use cubecl::prelude::*;

pub(crate) use self::choice::choose;
pub(crate) use self::scores::score;
use crate::common::launch::{address_type, is_row, or_dummy};
use crate::linear::{self, LinearArgs};

/// Experts at most: their scores lie in shared memory, with room for those of the groups.
pub const MAX_EXPERTS: usize = 1024;
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
    /// They are those of a row of a table; the scores only weigh them.
    Table,
}

impl Choice {
    /// Whether scores only weigh what is chosen.
    pub(crate) fn is_given(self) -> bool {
        matches!(self, Self::Given | Self::Table)
    }
}

/// Arguments of [`launch`].
pub struct RouteArgs {
    /// f32 `[tokens, experts]`.
    pub logits: BufferArg,
    /// The product that has the logits as its output, if they are not there.
    pub product: Option<Box<LinearArgs>>,
    /// f32 `[experts]`, if the choice is [`Choice::BiasedScores`]; otherwise anything.
    pub bias: BufferArg,
    /// i32 `[tokens, top_k]`, if the choice is [`Choice::Given`], and `[table_rows, top_k]`, if it is [`Choice::Table`]; otherwise
    /// anything.
    pub given: BufferArg,
    /// i32 `[tokens]`, if the choice is [`Choice::Table`]: the row of each token; of one that there is not, no expert is chosen.
    /// Otherwise anything.
    pub rows: BufferArg,
    /// Rows of the table.
    pub table_rows: usize,
    /// i32 `[tokens]`, if [`RouteForm::padded`]; otherwise anything. A token with a number below 0 is padding: all its experts are -1.
    pub slots: BufferArg,
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
    /// Whether some tokens may be padding.
    pub padded: bool,
}

/// Writes `indices` and `weights`, and the logits, if there is a product: of a single token in the same launch. Without tokens nothing is
/// launched.
pub fn launch(client: &Client, mut args: RouteArgs) {
    let RouteForm { experts, top_k, choice, padded, .. } = args.form;
    if args.tokens * top_k == 0 {
        return;
    }
    if let Some(product) = args.product.take() {
        if linear::takes_route(client, &product) {
            return linear::launch_routed(client, args, *product);
        }
        linear::launch(client, *product);
    }
    route_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, args.tokens, CubeDim::new_single()),
        CubeDim::new_1d(select::units(&args.form) as u32),
        address_type(client, &[&args.logits]),
        args.logits,
        or_dummy(client, args.bias, if choice == Choice::BiasedScores { experts } else { 0 }),
        or_dummy(client, args.given, if choice.is_given() { top_k } else { 0 }),
        or_dummy(client, args.rows, if choice == Choice::Table { args.tokens } else { 0 }),
        or_dummy(client, args.slots, if padded { args.tokens } else { 0 }),
        args.indices,
        args.weights,
        args.tokens,
        args.table_rows,
        args.scale,
        args.form,
    );
}

#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn route_kernel(
    logits: &[f32],
    bias: &[f32],
    given: &[i32],
    rows: &[i32],
    slots: &[i32],
    indices: &mut [i32],
    weights: &mut [f32],
    tokens: usize,
    table_rows: usize,
    scale: f32,
    #[comptime] form: RouteForm,
) {
    let token = CUBE_POS;
    if token < tokens {
        let units = comptime!(select::units(&form));
        route_token(logits, bias, given, rows, slots, indices, weights, token, table_rows, scale, form, units);
    }
}

/// What a cube of so many `units` does for a token.
#[cube]
pub(crate) fn route_token(
    logits: &[f32],
    bias: &[f32],
    given: &[i32],
    rows: &[i32],
    slots: &[i32],
    indices: &mut [i32],
    weights: &mut [f32],
    token: usize,
    table_rows: usize,
    scale: f32,
    #[comptime] form: RouteForm,
    #[comptime] units: usize,
) {
    let mut scores = Shared::<[f32]>::new_slice(form.experts);
    let mut chosen = Shared::<[i32]>::new_slice(form.top_k);
    score(logits, &mut scores, token, form, units);
    if comptime!(form.choice.is_given()) {
        take(given, rows, &mut chosen, token, table_rows, form, units);
    } else {
        choose(bias, &scores, &mut chosen, form, units);
    }
    let mut is_padding = false.runtime();
    if comptime!(form.padded) {
        is_padding = slots[token] < 0;
    }
    write(&scores, &chosen, indices, weights, token * form.top_k, is_padding, scale, form, units);
}

/// The experts that a token is given. Called by all of a cube's `units`, which have waited for each other then.
#[cube]
pub(crate) fn take(
    given: &[i32],
    rows: &[i32],
    chosen: &mut Shared<[i32]>,
    token: usize,
    table_rows: usize,
    #[comptime] form: RouteForm,
    #[comptime] units: usize,
) {
    let mut place = UNIT_POS as usize;
    while place < form.top_k {
        chosen[place] = given_expert(given, rows, token, place, table_rows, form);
        place += units;
    }
    sync_cube();
}

/// One of the experts that a token is given.
#[cube]
pub(crate) fn given_expert(
    given: &[i32],
    rows: &[i32],
    token: usize,
    place: usize,
    table_rows: usize,
    #[comptime] form: RouteForm,
) -> i32 {
    if comptime!(form.choice == Choice::Table) {
        let row = rows[token];
        let mut expert = i32::new(-1);
        if is_row(row, table_rows) {
            expert = given[usize::cast_from(row) * form.top_k + place];
        }
        expert
    } else {
        given[token * form.top_k + place]
    }
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
    is_padding: bool,
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
        indices[first + place] = cubecl::prelude::select(is_padding, -1, local_number(chosen[place], form));
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
        cubecl::prelude::select(is_local, expert - comptime!(first as i32), -1)
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
    padded: false,
};
/// That of DeepSeek-V4's first layers.
#[cfg(feature = "offline")]
pub(crate) const V4_TABLE: RouteForm =
    RouteForm { top_k: 6, scoring: Scoring::SqrtSoftplus, choice: Choice::Table, groups: None, ..V3 };
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
    padded: false,
};

/// DeepSeek-V2-Lite, V3 and V4.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, form};
    let entry = |name, form: RouteForm| {
        let dim = CubeDim::new_1d(select::units(&form) as u32);
        Entry::new(name, form!(route_kernel, dim, [AddressType::U32, _, _, _, _, _, _, _, 1, 1, 1.0, form]))
    };
    let given = RouteForm { scoring: Scoring::SqrtSoftplus, choice: Choice::Given, groups: None, ..V3 };
    let local = RouteForm { local: Some(LocalExperts { first: 32, count: 32 }), padded: true, ..V3 };
    let [v3, local] = [entry("route_experts.v3", V3), entry("route_experts.local", local)];
    let [given, table] = [entry("route_experts.given", given), entry("route_experts.table", V4_TABLE)];
    vec![v3, local, entry("route_experts.v2_lite", V2_LITE), given, table]
}
