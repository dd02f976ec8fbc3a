//! The kernel: which rows a cube has, its sums over the planes, and where they go.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::products::{load_weights, multiply};
use super::{Form, K, LANES, M, N, PLANES};
use crate::linear::activation::gated;
use crate::linear::choice::PairExperts;
use crate::linear::grid::{Part, Rows, Sizes, Tile};
use crate::linear::latents::Beside;
use crate::linear::source::RowSource;
use crate::linear::weight::{WeightRow, WeightRows};

/// Units of a cube.
const UNITS: usize = LANES * PLANES;

/// Cube `t * groups + g` has group `g` of the outputs for tile `t`: neighbours share the tokens.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
pub(super) fn linear_mma_kernel<E: Float, V: Size>(
    x: &[Vector<E, V>],
    weight: WeightRows<E, V>,
    second: WeightRows<E, V>,
    order: &[i32],
    tiles: &[i32],
    out: &mut [E],
    second_out: &mut [E],
    sizes: Sizes,
    limit: f32,
    source: &mut RowSource<E, V>,
    beside: &mut Beside<E, V>,
    pairs: &mut PairExperts,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    // [planes, rows, tokens]
    let mut sums = Shared::<[f32]>::new_slice(comptime!(PLANES * M * form.tokens()));
    let part = Part::new(&sizes, form.outputs(), form.second, form.rows);
    let groups = part.outputs.div_ceil(form.outputs());
    let number = part.cube / groups;
    let group = part.cube % groups;
    let output = group * form.outputs();
    let listed = if comptime!(form.routed) { 0usize.runtime() } else { sizes.max_tiles };
    let mut tile = Tile::read(tiles, number, listed, &sizes, form.tokens(), form.rows);
    if comptime!(form.routed) {
        pairs.assign(&mut tile, &part, number, sizes.max_tiles, sizes.tokens, UNITS);
    }
    if comptime!(form.second && form.rows != Rows::Dense) {
        part.place(&mut tile, sizes.max_tiles);
    }
    if tile.count > 0 {
        if comptime!(form.own_row > 0) {
            sum_own_row(x, &weight, &second, &tile, &part, output, &sizes, source, &mut sums, form);
        } else if comptime!(form.second) {
            if part.is_second {
                sum_channels(x, &second, order, &tile, &part, output, &sizes, &mut sums, form);
            } else {
                sum_channels(x, &weight, order, &tile, &part, output, &sizes, &mut sums, form);
            }
        } else {
            sum_channels(x, &weight, order, &tile, &part, output, &sizes, &mut sums, form);
        }
    }
    sync_cube();
    if comptime!(form.second && form.rows == Rows::Dense) {
        if part.is_second {
            write(&sums, order, &tile, &part, output, part.outputs, second_out, limit, form);
        } else {
            write(&sums, order, &tile, &part, output, sizes.outputs, out, limit, form);
        }
    } else {
        let width = tile.row(sizes.outputs, sizes.carried * V::value().comptime());
        write(&sums, order, &tile, &part, output, width, out, limit, form);
    }
    if comptime!(form.rows == Rows::Heads) {
        let is_first = group == 0;
        if is_first {
            beside.carry(&tile, x, out, sizes.vectors, sizes.outputs, sizes.carried, UNITS);
        }
        let own_cubes = groups * sizes.max_tiles;
        if CUBE_POS >= own_cubes {
            beside.write(sizes.tokens, CUBE_POS - own_cubes);
        }
    }
}

/// The two rows of the weights that a unit multiplies. Of a gated output they are the gate's and up's; past the last row, that
/// one again.
#[cube]
fn rows_of_unit(
    tile: &Tile,
    part: &Part,
    output: usize,
    matrix_stride: usize,
    #[comptime] form: Form,
) -> (WeightRow, WeightRow) {
    let row = (UNIT_POS_X / 4) as usize;
    let own = min(output + row, part.outputs - 1);
    let mut other = min(output + row + M / 2, part.outputs - 1);
    if comptime!(form.linear.gated) {
        other = part.outputs + own;
    }
    let matrix = tile.expert * matrix_stride;
    (WeightRow::new(matrix, own, part.vectors), WeightRow::new(matrix, other, part.vectors))
}

