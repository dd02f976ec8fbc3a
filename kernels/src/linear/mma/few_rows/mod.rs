//! A single row of x, or a few, and weights in blocks of codes: what a unit does for a code decides how fast the codes come, so that it
//! is little.
//!
//! The cube writes the rows into shared memory as f16, each with a power of two that brings its largest number just below 2^15. That is
//! exact for bf16 down to 2^-31 of the largest number; what is smaller is off by less than 2^-40 of it. So weights become f16, which takes
//! one instruction for two E4M3 codes where the GPU has it, and sums take the scale: a block of FP8 has all channels that one load of a
//! plane brings. FP4's blocks are narrower, 32 channels, and four units of a row have one each. The instruction has eight columns:
//! column `i` has the channels of unit `i % 4` of row `i / 4` of x, and zeros. So the four blocks have sums of their own.
//!
//! Of FP8 there is one row; of FP4 there may be [`ROWS`] at a time, two for each instruction, and a cube reads the codes anew for the next
//! ones. Batch-invariant products are not computed here: many rows have another order of sums.

mod decode;
mod rows;

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;
use half::f16;

use self::decode::{decoded, factor, has_conversion};
use self::rows::write_rows;
use super::select::Form;
use super::{K, LANES, M, N, PLANES, VECTOR};
use crate::linear::packed::e8m0;
use crate::linear::source::RowSource;
use crate::linear::weight::{Codes, WeightFormat, WeightRow, WeightRows};
use crate::ptx::warp;

/// Channels of all rows that a cube writes into shared memory at most.
pub(super) const MAX_ROWS: usize = 1 << 15;
/// Rows at a time, where a tile has several.
pub(super) const ROWS: usize = 4;
/// Vectors of zeros behind the rows: for units without channels of their own.
const ZEROS: usize = 4;
/// Loads of 16 bytes of each of its two rows that a unit starts before it decodes any, of FP8 and of FP4. Half of them leave registers for
/// another cube, and take 5 to 40 % longer.
const AHEAD: [usize; 2] = [4, 2];
/// Units of a cube.
const UNITS: usize = LANES * PLANES;

/// Channels that a row has a multiple of: blocks of either format are whole.
pub(super) const CHANNELS: usize = 128;

/// Vectors from one row in shared memory to the next: units of neighbouring rows read from different banks.
fn stride(form: Form) -> usize {
    form.own_row + usize::from(form.few_rows > 1)
}

/// Vectors of shared memory.
pub(super) fn shared_vectors(form: Form) -> usize {
    form.few_rows * stride(form) + ZEROS
}

/// Channels that four units load at once.
pub(super) fn chunk_channels(format: WeightFormat) -> usize {
    match format {
        WeightFormat::Fp4 => 128,
        WeightFormat::Fp8 | WeightFormat::Dense => 64,
    }
}

/// Chunks whose loads a plane starts before it decodes any.
fn ahead(format: WeightFormat, form: Form) -> usize {
    let most = AHEAD[usize::from(format == WeightFormat::Fp4)];
    let turns = (form.own_row * VECTOR).div_ceil(chunk_channels(format) * PLANES);
    turns.clamp(1, most)
}

/// Which rows of x.
#[derive(CubeType)]
pub(super) struct RowPlaces {
    /// Their first vectors in x.
    pub from: Array<usize>,
    /// How many there are: one at least.
    pub count: usize,
    /// The number of the first one among the rows of its token, of which there are `of_token`.
    pub number: usize,
    pub of_token: usize,
}

