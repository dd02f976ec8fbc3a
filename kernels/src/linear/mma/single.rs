//! A single row of x and weights in blocks of codes: what a unit does for a code decides how fast the codes come, so that it is little.
//!
//! The cube writes the row into shared memory as f16, with a power of two (`powers.rs`). So weights become f16, which takes one
//! instruction for two E4M3 codes where the GPU has it, and sums take the scale: a block of FP8 has all channels that one load of a
//! plane brings. FP4's blocks are narrower, 32 channels, and four units of a row have one each. The instruction has eight columns for
//! one row of x: in column `i` that has the channels of unit `i` alone, and zeros. So the four blocks have sums of their own.
//!
//! Batch-invariant products are not computed here: many rows have another order of sums.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;
use half::f16;

use super::select::Form;
use super::{CHUNK, K, LANES, M, N, PLANES, VECTOR};
use crate::linear::grid::{Part, Tile};
use crate::linear::packed::{E2M1_FACTOR, E4M3_FACTOR, e2m1_halves, e4m3_halves, e8m0_of_word, is_bf16};
use crate::linear::powers::{halves, larger, order, power};
use crate::linear::source::RowSource;
use crate::linear::weight::{Codes, WeightFormat, WeightRow, WeightRows};
use crate::ptx::{math, warp};

/// Vectors of zeros behind the row: for units without channels of their own.
const ZEROS: usize = 4;
/// Vectors of the row that a unit keeps in registers while it looks for the largest number; the others it reads twice.
const KEPT: usize = 2;
/// Turns of a launch with FP4 that are no loop, at most, and of one with FP8 alone: addresses are constants of the instructions then. The
/// README of `linear` says where that was measured.
const UNROLLED_FP4: usize = 8;
const UNROLLED_FP8: usize = 2;

/// Vectors of shared memory for rows of so many at most.
pub(super) fn shared_vectors(row: usize) -> usize {
    row + ZEROS
}

/// Channels that four units load at once.
fn chunk_channels(format: WeightFormat) -> usize {
    match format {
        WeightFormat::Fp4 => 128,
        WeightFormat::Fp8 | WeightFormat::Dense => 64,
    }
}

/// Chunks whose loads a plane starts before it decodes any: a load of FP4 is decoded for twice as long.
fn ahead(format: WeightFormat, form: Form) -> usize {
    let most = if format == WeightFormat::Fp4 { form.single.div_ceil(2) } else { form.single };
    turns(format, form).clamp(1, most)
}

/// Chunks of a plane, of the longest row.
fn turns(format: WeightFormat, form: Form) -> usize {
    (form.own_row * VECTOR).div_ceil(chunk_channels(format) * PLANES)
}

/// Whether a row's turns are no loop, where the launch's first matrix has this format.
pub(super) fn unrolls(first: WeightFormat, format: WeightFormat, form: Form) -> bool {
    turns(format, form) <= if first == WeightFormat::Fp4 { UNROLLED_FP4 } else { UNROLLED_FP8 }
}