/// Writes the sums of each plane's channels, for tokens whose rows are in memory.
#[cube]
#[allow(clippy::too_many_arguments)]
fn sum_channels<E: Float, V: Size>(
    x: &[Vector<E, V>],
    weight: &WeightRows<E, V>,
    order: &[i32],
    tile: &Tile,
    part: &Part,
    output: usize,
    sizes: &Sizes,
    sums: &mut [f32],
    #[comptime] form: Form,
) {
    let size!(NC) = MmaDefinition::<E, E, f32>::new(M, N, K).vector_size(MatrixIdent::Accumulator);
    let (own, other) = rows_of_unit(tile, part, output, sizes.matrix_stride, form);
    let mut inputs = Sequence::<usize>::new();
    #[unroll]
    for step in 0..form.steps {
        let token = (UNIT_POS_X / 4) as usize + comptime!(step * N);
        inputs.push((UNIT_POS_X % 4) as usize + tile.input(order, token) * tile.row(sizes.vectors, sizes.carried));
    }
    let mut acc = zeros::<NC>(form);
    let chunks = part.vectors / 4;
    let mut chunk = UNIT_POS_Y as usize;
    if comptime!(form.few_cubes) {
        while chunk < chunks {
            let weights = load_weights(weight, &own, &other, chunk, chunks, form.ahead(), form);
            multiply::<E, V, NC>(x, &weights, &inputs, chunk, chunks, &mut acc, form.ahead(), form);
            chunk += comptime!(form.ahead() * PLANES);
        }
    } else {
        while chunk + comptime!((form.ahead() - 1) * PLANES) < chunks {
            let weights = load_weights(weight, &own, &other, chunk, chunks, form.ahead(), form);
            multiply::<E, V, NC>(x, &weights, &inputs, chunk, chunks, &mut acc, form.ahead(), form);
            chunk += comptime!(form.ahead() * PLANES);
        }
        while chunk < chunks {
            let weights = load_weights(weight, &own, &other, chunk, chunks, 1usize, form);
            multiply::<E, V, NC>(x, &weights, &inputs, chunk, chunks, &mut acc, 1usize, form);
            chunk += PLANES;
        }
    }
    store::<NC>(&acc, sums, form);
}

/// The same for one token whose row the cube writes for itself, while the weights are on their way.
#[cube]
#[allow(clippy::too_many_arguments)]
fn sum_own_row<E: Float, V: Size>(
    x: &[Vector<E, V>],
    weight: &WeightRows<E, V>,
    second: &WeightRows<E, V>,
    tile: &Tile,
    part: &Part,
    output: usize,
    sizes: &Sizes,
    source: &mut RowSource<E, V>,
    sums: &mut [f32],
    #[comptime] form: Form,
) {
    let size!(NC) = MmaDefinition::<E, E, f32>::new(M, N, K).vector_size(MatrixIdent::Accumulator);
    let (own, other) = rows_of_unit(tile, part, output, sizes.matrix_stride, form);
    let mut inputs = Sequence::<usize>::new();
    inputs.push((UNIT_POS_X % 4) as usize);
    let mut acc = zeros::<NC>(form);
    let chunks = part.vectors / 4;
    let mut row = Shared::<[Vector<E, V>]>::new_slice(form.own_row);
    let mut chunk = UNIT_POS_Y as usize;
    let weights = load_of_part(part, weight, second, &own, &other, chunk, chunks, form);
    source.write(x, &mut row, tile.expert, sizes.per_token, sizes.vectors);
    sync_cube();
    multiply::<E, V, NC>(&row, &weights, &inputs, chunk, chunks, &mut acc, form.ahead(), form);
    if comptime!(form.own_row / 4 > form.ahead() * PLANES) {
        chunk += comptime!(form.ahead() * PLANES);
        while chunk < chunks {
            let weights = load_of_part(part, weight, second, &own, &other, chunk, chunks, form);
            multiply::<E, V, NC>(&row, &weights, &inputs, chunk, chunks, &mut acc, form.ahead(), form);
            chunk += comptime!(form.ahead() * PLANES);
        }
    }
    store::<NC>(&acc, sums, form);
}

