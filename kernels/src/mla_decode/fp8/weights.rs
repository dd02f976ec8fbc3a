//! The softmax of a block: weights from scores. A warp has some query rows, a lane two keys of each.
//!
//! A weight is multiplied with the scale of its key, once for the channels of each scale, for the output is a product with the codes
//! themselves. Where a maximum or a power of two of the scales changes, the output so far is scaled anew.
//!
//! Most blocks are seen by all rows, change nothing, and take a short way. The long way has the same bits where both may be taken: which
//! of them it is depends on other rows.

use cubecl::prelude::*;

use super::cube::Cube;
use super::form::{Form, ROW_BYTES, SCALES, SCALES_AT, SCORE_STRIDE, WEIGHT_STRIDE};
use super::query::{warp_max, warp_sum};
use super::scales::{self, EXPONENT, FIRST_POWER, MOST};
use crate::ptx::wgmma::Elem;
use crate::ptx::{math, matrix, warp};
use crate::tiles::form::{KEYS, LOWEST};
use crate::tiles::loader::{Item, Plan};
use crate::tiles::output::{Results, Target};
use crate::tiles::softmax::{SLACK, inverse, log_sum};

/// The rows of a warp.
#[derive(CubeType)]
pub(super) struct Softmax {
    /// Of each row: what the weights are relative to, the sum of this lane's weights, one past the last key that is seen.
    highest: Array<f32>,
    sums: Array<f32>,
    ends: Array<u32>,
    /// What scores are multiplied with: they are powers of two then.
    scales: Array<f32>,
    /// `[row][scale]`: the power of two of the scales.
    powers: Array<f32>,
    /// That of the scale which the warp has scores of. It is the same in all rows until keys are hidden from some.
    pub power: f32,
    /// One past the last key that all rows of the cube see.
    all_see: u32,
    /// Of each row: whether a factor other than 1 may be there.
    stale: Array<u32>,
    #[cube(comptime)]
    form: Form,
}

#[cube]
impl Softmax {
    /// Before the first block of an item. Powers of queries have been written.
    pub fn new(cube: &Cube, plan: &Plan, item: &Item, scale: f32) -> Softmax {
        let form = comptime!(cube.form);
        let count = comptime!(form.own_rows());
        let mut softmax = Softmax {
            highest: Array::new(count),
            sums: Array::new(count),
            ends: Array::new(count),
            scales: Array::new(count),
            powers: Array::new(comptime!(count * SCALES)),
            power: f32::new(FIRST_POWER),
            all_see: warp::uniform(cube.visible_end(plan, item, 0u32)),
            stale: Array::new(count),
            form,
        };
        #[unroll]
        for i in 0..count {
            let row = cube.warp * comptime!(count as u32) + comptime!(i as u32);
            softmax.highest[i] = f32::new(LOWEST);
            softmax.sums[i] = 0.0f32;
            softmax.stale[i] = 1u32;
            softmax.ends[i] = cube.visible_end(plan, item, row);
            softmax.scales[i] = scale * inverse_power(matrix::load_4(cube.powers_at + row * 4, 0u32));
            #[unroll]
            for group in 0..SCALES {
                softmax.powers[comptime!(i * SCALES + group)] = f32::new(FIRST_POWER);
            }
        }
        softmax
    }

    /// Writes the weights of the block of a turn, of which `base` is the first key, and the factors of the output.
    pub fn weigh(&mut self, cube: &Cube, stage_at: u32, base: u32, turn: u32) {
        let scaled = scales::load(cube);
        let unusual = base + comptime!(KEYS as u32) > self.all_see || scales::exceed(cube, turn);
        #[unroll]
        for i in 0..comptime!(self.form.own_rows()) {
            let row = cube.warp * comptime!(self.form.own_rows() as u32) + comptime!(i as u32);
            let scores = self.scores(cube, row);
            let (a, b) = (scores.extract(0usize) * self.scales[i], scores.extract(1usize) * self.scales[i]);
            if warp::any(unusual || max(a, b) >= self.highest[i] + SLACK) {
                self.weigh_row(cube, stage_at, base, a, b, i);
            } else {
                if self.stale[i] != 0 {
                    self.write_ones(cube, row, i);
                }
                let (weight_a, weight_b) = self.weights(a, b, i);
                #[unroll]
                for group in 0..SCALES {
                    let (low, high) = (scaled[comptime!(2 * group)], scaled[comptime!(2 * group + 1)]);
                    self.store(cube, row, weight_a * low, weight_b * high, group);
                }
            }
        }
    }

