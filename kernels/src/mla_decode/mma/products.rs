//! Both products of a tile, by matrix instructions, and what becomes of the accumulators.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::tile::{K, M, MmaTile, N, PLANES};
use crate::common::plane;

/// Scores of the whole tile, not yet scaled: of this plane's rows and keys, summed over its slice of the channels.
#[cube]
pub(super) fn score<E: Float, V: Size, P: Size>(
    def: &MmaDefinition<E, E, f32>,
    queries: &Shared<[Vector<E, V>]>,
    keys: &Shared<[Vector<E, V>]>,
    stage_start: usize,
    scores: &mut Shared<[Vector<f32, P>]>,
    #[comptime] tile: MmaTile,
) {
    let lane = UNIT_POS_X as usize;
    let plane = UNIT_POS_Y as usize;
    let row_steps = comptime!(tile.rows / tile.row_groups / M);
    let key_steps = comptime!(tile.keys / tile.key_groups / N);
    let first_row = plane % tile.row_groups * comptime!(tile.rows / tile.row_groups);
    let first_key = plane / tile.row_groups % tile.key_groups * comptime!(tile.keys / tile.key_groups);
    let slice = plane / comptime!(tile.row_groups * tile.key_groups);

    let size!(NA) = def.vector_size(MatrixIdent::A);
    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
    let mut acc = Sequence::<Array<Vector<f32, NC>>>::new();
    #[unroll]
    for i in 0..comptime!(row_steps * key_steps) {
        acc.push(Array::new(2usize));
        clear(&mut acc[i]);
    }

    // Where this lane's rows of the matrices start that `ldmatrix` loads.
    let query_at = (first_row + lane % M) * comptime!(tile.stride()) + lane / M + 2 * slice;
    let query_rows = &queries[query_at..queries.len()];
    let key_at =
        stage_start + (first_key + lane / M * N + lane % N) * comptime!(tile.stride()) + lane / N % 2 + 2 * slice;
    let key_rows = &keys[key_at..keys.len()];
    // Unrolled: the loads of later steps hide behind the products of earlier ones.
    #[unroll]
    for i in 0..comptime!(tile.key_vectors / 2 / tile.slices) {
        let step = comptime!(2 * i * tile.slices);
        let mut a = Sequence::<Array<Vector<E, NA>>>::new();
        #[unroll]
        for r in 0..row_steps {
            let at = comptime!(step + r * M * tile.stride());
            a.push(def.load_matrix::<Vector<E, V>, NA>(&query_rows[at..at + 1], MatrixIdent::A, 4usize, false));
        }
        // Two columns of tiles at a time, and the last one alone if their number is odd.
        #[unroll]
        for pair in 0..comptime!(key_steps.div_ceil(2)) {
            let at = comptime!(step + pair * 2 * N * tile.stride());
            let width = comptime!(if 2 * pair + 1 < key_steps { 2 } else { 1 });
            let b = def.load_matrix::<Vector<E, V>, NA>(&key_rows[at..at + 1], MatrixIdent::B, 2 * width, false);
            #[unroll]
            for column in 0..width {
                let mut fragment = Array::<Vector<E, NA>>::new(2usize);
                fragment[0] = b[2 * column];
                fragment[1] = b[2 * column + 1];
                #[unroll]
                for r in 0..row_steps {
                    let tile_at = comptime!(r * key_steps + 2 * pair + column);
                    def.execute_inplace(&a[r], &fragment, &mut acc[tile_at]);
                }
            }
        }
    }

    #[unroll]
    for r in 0..row_steps {
        #[unroll]
        for half in 0..2usize {
            let (row, column) = def.position_of_nth(UNIT_POS_X, comptime!(2 * half as u32), MatrixIdent::Accumulator);
            let row = slice * tile.rows + first_row + r * M + row as usize;
            let pair = (first_key + column as usize) / 2;
            #[unroll]
            for c in 0..key_steps {
                let at = row * comptime!(tile.score_stride()) + pair + c * comptime!(N / 2);
                scores[at] = part::<NC, P>(&acc[comptime!(r * key_steps + c)], half);
            }
        }
    }
}

/// Of this plane, `[rows / 16, channels / 8]`.
#[cube]
pub(super) fn accumulators<NC: Size>(#[comptime] tile: MmaTile) -> Sequence<Array<Vector<f32, NC>>> {
    let mut acc = Sequence::<Array<Vector<f32, NC>>>::new();
    #[unroll]
    for _ in 0..comptime!(tile.rows / M * tile.plane_steps() * 2) {
        acc.push(Array::new(2usize));
    }
    acc
}

/// Sets them to zero.
#[cube]
pub(super) fn clear_all<NC: Size>(acc: &mut Sequence<Array<Vector<f32, NC>>>, #[comptime] tile: MmaTile) {
    #[unroll]
    for i in 0..comptime!(tile.rows / M * tile.plane_steps() * 2) {
        clear(&mut acc[i]);
    }
}

/// Sets an accumulator to zero.
#[cube]
fn clear<NC: Size>(acc: &mut Array<Vector<f32, NC>>) {
    #[unroll]
    for half in 0..2 {
        acc[half] = Vector::new(0.0f32);
    }
}

/// Multiplies one of the two rows of an accumulator.
#[cube]
fn scale<NC: Size>(acc: &mut Array<Vector<f32, NC>>, #[comptime] half: usize, factor: Vector<f32, NC>) {
    acc[half] *= factor;
}

