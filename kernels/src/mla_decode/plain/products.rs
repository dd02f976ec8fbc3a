//! What a tile computes: scores, sums of values, and what becomes of them.

use cubecl::prelude::*;

use super::tile::Tile;

/// Scores of the whole tile, not yet scaled. Each unit has one key, a few rows and a slice of the channels.
#[cube]
pub(super) fn score<E: Float, V: Size>(
    queries: &Shared<[Vector<E, V>]>,
    keys: &Shared<[Vector<E, V>]>,
    scores: &mut Shared<[f32]>,
    #[comptime] tile: Tile,
) {
    let unit = UNIT_POS as usize;
    let key = unit % tile.keys;
    let first_row = unit / tile.keys % comptime!(tile.rows / tile.score_rows) * tile.score_rows;
    let slice = unit / comptime!(tile.keys * (tile.rows / tile.score_rows));
    let mut sums = Array::<Vector<f32, V>>::new(tile.score_rows);
    #[unroll]
    for r in 0..tile.score_rows {
        sums[r] = Vector::new(0.0f32);
    }
    let mut vector = slice;
    while vector < tile.key_vectors {
        let key_part = Vector::<f32, V>::cast_from(keys[key * comptime!(tile.stride()) + vector]);
        #[unroll]
        for r in 0..tile.score_rows {
            let query_part = queries[(first_row + r) * comptime!(tile.stride()) + vector];
            sums[r] += Vector::<f32, V>::cast_from(query_part) * key_part;
        }
        vector += tile.slices;
    }
    #[unroll]
    for r in 0..tile.score_rows {
        let lanes = sums[r];
        let mut total = lanes.extract(0usize);
        #[unroll]
        for i in 1..tile.vector {
            total += lanes.extract(i);
        }
        scores[(slice * tile.rows + first_row + r) * tile.keys + key] = total;
    }
}

/// A score, from its slices.
#[cube]
pub(super) fn score_of(scores: &Shared<[f32]>, row: usize, key: usize, #[comptime] tile: Tile) -> f32 {
    let mut total = 0.0f32;
    #[unroll]
    for slice in 0..tile.slices {
        total += scores[(slice * tile.rows + row) * tile.keys + key];
    }
    total
}

/// Shrinks the accumulators and adds the first `count` keys of the tile, times their weights.
#[cube]
pub(super) fn accumulate<E: Float, V: Size>(
    keys: &Shared<[Vector<E, V>]>,
    weights: &Shared<[f32]>,
    factors: &Shared<[f32]>,
    acc: &mut Array<Vector<f32, V>>,
    count: usize,
    #[comptime] tile: Tile,
) {
    let unit = UNIT_POS as usize;
    let column = unit % tile.value_units;
    let group = unit / tile.value_units;
    if group < tile.row_groups {
        let group_rows = comptime!(tile.group_rows());
        let first_row = group * group_rows;
        #[unroll]
        for r in 0..group_rows {
            let factor = Vector::<f32, V>::new(factors[first_row + r]);
            #[unroll]
            for c in 0..comptime!(tile.unit_vectors()) {
                acc[c * group_rows + r] *= factor;
            }
        }
        for key in 0..count {
            #[unroll]
            for c in 0..comptime!(tile.unit_vectors()) {
                let vector = column + c * tile.value_units;
                if vector < tile.value_vectors {
                    let value = Vector::<f32, V>::cast_from(keys[key * comptime!(tile.stride()) + vector]);
                    #[unroll]
                    for r in 0..group_rows {
                        let weight = Vector::<f32, V>::new(weights[(first_row + r) * tile.keys + key]);
                        acc[c * group_rows + r] += value * weight;
                    }
                }
            }
        }
    }
}

/// Writes the accumulators, times the factors.
#[cube]
pub(super) fn write_out<V: Size>(
    acc: &Array<Vector<f32, V>>,
    factors: &Shared<[f32]>,
    partial_out: &mut [Vector<f32, V>],
    item_row: usize,
    tile_row: usize,
    rows: usize,
    #[comptime] tile: Tile,
) {
    let unit = UNIT_POS as usize;
    let column = unit % tile.value_units;
    let group = unit / tile.value_units;
    if group < tile.row_groups {
        let group_rows = comptime!(tile.group_rows());
        #[unroll]
        for r in 0..group_rows {
            let row = group * group_rows + r;
            if tile_row + row < rows {
                let factor = Vector::<f32, V>::new(factors[row]);
                #[unroll]
                for c in 0..comptime!(tile.unit_vectors()) {
                    let vector = column + c * tile.value_units;
                    if vector < tile.value_vectors {
                        let at = (item_row + tile_row + row) * tile.value_vectors + vector;
                        partial_out[at] = acc[c * group_rows + r] * factor;
                    }
                }
            }
        }
    }
}
