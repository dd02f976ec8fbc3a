//! From scores to the experts of a token.

use cubecl::prelude::*;

use super::{Choice, Groups, RouteForm};
use crate::common::plane;

/// What hides an expert: not more than any score. (WGSL has no infinity.)
const HIDDEN: f32 = f32::MIN;

/// The experts with the best scores, the best first. Called by all of a cube's `units`, which have waited for each other then.
#[cube]
pub(crate) fn choose(
    bias: &[f32],
    scores: &[f32],
    chosen: &mut Shared<[i32]>,
    #[comptime] form: RouteForm,
    #[comptime] units: usize,
) {
    let unit = UNIT_POS as usize;
    // What the choice goes by: of two experts with the same, the first one is better.
    let mut ranked = Shared::<[f32]>::new_aligned_slice(form.experts, 16usize);
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

/// How many experts are better than this one. Four at a time, where they come out even: each load is of all units together.
#[allow(clippy::needless_range_loop, reason = "kernels have no iterators of slices")]
#[cube]
fn place_of(ranked: &[f32], expert: usize, #[comptime] experts: usize) -> usize {
    let own = ranked[expert];
    let mut place = 0usize.runtime();
    // Shaders have no vectors of what is in memory as numbers.
    let ptx = plane::is_ptx().comptime();
    if comptime!(ptx && experts.is_multiple_of(4)) {
        let fours = ranked.as_vectorized().with_vector_size::<Const<4>>();
        for at in 0..comptime!(experts / 4) {
            let four = fours[at];
            #[unroll]
            for i in 0..4usize {
                place += is_better(four.extract(i), at * 4 + i, own, expert);
            }
        }
    } else {
        for other in 0..experts {
            place += is_better(ranked[other], other, own, expert);
        }
    }
    place
}

/// 1 if the value of another expert is better than an expert's own, otherwise 0.
#[cube]
fn is_better(value: f32, other: usize, own: f32, expert: usize) -> usize {
    usize::cast_from(value > own || (value == own && other < expert))
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
    let mut group_scores = Shared::<[f32]>::new_aligned_slice(groups.count, 16usize);
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
