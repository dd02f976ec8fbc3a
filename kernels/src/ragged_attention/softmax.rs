//! The online softmax of a block, in the registers of a warpgroup or a warp.
//!
//! Scores lie as the matrix instructions have their accumulators: element `4 * i + 2 * j + h` is in row `t / 4 + 8 * j` of a warp's 16
//! and column `8 * i + 2 * (t % 4) + h`, with `t` the thread in the warp. Packed pair by pair, they are the left factor of a product.

use cubecl::prelude::*;

use super::form::Form;
use super::problem::RaggedAttentionOptions;
use crate::ptx::math;
use crate::tiles::form::LOWEST;
use crate::tiles::softmax::{SLACK, SoftmaxState, quad_max};

/// Weights of a block, and the factors that the output so far is to be multiplied with.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Weights<N: Size> {
    pub weights: Vector<f32, N>,
    pub factor_a: f32,
    pub factor_b: f32,
}

/// The least factor of the scores: smaller ones, and 0, make all weights 1 as well.
const LEAST_SCALE: f32 = 1e-20;

/// The factor of a product before the hyperbolic tangent, where there is one; and that of a score, which makes it a power of two.
pub(super) fn factors(options: &RaggedAttentionOptions) -> (f32, f32) {
    let (before_cap, scale) = match options.softcap {
        Some(softcap) => (options.softmax_scale / softcap, softcap),
        None => (1.0, options.softmax_scale.abs()),
    };
    (before_cap, (scale * std::f32::consts::LOG2_E).max(LEAST_SCALE))
}

/// What becomes of products.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Scores {
    /// How many keys a row sees at most, where it sees only its last ones.
    pub most_seen: i32,
    /// The factor before the hyperbolic tangent, where scores are capped.
    pub before_cap: f32,
    /// The factor of the scores, positive, which makes them powers of two.
    pub scale: f32,
}

/// Up to which of the block's keys the two rows see, less the unit's first column: column `i` of a row is seen if it is less, and
/// not too far before.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Seen {
    pub a: i32,
    pub b: i32,
}

/// Which of a block's keys may be hidden from a row.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mask {
    /// None.
    None,
    /// Those before its window.
    Window,
    /// And those past its last one.
    Ends,
}

/// The weights of a block.
///
/// Maxima are of scores before the scale, so that a weight costs one multiplication and addition, and one power.
#[cube]
pub(super) fn weigh<N: Size>(
    products: Vector<f32, N>,
    state: &mut SoftmaxState,
    scores: Scores,
    seen: &Seen,
    #[comptime] mask: Mask,
    #[comptime] form: Form,
) -> Weights<N> {
    let count = N::value().comptime();
    let scale = scores.scale;
    let mut all = Sequence::<f32>::new();
    let mut top_a = f32::new(LOWEST);
    let mut top_b = f32::new(LOWEST);
    #[unroll]
    for i in 0..count {
        let (row, column) = comptime!((i / 2 % 2, (i / 4 * 8 + i % 2) as i32));
        let mut score = products.extract(i);
        if comptime!(form.capped) {
            score = math::tanh(score * scores.before_cap);
        }
        if comptime!(form.negative) {
            score = -score;
        }
        let end = if comptime!(row == 0) { seen.a } else { seen.b };
        if comptime!(mask == Mask::Ends) {
            score = select(column < end, score, f32::new(2.0 * LOWEST));
        }
        if comptime!(form.windowed && mask != Mask::None) {
            score = select(column < end - scores.most_seen, f32::new(2.0 * LOWEST), score);
        }
        all.push(score);
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

/// What weights are relative to from now on.
#[cube]
fn raised(top: f32, highest: f32, slack: f32) -> f32 {
    select(top > highest + slack, top, highest)
}

/// The weights as the left factor of a product: half as many pairs.
#[cube]
pub(super) fn pack<N: Size, P: Size>(weights: Vector<f32, N>, #[comptime] form: Form) -> Vector<u32, P> {
    let count = P::value().comptime();
    let mut pairs = Sequence::<u32>::new();
    #[unroll]
    for i in 0..count {
        let (low, high) = (weights.extract(comptime!(2 * i)), weights.extract(comptime!(2 * i + 1)));
        pairs.push(math::pack(low, high, comptime!(form.elem())));
    }
    math::vector::<u32, P>(&pairs)
}
