//! A single row of x in shared memory, in f16 times a power of two of its own (`powers.rs`), for [`single`](super::single).

use cubecl::prelude::*;

use super::select::Form;
use super::single::has_conversion;
use crate::linear::packed::is_bf16;
use crate::linear::powers::{halves, larger, order, power};
use crate::linear::source::RowSource;
use crate::linear::weight::WeightFormat;
use crate::ptx::warp;

/// Vectors of zeros behind the row: for units without channels of their own.
const ZEROS: usize = 4;
/// Vectors of the row that the units of a cube keep in registers while they look for the largest number; the others they read twice.
const KEPT: usize = 512;

/// Vectors of shared memory for rows of so many at most.
pub(super) fn shared_vectors(row: usize) -> usize {
    row + ZEROS
}

/// Where the row is.
#[derive(CubeType)]
pub(super) struct RowPlace {
    /// Its first vector in x.
    pub from: usize,
    /// Its number among the rows of the token, of which there are `count`.
    pub number: usize,
    pub count: usize,
}

/// Writes the row in f16, times a power of two, and zeros behind it; the inverse of that power. Called by all units of a cube.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn write_row<E: Float, V: Size>(
    x: &[Vector<E, V>],
    source: &mut RowSource<E, V>,
    row: &mut [Vector<E, V>],
    place: &RowPlace,
    vectors: usize,
    #[comptime] format: WeightFormat,
    #[comptime] form: Form,
) -> f32 {
    let units = comptime!(form.units());
    let turns = comptime!(form.own_row.div_ceil(units));
    let in_memory = source.is_memory();
    source.write(x, row, place.number, place.count, vectors);
    if comptime!(!in_memory) {
        sync_cube();
    }
    let kept = comptime!(turns.min(KEPT / units));
    let mut values = Array::<Vector<E, V>>::new(kept);
    let mut largest = 0u32.runtime();
    #[unroll]
    for turn in 0..turns {
        let column = UNIT_POS as usize + comptime!(turn * units);
        let value = read(x, &*row, place.from, column, vectors, in_memory);
        if comptime!(turn < kept) {
            values[turn] = value;
        }
        largest = larger(largest, value);
    }
    let mut inverse = 1.0f32.runtime();
    let mut factor = 1.0f32.runtime();
    let in_bf16 = is_bf16::<E>();
    if comptime!(in_bf16) {
        (factor, inverse) = power(largest_of_cube(largest, form.planes()));
    }
    let has_conversion = has_conversion();
    let order = comptime!(order(format, has_conversion));
    #[unroll]
    for turn in 0..turns {
        let column = UNIT_POS as usize + comptime!(turn * units);
        let value =
            if comptime!(turn < kept) { values[turn] } else { read(x, &*row, place.from, column, vectors, in_memory) };
        if column < vectors {
            row[column] = Vector::<E, V>::reinterpret(halves(value, factor, order));
        }
    }
    if UNIT_POS < comptime!(ZEROS as u32) {
        row[comptime!(form.own_row) + UNIT_POS as usize] = Vector::new(E::from_int(0));
    }
    sync_cube();
    inverse
}

/// A vector of the row where it is; past its end, the last one again. Without a branch, behind which each number would be chosen.
#[cube]
fn read<E: Float, V: Size>(
    x: &[Vector<E, V>],
    row: &[Vector<E, V>],
    from: usize,
    column: usize,
    vectors: usize,
    #[comptime] in_memory: bool,
) -> Vector<E, V> {
    let column = min(column, vectors - 1);
    if comptime!(in_memory) { x[from + column] } else { row[column] }
}

/// The largest number of the units of a cube.
#[cube]
fn largest_of_cube(of_unit: u32, #[comptime] planes: usize) -> u32 {
    let mut largest = of_unit;
    #[unroll]
    for step in 0..5u32 {
        largest = max(largest, warp::shuffle_xor::<u32>(largest, comptime!(1u32 << step)));
    }
    let mut of_planes = Shared::<[u32]>::new_slice(planes);
    if UNIT_POS_X == 0 {
        of_planes[UNIT_POS_Y as usize] = largest;
    }
    sync_cube();
    #[unroll]
    for plane in 0..planes {
        largest = max(largest, of_planes[plane]);
    }
    largest
}