/// The weights of the matrix of this part, as [`load_weights`] loads them.
#[cube]
#[allow(clippy::too_many_arguments)]
fn load_of_part<E: Float, V: Size>(
    part: &Part,
    weight: &WeightRows<E, V>,
    second: &WeightRows<E, V>,
    own: &WeightRow,
    other: &WeightRow,
    chunk: usize,
    chunks: usize,
    #[comptime] form: Form,
) -> Sequence<Vector<E, V>> {
    let count = comptime!(form.ahead());
    let mut held = Array::<Vector<E, V>>::new(comptime!(2 * count));
    if comptime!(form.second) {
        if part.is_second {
            hold(load_weights(second, own, other, chunk, chunks, count, form), &mut held, count);
        } else {
            hold(load_weights(weight, own, other, chunk, chunks, count, form), &mut held, count);
        }
    } else {
        hold(load_weights(weight, own, other, chunk, chunks, count, form), &mut held, count);
    }
    let mut weights = Sequence::<Vector<E, V>>::new();
    #[unroll]
    for i in 0..comptime!(2 * count) {
        weights.push(held[i]);
    }
    weights
}

/// Keeps weights past the end of a branch.
#[cube]
fn hold<E: Float, V: Size>(weights: Sequence<Vector<E, V>>, held: &mut Array<Vector<E, V>>, #[comptime] count: usize) {
    #[unroll]
    for i in 0..comptime!(2 * count) {
        held[i] = weights[i];
    }
}

/// Sums of nothing.
#[cube]
fn zeros<NC: Size>(#[comptime] form: Form) -> Array<Vector<f32, NC>> {
    let mut acc = Array::<Vector<f32, NC>>::new(comptime!(2 * form.steps));
    #[unroll]
    for i in 0..comptime!(2 * form.steps) {
        acc[i] = Vector::new(0.0f32);
    }
    acc
}

/// Writes the sums of a plane: a unit has rows `row` and `row + 8`, tokens `2 * quad` and the next of each step.
#[cube]
fn store<NC: Size>(acc: &Array<Vector<f32, NC>>, sums: &mut [f32], #[comptime] form: Form) {
    let (row, quad) = ((UNIT_POS_X / 4) as usize, (UNIT_POS_X % 4) as usize);
    let at = (UNIT_POS_Y as usize * M + row) * form.tokens() + 2 * quad;
    #[unroll]
    for i in 0..comptime!(2 * form.steps) {
        let at = at + comptime!(i % 2 * (M / 2) * form.tokens() + i / 2 * N);
        sums[at] = acc[i].extract(0usize);
        sums[at + 1] = acc[i].extract(1usize);
    }
}

/// Adds up the planes, and writes the outputs of a tile into rows of `width`.
#[cube]
#[allow(clippy::too_many_arguments)]
fn write<E: Float>(
    sums: &[f32],
    order: &[i32],
    tile: &Tile,
    part: &Part,
    output: usize,
    width: usize,
    out: &mut [E],
    limit: f32,
    #[comptime] form: Form,
) {
    let mut value = UNIT_POS as usize;
    while value < tile.count * form.outputs() {
        let (token, row) = (value / form.outputs(), value % form.outputs());
        if output + row < part.outputs {
            let first = sum(sums, row, token, form);
            let mut result = first;
            if comptime!(form.linear.gated) {
                result = gated(first, sum(sums, row + M / 2, token, form), limit, form.linear.limited);
            }
            out[tile.output(order, token) * width + output + row] = E::cast_from(result);
        }
        value += UNITS;
    }
}

/// The sum over the planes.
#[cube]
fn sum(sums: &[f32], row: usize, token: usize, #[comptime] form: Form) -> f32 {
    let mut total = 0.0f32;
    #[unroll]
    for plane in 0..PLANES {
        total += sums[(comptime!(plane * M) + row) * form.tokens() + token];
    }
    total
}
