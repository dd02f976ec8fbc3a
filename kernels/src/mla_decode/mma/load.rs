//! Copies of queries and keys into shared memory.

use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use super::tile::{LANES, MmaTile, UNITS};
use crate::cache_rows::CacheRows;
use crate::common::keys::SequencePages;

/// Units that copy a key together: they read 128 bytes at a time.
const KEY_UNITS: usize = 8;

/// Starts to copy a tile of keys into the stage of a turn. Zeros stand for keys from `end` on: what is there is not read.
#[cube]
pub(super) fn load_keys<E: Float, V: Size>(
    kv_cache: &CacheRows<E, V>,
    page_table: &[i32],
    keys: &mut Shared<[Vector<E, V>]>,
    arrived: &Sequence<Shared<Barrier>>,
    pages: &SequencePages,
    turn: u32,
    base: usize,
    end: usize,
    #[comptime] tile: MmaTile,
) {
    let stage = turn % comptime!(tile.stages as u32);
    // Eight units copy a key, so that they read whole lines.
    let unit = UNIT_POS_Y as usize * LANES + UNIT_POS_X as usize;
    let lane = unit % KEY_UNITS;
    if base < end {
        #[unroll]
        for pass in 0..comptime!(tile.keys.div_ceil(UNITS / KEY_UNITS)) {
            let key = unit / KEY_UNITS + pass * comptime!(UNITS / KEY_UNITS);
            let to = (stage as usize * tile.keys + key) * comptime!(tile.stride()) + lane;
            if comptime!(tile.keys.is_multiple_of(UNITS / KEY_UNITS)) || key < tile.keys {
                if base + key < end {
                    let slot = pages.slot(page_table, base + key);
                    #[unroll]
                    for i in 0..comptime!(tile.key_vectors.div_ceil(KEY_UNITS)) {
                        let (vector, to) = (lane + i * KEY_UNITS, to + i * KEY_UNITS);
                        if comptime!((i + 1) * KEY_UNITS <= tile.key_vectors) || vector < tile.key_vectors {
                            kv_cache.copy(slot as usize, vector, keys, to);
                        }
                    }
                } else {
                    let mut vector = lane;
                    while vector < tile.key_vectors {
                        keys[to - lane + vector] = Vector::new(E::from_int(0));
                        vector += KEY_UNITS;
                    }
                }
            }
        }
    }
    #[unroll]
    for i in 0..tile.stages {
        if stage == comptime!(i as u32) {
            // Nothing waits for a turn past the end: its arrivals must not be under way when the cube ends.
            if base < end {
                arrived[i].commit_copy_async();
            }
            arrived[i].arrive();
        }
    }
}

/// A barrier for each stage, at which all units arrive with their copies.
#[cube]
pub(super) fn stage_barriers(unit: usize, #[comptime] tile: MmaTile) -> Sequence<Shared<Barrier>> {
    let mut arrived = Sequence::<Shared<Barrier>>::new();
    #[unroll]
    for _ in 0..tile.stages {
        arrived.push(Barrier::shared(comptime!(UNITS as u32).runtime(), unit == 0));
    }
    arrived
}

#[cube]
pub(super) fn wait_for_stage(arrived: &Sequence<Shared<Barrier>>, stage: u32, phase: u32, #[comptime] tile: MmaTile) {
    #[unroll]
    for i in 0..tile.stages {
        if stage == comptime!(i as u32) {
            arrived[i].wait_parity(phase);
        }
    }
}

/// The rows of a tile, zeros past the last one.
#[cube]
pub(super) fn load_queries<E: Float, V: Size>(
    q: &[Vector<E, V>],
    queries: &mut Shared<[Vector<E, V>]>,
    sequence_row: usize,
    first_row: usize,
    rows: usize,
    unit: usize,
    #[comptime] tile: MmaTile,
) {
    let mut i = unit;
    while i < comptime!(tile.rows * tile.key_vectors) {
        let row = i / tile.key_vectors;
        let vector = i % tile.key_vectors;
        let mut value = Vector::<E, V>::new(E::from_int(0));
        if first_row + row < rows {
            value = q[(sequence_row + first_row + row) * tile.key_vectors + vector];
        }
        queries[row * comptime!(tile.stride()) + vector] = value;
        i += UNITS;
    }
}
