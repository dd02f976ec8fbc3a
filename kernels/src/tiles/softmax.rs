//! The online softmax of a block: weights from scores, both in the registers of the scores' warpgroup.

use cubecl::prelude::*;

use super::form::{Form, GROUP, KEYS, LOWEST, ROWS, TILE_BYTES};
use crate::ptx::{math, warp};

/// By how much scores (in powers of two) may exceed what the weights are relative to, before the output is scaled anew.
pub(crate) const SLACK: f32 = 8.0;

/// Maxima and sums of the two rows of a unit; the sums are of its own weights.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct SoftmaxState {
    pub highest_a: f32,
    pub highest_b: f32,
    pub sum_a: f32,
    pub sum_b: f32,
}

#[cube]
impl SoftmaxState {
    /// Without a key.
    pub fn new() -> SoftmaxState {
        SoftmaxState { highest_a: f32::new(LOWEST), highest_b: f32::new(LOWEST), sum_a: 0.0f32, sum_b: 0.0f32 }
    }
}

/// Weights of a block, packed in pairs, and the factors that the output so far is to be multiplied with.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Weighted {
    pub weights: Vector<u32, Const<16>>,
    pub factor_a: f32,
    pub factor_b: f32,
}

/// Of 64 keys, whose scores lie as `wgmma` has its accumulators.
#[cube]
pub(crate) fn weigh(
    s: Vector<f32, Const<32>>,
    state: &mut SoftmaxState,
    base: u32,
    end_a: u32,
    end_b: u32,
    scale: f32,
    lane: u32,
    #[comptime] form: Form,
) -> Weighted {
    let column = base + lane % 4 * 2;
    let mut masked = Sequence::<f32>::new();
    let mut top_a = f32::new(LOWEST);
    let mut top_b = f32::new(LOWEST);
    #[unroll]
    for i in 0..comptime!(KEYS / 8) {
        #[unroll]
        for j in 0..2usize {
            let key = column + comptime!((8 * i + j) as u32);
            let a = select(key < end_a, s.extract(comptime!(4 * i + j)) * scale, f32::new(2.0 * LOWEST));
            masked.push(a);
            top_a = max(top_a, a);
        }
        #[unroll]
        for j in 0..2usize {
            let key = column + comptime!((8 * i + j) as u32);
            let b = select(key < end_b, s.extract(comptime!(4 * i + 2 + j)) * scale, f32::new(2.0 * LOWEST));
            masked.push(b);
            top_b = max(top_b, b);
        }
    }
    weigh_masked(&masked, top_a, top_b, state, SLACK, form)
}

/// [`weigh`] where a bit of `low` and `high` says for each of the 64 keys whether all rows see it, and with a slack of its own.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn weigh_seen(
    s: Vector<f32, Const<32>>,
    state: &mut SoftmaxState,
    low: u32,
    high: u32,
    scale: f32,
    lane: u32,
    #[comptime] slack: f32,
    #[comptime] form: Form,
) -> Weighted {
    let mut scaled = Sequence::<f32>::new();
    #[unroll]
    for i in 0..32usize {
        scaled.push(s.extract(i) * scale);
    }
    let mut scores = math::vector::<f32, Const<32>>(&scaled);
    // Almost always all are seen.
    if low & high != u32::MAX {
        let own = lane % 4 * 2;
        let (low, high) = (low >> own, high >> own);
        let mut masked = Sequence::<f32>::new();
        #[unroll]
        for i in 0..comptime!(KEYS / 8) {
            let bits = if comptime!(i < KEYS / 16) { low } else { high };
            #[unroll]
            for j in 0..4usize {
                let seen = bits & comptime!(1u32 << (8 * i % 32 + j % 2)) != 0;
                masked.push(select(seen, scores.extract(comptime!(4 * i + j)), f32::new(2.0 * LOWEST)));
            }
        }
        scores = math::vector::<f32, Const<32>>(&masked);
    }
    let mut masked = Sequence::<f32>::new();
    let mut top_a = f32::new(LOWEST);
    let mut top_b = f32::new(LOWEST);
    #[unroll]
    for i in 0..comptime!(KEYS / 8) {
        #[unroll]
        for j in 0..4usize {
            masked.push(scores.extract(comptime!(4 * i + j)));
        }
        top_a = max(top_a, max(masked[comptime!(4 * i)], masked[comptime!(4 * i + 1)]));
        top_b = max(top_b, max(masked[comptime!(4 * i + 2)], masked[comptime!(4 * i + 3)]));
    }
    weigh_masked(&masked, top_a, top_b, state, slack, form)
}

