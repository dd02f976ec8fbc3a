//! Loads of weights and tokens, and the matrix instructions of a plane.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::{Form, K, M, N, PLANES};
use crate::linear::weight::{WeightRow, WeightRows};

/// A unit's weights of some chunks of channels, one from `chunk` on for each turn of the planes; past the last one, zeros.
#[cube]
pub(super) fn load_weights<E: Float, V: Size>(
    weight: &WeightRows<E, V>,
    own: &WeightRow,
    other: &WeightRow,
    chunk: usize,
    chunks: usize,
    #[comptime] count: usize,
    #[comptime] form: Form,
) -> Sequence<Vector<E, V>> {
    let mut weights = Sequence::<Vector<E, V>>::new();
    #[unroll]
    for i in 0..count {
        let at = chunk + comptime!(i * PLANES);
        weights.push(load_weight(weight, own, at, chunks, form.few_cubes));
        weights.push(load_weight(weight, other, at, chunks, form.few_cubes));
    }
    weights
}

/// Multiplies the chunks of these weights, which are loaded first: they are the longer way.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn multiply<E: Float, V: Size, NC: Size>(
    x: &[Vector<E, V>],
    weights: &Sequence<Vector<E, V>>,
    inputs: &Sequence<usize>,
    chunk: usize,
    chunks: usize,
    acc: &mut Array<Vector<f32, NC>>,
    #[comptime] count: usize,
    #[comptime] form: Form,
) {
    let def = MmaDefinition::<E, E, f32>::new(M, N, K);
    let size!(NA) = def.vector_size(MatrixIdent::A);
    #[unroll]
    for i in 0..count {
        let at = chunk + comptime!(i * PLANES);
        let a = weights[comptime!(2 * i)];
        let b = weights[comptime!(2 * i + 1)];
        #[unroll]
        for step in 0..form.steps {
            let tokens = load::<E, V>(x, inputs[step], at, chunks, form.few_cubes);
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
}

/// What a unit has of chunk number `at` of a row of the weights; zeros, where there is none and that is `checked`.
#[cube]
fn load_weight<E: Float, V: Size>(
    weight: &WeightRows<E, V>,
    row: &WeightRow,
    at: usize,
    chunks: usize,
    #[comptime] checked: bool,
) -> Vector<E, V> {
    let column = at * 4;
    if comptime!(checked) {
        let mut values = Vector::<E, V>::new(E::from_int(0));
        if at < chunks {
            values = weight.load(row, column);
        }
        values
    } else {
        weight.load(row, column)
    }
}

/// What a unit has of chunk number `at` of a row of tokens; zeros, where there is none and that is `checked`.
#[cube]
fn load<E: Float, V: Size>(
    rows: &[Vector<E, V>],
    row: usize,
    at: usize,
    chunks: usize,
    #[comptime] checked: bool,
) -> Vector<E, V> {
    if comptime!(checked) {
        let mut values = Vector::<E, V>::new(E::from_int(0));
        if at < chunks {
            values = rows[row + at * 4];
        }
        values
    } else {
        rows[row + at * 4]
    }
}

/// Pair number `index` of the numbers in a vector, as an operand of the instruction.
#[cube]
pub(crate) fn pair<E: Float, V: Size, NA: Size>(vector: Vector<E, V>, #[comptime] index: usize) -> Vector<E, NA> {
    let words = Vector::<u32, Const<4>>::reinterpret(vector);
    Vector::<E, NA>::reinterpret(words.extract(index))
}
