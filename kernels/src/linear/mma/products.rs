//! Loads of weights and tokens, and the matrix instructions of a plane.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::codes::multiply_codes;
use super::select::Form;
use super::vectors::{pair, tokens_at};
use super::{CHUNK, K, M, N, PLANES, VECTOR};
use crate::linear::parts::{BLOCK, PARTS};
use crate::linear::weight::{Fetched, WeightRow, WeightRows};
use crate::ptx::warp;

/// Chunks of a block of channels that a plane takes at a time, if its sum is a part.
const CHUNKS: usize = BLOCK / CHUNK;

const _: () = assert!(CHUNKS == 2 && PARTS == PLANES, "the sum of a plane is a part");

/// Where chunk `number` of those that planes take in turn is among all chunks of channels.
#[cube]
pub(super) fn place(number: usize, #[comptime] form: Form) -> usize {
    if comptime!(form.in_parts) {
        let (turn, plane) = (number / PLANES, number % PLANES);
        (turn / CHUNKS * PLANES + plane) * CHUNKS + turn % CHUNKS
    } else {
        number
    }
}

/// Chunks from that of a turn to that of `turns` turns later. In parts, a plane takes its blocks whole: there are several turns from
/// an even one on.
fn takes_rope(turns: usize, form: Form) -> usize {
    if form.in_parts { turns / CHUNKS * CHUNKS * PLANES + turns % CHUNKS } else { turns * form.sharing() }
}

/// The number behind the last one that a plane takes, where some may have no chunk.
#[cube]
pub(super) fn end_of(chunks: usize, #[comptime] form: Form) -> usize {
    if comptime!(form.in_parts) {
        chunks.div_ceil(comptime!(CHUNKS * PLANES)) * comptime!(CHUNKS * PLANES)
    } else {
        chunks
    }
}

/// Numbers before this one all have a chunk.
#[cube]
pub(super) fn whole(chunks: usize, #[comptime] form: Form) -> usize {
    if comptime!(form.in_parts) { chunks / comptime!(CHUNKS * PLANES) * comptime!(CHUNKS * PLANES) } else { chunks }
}

/// A unit's weights of some chunks of channels, one from `chunk` on for each turn of the planes; past the last one, zeros. None is
/// decoded before all loads have been started.
#[cube]
pub(super) fn load_weights<E: Float, V: Size>(
    weight: &WeightRows<E, V>,
    own: &WeightRow,
    other: &WeightRow,
    chunk: usize,
    chunks: usize,
    #[comptime] count: usize,
    #[comptime] form: Form,
) -> Sequence<Fetched<E, V>> {
    let mut weights = Sequence::<Fetched<E, V>>::new();
    #[unroll]
    for i in 0..count {
        let at = place(chunk, form) + comptime!(takes_rope(i, form));
        weights.push(fetch_weight(weight, own, at, chunks, form));
        weights.push(fetch_weight(weight, other, at, chunks, form));
    }
    weights
}

/// Weights that are kept past the end of a branch.
#[derive(CubeType)]
pub(super) struct Held<E: Float, V: Size> {
    values: Array<Vector<E, V>>,
    codes: Array<Vector<u32, Const<4>>>,
    scales: Array<f32>,
    scale_codes: Array<u32>,
}

#[cube]
impl<E: Float, V: Size> Held<E, V> {
    pub fn new(#[comptime] count: usize) -> Held<E, V> {
        Held::<E, V> {
            values: Array::new(count),
            codes: Array::new(count),
            scales: Array::new(count),
            scale_codes: Array::new(count),
        }
    }

    pub fn keep(&mut self, weights: &Sequence<Fetched<E, V>>, #[comptime] count: usize) {
        #[unroll]
        for i in 0..count {
            let weight = &weights[i];
            self.values[i] = weight.values;
            self.codes[i] = weight.codes;
            self.scales[i] = weight.scale;
            self.scale_codes[i] = weight.scale_code;
        }
    }

    pub fn all(&self, #[comptime] count: usize) -> Sequence<Fetched<E, V>> {
        let mut weights = Sequence::<Fetched<E, V>>::new();
        #[unroll]
        for i in 0..count {
            weights.push(Fetched::<E, V> {
                values: self.values[i],
                codes: self.codes[i],
                scale: self.scales[i],
                scale_code: self.scale_codes[i],
            });
        }
        weights
    }
}

/// Multiplies the chunks of these weights, which are loaded first: they are the longer way.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn multiply<E: Float, V: Size, NC: Size>(
    x: &[Vector<E, V>],
    weight: &WeightRows<E, V>,
    weights: &Sequence<Fetched<E, V>>,
    inputs: &Sequence<usize>,
    chunk: usize,
    chunks: usize,
    acc: &mut Array<Vector<f32, NC>>,
    #[comptime] count: usize,
    #[comptime] form: Form,
) {
    #[unroll]
    for i in 0..count {
        let at = place(chunk, form) + comptime!(takes_rope(i, form));
        let (first, second) = (&weights[comptime!(2 * i)], &weights[comptime!(2 * i + 1)]);
        if comptime!(form.codes > 0) {
            multiply_codes(x, weight, first, second, inputs, at, chunks, acc, form);
        } else {
            multiply_chunk(x, weight, first, second, inputs, at, chunks, acc, form);
        }
    }
}