/// Of scaled scores, of which those that are not seen are below [`LOWEST`], and of the highest that this unit has of each row.
#[cube]
fn weigh_masked(
    masked: &Sequence<f32>,
    own_a: f32,
    own_b: f32,
    state: &mut SoftmaxState,
    #[comptime] slack: f32,
    #[comptime] form: Form,
) -> Weighted {
    let mut top_a = quad_max(own_a);
    let mut top_b = quad_max(own_b);
    if top_a < state.highest_a + slack {
        top_a = state.highest_a;
    }
    if top_b < state.highest_b + slack {
        top_b = state.highest_b;
    }
    let factor_a = math::exp2(state.highest_a - top_a);
    let factor_b = math::exp2(state.highest_b - top_b);
    let mut sum_a = state.sum_a * factor_a;
    let mut sum_b = state.sum_b * factor_b;
    let mut packed = Sequence::<u32>::new();
    #[unroll]
    for i in 0..comptime!(KEYS / 8) {
        let a0 = math::exp2(masked[comptime!(4 * i)] - top_a);
        let a1 = math::exp2(masked[comptime!(4 * i + 1)] - top_a);
        let b0 = math::exp2(masked[comptime!(4 * i + 2)] - top_b);
        let b1 = math::exp2(masked[comptime!(4 * i + 3)] - top_b);
        sum_a += a0 + a1;
        sum_b += b0 + b1;
        packed.push(math::pack(a0, a1, comptime!(form.elem())));
        packed.push(math::pack(b0, b1, comptime!(form.elem())));
    }
    state.highest_a = top_a;
    state.highest_b = top_b;
    state.sum_a = sum_a;
    state.sum_b = sum_b;
    Weighted { weights: math::vector::<u32, Const<16>>(&packed), factor_a, factor_b }
}

/// Stores them where the output's warpgroups find them. A whole warp, whose lanes are together behind it.
#[cube]
pub(crate) fn store_weights(
    weighted: &Weighted,
    own_row: u32,
    lane: u32,
    weights: &mut Shared<[u32]>,
    factors: &mut Shared<[f32]>,
) {
    #[unroll]
    for i in 0..comptime!(KEYS / 8) {
        // [keys / 8][rows][8 keys], four words each
        let at = (own_row * 4 + lane % 4) as usize + comptime!(i * ROWS * 4);
        weights[at] = weighted.weights.extract(comptime!(2 * i));
        weights[at + 32] = weighted.weights.extract(comptime!(2 * i + 1));
    }
    let corner = lane % 4;
    if corner == 0 {
        factors[own_row as usize] = weighted.factor_a;
        factors[own_row as usize + 8] = weighted.factor_b;
    }
    // `wgmma` is next, which all lanes execute together.
    sync_plane();
}

/// Zeros for the keys of a block from `count` on: their weights are zero, but what is there may be NaN.
#[cube]
pub(crate) fn clear_keys(keys: &mut Shared<[u32]>, stage: u32, count: u32, #[comptime] form: Form) {
    let mut key = count;
    let at =
        stage * comptime!(form.stage_bytes() / 4) + UNIT_POS % GROUP / 32 * comptime!(TILE_BYTES / 4) + UNIT_POS % 32;
    while key < comptime!(KEYS as u32) {
        keys[(at + key * 32) as usize] = 0u32;
        keys[(at + key * 32 + comptime!(TILE_BYTES)) as usize] = 0u32;
        key += 1;
    }
}

#[cube]
pub(crate) fn quad_max(value: f32) -> f32 {
    let pair = max(value, warp::shuffle_xor::<f32>(value, 1u32));
    max(pair, warp::shuffle_xor::<f32>(pair, 2u32))
}

#[cube]
pub(crate) fn quad_sum(value: f32) -> f32 {
    let pair = value + warp::shuffle_xor::<f32>(value, 1u32);
    pair + warp::shuffle_xor::<f32>(pair, 2u32)
}

#[cube]
pub(crate) fn inverse(sum: f32) -> f32 {
    let mut inverse = 0.0f32;
    if sum > 0.0f32 {
        inverse = 1.0f32 / sum;
    }
    inverse
}

#[cube]
pub(crate) fn log_sum(sum: f32, highest: f32, empty_lse: u32) -> f32 {
    let mut lse = f32::from_bits(empty_lse);
    if sum > 0.0f32 {
        lse = highest * f32::new(std::f32::consts::LN_2) + sum.ln();
    }
    lse
}
