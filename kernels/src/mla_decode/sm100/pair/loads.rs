//! The warp that loads chunks: keys a block ahead, and values into the places of keys that are no longer needed.

use cubecl::prelude::*;

use super::places::{CHUNK_TILES, HELD, PARTS, Places, has_key_tile, of_block, parity, slot, slot_at};
use super::walk::{Range, Walk};
use crate::ptx::{mbarrier, tma, warp};
use crate::tiles::form::{Form, ROWS, TILE_BYTES};
use crate::tiles::loader::{Item, NO_ROW, PagedKeys, Plan};
use crate::tiles::pair::{CHUNK_BYTES, Cube, PAIR_KEYS};

/// Loads the chunks of all items of a cube: for each block its own 64 keys with all channels, the chunks of the query before those of
/// an item's first block, and, where the products of scores are done with a chunk of keys, the other cube's rows of half of the values'
/// channels. A whole warp.
#[cube]
pub(super) fn load_chunks<E: Float>(
    cube: &Cube,
    places: &Places,
    range: &Range,
    plan: &Plan,
    paged: PagedKeys,
    q_map: &TensorMap<E, Tiled>,
    #[comptime] form: Form,
) {
    let mut keys = Walk::new(range, plan);
    let mut values = Walk::new(range, plan);
    let mut value_pages = 0u32;
    let mut step = 0u32;
    let mut queries = 0u32;
    while values.has_block() {
        let is_key = keys.has_block();
        let mut pages = 0u32;
        if is_key {
            pages = read_pages(&keys, &paged, plan, cube.lane, form);
        }
        // The order is that in which places become free: of the first chunks with the output of three blocks before, of the others with
        // that of two before, which is issued behind the scores of the block before; of all, where a query is among the last places.
        let is_first = is_key && keys.block == 0;
        if is_key && !is_first {
            load_keys(cube, places, &keys, &paged, pages, 0u32, comptime!(PARTS - 1), form);
        }
        if is_first {
            load_query_chunks::<E>(cube, places, range, &keys, queries, q_map);
            queries = warp::next(queries);
        }
        if step > 0 {
            load_values(cube, places, &values, &paged, value_pages, form);
            values.advance(range, plan);
        }
        if is_first {
            load_keys(cube, places, &keys, &paged, pages, 0u32, comptime!(PARTS - 1), form);
        }
        if is_key {
            load_key_tile(cube, places, &keys, &paged, pages, form);
            load_keys(cube, places, &keys, &paged, pages, comptime!(PARTS - 1), PARTS, form);
            keys.advance(range, plan);
        }
        value_pages = pages;
        step = warp::next(step);
    }
}

/// Some chunks of the cube's own 64 keys of a block.
#[allow(clippy::too_many_arguments)]
#[cube]
fn load_keys(
    cube: &Cube,
    places: &Places,
    at: &Walk,
    paged: &PagedKeys,
    pages: u32,
    #[comptime] first: u32,
    #[comptime] end: u32,
    #[comptime] form: Form,
) {
    let half = at.block * 2 + places.rank;
    #[unroll]
    for part in first..end {
        let turn = at.turn + part;
        let full = cube.barriers.full + slot(turn) * 8;
        mbarrier::wait_cluster(cube.barriers.empty + slot(turn) * 8, parity(turn) ^ 1);
        let first_tile = comptime!(part * CHUNK_TILES as u32).runtime();
        let to = slot_at(cube.chunks_at, turn);
        load_rows(&at.item, paged, pages, half, first_tile, CHUNK_TILES, to, full, cube.lane, form);
    }
}

/// The tile of a block's own keys that values have not.
#[cube]
fn load_key_tile(cube: &Cube, places: &Places, at: &Walk, paged: &PagedKeys, pages: u32, #[comptime] form: Form) {
    if comptime!(has_key_tile(form)) {
        let half = at.block * 2 + places.rank;
        mbarrier::wait_cluster(places.key_tile_empty, (at.count % 2) ^ 1);
        let first_tile = comptime!(PARTS * CHUNK_TILES as u32).runtime();
        let (to, full) = (places.key_tile_at, places.key_tile_full);
        load_rows(&at.item, paged, pages, half, first_tile, 1usize, to, full, cube.lane, form);
    }
}