/// Multiplies chunk number `at`, of which `first` and `second` are a unit's weights of its two rows.
#[cube]
#[allow(clippy::too_many_arguments)]
fn multiply_chunk<E: Float, V: Size, NC: Size>(
    x: &[Vector<E, V>],
    weight: &WeightRows<E, V>,
    first: &Fetched<E, V>,
    second: &Fetched<E, V>,
    inputs: &Sequence<usize>,
    at: usize,
    chunks: usize,
    acc: &mut Array<Vector<f32, NC>>,
    #[comptime] form: Form,
) {
    let def = MmaDefinition::<E, E, f32>::new(M, N, K);
    let size!(NA) = def.vector_size(MatrixIdent::A);
    let a = in_order(weight.decode(first), form);
    let b = in_order(weight.decode(second), form);
    #[unroll]
    for step in 0..form.steps {
        let tokens = in_order(tokens_at(x, inputs[step], at * 4, at < chunks, form), form);
        let mut part = Array::<Vector<f32, NC>>::new(2usize);
        part[0] = acc[comptime!(2 * step)];
        part[1] = acc[comptime!(2 * step + 1)];
        #[unroll]
        for half in 0..2usize {
            let first_pair = comptime!(2 * half);
            let mut rows = Array::<Vector<E, NA>>::new(4usize);
            rows[0] = pair::<E, V, NA>(a, first_pair);
            rows[1] = pair::<E, V, NA>(b, first_pair);
            rows[2] = pair::<E, V, NA>(a, comptime!(first_pair + 1));
            rows[3] = pair::<E, V, NA>(b, comptime!(first_pair + 1));
            let mut columns = Array::<Vector<E, NA>>::new(2usize);
            columns[0] = pair::<E, V, NA>(tokens, first_pair);
            columns[1] = pair::<E, V, NA>(tokens, comptime!(first_pair + 1));
            def.execute_inplace(&rows, &columns, &mut part);
        }
        acc[comptime!(2 * step)] = part[0];
        acc[comptime!(2 * step + 1)] = part[1];
    }
}

/// What a unit multiplies of a chunk, of which the four units of a row have 16 bytes each. It may be its own 16 bytes. In parts, a
/// step has to have 16 neighbouring channels: unit `q` gets pair `q` of each of the four.
#[cube]
fn in_order<E: Float, V: Size>(own: Vector<E, V>, #[comptime] form: Form) -> Vector<E, V> {
    if comptime!(form.in_parts) { Vector::<E, V>::reinterpret(transposed(Vector::reinterpret(own))) } else { own }
}

/// Of four neighbours with four words each: word `q` of each, for unit `q` of them.
#[cube]
fn transposed(own: Vector<u32, Const<4>>) -> Vector<u32, Const<4>> {
    let (odd, high) = (UNIT_POS_X % 2 == 1, UNIT_POS_X % 4 >= 2);
    let mut words = Vector::<u32, Const<4>>::new(0u32);
    #[unroll]
    for i in 0..2usize {
        let (even_word, odd_word) = (own.extract(comptime!(2 * i)), own.extract(comptime!(2 * i + 1)));
        let other = warp::shuffle_xor::<u32>(select(odd, even_word, odd_word), 1u32);
        words.insert(comptime!(2 * i), select(odd, other, even_word));
        words.insert(comptime!(2 * i + 1), select(odd, odd_word, other));
    }
    let mut result = Vector::<u32, Const<4>>::new(0u32);
    #[unroll]
    for i in 0..2usize {
        let (low_word, high_word) = (words.extract(i), words.extract(comptime!(i + 2)));
        let other = warp::shuffle_xor::<u32>(select(high, low_word, high_word), 2u32);
        result.insert(i, select(high, other, low_word));
        result.insert(comptime!(i + 2), select(high, high_word, other));
    }
    result
}

/// What a unit has of chunk number `at` of a row of the weights; zeros, where there is none and that is to be checked.
#[cube]
fn fetch_weight<E: Float, V: Size>(
    weight: &WeightRows<E, V>,
    row: &WeightRow,
    at: usize,
    chunks: usize,
    #[comptime] form: Form,
) -> Fetched<E, V> {
    let column = at * comptime!(form.chunk() / VECTOR);
    if comptime!(form.codes > 0) {
        weight.fetch_codes(at < chunks, row, column, form.codes)
    } else if comptime!(form.at_once) {
        weight.fetch_if(at < chunks, row, column)
    } else {
        weight.fetch(row, column)
    }
}
