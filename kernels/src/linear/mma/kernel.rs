//! The kernel: which rows a cube has, its sums over the planes, and where they go.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::groups::multiply_groups;
use super::more::DenseMatrix;
use super::products::{Held, end_of, load_weights, multiply};
use super::row::{RowPlace, shared_vectors};
use super::select::Form;
use super::single::{self, multiply_single, unrolls};
use super::unit::{inputs_of_unit, multiply_all, rows_of_unit, store, write};
use super::{K, M, N, PLANES, UNITS, VECTOR};
use crate::common::last_cube::is_last;
use crate::linear::choice::PairExperts;
use crate::linear::grid::{Part, Rows, Sizes, Tile};
use crate::linear::latents::Beside;
use crate::linear::source::RowSource;
use crate::linear::weight::{Fetched, WeightFormat, WeightRow, WeightRows};

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
    more: &mut Sequence<DenseMatrix<E, V>>,
    sizes: Sizes,
    limit: f32,
    source: &mut RowSource<E, V>,
    beside: &mut Beside<E, V>,
    pairs: &mut PairExperts,
    then_norm: &mut RowSource<E, V>,
    normed: &mut [Vector<E, V>],
    counters: &mut [u32],
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    // [planes, rows, tokens], of several groups twice
    let mut sums = Shared::<[f32]>::new_slice(comptime!(form.sums() * if form.several { 2 } else { 1 }));
    let part = Part::new(&sizes, form.outputs(), form.second, form.rows);
    let mut groups = part.outputs.div_ceil(form.outputs());
    if comptime!(form.several) {
        groups = groups.div_ceil(sizes.groups);
    }
    let (mut number, mut group) = (part.cube / groups, part.cube % groups);
    if comptime!(form.single.is_some()) {
        // By 32 bits, which number all cubes: where addresses take 64, so would the division.
        let (cube, all) = (u32::cast_from(part.cube), u32::cast_from(groups));
        (number, group) = (usize::cast_from(cube / all), usize::cast_from(cube % all));
    }
    let output = group * form.outputs();
    let listed = if comptime!(form.routed) { 0usize.runtime() } else { sizes.max_tiles };
    let mut tile = Tile::read(tiles, number, listed, &sizes, form.tokens(), form.rows);
    if comptime!(form.routed) {
        pairs.assign(&mut tile, &part, number, sizes.max_tiles, sizes.tokens, form.units());
    }
    if comptime!(form.second && form.rows != Rows::Dense) {
        part.place(&mut tile, sizes.max_tiles);
    }
    if comptime!(form.several) {
        multiply_groups(x, &weight, order, &tile, &part, group, &sizes, &mut sums, out, second_out, limit, form);
    } else if tile.count > 0 {
        if comptime!(form.single.is_some()) {
            let mut row = Shared::<[Vector<E, V>]>::new_slice(comptime!(shared_vectors(form.own_row)));
            let first = weight.format();
            if comptime!(form.second) {
                if part.is_second {
                    multiply_one(
                        x, source, &mut row, &second, order, &tile, &part, output, &sizes, &mut sums, first, form,
                    );
                } else {
                    multiply_one(
                        x, source, &mut row, &weight, order, &tile, &part, output, &sizes, &mut sums, first, form,
                    );
                }
            } else {
                multiply_one(x, source, &mut row, &weight, order, &tile, &part, output, &sizes, &mut sums, first, form);
            }
        } else {
            let size!(NC) = MmaDefinition::<E, E, f32>::new(M, N, K).vector_size(MatrixIdent::Accumulator);
            let (own, other) = rows_of_unit(&tile, &part, output, sizes.matrix_stride, form.chunk(), form);
            let inputs = inputs_of_unit(order, &tile, &sizes, form);
            let mut acc = Array::<Vector<f32, NC>>::new(comptime!(2 * form.steps));
            #[unroll]
            for i in 0..comptime!(2 * form.steps) {
                acc[i] = Vector::new(0.0f32);
            }
            let chunks = part.vectors / comptime!(form.chunk() / VECTOR);
            if comptime!(form.own_row > 0) {
                let mut row = Shared::<[Vector<E, V>]>::new_slice(form.own_row);
                // The weights are on their way meanwhile.
                let weights = load_of_part(&part, &weight, &second, &own, &other, UNIT_POS_Y as usize, chunks, form);
                source.write(x, &mut row, tile.expert, sizes.per_token, sizes.vectors);
                sync_cube();
                multiply_row(&row, weights, &part, &weight, &second, &own, &other, &inputs, chunks, &mut acc, form);
            } else if comptime!(form.second) {
                if part.is_second {
                    multiply_all(x, &second, &own, &other, &inputs, chunks, &mut acc, form);
                } else {
                    multiply_all(x, &weight, &own, &other, &inputs, chunks, &mut acc, form);
                }
            } else {
                multiply_all(x, &weight, &own, &other, &inputs, chunks, &mut acc, form);
            }
            store(&acc, &mut sums, form);
        }
    }
    if comptime!(!form.several) {
        sync_cube();
        write(&sums, order, &tile, &part, output, &sizes, out, second_out, V::value().comptime(), limit, form);
    }
    let is_done = then_norm.is_memory();
    if comptime!(!is_done) {
        let is_first = !part.is_second && part.cube < groups;
        if is_first && is_last(counters, 0usize, groups) {
            let row = out.as_vectorized().with_vector_size::<V>();
            then_norm.write(row, normed, 0usize, 1usize, sizes.outputs / V::value().comptime());
        }
    }
    // Cubes of other matrices have had an empty tile so far.
    let mut before = sizes.outputs.div_ceil(form.outputs()) * sizes.max_tiles;
    if comptime!(form.second) {
        before += sizes.second_width.div_ceil(form.outputs()) * sizes.max_tiles;
    }
    #[unroll]
    for i in 0..comptime!(more.len()) {
        let matrix = more.index_mut(i);
        let cubes = matrix.cubes(&sizes);
        if CUBE_POS >= before && CUBE_POS < before + cubes {
            matrix.multiply(x, order, tiles, CUBE_POS - before, &sizes, &mut sums, out, limit);
        }
        before += cubes;
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

/// Multiplies the row of a tile by a matrix in blocks of codes.
#[cube]
#[allow(clippy::too_many_arguments)]
fn multiply_one<E: Float, V: Size>(
    x: &[Vector<E, V>],
    source: &mut RowSource<E, V>,
    row: &mut [Vector<E, V>],
    weight: &WeightRows<E, V>,
    order: &[i32],
    tile: &Tile,
    part: &Part,
    output: usize,
    sizes: &Sizes,
    sums: &mut [f32],
    #[comptime] first: WeightFormat,
    #[comptime] form: Form,
) {
    let format = weight.format();
    let (own, other) = single::rows_of_unit(tile, part, output, sizes.matrix_stride, format, form);
    let from = tile.input(order, 0usize) * tile.row(sizes.vectors, sizes.carried);
    let place = RowPlace { from, number: tile.expert, count: sizes.per_token };
    let unrolls = comptime!(unrolls(first, format, form));
    multiply_single(x, source, row, weight, &own, &other, &place, part.vectors, sums, unrolls, form);
}

/// The same for the row that the cube has written; the first weights are there.
#[cube]
#[allow(clippy::too_many_arguments)]
fn multiply_row<E: Float, V: Size, NC: Size>(
    row: &[Vector<E, V>],
    first: Sequence<Fetched<E, V>>,
    part: &Part,
    weight: &WeightRows<E, V>,
    second: &WeightRows<E, V>,
    own: &WeightRow,
    other: &WeightRow,
    inputs: &Sequence<usize>,
    chunks: usize,
    acc: &mut Array<Vector<f32, NC>>,
    #[comptime] form: Form,
) {
    let mut chunk = UNIT_POS_Y as usize;
    multiply(row, weight, &first, inputs, chunk, chunks, acc, form.ahead(), form);
    if comptime!(form.takes_rope() > form.ahead()) {
        chunk += comptime!(form.ahead() * PLANES);
        let end = end_of(chunks, form);
        while chunk < end {
            let weights = load_of_part(part, weight, second, own, other, chunk, chunks, form);
            multiply(row, weight, &weights, inputs, chunk, chunks, acc, form.ahead(), form);
            chunk += comptime!(form.ahead() * PLANES);
        }
    }
}

/// The weights of the matrix of this part, as [`load_weights`] loads them. Both matrices have the same format.
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
) -> Sequence<Fetched<E, V>> {
    let count = comptime!(form.ahead());
    let mut held = Held::<E, V>::new(comptime!(2 * count));
    if comptime!(form.second) {
        if part.is_second {
            held.keep(&load_weights(second, own, other, chunk, chunks, count, form), comptime!(2 * count));
        } else {
            held.keep(&load_weights(weight, own, other, chunk, chunks, count, form), comptime!(2 * count));
        }
    } else {
        held.keep(&load_weights(weight, own, other, chunk, chunks, count, form), comptime!(2 * count));
    }
    held.all(comptime!(2 * count))
}
