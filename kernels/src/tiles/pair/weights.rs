//! The weights of a row, which two units have, each of half of a block's keys.

use cubecl::prelude::*;

use crate::ptx::tcgen05::{self, Shape};
use crate::ptx::{barrier, math, warp};
use crate::tiles::form::{Form, LOWEST, ROWS};
use crate::tiles::softmax::SLACK;

/// Maximum and sum of a row; the sum is of the unit's own weights.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct RowState {
    pub highest: f32,
    pub sum: f32,
}

#[cube]
impl RowState {
    /// Without a key.
    pub fn new() -> RowState {
        RowState { highest: f32::new(LOWEST), sum: 0.0f32 }
    }
}

/// A unit's weights of a block, packed in pairs, and the factor that the output so far is to be multiplied with.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct WeighedRow {
    weights: Vector<u32, Const<32>>,
    pub factor: f32,
}

/// Tells the unit that has the same row a number, and gives the one it tells. `times` counts the calls: memory is used anew
/// every other time, so that a unit may still read when the other one comes again.
#[cube]
pub(crate) fn partner(told: &mut Shared<[f32]>, times: u32, value: f32) -> f32 {
    let at = times % 2 * 128;
    told[(at + UNIT_POS) as usize] = value;
    // Warps 0 and 2 meet, and warps 1 and 3.
    barrier::sync_at(1 + UNIT_POS / 32 % 2, 64u32);
    told[(at + (UNIT_POS ^ 64u32)) as usize]
}

/// Weights of the 64 keys from `first_key` on, of which the row sees those before `end`, and all rows of its warp those before `first_end`.
#[allow(clippy::too_many_arguments)]
#[cube]
pub(crate) fn weigh_row(
    s: Vector<f32, Const<64>>,
    state: &mut RowState,
    told: &mut Shared<[f32]>,
    times: u32,
    first_key: u32,
    end: u32,
    first_end: u32,
    scale: f32,
    #[comptime] form: Form,
) -> WeighedRow {
    let mut scaled = Sequence::<f32>::new();
    #[unroll]
    for i in 0..64usize {
        scaled.push(s.extract(i) * scale);
    }
    let mut scores = math::vector::<f32, Const<64>>(&scaled);
    // Only in the last blocks of an item.
    if first_end < first_key + comptime!(ROWS as u32) {
        let mut masked = Sequence::<f32>::new();
        #[unroll]
        for i in 0..64usize {
            let key = first_key + comptime!(i as u32);
            masked.push(select(key < end, scores.extract(i), f32::new(2.0 * LOWEST)));
        }
        scores = math::vector::<f32, Const<64>>(&masked);
    }
    let mut masked = Sequence::<f32>::new();
    let mut top = f32::new(LOWEST);
    #[unroll]
    for i in 0..64usize {
        masked.push(scores.extract(i));
        top = max(top, masked[i]);
    }
    weigh_masked(&masked, top, state, told, times, SLACK, form)
}

/// Where the bit of a key is that says whether all rows see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Seen {
    /// Of key `i` bit `i / 4` of word `i % 4`: a lane has four keys.
    OfLanes,
    /// Bit `i % 16` of word `i / 16`: a warp has 16.
    OfWarps,
}

impl Seen {
    fn bit_of(self, key: usize) -> (usize, u32) {
        match self {
            Self::OfLanes => (key % 4, 1 << (key / 4)),
            Self::OfWarps => (key / 16, 1 << (key % 16)),
        }
    }
}

/// [`weigh_row`] where a bit of `seen` says whether all rows see a key, and with a slack of its own.
#[cube]
pub(crate) fn weigh_seen_row(
    s: Vector<f32, Const<64>>,
    state: &mut RowState,
    told: &mut Shared<[f32]>,
    times: u32,
    seen: Vector<u32, Const<4>>,
    scale: f32,
    #[comptime] bits: Seen,
    #[comptime] slack: f32,
    #[comptime] form: Form,
) -> WeighedRow {
    let mut scaled = Sequence::<f32>::new();
    #[unroll]
    for i in 0..64usize {
        scaled.push(s.extract(i) * scale);
    }
    let mut scores = math::vector::<f32, Const<64>>(&scaled);
    // Almost always all are seen.
    let all = seen.extract(0usize) & seen.extract(1usize) & seen.extract(2usize) & seen.extract(3usize);
    if all & 0xffffu32 != 0xffffu32 {
        let mut masked = Sequence::<f32>::new();
        #[unroll]
        for i in 0..64usize {
            let (word, bit) = comptime!(bits.bit_of(i));
            let is_seen = seen.extract(word) & bit != 0;
            masked.push(select(is_seen, scores.extract(i), f32::new(2.0 * LOWEST)));
        }
        scores = math::vector::<f32, Const<64>>(&masked);
    }
    let mut masked = Sequence::<f32>::new();
    let mut top = f32::new(LOWEST);
    #[unroll]
    for i in 0..64usize {
        masked.push(scores.extract(i));
        top = max(top, masked[i]);
    }
    weigh_masked(&masked, top, state, told, times, slack, form)
}

/// Of scaled scores, of which those that are not seen are below [`LOWEST`], and of the highest that this unit has.
#[cube]
fn weigh_masked(
    masked: &Sequence<f32>,
    own: f32,
    state: &mut RowState,
    told: &mut Shared<[f32]>,
    times: u32,
    #[comptime] slack: f32,
    #[comptime] form: Form,
) -> WeighedRow {
    let mut top = max(own, partner(told, times, own));
    if top < state.highest + slack {
        top = state.highest;
    }
    let factor = math::exp2(state.highest - top);
    let mut sum = state.sum * factor;
    let mut packed = Sequence::<u32>::new();
    #[unroll]
    for i in 0..32usize {
        let low = math::exp2(masked[comptime!(2 * i)] - top);
        let high = math::exp2(masked[comptime!(2 * i + 1)] - top);
        sum += low + high;
        packed.push(math::pack(low, high, comptime!(form.elem())));
    }
    state.highest = top;
    state.sum = sum;
    WeighedRow { weights: math::vector::<u32, Const<32>>(&packed), factor }
}

/// Writes a unit's weights, 128 bytes, into the tile of their half, with 128-byte swizzle. Eight units write to all banks.
#[cube]
pub(crate) fn store_weights(weighed: &WeighedRow, weights: &mut Shared<[Vector<u32, Const<4>>]>, half: u32) {
    let row = UNIT_POS % comptime!(ROWS as u32);
    #[unroll]
    for i in 0..8u32 {
        let mut words = Sequence::<u32>::new();
        #[unroll]
        for j in 0..4u32 {
            words.push(weighed.weights.extract(comptime!((4 * i + j) as usize)));
        }
        let at = (half * comptime!(ROWS as u32) + row) * 8 + (comptime!(i).runtime() ^ (row % 8));
        weights[at as usize] = math::vector::<u32, Const<4>>(&words);
    }
}

/// Multiplies a unit's row of the output. The next products are issued after the stores have been waited for.
#[cube]
pub(crate) fn scale_output(output: u32, factor: f32) {
    let mut part = 0u32;
    while part < 8u32 {
        let acc = tcgen05::load::<Const<32>>(output + part * 32, comptime!(Shape::Lanes));
        let mut scaled = Sequence::<f32>::new();
        #[unroll]
        for i in 0..32usize {
            scaled.push(acc.extract(i) * factor);
        }
        let scaled = math::vector::<f32, Const<32>>(&scaled);
        tcgen05::store::<f32, Const<32>>(output + part * 32, scaled, comptime!(Shape::Lanes));
        part = warp::next(part);
    }
}
