//! The queries of an item in the registers of the warps.
//!
//! Codes are multiplied as f16, which has all of E4M3 but not the range of bf16. So a query is multiplied with a power of two that
//! brings its largest number below 2^15, and the scores with its inverse: both are exact, and what becomes too small for f16 then is less
//! than 2^-38 of the largest, or than 2^-84.

use cubecl::prelude::*;

use super::cube::Cube;
use super::form::{CODES, ROPE, SCALED, SCALES, TILE_ROWS};
use crate::ptx::wgmma::Elem;
use crate::ptx::{math, matrix, warp};

/// Numbers of a query that are read at once.
pub(super) const VECTOR: usize = 4;
const WIDTH: usize = CODES + ROPE;
/// Steps of 16 terms over the codes of a scale.
pub(super) const STEPS: usize = SCALED / 16;

/// Writes the power of two of each row that is this warp's. All synchronise behind it.
#[cube]
pub(super) fn write_powers<E: Float, V: Size>(q: &[Vector<E, V>], cube: &Cube, sequence: u32) {
    #[unroll]
    for i in 0..comptime!(cube.form.own_rows() as u32) {
        let row = cube.warp * comptime!(cube.form.own_rows() as u32) + i;
        // Rows past the end have the power of the last one.
        let own = min(cube.tile_row + row, cube.rows - 1);
        let at = ((sequence * cube.rows + own) * comptime!((WIDTH / VECTOR) as u32) + cube.lane) as usize;
        let mut highest = 0.0f32;
        #[unroll]
        for j in 0..comptime!(CODES / VECTOR / 32) {
            let numbers = q[at + 32 * j];
            #[unroll]
            for n in 0..VECTOR {
                highest = max(highest, f32::cast_from(numbers.extract(n)).abs());
            }
        }
        let highest = warp_max(highest);
        // The power is 2^14 by the highest's, but at most 2^60: where all codes meet zeros, rotary channels must remain numbers.
        let power = min(268 - (u32::reinterpret(highest) >> 23), 187u32) << 23;
        matrix::store_4_if(cube.powers_at + row * 4, 0u32, power, cube.lane == 0);
    }
}

/// The first factor of the scores of one scale: of each tile eight steps over its codes, then one over its quarter of the rotary
/// channels. Of each group of 16 numbers a thread has four neighbours, which are the pairs of both halves of a step.
#[cube]
pub(super) fn load<E: Float, V: Size>(q: &[Vector<E, V>], cube: &Cube, sequence: u32) -> Array<Vector<u32, Const<4>>> {
    let mut query = Array::<Vector<u32, Const<4>>>::new(comptime!(cube.form.tiles * (STEPS + 1)));
    let scale = cube.warp % comptime!(SCALES as u32);
    let corner = cube.lane % 4;
    #[unroll]
    for tile in 0..cube.form.tiles {
        let row = comptime!((tile * TILE_ROWS) as u32) + cube.lane / 4;
        let upper = Row::of(cube, sequence, row);
        let lower = Row::of(cube, sequence, row + 8);
        #[unroll]
        for step in 0..STEPS {
            // 16 bytes of codes of a thread are four steps.
            let channel =
                scale * comptime!(SCALED as u32) + corner * 16 + comptime!((step / 4 * 64 + step % 4 * 4) as u32);
            query[comptime!(tile * (STEPS + 1) + step)] =
                pairs::<E, V>(q, &upper, &lower, channel, comptime!(Elem::F16));
        }
        let channel = comptime!(CODES as u32) + scale * comptime!((ROPE / SCALES) as u32) + corner * 4;
        query[comptime!(tile * (STEPS + 1) + STEPS)] = pairs::<E, V>(q, &upper, &lower, channel, comptime!(Elem::Bf16));
    }
    query
}

/// A row of queries.
#[derive(CubeType, Clone, Copy)]
struct Row {
    /// Whether there is such a row.
    there: bool,
    /// Its first vector.
    at: u32,
    power: f32,
}

#[cube]
impl Row {
    fn of(cube: &Cube, sequence: u32, row: u32) -> Row {
        let power = f32::reinterpret(matrix::load_4(cube.powers_at + row * 4, 0u32));
        let own = cube.tile_row + row;
        Row { there: own < cube.rows, at: (sequence * cube.rows + own) * comptime!((WIDTH / VECTOR) as u32), power }
    }

    /// Four numbers from a channel on, as two pairs.
    fn pairs<E: Float, V: Size>(
        &self,
        q: &[Vector<E, V>],
        channel: u32,
        #[comptime] elem: Elem,
    ) -> Vector<u32, Const<2>> {
        let mut numbers = Vector::<E, V>::new(E::from_int(0));
        if self.there {
            numbers = q[(self.at + channel / comptime!(VECTOR as u32)) as usize];
        }
        let mut packed = Sequence::<u32>::new();
        #[unroll]
        for half in 0..2usize {
            let low = f32::cast_from(numbers.extract(comptime!(2 * half))) * self.power;
            let high = f32::cast_from(numbers.extract(comptime!(2 * half + 1))) * self.power;
            packed.push(math::pack(low, high, elem));
        }
        math::vector::<u32, Const<2>>(&packed)
    }
}

#[cube]
fn pairs<E: Float, V: Size>(
    q: &[Vector<E, V>],
    upper: &Row,
    lower: &Row,
    channel: u32,
    #[comptime] elem: Elem,
) -> Vector<u32, Const<4>> {
    let (upper, lower) = (upper.pairs::<E, V>(q, channel, elem), lower.pairs::<E, V>(q, channel, elem));
    let mut words = Sequence::<u32>::new();
    words.push(upper.extract(0usize));
    words.push(lower.extract(0usize));
    words.push(upper.extract(1usize));
    words.push(lower.extract(1usize));
    math::vector::<u32, Const<4>>(&words)
}

/// The greatest that a lane has.
#[cube]
pub(super) fn warp_max(value: f32) -> f32 {
    let mut highest = value;
    #[unroll]
    for bit in 0..5u32 {
        highest = max(highest, warp::shuffle_xor::<f32>(highest, comptime!(1u32 << bit)));
    }
    highest
}

/// The sum over all lanes.
#[cube]
pub(super) fn warp_sum(value: f32) -> f32 {
    let mut sum = value;
    #[unroll]
    for bit in 0..5u32 {
        sum += warp::shuffle_xor::<f32>(sum, comptime!(1u32 << bit));
    }
    sum
}