    /// The same for one row, where keys may be hidden, or something may have grown.
    fn weigh_row(&mut self, cube: &Cube, stage_at: u32, base: u32, a: f32, b: f32, #[comptime] i: usize) {
        let row = cube.warp * comptime!(self.form.own_rows() as u32) + comptime!(i as u32);
        let key = base + 2 * cube.lane;
        let (there_a, there_b) = (key < self.ends[i], key + 1 < self.ends[i]);
        let a = select(there_a, a, f32::new(2.0 * LOWEST));
        let b = select(there_b, b, f32::new(2.0 * LOWEST));
        let scales_at = stage_at + 2 * cube.lane * ROW_BYTES;
        let scales_a = matrix::load_16(scales_at, SCALES_AT);
        let scales_b = matrix::load_16(scales_at, comptime!(SCALES_AT + ROW_BYTES));
        let mut seen = Sequence::<f32>::new();
        #[unroll]
        for group in 0..SCALES {
            seen.push(f32::reinterpret(select(there_a, scales_a.extract(group), 0u32)));
            seen.push(f32::reinterpret(select(there_b, scales_b.extract(group), 0u32)));
        }
        self.grow(&seen, max(a, b), cube.factors_at + row * 4, cube.lane, i);
        self.stale[i] = 1u32;
        let (weight_a, weight_b) = self.weights(a, b, i);
        let own = cube.warp % comptime!(SCALES as u32);
        #[unroll]
        for group in 0..SCALES {
            let power = self.powers[comptime!(i * SCALES + group)];
            let low = weight_a * (seen[comptime!(2 * group)] * power);
            let high = weight_b * (seen[comptime!(2 * group + 1)] * power);
            self.store(cube, row, low, high, group);
            self.power = select(own == group as u32, power, self.power);
        }
    }

    /// The weights of a lane's keys.
    fn weights(&mut self, a: f32, b: f32, #[comptime] i: usize) -> (f32, f32) {
        let weights = (math::exp2(a - self.highest[i]), math::exp2(b - self.highest[i]));
        self.sums[i] += weights.0 + weights.1;
        weights
    }

    /// Writes weights times scales.
    fn store(&self, cube: &Cube, row: u32, low: f32, high: f32, #[comptime] group: usize) {
        let at = cube.weights_at + row * comptime!(2 * WEIGHT_STRIDE as u32) + 4 * cube.lane;
        let offset = comptime!((group * self.form.rows() * WEIGHT_STRIDE * 2) as u32);
        matrix::store_4(at, offset, math::pack(low, high, comptime!(Elem::F16)));
    }

    /// Factors of 1 for the output of a row.
    fn write_ones(&mut self, cube: &Cube, row: u32, #[comptime] i: usize) {
        self.stale[i] = 0u32;
        #[unroll]
        for group in 0..SCALES {
            let offset = comptime!((group * self.form.rows() * 4) as u32);
            let one = comptime!(1.0f32.to_bits()).runtime();
            matrix::store_4_if(cube.factors_at + row * 4, offset, one, cube.lane == 0);
        }
    }

    /// The scores of two keys of a row, added up in a fixed order.
    fn scores(&self, cube: &Cube, row: u32) -> Vector<f32, Const<2>> {
        let at = cube.scores_at + row * comptime!(4 * SCORE_STRIDE as u32) + 8 * cube.lane;
        let mut sum = Vector::<f32, Const<2>>::new(0.0f32);
        #[unroll]
        for group in 0..SCALES {
            let part = matrix::load_8(at, comptime!((group * self.form.rows() * SCORE_STRIDE * 4) as u32));
            sum += Vector::<f32, Const<2>>::reinterpret(part);
        }
        sum
    }

    /// Takes what row `i` is relative to anew.
    fn grow(&mut self, seen: &Sequence<f32>, top: f32, factors_at: u32, lane: u32, #[comptime] i: usize) {
        let before = self.highest[i];
        let top = warp_max(top);
        if top >= before + SLACK {
            self.highest[i] = top;
        }
        let factor = math::exp2(before - self.highest[i]);
        self.sums[i] *= factor;
        #[unroll]
        for group in 0..SCALES {
            let at = comptime!(i * SCALES + group);
            let before = self.powers[at];
            let largest = warp_max(max(seen[comptime!(2 * group)].abs(), seen[comptime!(2 * group + 1)].abs()));
            if largest * before > MOST {
                let exponent = u32::reinterpret(largest) >> 23;
                self.powers[at] = f32::reinterpret(min(127 + EXPONENT - exponent, 253u32) << 23);
            }
            let scaled = factor * (self.powers[at] * inverse_power(u32::reinterpret(before)));
            let offset = comptime!((group * self.form.rows() * 4) as u32);
            matrix::store_4_if(factors_at, offset, u32::reinterpret(scaled), lane == 0);
        }
    }

    /// Writes the factors that normalise the output, and the lse.
    pub fn finish<E: Float, P: Size>(&self, cube: &Cube, target: &Target, empty_lse: u32, results: &mut Results<E, P>) {
        #[unroll]
        for i in 0..comptime!(self.form.own_rows()) {
            let row = cube.warp * comptime!(self.form.own_rows() as u32) + comptime!(i as u32);
            let sum = warp_sum(self.sums[i]);
            let inverse = inverse(sum);
            #[unroll]
            for group in 0..SCALES {
                let power = inverse_power(u32::reinterpret(self.powers[comptime!(i * SCALES + group)]));
                let offset = comptime!((group * self.form.rows() * 4) as u32);
                matrix::store_4_if(cube.ends_at + row * 4, offset, u32::reinterpret(inverse * power), cube.lane == 0);
            }
            let lse = log_sum(sum, self.highest[i], empty_lse);
            let row = cube.tile_row + row;
            if cube.lane == 0 && row < cube.rows {
                results.write_lse(target, row, lse);
            }
            sync_plane();
        }
    }
}

/// The inverse of a power of two, of which these are the bits.
#[cube]
fn inverse_power(power: u32) -> f32 {
    f32::reinterpret(comptime!(254u32 << 23) - power)
}