/// Multiplies some rows, and writes the sums of this plane for 16 rows of the weights, of which a unit has two, from place `first` of
/// `sums` on. `rows` is shared memory for [`shared_vectors`].
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn multiply_few<E: Float, V: Size>(
    x: &[Vector<E, V>],
    source: &mut RowSource<E, V>,
    rows: &mut [Vector<E, V>],
    weight: &WeightRows<E, V>,
    own: &WeightRow,
    other: &WeightRow,
    places: &RowPlaces,
    vectors: usize,
    sums: &mut [f32],
    first: usize,
    #[comptime] form: Form,
) {
    let format = weight.format();
    let chunks = vectors / comptime!(chunk_channels(format) / VECTOR);
    let ahead = comptime!(ahead(format, form));
    let mut at = UNIT_POS_Y as usize;
    // The codes are on their way while the rows are written.
    let codes = load(weight, own, other, at, chunks, ahead);
    let inverses = write_rows(x, source, rows, places, vectors, format, form);
    let mut totals = Array::<f32>::new(comptime!(2 * pairs(form)));
    #[unroll]
    for i in 0..comptime!(2 * pairs(form)) {
        totals[i] = 0.0f32;
    }
    multiply(&*rows, &codes, weight, at, chunks, places.count, &mut totals, ahead, form);
    at += comptime!(ahead * PLANES);
    while at < chunks {
        let codes = load(weight, own, other, at, chunks, ahead);
        multiply(&*rows, &codes, weight, at, chunks, places.count, &mut totals, ahead, form);
        at += comptime!(ahead * PLANES);
    }
    let has_conversion = has_conversion();
    let factor = comptime!(factor(format, has_conversion));
    // Two units have a row of FP4, of two blocks each.
    let quad = (UNIT_POS_X % 4) as usize;
    let (own_place, writes) =
        if comptime!(format == WeightFormat::Fp4) { (quad / 2, quad % 2 == 0) } else { (quad, quad == 0) };
    #[unroll]
    for pair in 0..comptime!(pairs(form)) {
        let place = own_place + comptime!(2 * pair);
        let mut inverse = inverses[comptime!(2 * pair)];
        if comptime!(2 * pair + 1 < form.few_rows) {
            inverse = select(own_place == 0, inverse, inverses[comptime!(2 * pair + 1)]);
        }
        #[unroll]
        for i in 0..2usize {
            let mut total = totals[comptime!(2 * pair + i)] * factor * inverse;
            if comptime!(format == WeightFormat::Fp4) {
                total += warp::shuffle_xor::<f32>(total, 1u32);
            }
            if writes && place < places.count {
                let at = UNIT_POS_Y as usize * M + (UNIT_POS_X / 4) as usize + comptime!(i * (M / 2));
                sums[at * comptime!(form.tokens()) + first + place] = total;
            }
        }
    }
}

/// Pairs of rows that one instruction multiplies.
fn pairs(form: Form) -> usize {
    form.few_rows.div_ceil(2)
}

/// The codes of two rows, a pair of loads for each turn of the planes from chunk `at` on; past the last chunk, zeros.
#[cube]
fn load<E: Float, V: Size>(
    weight: &WeightRows<E, V>,
    own: &WeightRow,
    other: &WeightRow,
    at: usize,
    chunks: usize,
    #[comptime] count: usize,
) -> Sequence<Codes> {
    let format = weight.format();
    let mut codes = Sequence::<Codes>::new();
    #[unroll]
    for i in 0..count {
        let chunk = at + comptime!(i * PLANES);
        let column = chunk * comptime!(chunk_channels(format) / VECTOR);
        codes.push(weight.codes_if(chunk < chunks, own, column));
        codes.push(weight.codes_if(chunk < chunks, other, column));
    }
    codes
}

/// Adds the products of these chunks to the sums of a unit: two for each pair of rows.
#[cube]
#[allow(clippy::too_many_arguments)]
fn multiply<E: Float, V: Size>(
    rows: &[Vector<E, V>],
    codes: &Sequence<Codes>,
    weight: &WeightRows<E, V>,
    at: usize,
    chunks: usize,
    live: usize,
    totals: &mut Array<f32>,
    #[comptime] count: usize,
    #[comptime] form: Form,
) {
    let format = weight.format();
    let size!(NC) = MmaDefinition::<f16, f16, f32>::new(M, N, K).vector_size(MatrixIdent::Accumulator);
    #[unroll]
    for i in 0..count {
        let chunk = at + comptime!(i * PLANES);
        let columns = columns(chunk, chunks, live, format, form);
        let (first, second) = (&codes[comptime!(2 * i)], &codes[comptime!(2 * i + 1)]);
        let mut sums = Array::<Vector<f32, NC>>::new(comptime!(2 * pairs(form)));
        #[unroll]
        for i in 0..comptime!(2 * pairs(form)) {
            sums[i] = Vector::new(0.0f32);
        }
        #[unroll]
        for word in 0..4usize {
            let own = decoded(first.words.extract(word), format);
            let other = decoded(second.words.extract(word), format);
            #[unroll]
            for pair in 0..comptime!(pairs(form)) {
                let column = columns[pair];
                if comptime!(pair == 0) {
                    multiply_word(rows, &own, &other, column, &mut sums, pair, word, format);
                } else if live > comptime!(2 * pair) {
                    multiply_word(rows, &own, &other, column, &mut sums, pair, word, format);
                }
            }
        }
        #[unroll]
        for pair in 0..comptime!(pairs(form)) {
            totals[comptime!(2 * pair)] += scaled(sums[comptime!(2 * pair)], first, format);
            totals[comptime!(2 * pair + 1)] += scaled(sums[comptime!(2 * pair + 1)], second, format);
        }
    }
}

