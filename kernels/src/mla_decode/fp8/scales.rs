//! The scales of a block's keys as the weights are multiplied with them, once for all query rows.
//!
//! Products of weights and scales are f16, so that scales are brought near 1 by a power of two. It is the same for all blocks until larger
//! scales come; a warp that meets them says so, and the softmax looks at them itself.

use cubecl::prelude::*;

use super::cube::Cube;
use super::form::{ROW_BYTES, SCALES, SCALES_AT};
use crate::ptx::{matrix, warp};
use crate::tiles::form::KEYS;

/// Scales times their power of two are at most this, and begin in the upper half of what is below it by a factor of two. Times the largest
/// weight, 2^[`SLACK`](crate::tiles::softmax::SLACK), that is half of what f16 has.
pub(super) const MOST: f32 = 128.0;
/// The exponent, as f32 has it, that the power of two brings the largest scale to: between 32 and 64.
pub(super) const EXPONENT: u32 = 127 + 5;
/// Powers of two before there was a scale.
pub(super) const FIRST_POWER: f32 = (1u128 << 120) as f32;

/// Numbers of two neighbouring keys side by side, of two scales: what is loaded at once.
const VECTOR: usize = 4;

/// Writes those that this warp's scores have, of the keys in a stage, times their power of two. All synchronise behind it.
#[cube]
pub(super) fn write(cube: &Cube, stage_at: u32, power: f32, turn: u32) {
    let count = comptime!(cube.form.own_keys() as u32);
    let scale = cube.warp % comptime!(SCALES as u32);
    let key = cube.warp / comptime!(SCALES as u32) * count + cube.lane % count;
    let scaled = f32::reinterpret(matrix::load_4(stage_at + key * ROW_BYTES + scale * 4, SCALES_AT)) * power;
    let at = (scale / 2 * comptime!((KEYS / 2) as u32) + key / 2) * comptime!(VECTOR as u32) + scale % 2 * 2 + key % 2;
    matrix::store_4_if(cube.scales_at + at * 4, 0u32, u32::reinterpret(scaled), cube.lane < count);
    let exceeds = warp::any(scaled.abs() > MOST);
    matrix::store_4_if(cube.exceeded_at + cube.warp * 4, 0u32, turn, exceeds && cube.lane == 0);
}

/// Whether a scale of this block is too large for its power of two, to some lane.
#[cube]
pub(super) fn exceed(cube: &Cube, turn: u32) -> bool {
    let at = cube.exceeded_at + cube.lane % comptime!(cube.form.warps() as u32) * 4;
    matrix::load_4(at, 0u32) == turn
}

/// Those of this lane's two keys, `[scale][key]`.
#[cube]
pub(super) fn load(cube: &Cube) -> Sequence<f32> {
    let at = cube.scales_at + cube.lane * comptime!(4 * VECTOR as u32);
    let mut scaled = Sequence::<f32>::new();
    #[unroll]
    for pair in 0..comptime!(SCALES / 2) {
        let words = matrix::load_16(at, comptime!((pair * KEYS / 2 * VECTOR * 4) as u32));
        #[unroll]
        for i in 0..VECTOR {
            scaled.push(f32::reinterpret(words.extract(i)));
        }
    }
    scaled
}
