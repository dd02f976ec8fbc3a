//! Cubes that multiply several groups of outputs, one after the other.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::select::Form;
use super::unit::{inputs_of_unit, multiply_all, rows_of_unit, store, write};
use super::{K, M, N, VECTOR};
use crate::linear::grid::{Part, Sizes, Tile};
use crate::linear::weight::WeightRows;

/// Multiplies and writes the groups of cube `number` of those of a tile, if that has rows.
///
/// Sums of a group are added up while the planes are at the next one: they have two places in turn, and a barrier between.
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
