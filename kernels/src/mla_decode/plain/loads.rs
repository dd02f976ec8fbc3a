//! What a tile reads: query rows, the places of its keys, and keys.

use cubecl::prelude::*;

use super::tile::{Tile, UNITS};
use crate::cache_rows::CacheRows;
use crate::common::keys::SequencePages;

/// The rows of a tile, zeros past the last one.
#[cube]
pub(super) fn load_queries<E: Float, V: Size>(
    q: &[Vector<E, V>],
    queries: &mut Shared<[Vector<E, V>]>,
    sequence_row: usize,
    first_row: usize,
    rows: usize,
    #[comptime] tile: Tile,
) {
    let mut i = UNIT_POS as usize;
    while i < comptime!(tile.rows * tile.key_vectors) {
        let row = i / tile.key_vectors;
        let vector = i % tile.key_vectors;
        let at = row * comptime!(tile.stride()) + vector;
        if first_row + row < rows {
            queries[at] = q[(sequence_row + first_row + row) * tile.key_vectors + vector];
        } else {
            queries[at] = Vector::new(E::from_int(0));
        }
        i += UNITS;
    }
}

/// Looks up where the keys `base ..` of a sequence are; those from `end` on are left alone.
#[cube]
pub(super) fn find_slots(
    page_table: &[i32],
    slots: &mut Shared<[u32]>,
    pages: &SequencePages,
    base: usize,
    end: usize,
    #[comptime] tile: Tile,
) {
    let unit = UNIT_POS as usize;
    if unit < tile.keys && base + unit < end {
        slots[unit] = pages.slot(page_table, base + unit);
    }
}

/// A tile of keys, zeros from `end` on: what is there is not read.
#[cube]
pub(super) fn load_keys<E: Float, V: Size>(
    kv_cache: &CacheRows<E, V>,
    keys: &mut Shared<[Vector<E, V>]>,
    slots: &Shared<[u32]>,
    base: usize,
    end: usize,
    #[comptime] tile: Tile,
) {
    let mut i = UNIT_POS as usize;
    while i < comptime!(tile.keys * tile.key_vectors) {
        let key = i / tile.key_vectors;
        let vector = i % tile.key_vectors;
        let at = key * comptime!(tile.stride()) + vector;
        if base + key < end {
            keys[at] = kv_cache.load(slots[key] as usize, vector);
        } else {
            keys[at] = Vector::new(E::from_int(0));
        }
        i += UNITS;
    }
}
