//! The online softmax of a block, in the registers of a warpgroup.

use cubecl::prelude::*;

use super::form::{Form, KEYS};
use crate::ptx::math;
use crate::tiles::form::LOWEST;
use crate::tiles::softmax::{SLACK, SoftmaxState, quad_max};

/// Scores of a unit: of two rows (a and b, 8 apart), every other pair of columns.
pub(super) const SCORES: usize = KEYS / 2;
/// Pairs of weights of a unit.
pub(super) const PAIRS: usize = SCORES / 2;

/// Weights of a block, and the factors that the output so far is to be multiplied with.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Weights {
    pub weights: Vector<f32, Const<SCORES>>,
    pub factor_a: f32,
    pub factor_b: f32,
}

/// How many of the block's keys the two rows see, less the unit's first column: column `i` of a row is seen if it is less.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Ends {
    pub a: i32,
    pub b: i32,
}

/// The weights of a block. Its scores lie as `wgmma` has its accumulators; `scale`, which is positive, makes them powers of two.
///
/// Maxima are of scores before the scale, so that a weight costs one multiplication and addition, and one power.
#[cube]
pub(super) fn weigh(
    scores: Vector<f32, Const<SCORES>>,
    state: &mut SoftmaxState,
    scale: f32,
    ends: &Ends,
    #[comptime] masked: bool,
    #[comptime] form: Form,
) -> Weights {
    let mut seen = Sequence::<f32>::new();
    let mut top_a = f32::new(LOWEST);
    let mut top_b = f32::new(LOWEST);
    #[unroll]
    for i in 0..SCORES {
        let (row, column) = comptime!((i / 2 % 2, (i / 4 * 8 + i % 2) as i32));
        let mut score = scores.extract(i);
        if comptime!(form.negative) {
            score = -score;
        }
        if comptime!(masked) {
            let end = if comptime!(row == 0) { ends.a } else { ends.b };
            score = select(column < end, score, f32::new(2.0 * LOWEST));
        }
        seen.push(score);
        if comptime!(row == 0) {
            top_a = max(top_a, score);
        } else {
            top_b = max(top_b, score);
        }
    }
    // Scores may exceed what the weights are relative to, before the output is scaled anew.
    let slack = SLACK / scale;
    let (top_a, top_b) =
        (raised(quad_max(top_a), state.highest_a, slack), raised(quad_max(top_b), state.highest_b, slack));
    let factor_a = math::exp2((state.highest_a - top_a) * scale);
    let factor_b = math::exp2((state.highest_b - top_b) * scale);
    let (shift_a, shift_b) = (-top_a * scale, -top_b * scale);
    let mut sum_a = state.sum_a * factor_a;
    let mut sum_b = state.sum_b * factor_b;
    let mut weights = Sequence::<f32>::new();
    #[unroll]
    for i in 0..SCORES {
        let row = comptime!(i / 2 % 2);
        let shift = if comptime!(row == 0) { shift_a } else { shift_b };
        let weight = math::exp2(fma(*seen.index(i), scale, shift));
        weights.push(weight);
        if comptime!(row == 0) {
            sum_a += weight;
        } else {
            sum_b += weight;
        }
    }
    state.highest_a = top_a;
    state.highest_b = top_b;
    state.sum_a = sum_a;
    state.sum_b = sum_b;
    Weights { weights: math::vector::<f32, Const<SCORES>>(&weights), factor_a, factor_b }
}

/// What weights are relative to from now on.
#[cube]
fn raised(top: f32, highest: f32, slack: f32) -> f32 {
    select(top > highest + slack, top, highest)
}

/// The weights as the left factor of a product.
#[cube]
pub(super) fn pack(weights: Vector<f32, Const<SCORES>>, #[comptime] form: Form) -> Vector<u32, Const<PAIRS>> {
    let mut pairs = Sequence::<u32>::new();
    #[unroll]
    for i in 0..PAIRS {
        let (low, high) = (weights.extract(comptime!(2 * i)), weights.extract(comptime!(2 * i + 1)));
        pairs.push(math::pack(low, high, comptime!(form.elem())));
    }
    math::vector::<u32, Const<PAIRS>>(&pairs)
}
