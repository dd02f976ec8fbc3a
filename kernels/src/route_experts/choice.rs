//! From scores to the experts of a token.

use cubecl::prelude::*;

use super::{Choice, Groups, RouteForm};

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
