//! The warp that waits for chunks in its cube and tells the first cube, which issues the products.

use cubecl::prelude::*;

use super::places::{CHUNK_TILES, HELD, PARTS, Places, has_key_tile, of_block, parity, slot};
use super::walk::Range;
use crate::ptx::{fence, mbarrier, warp};
use crate::tiles::form::{Form, ROWS, TILE_BYTES};
use crate::tiles::loader::{Item, Plan};
use crate::tiles::pair::{CHUNK_BYTES, Cube, pass};

/// Chunks as the warps see them: 16 bytes at a time.
pub(super) type Chunks = Shared<[Vector<u32, Const<4>>]>;

/// Passes the chunks of all items on, in the order of the products. A whole warp.
#[cube]
pub(super) fn pass_chunks(
    cube: &Cube,
    places: &Places,
    range: &Range,
    plan: &Plan,
    chunks: &mut Chunks,
    #[comptime] form: Form,
) {
    let mut turn = 0u32;
    let mut count = 0u32;
    let mut index = range.first;
    while index < range.end {
        let mut item = Item::none();
        item.read(plan, index, &range.tile);
        let blocks = item.blocks.div_ceil(2u32);
        if blocks > 0 {
            #[unroll]
            for _ in 0..HELD {
                mbarrier::wait(cube.barriers.full + slot(turn) * 8, parity(turn));
                pass(cube.barriers.come, slot(turn), cube.lane);
                turn = warp::next(turn);
            }
        }
        let mut block = 0u32;
        while block < blocks + comptime!(1u32).runtime() {
            if block < blocks {
                pass_keys(cube, places, &item, block, turn, count, chunks, form);
            }
            if block > 0 {
                pass_values(cube, places, &item, block - 1, turn - PARTS, count - 1, chunks);
            }
            if block < blocks {
                turn += PARTS;
                count = warp::next(count);
            }
            block = warp::next(block);
        }
        index = warp::next(index);
    }
}

/// The cube's own keys. Those that it needs as values, too, are zero behind the end: the weights there are zero, but what the page has
/// may be NaN.
#[allow(clippy::too_many_arguments)]
#[cube]
fn pass_keys(
    cube: &Cube,
    places: &Places,
    item: &Item,
    block: u32,
    turn: u32,
    count: u32,
    chunks: &mut Chunks,
    #[comptime] form: Form,
) {
    let rows = item.tile_end - (item.first_key + (block * 2 + places.rank) * comptime!(ROWS as u32));
    #[unroll]
    for part in 0..PARTS {
        let turn = turn + part;
        mbarrier::wait(cube.barriers.full + slot(turn) * 8, parity(turn));
        if comptime!(part % 2) == places.rank {
            clear(chunks, slot(turn), rows, cube.lane);
        }
        pass(cube.barriers.come, slot(turn), cube.lane);
    }
    if comptime!(has_key_tile(form)) {
        mbarrier::wait(places.key_tile_full, count % 2);
        pass(places.key_tile_come, 0u32, cube.lane);
    }
}

/// The other cube's rows.
#[cube]
fn pass_values(cube: &Cube, places: &Places, item: &Item, block: u32, turn: u32, count: u32, chunks: &mut Chunks) {
    let other = places.rank ^ 1;
    let rows = item.tile_end - (item.first_key + (block * 2 + other) * comptime!(ROWS as u32));
    #[unroll]
    for side in 0..comptime!(PARTS / 2) {
        let part = comptime!(2 * side) + other;
        mbarrier::wait(places.values_full + of_block(count, part), count / 2 % 2);
        clear(chunks, slot(turn + part), rows, cube.lane);
        pass(places.values_come + of_block(count, part), 0u32, cube.lane);
    }
}

/// Clears the rows of a chunk from `rows` on. Of one without any, zeros have come.
#[cube]
fn clear(chunks: &mut Chunks, slot: u32, rows: u32, lane: u32) {
    let mut row = rows;
    if row > 0 && row < comptime!(ROWS as u32) {
        let at = slot * comptime!(CHUNK_BYTES / 16) + lane / 8 * comptime!(TILE_BYTES / 16) + lane % 8;
        while row < comptime!(ROWS as u32) {
            if lane < comptime!(8 * CHUNK_TILES as u32) {
                chunks[(at + row * 8) as usize] = Vector::<u32, Const<4>>::zeroed();
            }
            row = warp::next(row);
        }
        fence::async_shared();
    }
}
