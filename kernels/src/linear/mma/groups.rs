//! Cubes that multiply several groups of outputs, one after the other.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::select::Form;
use super::unit::{inputs_of_unit, multiply_all, rows_of_unit, store, write};
use super::{K, M, N, VECTOR};
use crate::linear::grid::{Part, Sizes, Tile};
use crate::linear::weight::{WeightRow, WeightRows};
use crate::ptx::copy::has_bulk_copies;

/// Multiplies and writes the groups of cube `number` of those of a tile, if that has rows.
///
/// Sums of a group are added up while the planes are at the next one: they have two places in turn, and a barrier between. The memory has
/// the rows of the next one ready in L2 meanwhile, since nothing else is asked for while codes are decoded and sums added up.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn multiply_groups<E: Float, V: Size>(
    x: &[Vector<E, V>],
    weight: &WeightRows<E, V>,
    order: &[i32],
    tile: &Tile,
    part: &Part,
    number: usize,
    sizes: &Sizes,
    sums: &mut [f32],
    out: &mut [E],
    second_out: &mut [E],
    limit: f32,
    #[comptime] form: Form,
) {
    let size!(NC) = MmaDefinition::<E, E, f32>::new(M, N, K).vector_size(MatrixIdent::Accumulator);
    let len = comptime!(form.sums());
    let groups = part.outputs.div_ceil(form.outputs());
    let chunks = part.vectors / comptime!(form.chunk() / VECTOR);
    let prefetches = has_bulk_copies().comptime();
    let mut group = number * sizes.groups;
    if tile.count > 0 {
        let end = min(group + sizes.groups, groups);
        let inputs = inputs_of_unit(order, tile, sizes, form);
        let mut place = 0usize.runtime();
        while group < end {
            let output = group * form.outputs();
            let (own, other) = rows_of_unit(tile, part, output, sizes.matrix_stride, form.chunk(), form);
            let mut acc = Array::<Vector<f32, NC>>::new(comptime!(2 * form.steps));
            #[unroll]
            for i in 0..comptime!(2 * form.steps) {
                acc[i] = Vector::new(0.0f32);
            }
            if comptime!(prefetches) && group + 1 < end {
                prefetch(weight, tile, part, output + form.outputs(), sizes.matrix_stride, form);
            }
            multiply_all(x, weight, &own, &other, &inputs, chunks, &mut acc, form);
            store(&acc, &mut sums[place..place + len], form);
            sync_cube();
            write(
                &sums[place..place + len],
                order,
                tile,
                part,
                output,
                sizes,
                out,
                second_out,
                V::value().comptime(),
                limit,
                form,
            );
            place = len - place;
            group += 1;
        }
    }
}

/// Asks the L2 cache for the rows of the group whose first output is `output`: a row of each of the first units.
#[cube]
fn prefetch<E: Float, V: Size>(
    weight: &WeightRows<E, V>,
    tile: &Tile,
    part: &Part,
    output: usize,
    matrix_stride: usize,
    #[comptime] form: Form,
) {
    let unit = UNIT_POS as usize;
    if unit < M {
        let mut row = min(output + unit, part.outputs - 1);
        if comptime!(form.linear.gated) {
            row = min(output + unit % (M / 2), part.outputs - 1) + unit / (M / 2) * part.outputs;
        }
        let row = WeightRow::new(tile.expert, tile.expert * matrix_stride, row, part.vectors, 0usize.runtime());
        weight.prefetch(&row, part.vectors * VECTOR);
    }
}
