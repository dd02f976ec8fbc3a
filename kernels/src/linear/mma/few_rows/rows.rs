//! Rows of x in shared memory, in f16.

use cubecl::prelude::*;

use super::super::PLANES;
use super::super::select::Form;
use super::decode::{has_conversion, order};
use super::{RowPlaces, UNITS, ZEROS, stride};
use crate::linear::packed::is_bf16;
use crate::linear::source::RowSource;
use crate::linear::weight::WeightFormat;
use crate::ptx::wgmma::Elem;
use crate::ptx::{math, warp};

/// Exponent of the largest number of a row, biased: 14.
const TOP: u32 = 127 + 14;
/// The largest biased exponent of the factor, so that its inverse is a normal number.
const LARGEST: u32 = 253;

/// Vectors of the row that a unit keeps in registers while it looks for the largest number; the others it reads twice.
const KEPT: usize = 2;
/// Writes rows in f16, each times a power of two, and zeros behind them; the inverses of those powers. Called by all units of a cube.
#[cube]
pub(super) fn write_rows<E: Float, V: Size>(
    x: &[Vector<E, V>],
    source: &mut RowSource<E, V>,
    rows: &mut [Vector<E, V>],
    places: &RowPlaces,
    vectors: usize,
    #[comptime] format: WeightFormat,
    #[comptime] form: Form,
) -> Array<f32> {
    let in_memory = source.is_memory();
    let in_bf16 = is_bf16::<E>();
    let turns = comptime!(form.own_row.div_ceil(UNITS));
    source.write(x, rows, places.number, places.of_token, vectors);
    if comptime!(!in_memory) {
        sync_cube();
    }
    // The only row may stay in registers.
    let kept = comptime!(if form.few_rows == 1 { turns.min(KEPT) } else { 0 });
    let mut values = Array::<Vector<E, V>>::new(comptime!(kept.max(1)));
    let mut of_planes = Shared::<[u32]>::new_slice(comptime!(form.few_rows * PLANES));
    #[unroll]
    for row in 0..form.few_rows {
        let mut largest = 0u32.runtime();
        if comptime!(row == 0) || row < places.count {
            #[unroll]
            for turn in 0..turns {
                let column = UNIT_POS as usize + comptime!(turn * UNITS);
                let value = read(x, &*rows, places.from[row], column, vectors, in_memory);
                if comptime!(turn < kept) {
                    values[turn] = value;
                }
                largest = larger(largest, value);
            }
        }
        if comptime!(in_bf16) {
            let largest = largest_of_plane(largest);
            if UNIT_POS_X == 0 {
                of_planes[UNIT_POS_Y as usize + comptime!(row * PLANES)] = largest;
            }
        }
    }
    if comptime!(in_bf16) {
        sync_cube();
    }
    let mut inverses = Array::<f32>::new(form.few_rows);
    #[unroll]
    for row in 0..form.few_rows {
        let mut factor = 1.0f32.runtime();
        inverses[row] = 1.0f32;
        if comptime!(in_bf16) {
            let mut largest = 0u32.runtime();
            #[unroll]
            for plane in 0..PLANES {
                largest = max(largest, of_planes[comptime!(row * PLANES + plane)]);
            }
            let biased = min(comptime!(TOP + 127) - (largest >> 7), LARGEST);
            factor = f32::reinterpret(biased << 23);
            inverses[row] = f32::reinterpret((254 - biased) << 23);
        }
        if comptime!(row == 0) || row < places.count {
            #[unroll]
            for turn in 0..turns {
                let column = UNIT_POS as usize + comptime!(turn * UNITS);
                let value = if comptime!(turn < kept) {
                    values[turn]
                } else {
                    read(x, &*rows, places.from[row], column, vectors, in_memory)
                };
                if column < vectors {
                    rows[column + comptime!(row * stride(form))] = in_f16(value, factor, format);
                }
            }
        }
    }
    if UNIT_POS < comptime!(ZEROS as u32) {
        rows[comptime!(form.few_rows * stride(form)) + UNIT_POS as usize] = Vector::new(E::from_int(0));
    }
    sync_cube();
    inverses
}

/// A vector times a factor in f16, in the order in which codes are decoded.
#[cube]
fn in_f16<E: Float, V: Size>(value: Vector<E, V>, factor: f32, #[comptime] format: WeightFormat) -> Vector<E, V> {
    let has_conversion = has_conversion();
    let order = comptime!(order(format, has_conversion));
    let mut words = Vector::<u32, Const<4>>::new(0u32);
    #[unroll]
    for pair in 0..4usize {
        let low = f32::cast_from(value.extract(comptime!(order[2 * pair])));
        let high = f32::cast_from(value.extract(comptime!(order[2 * pair + 1])));
        words.insert(pair, math::pack(low * factor, high * factor, Elem::F16));
    }
    Vector::<E, V>::reinterpret(words)
}

/// A vector of the row where it is; zeros past its end.
#[cube]
fn read<E: Float, V: Size>(
    x: &[Vector<E, V>],
    row: &[Vector<E, V>],
    from: usize,
    column: usize,
    vectors: usize,
    #[comptime] in_memory: bool,
) -> Vector<E, V> {
    let mut value = Vector::<E, V>::new(E::from_int(0));
    if column < vectors {
        if comptime!(in_memory) {
            value = x[from + column];
        } else {
            value = row[column];
        }
    }
    value
}

/// The larger of some bits of bf16 without a sign, and those of a vector.
#[cube]
fn larger<E: Float, V: Size>(bits: u32, value: Vector<E, V>) -> u32 {
    let words = Vector::<u32, Const<4>>::reinterpret(value);
    let mut largest = bits;
    #[unroll]
    for word in 0..4usize {
        let pair = words.extract(word);
        largest = max(largest, max(pair & 0x7fff, (pair >> 16) & 0x7fff));
    }
    largest
}

/// The largest number of the units of a plane.
#[cube]
fn largest_of_plane(of_unit: u32) -> u32 {
    let mut largest = of_unit;
    #[unroll]
    for step in 0..5u32 {
        largest = max(largest, warp::shuffle_xor::<u32>(largest, comptime!(1u32 << step)));
    }
    largest
}
