//! What a unit multiplies and writes: of a launch's first matrix or of another one.

use cubecl::prelude::*;

use super::products::{end_of, load_weights, multiply, place, whole};
use super::select::{Form, outputs};
use super::{CHUNK, M, N};
use crate::linear::activation::gated;
use crate::linear::grid::{Part, Rows, Sizes, Tile};
use crate::linear::weight::{WeightRow, WeightRows};

/// The two rows of the weights that a unit multiplies, from its first channels on. Of a gated output they are the gate's and
/// up's; past the last row, that one again.
#[cube]
pub(super) fn rows_of_unit(
    tile: &Tile,
    part: &Part,
    output: usize,
    matrix_stride: usize,
    #[comptime] chunk: usize,
    #[comptime] form: Form,
) -> (WeightRow, WeightRow) {
    let (row, quad) = ((UNIT_POS_X / 4) as usize, (UNIT_POS_X % 4) as usize * comptime!(chunk / CHUNK));
    let output = output + comptime!(if form.apart { M } else { 0 }) * UNIT_POS_Y as usize;
    let own = min(output + row, part.outputs - 1);
    let mut other = min(output + row + M / 2, part.outputs - 1);
    if comptime!(form.linear.gated) {
        other = part.outputs + own;
    }
    let matrix = tile.expert * matrix_stride;
    let number = tile.expert;
    (WeightRow::new(number, matrix, own, part.vectors, quad), WeightRow::new(number, matrix, other, part.vectors, quad))
}

/// Where a unit's first channels of its token of each step are, in x or in the row that the cube writes for itself.
#[cube]
pub(super) fn inputs_of_unit(order: &[i32], tile: &Tile, sizes: &Sizes, #[comptime] form: Form) -> Sequence<usize> {
    let (row, quad) = ((UNIT_POS_X / 4) as usize, (UNIT_POS_X % 4) as usize * comptime!(form.chunk() / CHUNK));
    let mut inputs = Sequence::<usize>::new();
    #[unroll]
    for step in 0..form.steps {
        let mut input = quad;
        if comptime!(form.own_row == 0) {
            let token = row + comptime!(step * N);
            input += tile.input(order, token) * tile.row(sizes.vectors, sizes.carried);
        }
        inputs.push(input);
    }
    inputs
}

/// Multiplies all chunks of channels of this plane.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn multiply_all<E: Float, V: Size, NC: Size>(
    x: &[Vector<E, V>],
    weight: &WeightRows<E, V>,
    own: &WeightRow,
    other: &WeightRow,
    inputs: &Sequence<usize>,
    chunks: usize,
    acc: &mut Array<Vector<f32, NC>>,
    #[comptime] form: Form,
) {
    let mut chunk = if comptime!(form.apart) { 0usize.runtime() } else { UNIT_POS_Y as usize };
    let end = end_of(chunks, form);
    if comptime!(form.at_once) {
        while chunk < end {
            let weights = load_weights(weight, own, other, chunk, chunks, form.ahead(), form);
            multiply(x, weight, &weights, inputs, chunk, chunks, acc, form.ahead(), form);
            chunk += comptime!(form.ahead() * form.sharing());
        }
    } else {
        let whole = whole(chunks, form);
        while chunk + comptime!((form.ahead() - 1) * form.sharing()) < whole {
            let weights = load_weights(weight, own, other, chunk, chunks, form.ahead(), form);
            multiply(x, weight, &weights, inputs, chunk, chunks, acc, form.ahead(), form);
            chunk += comptime!(form.ahead() * form.sharing());
        }
        while chunk < end {
            if place(chunk, form) < chunks {
                let weights = load_weights(weight, own, other, chunk, chunks, 1usize, form);
                multiply(x, weight, &weights, inputs, chunk, chunks, acc, 1usize, form);
            }
            chunk += comptime!(form.sharing());
        }
    }
}

/// Writes the sums of a plane: a unit has rows `row` and `row + 8`, tokens `2 * quad` and the next of each step.
#[cube]
pub(super) fn store<NC: Size>(acc: &Array<Vector<f32, NC>>, sums: &mut [f32], #[comptime] form: Form) {
    let (row, quad) = ((UNIT_POS_X / 4) as usize, (UNIT_POS_X % 4) as usize);
    let at = (UNIT_POS_Y as usize * M + row) * form.tokens() + 2 * quad;
    #[unroll]
    for i in 0..comptime!(2 * form.steps) {
        let at = at + comptime!(i % 2 * (M / 2) * form.tokens() + i / 2 * N);
        sums[at] = acc[i].extract(0usize);
        sums[at + 1] = acc[i].extract(1usize);
    }
}

/// Adds up the planes, and writes the outputs of a tile.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn write<E: Float>(
    sums: &[f32],
    order: &[i32],
    tile: &Tile,
    part: &Part,
    output: usize,
    sizes: &Sizes,
    out: &mut [E],
    second_out: &mut [E],
    #[comptime] lanes: usize,
    limit: f32,
    #[comptime] form: Form,
) {
    let mut value = UNIT_POS as usize;
    while value < tile.count * form.outputs() {
        let (token, row) = (value / form.outputs(), value % form.outputs());
        if output + row < part.outputs {
            let place = place_of(row, form);
            let first = sum(sums, place, token, form);
            let mut result = first;
            if comptime!(form.linear.gated) {
                result = gated(first, sum(sums, place + M / 2, token, form), limit, form.linear.limited);
            }
            let to = tile.output(order, token);
            let result = E::cast_from(result);
            if comptime!(form.second && form.rows == Rows::Dense) {
                if part.is_second {
                    second_out[to * part.outputs + output + row] = result;
                } else {
                    out[to * sizes.outputs + output + row] = result;
                }
            } else {
                out[to * tile.row(sizes.outputs, sizes.carried * lanes) + output + row] = result;
            }
        }
        value += form.units();
    }
}

/// Where the sums of an output of the cube are in the first of the planes that share its channels.
#[cube]
fn place_of(row: usize, #[comptime] form: Form) -> usize {
    let each = comptime!(outputs(form.linear));
    let mut place = row;
    if comptime!(!form.apart && form.planes() > form.sharing()) {
        place = row / each * comptime!(form.sharing() * M) + row % each;
    }
    place
}

/// The sum over the planes that share the channels.
#[cube]
fn sum(sums: &[f32], row: usize, token: usize, #[comptime] form: Form) -> f32 {
    let mut total = 0.0f32;
    #[unroll]
    for plane in 0..comptime!(form.sharing()) {
        total += sums[(comptime!(plane * M) + row) * form.tokens() + token];
    }
    total
}
