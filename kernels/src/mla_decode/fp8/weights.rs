//! The softmax of a block: weights from scores. A warp has some query rows, a lane two keys of each.
//!
//! A weight is multiplied with the scale of its key, once for the channels of each scale, for the output is a product with the codes
//! themselves. These products are f16, so that scales are brought near 1 by a power of two that is the same for all blocks until larger
//! scales come; then the output so far is scaled anew, as it is where a maximum has grown.

use cubecl::prelude::*;

use super::cube::Cube;
use super::form::{Form, ROW_BYTES, SCALES, SCALES_AT, SCORE_STRIDE, WEIGHT_STRIDE};
use super::query::{warp_max, warp_sum};
use crate::ptx::wgmma::Elem;
use crate::ptx::{math, matrix, warp};
use crate::tiles::form::LOWEST;
use crate::tiles::loader::{Item, Plan};
use crate::tiles::output::{Results, Target};
use crate::tiles::softmax::{SLACK, inverse, log_sum};

/// Scales times their power of two are at most this, and begin in the upper half of what is below it by a factor of two. Times the largest
/// weight, 2^[`SLACK`], that is half of what f16 has.
const MOST: f32 = 128.0;
/// The exponent, as f32 has it, that the power of two brings the largest scale to: between 32 and 64.
const EXPONENT: u32 = 127 + 5;
/// Powers of two before there was a scale.
const FIRST_POWER: f32 = (1u128 << 120) as f32;

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
            form,
        };
        #[unroll]
        for i in 0..count {
            let row = cube.warp * comptime!(count as u32) + comptime!(i as u32);
            softmax.highest[i] = f32::new(LOWEST);
            softmax.sums[i] = 0.0f32;
            softmax.ends[i] = cube.visible_end(plan, item, row);
            softmax.scales[i] = scale * inverse_power(matrix::load_4(cube.powers_at + row * 4, 0u32));
            #[unroll]
            for group in 0..SCALES {
                softmax.powers[comptime!(i * SCALES + group)] = f32::new(FIRST_POWER);
            }
        }
        softmax
    }

    /// Writes the weights of a block, of which `base` is the first key, and the factors of the output.
    pub fn weigh(&mut self, cube: &Cube, stage_at: u32, base: u32) {
        let key = base + 2 * cube.lane;
        let scales_at = stage_at + 2 * cube.lane * ROW_BYTES;
        let scales_a = matrix::load_16(scales_at, SCALES_AT);
        let scales_b = matrix::load_16(scales_at, comptime!(SCALES_AT + ROW_BYTES));
        #[unroll]
        for i in 0..comptime!(self.form.own_rows()) {
            let row = cube.warp * comptime!(self.form.own_rows() as u32) + comptime!(i as u32);
            let (there_a, there_b) = (key < self.ends[i], key + 1 < self.ends[i]);
            let scores = self.scores(cube, row);
            let a = select(there_a, scores.extract(0usize) * self.scales[i], f32::new(2.0 * LOWEST));
            let b = select(there_b, scores.extract(1usize) * self.scales[i], f32::new(2.0 * LOWEST));
            let top = max(a, b);
            let mut seen = Sequence::<f32>::new();
            let mut grown = top >= self.highest[i] + SLACK;
            #[unroll]
            for group in 0..SCALES {
                let scale_a = f32::reinterpret(select(there_a, scales_a.extract(group), 0u32));
                let scale_b = f32::reinterpret(select(there_b, scales_b.extract(group), 0u32));
                let largest = max(scale_a.abs(), scale_b.abs());
                grown = grown || largest * self.powers[comptime!(i * SCALES + group)] > MOST;
                seen.push(scale_a);
                seen.push(scale_b);
            }
            let factors_at = cube.factors_at + row * 4;
            // Almost never.
            if warp::any(grown) {
                self.grow(&seen, top, factors_at, cube.lane, i);
            } else {
                #[unroll]
                for group in 0..SCALES {
                    let offset = comptime!((group * self.form.rows() * 4) as u32);
                    matrix::store_4_if(factors_at, offset, comptime!(1.0f32.to_bits()).runtime(), cube.lane == 0);
                }
            }
            let weight_a = math::exp2(a - self.highest[i]);
            let weight_b = math::exp2(b - self.highest[i]);
            self.sums[i] += weight_a + weight_b;
            let weights_at = cube.weights_at + row * comptime!(2 * WEIGHT_STRIDE as u32) + 4 * cube.lane;
            #[unroll]
            for group in 0..SCALES {
                let power = self.powers[comptime!(i * SCALES + group)];
                let low = weight_a * (seen[comptime!(2 * group)] * power);
                let high = weight_b * (seen[comptime!(2 * group + 1)] * power);
                let offset = comptime!((group * self.form.rows() * WEIGHT_STRIDE * 2) as u32);
                matrix::store_4(weights_at, offset, math::pack(low, high, comptime!(Elem::F16)));
            }
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