/// Where a unit's channels of a chunk are, of its row in each pair; zeros where it has none.
#[cube]
fn columns(
    chunk: usize,
    chunks: usize,
    live: usize,
    #[comptime] format: WeightFormat,
    #[comptime] form: Form,
) -> Sequence<usize> {
    let (line, quad) = ((UNIT_POS_X / 4) as usize, (UNIT_POS_X % 4) as usize);
    let column = (chunk * 4 + quad) * comptime!(chunk_channels(format) / (4 * VECTOR));
    let zeros = comptime!(form.few_rows * stride(form)).runtime();
    let mut columns = Sequence::<usize>::new();
    #[unroll]
    for pair in 0..comptime!(pairs(form)) {
        let mut has_channels = chunk < chunks;
        let mut own = column;
        if comptime!(format == WeightFormat::Fp4) {
            let row = line / 4 + comptime!(2 * pair);
            has_channels = has_channels && line % 4 == quad && row < live;
            own += row * comptime!(stride(form));
        }
        columns.push(select(has_channels, own, zeros));
    }
    columns
}

/// Adds the products of a word of codes of each of a unit's two rows of the weights to the sums of a pair of rows.
#[cube]
#[allow(clippy::too_many_arguments)]
fn multiply_word<E: Float, V: Size, NC: Size>(
    rows: &[Vector<E, V>],
    own: &Sequence<u32>,
    other: &Sequence<u32>,
    column: usize,
    sums: &mut Array<Vector<f32, NC>>,
    #[comptime] pair: usize,
    #[comptime] word: usize,
    #[comptime] format: WeightFormat,
) {
    let def = MmaDefinition::<f16, f16, f32>::new(M, N, K);
    let size!(NA) = def.vector_size(MatrixIdent::A);
    // A word of FP8 is half of a vector of x, one of FP4 all of it.
    let steps = comptime!(if format == WeightFormat::Fp4 { 2 } else { 1 });
    let numbers = Vector::<u32, Const<4>>::reinterpret(rows[column + comptime!(word * steps / 2)]);
    let mut part = Array::<Vector<f32, NC>>::new(2usize);
    part[0] = sums[comptime!(2 * pair)];
    part[1] = sums[comptime!(2 * pair + 1)];
    #[unroll]
    for step in 0..steps {
        let half = comptime!(if steps == 2 { 2 * step } else { word % 2 * 2 });
        let mut weights = Array::<Vector<f16, NA>>::new(4usize);
        weights[0] = Vector::<f16, NA>::reinterpret(own[comptime!(2 * step)]);
        weights[1] = Vector::<f16, NA>::reinterpret(other[comptime!(2 * step)]);
        weights[2] = Vector::<f16, NA>::reinterpret(own[comptime!(2 * step + 1)]);
        weights[3] = Vector::<f16, NA>::reinterpret(other[comptime!(2 * step + 1)]);
        let mut columns = Array::<Vector<f16, NA>>::new(2usize);
        columns[0] = Vector::<f16, NA>::reinterpret(numbers.extract(half));
        columns[1] = Vector::<f16, NA>::reinterpret(numbers.extract(comptime!(half + 1)));
        def.execute_inplace(&weights, &columns, &mut part);
    }
    sums[comptime!(2 * pair)] = part[0];
    sums[comptime!(2 * pair + 1)] = part[1];
}

/// A unit's sums of a chunk, with their scales.
#[cube]
fn scaled<NC: Size>(sums: Vector<f32, NC>, codes: &Codes, #[comptime] format: WeightFormat) -> f32 {
    if comptime!(format == WeightFormat::Fp4) {
        // Two of the four blocks; those of the last two units are sums of nothing.
        let scales = codes.scale_codes >> (UNIT_POS_X % 2 * 16);
        sums.extract(0usize) * e8m0(scales) + sums.extract(1usize) * e8m0(scales >> 8)
    } else {
        sums.extract(0usize) * codes.scale
    }
}
