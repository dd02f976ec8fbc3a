//! The online softmax of a block, in the registers of a warpgroup or a warp.
//!
//! Scores lie as the matrix instructions have their accumulators: element `4 * i + 2 * j + h` is in row `t / 4 + 8 * j` of a warp's 16
//! and column `8 * i + 2 * (t % 4) + h`, with `t` the thread in the warp. Packed pair by pair, they are the left factor of a product.

use cubecl::prelude::*;

use super::form::Form;
use crate::ptx::math;
use crate::tiles::form::LOWEST;
use crate::tiles::softmax::{SLACK, SoftmaxState, quad_max};

/// Weights of a block, and the factors that the output so far is to be multiplied with.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Weights<N: Size> {
    pub weights: Vector<f32, N>,
    pub factor_a: f32,
    pub factor_b: f32,
}

/// The least factor of the scores: smaller ones, and 0, make all weights 1 as well.
const LEAST_SCALE: f32 = 1e-20;

/// The factor of a product before the hyperbolic tangent, where there is one; and that of a score, which makes it a power of two.
pub(crate) fn factors(softmax_scale: f32, softcap: Option<f32>) -> (f32, f32) {
    let (before_cap, scale) = match softcap {
        Some(softcap) => (softmax_scale / softcap, softcap),
        None => (1.0, softmax_scale.abs()),
    };
    (before_cap, (scale * std::f32::consts::LOG2_E).max(LEAST_SCALE))
}

/// What becomes of products.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Scores {
    /// The factor before the hyperbolic tangent, where scores are capped.
    pub before_cap: f32,
    /// The factor of the scores, positive, which makes them powers of two.
    pub scale: f32,
    /// Whether weights are relative to the greatest score so far, so that its own is 1, which no rounding changes; otherwise to one
    /// that scores exceed by [`SLACK`] at most, and outputs are scaled anew almost never.
    #[cube(comptime)]
    pub exact: bool,
}

/// The score of a key that its row does not see.
pub(crate) const HIDDEN: f32 = 2.0 * LOWEST;

/// Which keys of a block the rows of a unit see.
#[cube]
pub(crate) trait Visible {
    /// The score of element `i`, or [`HIDDEN`] where its row does not see its key.
    fn visible(&self, score: f32, #[comptime] i: usize) -> f32;
}

/// All of them.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct All {}

#[cube]
impl Visible for All {
    fn visible(&self, score: f32, #[comptime] _i: usize) -> f32 {
        score
    }
}

/// The weights of a block.
///
/// Maxima are of scores before the scale, so that a weight costs one multiplication and addition, and one power.
#[cube]
pub(crate) fn weigh<N: Size, S: Visible>(
    products: Vector<f32, N>,
    state: &mut SoftmaxState,
    scores: Scores,
    seen: &S,
    #[comptime] form: Form,
) -> Weights<N> {
    let count = N::value().comptime();
    let scale = scores.scale;
    let mut all = Sequence::<f32>::new();
    let mut top_a = f32::new(LOWEST);
    let mut top_b = f32::new(LOWEST);
    #[unroll]
    for i in 0..count {
        let row = comptime!(i / 2 % 2);
        let mut score = products.extract(i);
        if comptime!(form.capped) {
            score = math::tanh(score * scores.before_cap);
        }
        if comptime!(form.negative) {
            score = -score;
        }
        let score = seen.visible(score, i);
        all.push(score);
        if comptime!(row == 0) {
            top_a = max(top_a, score);
        } else {
            top_b = max(top_b, score);
        }
    }
    let (top_a, top_b) = (quad_max(top_a), quad_max(top_b));
    let (top_a, top_b) = if comptime!(scores.exact) {
        (max(top_a, state.highest_a), max(top_b, state.highest_b))
    } else {
        let slack = SLACK / scale;
        (raised(top_a, state.highest_a, slack), raised(top_b, state.highest_b, slack))
    };
    let factor_a = math::exp2((state.highest_a - top_a) * scale);
    let factor_b = math::exp2((state.highest_b - top_b) * scale);
    let (shift_a, shift_b) = (-top_a * scale, -top_b * scale);
    let mut sum_a = state.sum_a * factor_a;
    let mut sum_b = state.sum_b * factor_b;
    let mut weights = Sequence::<f32>::new();
    #[unroll]
    for i in 0..count {
        let row = comptime!(i / 2 % 2);
        let shift = if comptime!(row == 0) { shift_a } else { shift_b };
        let weight = math::exp2(fma(*all.index(i), scale, shift));
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
    Weights::<N> { weights: math::vector::<f32, N>(&weights), factor_a, factor_b }
}

/// What weights are relative to from now on: scores may exceed it before the output is scaled anew.
#[cube]
fn raised(top: f32, highest: f32, slack: f32) -> f32 {
    select(top > highest + slack, top, highest)
}

/// The weights as the left factor of a product: half as many pairs.
#[cube]
pub(crate) fn pack<N: Size, P: Size>(weights: Vector<f32, N>, #[comptime] form: Form) -> Vector<u32, P> {
    let count = P::value().comptime();
    let mut pairs = Sequence::<u32>::new();
    #[unroll]
    for i in 0..count {
        let (low, high) = (weights.extract(comptime!(2 * i)), weights.extract(comptime!(2 * i + 1)));
        pairs.push(math::pack(low, high, comptime!(form.elem())));
    }
    math::vector::<u32, P>(&pairs)
}