/// The other cube's 64 keys of a block, this cube's half of the channels of each product: chunks 2 * side + (rank of the other one) of
/// the places, where this cube's keys are not needed as values. The product that reads them finds the other cube's own keys in its place.
#[cube]
fn load_values(cube: &Cube, places: &Places, at: &Walk, paged: &PagedKeys, pages: u32, #[comptime] form: Form) {
    let other = places.rank ^ 1;
    let half = at.block * 2 + other;
    #[unroll]
    for side in 0..comptime!(PARTS / 2) {
        let part = comptime!(2 * side) + other;
        let full = places.values_full + of_block(at.count, part);
        mbarrier::wait_cluster(places.keys_read + of_block(at.count, part), at.count / 2 % 2);
        if half < at.item.blocks {
            let first_tile = comptime!(side * 2 * CHUNK_TILES as u32) + places.rank * comptime!(CHUNK_TILES as u32);
            let to = slot_at(cube.chunks_at, at.turn + part);
            load_rows(&at.item, paged, pages, half, first_tile, CHUNK_TILES, to, full, cube.lane, form);
        } else {
            mbarrier::arrive_if(full, cube.lane == 0);
        }
    }
}

/// The chunks of a query that will be in tensor memory. They have barriers of their own: who waits for them does not follow the places.
#[cube]
fn load_query_chunks<E: Float>(
    cube: &Cube,
    places: &Places,
    range: &Range,
    at: &Walk,
    queries: u32,
    q_map: &TensorMap<E, Tiled>,
) {
    let row = (at.item.sequence * range.rows + range.tile_row) as i32;
    let map = tma::tensor_map_address::<E, Tiled>(q_map);
    #[unroll]
    for part in 0..HELD {
        let turn = at.turn - HELD + part;
        let staged = places.staged + (queries % 2 * HELD + part) * 8;
        mbarrier::wait_cluster(cube.barriers.empty + slot(turn) * 8, parity(turn) ^ 1);
        if cube.lane == 0 {
            mbarrier::arrive(cube.barriers.full + slot(turn) * 8);
            mbarrier::arrive_expect(staged, CHUNK_BYTES.runtime());
            #[unroll]
            for tile in 0..CHUNK_TILES {
                let to = slot_at(cube.chunks_at, turn) + comptime!(tile as u32 * TILE_BYTES);
                tma::load_3d(
                    to,
                    map,
                    staged,
                    0i32,
                    row,
                    comptime!((part as usize * CHUNK_TILES + tile) as i32).runtime(),
                );
            }
        }
        sync_plane();
    }
}

/// Starts to load `tiles` tiles of the 64 keys with number `half` of the item, whose block has these pages. Zeros come for
/// pages past the end.
#[allow(clippy::too_many_arguments)]
#[cube]
fn load_rows(
    item: &Item,
    paged: &PagedKeys,
    pages: u32,
    half: u32,
    first_tile: u32,
    #[comptime] tiles: usize,
    to: u32,
    full: u32,
    lane: u32,
    #[comptime] form: Form,
) {
    if lane == 0 {
        mbarrier::arrive_expect(full, comptime!(tiles as u32 * TILE_BYTES).runtime());
    }
    #[unroll]
    for part in 0..comptime!(ROWS / form.box_keys) {
        let key = item.first_key + half * comptime!(ROWS as u32) + comptime!((part * form.box_keys) as u32);
        let page = warp::shuffle::<u32>(pages, half % 2 * comptime!((ROWS / form.box_keys) as u32) + part as u32);
        let mut row = ((page << paged.page_shift) + (key & ((1u32 << paged.page_shift) - 1))) as i32;
        if key >= item.tile_end {
            row = NO_ROW.runtime();
        }
        let box_to = to + comptime!((part * form.box_keys * 128) as u32);
        if lane == 0 {
            #[unroll]
            for tile in 0..tiles {
                let tile_to = box_to + comptime!(tile as u32 * TILE_BYTES);
                let tile = first_tile + comptime!(tile as u32);
                tma::load_3d(tile_to, paged.map, full, 0i32, row, tile as i32);
            }
        }
    }
    sync_plane();
}

/// The pages of a block, in each lane that of one box of keys.
#[cube]
fn read_pages(at: &Walk, paged: &PagedKeys, plan: &Plan, lane: u32, #[comptime] form: Form) -> u32 {
    let key_in_block = lane * comptime!(form.box_keys as u32);
    let key = at.item.first_key + at.block * PAIR_KEYS + key_in_block;
    let mut page = 0u32;
    if key_in_block < PAIR_KEYS && key < at.item.tile_end {
        page = plan.page_table[(at.item.sequence * paged.max_pages + (key >> paged.page_shift)) as usize] as u32;
    }
    page
}