/// One of the two rows of an accumulator.
#[cube]
fn part<NC: Size, P: Size>(acc: &Array<Vector<f32, NC>>, #[comptime] half: usize) -> Vector<f32, P> {
    Vector::cast_from(acc[half])
}

/// Multiplies the accumulators with a factor for each row.
#[cube]
pub(super) fn scale_rows<E: Float, NC: Size>(
    def: &MmaDefinition<E, E, f32>,
    acc: &mut Sequence<Array<Vector<f32, NC>>>,
    factors: &Shared<[f32]>,
    #[comptime] tile: MmaTile,
) {
    let columns = comptime!(2 * tile.plane_steps());
    let mut own = Array::<f32>::new(comptime!(tile.rows / N));
    let mut changed = false;
    #[unroll]
    for i in 0..comptime!(tile.rows / N) {
        let (row, _) = def.position_of_nth(UNIT_POS_X, comptime!((i % 2 * 2) as u32), MatrixIdent::Accumulator);
        let factor = factors[comptime!(i / 2 * M) + row as usize];
        own[i] = factor;
        changed = changed || factor != 1.0f32;
    }
    if plane::any(changed) {
        #[unroll]
        for i in 0..comptime!(tile.rows / N) {
            #[unroll]
            for c in 0..columns {
                scale(&mut acc[comptime!(i / 2 * columns + c)], comptime!(i % 2), Vector::new(own[i]));
            }
        }
    }
}

/// Adds the keys of a stage, times their weights, for this plane's channels.
#[cube]
pub(super) fn accumulate<E: Float, V: Size, P: Size, NC: Size>(
    def: &MmaDefinition<E, E, f32>,
    weights: &Shared<[Vector<E, P>]>,
    keys: &Shared<[Vector<E, V>]>,
    stage_start: usize,
    acc: &mut Sequence<Array<Vector<f32, NC>>>,
    #[comptime] tile: MmaTile,
) {
    let lane = UNIT_POS_X as usize;
    let plane = UNIT_POS_Y as usize;
    let size!(NA) = def.vector_size(MatrixIdent::A);
    let columns = comptime!(2 * tile.plane_steps());
    // A row of eight weights is four pairs.
    let weight_at = lane % M * comptime!(tile.weight_stride()) + lane / M * 4;
    let weight_rows = &weights[weight_at..weights.len()];
    let first_step = plane * comptime!(tile.plane_steps());
    let value_at = stage_start + lane % K * comptime!(tile.stride()) + lane / K + 2 * first_step;
    let value_rows = &keys[value_at..keys.len()];
    #[unroll]
    for step in 0..comptime!(tile.keys / K) {
        let mut a = Sequence::<Array<Vector<E, NA>>>::new();
        #[unroll]
        for r in 0..comptime!(tile.rows / M) {
            let at = comptime!(r * M * tile.weight_stride() + step * K / 2);
            a.push(def.load_matrix::<Vector<E, P>, NA>(&weight_rows[at..at + 1], MatrixIdent::A, 4usize, false));
        }
        #[unroll]
        for c in 0..comptime!(tile.plane_steps()) {
            if comptime!(tile.value_steps.is_multiple_of(PLANES)) || first_step + c < tile.value_steps {
                let at = comptime!(step * K * tile.stride() + 2 * c);
                let b = def.load_matrix::<Vector<E, V>, NA>(&value_rows[at..at + 1], MatrixIdent::B, 4usize, true);
                #[unroll]
                for column in 0..2usize {
                    let mut fragment = Array::<Vector<E, NA>>::new(2usize);
                    fragment[0] = b[2 * column];
                    fragment[1] = b[2 * column + 1];
                    #[unroll]
                    for r in 0..comptime!(tile.rows / M) {
                        let tile_at = comptime!(r * columns + 2 * c + column);
                        def.execute_inplace(&a[r], &fragment, &mut acc[tile_at]);
                    }
                }
            }
        }
    }
}

/// Writes the accumulators.
#[cube]
pub(super) fn write_out<E: Float, P: Size, NC: Size>(
    def: &MmaDefinition<E, E, f32>,
    acc: &Sequence<Array<Vector<f32, NC>>>,
    partial_out: &mut [Vector<f32, P>],
    item_row: usize,
    first_row: usize,
    rows: usize,
    #[comptime] tile: MmaTile,
) {
    let plane = UNIT_POS_Y as usize;
    let columns = comptime!(2 * tile.plane_steps());
    let row_pairs = comptime!(tile.value_steps * K / 2);
    #[unroll]
    for r in 0..comptime!(tile.rows / M) {
        #[unroll]
        for half in 0..2usize {
            let (row, column) = def.position_of_nth(UNIT_POS_X, comptime!(2 * half as u32), MatrixIdent::Accumulator);
            let row = first_row + r * M + row as usize;
            if row < rows {
                #[unroll]
                for c in 0..columns {
                    let tile_column = plane * columns + c;
                    if comptime!(tile.value_steps.is_multiple_of(PLANES))
                        || tile_column < comptime!(2 * tile.value_steps)
                    {
                        let at = (item_row + row) * row_pairs + tile_column * comptime!(N / 2) + column as usize / 2;
                        partial_out[at] = part::<NC, P>(&acc[comptime!(r * columns + c)], half);
                    }
                }
            }
        }
    }
}
