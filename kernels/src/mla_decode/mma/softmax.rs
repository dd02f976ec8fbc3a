//! The online softmax of a tile: weights from scores. Neighbouring units share a row.

use cubecl::prelude::*;

use super::tile::MmaTile;
use crate::common::plane;
use crate::mla_decode::problem::LOWEST;

/// By how much scores may exceed what the weights are relative to, before the accumulators are scaled anew. Weights of up to
/// exp(8) = 2981 and their sums are well within the range of f16 and f32, and no less exact.
const SLACK: f32 = 8.0;

/// The row of the tile that a unit computes weights of, together with its neighbours.
#[derive(CubeType, Clone, Copy)]
pub(super) struct OwnRow {
    /// Of the tile.
    pub row: usize,
    /// Of the unit, among those of the row.
    pub place: usize,
}

/// Of a row: the score that its weights are relative to, and the sum of those that this unit has computed.
#[derive(CubeType, Clone, Copy)]
pub(super) struct SoftmaxState {
    pub highest: f32,
    pub sum: f32,
}

#[cube]
impl SoftmaxState {
    pub fn new() -> SoftmaxState {
        SoftmaxState { highest: f32::new(LOWEST), sum: 0.0f32 }
    }
}

/// The weights of a tile of keys, of which `base` is the first and the row sees those before `end`; and the factor that the
/// output so far shrinks by.
#[cube]
pub(super) fn weigh<E: Float, P: Size>(
    state: &mut SoftmaxState,
    scores: &Shared<[Vector<f32, P>]>,
    weights: &mut Shared<[Vector<E, P>]>,
    factors: &mut Shared<[f32]>,
    own: &OwnRow,
    base: usize,
    end: usize,
    softmax_scale: f32,
    #[comptime] tile: MmaTile,
) {
    let mut top = state.highest;
    let mut pairs = Array::<Vector<f32, P>>::new(comptime!(tile.keys / 2 / tile.row_units()));
    #[unroll]
    for i in 0..comptime!(tile.keys / 2 / tile.row_units()) {
        let pair = own.place + i * comptime!(tile.row_units());
        let mut total = scores[own.row * comptime!(tile.score_stride()) + pair];
        #[unroll]
        for slice in 1..tile.slices {
            total += scores[(slice * tile.rows + own.row) * comptime!(tile.score_stride()) + pair];
        }
        total *= Vector::new(softmax_scale);
        pairs[i] = total;
        #[unroll]
        for half in 0..2usize {
            if base + 2 * pair + half < end {
                top = max(top, total.extract(half));
            }
        }
    }
    top = row_max(top, tile);
    if top < state.highest + SLACK {
        top = state.highest;
    }
    let factor = (state.highest - top).exp();
    state.sum *= factor;
    state.highest = top;
    #[unroll]
    for i in 0..comptime!(tile.keys / 2 / tile.row_units()) {
        let pair = own.place + i * comptime!(tile.row_units());
        let mut weight = (pairs[i] - Vector::new(top)).exp();
        #[unroll]
        for half in 0..2usize {
            if base + 2 * pair + half >= end {
                weight.insert(half, 0.0f32);
            }
            state.sum += weight.extract(half);
        }
        weights[own.row * comptime!(tile.weight_stride()) + pair] = Vector::cast_from(weight);
    }
    if own.place == 0 {
        factors[own.row] = factor;
    }
}

/// The highest of what the units of a row have.
#[cube]
fn row_max(value: f32, #[comptime] tile: MmaTile) -> f32 {
    let mut highest = value;
    #[unroll]
    for i in 0..comptime!(tile.row_units().ilog2()) {
        highest = max(highest, plane::shuffle_xor::<f32>(highest, comptime!(1u32 << i)));
    }
    highest
}

/// The sum of what the units of a row have.
#[cube]
pub(super) fn row_sum(value: f32, #[comptime] tile: MmaTile) -> f32 {
    let mut sum = value;
    #[unroll]
    for i in 0..comptime!(tile.row_units().ilog2()) {
        sum += plane::shuffle_xor::<f32>(sum, comptime!(1u32 << i));
    }
    sum
}
