//! A single row of x and weights in blocks of codes: what a unit does for a code decides how fast the codes come, so that it is little.
//!
//! The cube writes the row into shared memory as f16, with a power of two (`row.rs`). So weights become f16, which takes one
//! instruction for two E4M3 codes where the GPU has it, and sums take the scale: a block of FP8 has all channels that one load of a
//! plane brings. FP4's blocks are narrower, 32 channels, and four units of a row have one each. The instruction has eight columns for
//! one row of x: in column `i` that has the channels of unit `i` alone, and zeros. So the four blocks have sums of their own.
//!
//! Batch-invariant products are not computed here: many rows have another order of sums.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;
use half::f16;

use super::row::{RowPlace, write_row};
use super::select::{Form, Single, outputs};
use super::{CHUNK, K, M, N, VECTOR};
use crate::linear::grid::{Part, Tile};
use crate::linear::packed::{E2M1_FACTOR, E4M3_FACTOR, e2m1_halves, e4m3_halves, e8m0_of_word};
use crate::linear::source::RowSource;
use crate::linear::weight::{Codes, WeightFormat, WeightRow, WeightRows};
use crate::ptx::{math, warp};

/// Turns of a launch with FP4 that are no loop, at most, and of one with FP8 alone: addresses are constants of the instructions then. The
/// README of `linear` says where that was measured.
const UNROLLED_FP4: usize = 8;
const UNROLLED_FP8: usize = 2;

/// Channels that four units load at once.
fn chunk_channels(format: WeightFormat) -> usize {
    match format {
        WeightFormat::Fp4 => 128,
        WeightFormat::Fp8 | WeightFormat::Dense => 64,
    }
}

/// Chunks whose loads a plane starts before it decodes any: a load of FP4 is decoded for twice as long.
fn ahead(format: WeightFormat, form: Form) -> usize {
    let Single { loads, refills, .. } = form.single();
    let most = if format == WeightFormat::Fp4 && !refills { loads.div_ceil(2) } else { loads };
    turns(format, form).clamp(1, most)
}

/// Chunks of a plane, of the longest row.
fn turns(format: WeightFormat, form: Form) -> usize {
    (form.own_row * VECTOR).div_ceil(chunk_channels(format) * form.sharing())
}

/// Whether a row's turns are no loop, where the launch's first matrix has this format.
pub(super) fn unrolls(first: WeightFormat, format: WeightFormat, form: Form) -> bool {
    turns(format, form) <= if first == WeightFormat::Fp4 { UNROLLED_FP4 } else { UNROLLED_FP8 }
}

/// Whether the GPU has an instruction that makes f16 of E4M3: from sm_89 on.
#[cube]
pub(super) fn has_conversion() -> comptime_type!(bool) {
    let device = comptime::device_properties();
    let arch = comptime!(device.identity.fingerprint.strip_prefix("ptx_sm").and_then(|arch| arch.parse::<u32>().ok()));
    comptime!(arch.is_some_and(|arch| arch >= 89))
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
    let (rows, vectors) = (u32::cast_from(part.outputs), u32::cast_from(part.vectors));
    let (sharing, each) = comptime!((form.sharing() as u32, outputs(form.linear) as u32));
    let output = u32::cast_from(output) + UNIT_POS_Y / sharing * each;
    let own = min(output + row, rows - 1);
    let mut other = min(output + row + comptime!(M as u32 / 2), rows - 1);
    if comptime!(form.linear.gated) {
        other = rows + own;
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
    let mut at = UNIT_POS_Y % comptime!(form.sharing() as u32);
    // The codes are on their way while the row is written.
    let first = load(weight, own, other, at, chunks, ahead, form);
    let inverse = write_row(x, source, row, place, vectors, format, form);
    let mut totals = Array::<f32>::new(2usize);
    totals[0] = 0.0f32;
    totals[1] = 0.0f32;
    if comptime!(form.single().refills) {
        multiply_refilled(&*row, &first, weight, own, other, at, chunks, &mut totals, ahead, form);
    } else {
        multiply(&*row, &first, weight, at, chunks, &mut totals, ahead, form);
        if comptime!(unrolls) {
            #[unroll]
            for turn in 1..comptime!(turns(format, form).div_ceil(ahead)) {
                let at = at + comptime!((turn * ahead * form.sharing()) as u32);
                let codes = load(weight, own, other, at, chunks, ahead, form);
                multiply(&*row, &codes, weight, at, chunks, &mut totals, ahead, form);
            }
        } else {
            at += comptime!((ahead * form.sharing()) as u32);
            while at < chunks {
                let codes = load(weight, own, other, at, chunks, ahead, form);
                multiply(&*row, &codes, weight, at, chunks, &mut totals, ahead, form);
                at += comptime!((ahead * form.sharing()) as u32);
            }
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

/// The same for all chunks of a plane from `at` on, the first `ahead` of which are under way: as soon as one is decoded, the next one
/// takes its registers.
#[cube]
#[allow(clippy::too_many_arguments)]
fn multiply_refilled<E: Float, V: Size>(
    row: &[Vector<E, V>],
    first: &Sequence<Codes>,
    weight: &WeightRows<E, V>,
    own: &WeightRow,
    other: &WeightRow,
    at: u32,
    chunks: u32,
    totals: &mut Array<f32>,
    #[comptime] ahead: usize,
    #[comptime] form: Form,
) {
    let mut held = HeldCodes::new(comptime!(2 * ahead));
    #[unroll]
    for i in 0..comptime!(2 * ahead) {
        held.put(i, &first[i]);
    }
    let mut at = at;
    while at < chunks {
        #[unroll]
        for i in 0..ahead {
            let at = at + comptime!((i * form.sharing()) as u32);
            let mut codes = Sequence::<Codes>::new();
            codes.push(held.get(comptime!(2 * i)));
            codes.push(held.get(comptime!(2 * i + 1)));
            multiply(row, &codes, weight, at, chunks, totals, 1usize, form);
            let next = at + comptime!((ahead * form.sharing()) as u32);
            let next = load(weight, own, other, next, chunks, 1usize, form);
            held.put(comptime!(2 * i), &next[0]);
            held.put(comptime!(2 * i + 1), &next[1]);
        }
        at += comptime!((ahead * form.sharing()) as u32);
    }
}

/// Codes that are kept from one turn of a loop to the next.
#[derive(CubeType)]
struct HeldCodes {
    words: Array<Vector<u32, Const<4>>>,
    scales: Array<f32>,
    scale_codes: Array<u32>,
}

#[cube]
impl HeldCodes {
    fn new(#[comptime] count: usize) -> HeldCodes {
        HeldCodes { words: Array::new(count), scales: Array::new(count), scale_codes: Array::new(count) }
    }

    fn put(&mut self, #[comptime] at: usize, codes: &Codes) {
        self.words[at] = codes.words;
        self.scales[at] = codes.scale;
        self.scale_codes[at] = codes.scale_codes;
    }

    fn get(&self, #[comptime] at: usize) -> Codes {
        Codes { words: self.words[at], scale: self.scales[at], scale_codes: self.scale_codes[at] }
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
    #[comptime] form: Form,
) -> Sequence<Codes> {
    let format = weight.format();
    let mut codes = Sequence::<Codes>::new();
    #[unroll]
    for i in 0..count {
        let chunk = at + comptime!((i * form.sharing()) as u32);
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
        let chunk = at + comptime!((i * form.sharing()) as u32);
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

/// The numbers of a word of codes in f16, but for [`factor`], two in a word, in the order of [`order()`](crate::linear::powers::order).
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