/// Whether the GPU has an instruction that makes f16 of E4M3: from sm_89 on.
#[cube]
fn has_conversion() -> comptime_type!(bool) {
    let device = comptime::device_properties();
    let arch = comptime!(device.identity.fingerprint.strip_prefix("ptx_sm").and_then(|arch| arch.parse::<u32>().ok()));
    comptime!(arch.is_some_and(|arch| arch >= 89))
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

/// The two rows of the weights that a unit multiplies, as [`rows_of_unit()`](super::unit::rows_of_unit) has them. Within a matrix 32 bits
/// are enough, see [`supported()`](super::select::supported): where addresses take 64, these would, too. In that function they would be for all
/// forms, some of which then spill.
#[cube]
pub(super) fn rows_of_unit(
    tile: &Tile,
    part: &Part,
    output: usize,
    matrix_stride: usize,
    #[comptime] format: WeightFormat,
    #[comptime] form: Form,
) -> (WeightRow, WeightRow) {
    let (row, quad) = (UNIT_POS_X / 4, UNIT_POS_X % 4 * comptime!((chunk_channels(format) / CHUNK) as u32));
    let (outputs, vectors) = (u32::cast_from(part.outputs), u32::cast_from(part.vectors));
    let output = u32::cast_from(output);
    let own = min(output + row, outputs - 1);
    let mut other = min(output + row + comptime!(M as u32 / 2), outputs - 1);
    if comptime!(form.linear.gated) {
        other = outputs + own;
    }
    let (number, matrix) = (tile.expert, tile.expert * matrix_stride);
    (WeightRow::within(number, matrix, own, vectors, quad), WeightRow::within(number, matrix, other, vectors, quad))
}

/// Multiplies a row, and writes the sums of this plane for 16 rows of the weights, of which a unit has two. `row` is shared memory for
/// [`shared_vectors`].
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn multiply_single<E: Float, V: Size>(
    x: &[Vector<E, V>],
    source: &mut RowSource<E, V>,
    row: &mut [Vector<E, V>],
    weight: &WeightRows<E, V>,
    own: &WeightRow,
    other: &WeightRow,
    place: &RowPlace,
    vectors: usize,
    sums: &mut [f32],
    #[comptime] unrolls: bool,
    #[comptime] form: Form,
) {
    let format = weight.format();
    let chunks = u32::cast_from(vectors) / comptime!((chunk_channels(format) / VECTOR) as u32);
    let ahead = comptime!(ahead(format, form));
    let mut at = UNIT_POS_Y;
    // The codes are on their way while the row is written.
    let first = load(weight, own, other, at, chunks, ahead);
    let inverse = write_row(x, source, row, place, vectors, format, form);
    let mut totals = Array::<f32>::new(2usize);
    totals[0] = 0.0f32;
    totals[1] = 0.0f32;
    multiply(&*row, &first, weight, at, chunks, &mut totals, ahead, form);
    if comptime!(unrolls) {
        #[unroll]
        for turn in 1..comptime!(turns(format, form).div_ceil(ahead)) {
            let at = at + comptime!((turn * ahead * PLANES) as u32);
            let codes = load(weight, own, other, at, chunks, ahead);
            multiply(&*row, &codes, weight, at, chunks, &mut totals, ahead, form);
        }
    } else {
        at += comptime!((ahead * PLANES) as u32);
        while at < chunks {
            let codes = load(weight, own, other, at, chunks, ahead);
            multiply(&*row, &codes, weight, at, chunks, &mut totals, ahead, form);
            at += comptime!((ahead * PLANES) as u32);
        }
    }
    let has_conversion = has_conversion();
    let factor = comptime!(factor(format, has_conversion));
    #[unroll]
    for i in 0..2usize {
        let mut total = totals[i] * factor * inverse;
        if comptime!(format == WeightFormat::Fp4) {
            // The first unit has the columns of two blocks, its neighbour those of the others.
            total += warp::shuffle_xor::<f32>(total, 1u32);
        }
        let quad = UNIT_POS_X % 4;
        if quad == 0 {
            let at = UNIT_POS_Y as usize * M + (UNIT_POS_X / 4) as usize + comptime!(i * (M / 2));
            sums[at * comptime!(form.tokens())] = total;
        }
    }
}

/// What decoded numbers are multiplied by.
fn factor(format: WeightFormat, has_conversion: bool) -> f32 {
    match format {
        // E2M1 as E4M3, whose bias is larger by 6.
        WeightFormat::Fp4 if has_conversion => 64.0,
        WeightFormat::Fp4 => E2M1_FACTOR as f32,
        WeightFormat::Fp8 if has_conversion => 1.0,
        WeightFormat::Fp8 | WeightFormat::Dense => E4M3_FACTOR as f32,
    }
}

/// The codes of two rows, a pair of loads for each turn of the planes from chunk `at` on; past the last chunk, zeros.
#[cube]
fn load<E: Float, V: Size>(
    weight: &WeightRows<E, V>,
    own: &WeightRow,
    other: &WeightRow,
    at: u32,
    chunks: u32,
    #[comptime] count: usize,
) -> Sequence<Codes> {
    let format = weight.format();
    let mut codes = Sequence::<Codes>::new();
    #[unroll]
    for i in 0..count {
        let chunk = at + comptime!((i * PLANES) as u32);
        let column = usize::cast_from(chunk * comptime!((chunk_channels(format) / VECTOR) as u32));
        codes.push(weight.codes_if(chunk < chunks, own, column));
        codes.push(weight.codes_if(chunk < chunks, other, column));
    }
    codes
}

/// Adds the products of these chunks to the two sums of a unit.
#[cube]
#[allow(clippy::too_many_arguments)]
fn multiply<E: Float, V: Size>(
    row: &[Vector<E, V>],
    codes: &Sequence<Codes>,
    weight: &WeightRows<E, V>,
    at: u32,
    chunks: u32,
    totals: &mut Array<f32>,
    #[comptime] count: usize,
    #[comptime] form: Form,
) {
    let format = weight.format();
    let def = MmaDefinition::<f16, f16, f32>::new(M, N, K);
    let size!(NA) = def.vector_size(MatrixIdent::A);
    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
    let quad = UNIT_POS_X % 4;
    #[unroll]
    for i in 0..count {
        let chunk = at + comptime!((i * PLANES) as u32);
        let mut has_channels = chunk < chunks;
        if comptime!(format == WeightFormat::Fp4) {
            has_channels = has_channels && UNIT_POS_X / 4 == UNIT_POS_X % 4;
        }
        let column = (chunk * 4 + quad) * comptime!((chunk_channels(format) / (4 * VECTOR)) as u32);
        let column = usize::cast_from(select(has_channels, column, comptime!(form.own_row as u32).runtime()));
        let (first, second) = (&codes[comptime!(2 * i)], &codes[comptime!(2 * i + 1)]);
        let mut part = Array::<Vector<f32, NC>>::new(2usize);
        part[0] = Vector::new(0.0f32);
        part[1] = Vector::new(0.0f32);
        #[unroll]
        for word in 0..4usize {
            let own = decoded(first.words.extract(word), format);
            let other = decoded(second.words.extract(word), format);
            // A word of FP8 is half of a vector of x, one of FP4 all of it.
            let steps = comptime!(if format == WeightFormat::Fp4 { 2 } else { 1 });
            let numbers = Vector::<u32, Const<4>>::reinterpret(row[column + comptime!(word * steps / 2)]);
            #[unroll]
            for step in 0..steps {
                let pair = comptime!(if steps == 2 { 2 * step } else { word % 2 * 2 });
                let mut rows = Array::<Vector<f16, NA>>::new(4usize);
                rows[0] = Vector::<f16, NA>::reinterpret(own[comptime!(2 * step)]);
                rows[1] = Vector::<f16, NA>::reinterpret(other[comptime!(2 * step)]);
                rows[2] = Vector::<f16, NA>::reinterpret(own[comptime!(2 * step + 1)]);
                rows[3] = Vector::<f16, NA>::reinterpret(other[comptime!(2 * step + 1)]);
                let mut columns = Array::<Vector<f16, NA>>::new(2usize);
                columns[0] = Vector::<f16, NA>::reinterpret(numbers.extract(pair));
                columns[1] = Vector::<f16, NA>::reinterpret(numbers.extract(comptime!(pair + 1)));
                def.execute_inplace(&rows, &columns, &mut part);
            }
        }
        totals[0] += scaled(part[0], first, format);
        totals[1] += scaled(part[1], second, format);
    }
}

/// A unit's sums of a chunk, with their scales.
#[cube]
fn scaled<NC: Size>(sums: Vector<f32, NC>, codes: &Codes, #[comptime] format: WeightFormat) -> f32 {
    if comptime!(format == WeightFormat::Fp4) {
        // Two of the four blocks; those of the last two units are sums of nothing.
        let scales = codes.scale_codes >> (UNIT_POS_X % 2 * 16);
        sums.extract(0usize) * e8m0_of_word(scales, 0usize) + sums.extract(1usize) * e8m0_of_word(scales, 1usize)
    } else {
        sums.extract(0usize) * codes.scale
    }
}

/// The numbers of a word of codes in f16, but for [`factor`], two in a word, in the order of [`order()`].
#[cube]
fn decoded(word: u32, #[comptime] format: WeightFormat) -> Sequence<u32> {
    let has_conversion = has_conversion();
    let mut pairs = Sequence::<u32>::new();
    if comptime!(format == WeightFormat::Fp4 && has_conversion) {
        // As E4M3: sign, and exponent and fraction at the lower end of the exponent.
        let even = ((word << 4) & 0x8080_8080) | ((word << 2) & 0x1c1c_1c1c);
        let odd = (word & 0x8080_8080) | ((word >> 2) & 0x1c1c_1c1c);
        pairs.push(math::e4m3_pair(even, false));
        pairs.push(math::e4m3_pair(even, true));
        pairs.push(math::e4m3_pair(odd, false));
        pairs.push(math::e4m3_pair(odd, true));
    } else if comptime!(format == WeightFormat::Fp4) {
        #[unroll]
        for i in 0..4u32 {
            pairs.push(e2m1_halves(word >> comptime!(4 * i)));
        }
    } else if comptime!(has_conversion) {
        pairs.push(math::e4m3_pair(word, false));
        pairs.push(math::e4m3_pair(word, true));
    } else {
        // Two codes, each in the upper byte of a half.
        pairs.push(e4m3_halves(math::permute(word, 0x1404u32)));
        pairs.push(e4m3_halves(math::permute(word, 0x3424u32)));
    }
    pairs
}

/// Writes the row in f16, times a power of two, and zeros behind it; the inverse of that power. Called by all units of a cube.
#[cube]
#[allow(clippy::too_many_arguments)]
fn write_row<E: Float, V: Size>(
    x: &[Vector<E, V>],
    source: &mut RowSource<E, V>,
    row: &mut [Vector<E, V>],
    place: &RowPlace,
    vectors: usize,
    #[comptime] format: WeightFormat,
    #[comptime] form: Form,
) -> f32 {
    let units = comptime!(LANES * PLANES);
    let turns = comptime!(form.own_row.div_ceil(units));
    let in_memory = source.is_memory();
    source.write(x, row, place.number, place.count, vectors);
    if comptime!(!in_memory) {
        sync_cube();
    }
    let kept = comptime!(turns.min(KEPT));
    let mut values = Array::<Vector<E, V>>::new(kept);
    let mut largest = 0u32.runtime();
    #[unroll]
    for turn in 0..turns {
        let column = UNIT_POS as usize + comptime!(turn * units);
        let value = read(x, &*row, place.from, column, vectors, in_memory);
        if comptime!(turn < KEPT) {
            values[turn] = value;
        }
        largest = larger(largest, value);
    }
    let mut inverse = 1.0f32.runtime();
    let mut factor = 1.0f32.runtime();
    let in_bf16 = is_bf16::<E>();
    if comptime!(in_bf16) {
        (factor, inverse) = power(largest_of_cube(largest));
    }
    let has_conversion = has_conversion();
    let order = comptime!(order(format, has_conversion));
    #[unroll]
    for turn in 0..turns {
        let column = UNIT_POS as usize + comptime!(turn * units);
        let value =
            if comptime!(turn < KEPT) { values[turn] } else { read(x, &*row, place.from, column, vectors, in_memory) };
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
fn largest_of_cube(of_unit: u32) -> u32 {
    let mut largest = of_unit;
    #[unroll]
    for step in 0..5u32 {
        largest = max(largest, warp::shuffle_xor::<u32>(largest, comptime!(1u32 << step)));
    }
    let mut of_planes = Shared::<[u32]>::new_slice(PLANES);
    if UNIT_POS_X == 0 {
        of_planes[UNIT_POS_Y as usize] = largest;
    }
    sync_cube();
    #[unroll]
    for plane in 0..PLANES {
        largest = max(largest, of_planes[plane]);
    }
    largest
}
