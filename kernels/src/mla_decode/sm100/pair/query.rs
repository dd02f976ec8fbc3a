//! The four warps of the queries: most of a query to tensor memory, from where products read it beside shared memory; the rest stays
//! there. They write the output, too.

use cubecl::prelude::*;

use super::QUERIES;
use super::come::Chunks;
use super::output::{Done, write_output};
use super::places::{CHUNK_TILES, HELD, HELD_AT, HELD_COLUMNS, PARTS, Places, query_tiles, slot};
use super::walk::Range;
use crate::ptx::tcgen05::{self, LANE, Shape};
use crate::ptx::{barrier, math, mbarrier, tma, warp};
use crate::tiles::form::{Form, ROWS, TILE_BYTES};
use crate::tiles::loader::{Item, Plan};
use crate::tiles::output::{Results, Target};
use crate::tiles::pair::{CHUNK_BYTES, Cube};

/// Units of the four warps.
const UNITS: u32 = 128;
/// The barrier on which they meet; softmax has lower ones.
const MEETING: u32 = 3;

/// Brings the queries of all items, each as soon as the scores of the one before it are done, and then writes the output of that one.
#[allow(clippy::too_many_arguments)]
#[cube]
pub(super) fn load_and_write<E: Float, P: Size>(
    cube: &Cube,
    places: &Places,
    range: &Range,
    plan: &Plan,
    q_map: &TensorMap<E, Tiled>,
    chunks: &Chunks,
    factors: &Shared<[f32]>,
    results: &mut Results<E, P>,
    #[comptime] form: Form,
) {
    let mut turn = 0u32;
    let mut done = Done { index: range.first, sequence: 0u32, blocks: 0u32, items: 0u32, count: 0u32 };
    let mut items = 0u32;
    let mut count = 0u32;
    let mut index = range.first;
    while index < range.end + comptime!(1u32).runtime() {
        let mut item = Item::none();
        if index < range.end {
            item.read(plan, index, &range.tile);
        }
        let blocks = item.blocks.div_ceil(2u32);
        if blocks > 0 {
            bring::<E>(cube, places, range, &item, q_map, chunks, items, turn, form);
            turn += HELD + blocks * PARTS;
        }
        if index > range.first {
            let target = Target::new(plan.is_whole(done.sequence), done.sequence, done.index);
            write_output::<E, P>(cube, places, range, &done, &target, factors, results);
        }
        count += blocks;
        done.index = index;
        done.sequence = item.sequence;
        done.blocks = blocks;
        done.items = items;
        done.count = count;
        items += u32::cast_from(blocks > 0);
        index = warp::next(index);
    }
}

/// Brings a query, number `items` of all, whose chunks have the turns from `turn` on, and tells the first cube.
#[allow(clippy::too_many_arguments)]
#[cube]
fn bring<E: Float>(
    cube: &Cube,
    places: &Places,
    range: &Range,
    item: &Item,
    q_map: &TensorMap<E, Tiled>,
    chunks: &Chunks,
    items: u32,
    turn: u32,
    #[comptime] form: Form,
) {
    // The first query waits for nothing.
    if items == 0 && cube.warp == QUERIES && warp::elect() {
        load_rest::<E>(cube, q_map, item.sequence * range.rows + range.tile_row, form);
    }
    sync_plane();
    // Two chunks are in registers before there is room for them.
    let first = read_chunk(cube, places, chunks, turn, items, 0u32);
    let second = read_chunk(cube, places, chunks, turn, items, 1u32);
    mbarrier::wait_cluster(cube.barriers.query_empty, (items % 2) ^ 1);
    if items > 0 && cube.warp == QUERIES && warp::elect() {
        load_rest::<E>(cube, q_map, item.sequence * range.rows + range.tile_row, form);
    }
    sync_plane();
    tcgen05::fence_after();
    hold(cube, first, 0u32);
    hold(cube, second, 1u32);
    let third = read_chunk(cube, places, chunks, turn, items, 2u32);
    mbarrier::wait(cube.barriers.query_full, items % 2);
    hold(cube, third, 2u32);
}

/// Starts to load the tiles of a query that stay in shared memory.
#[cube]
fn load_rest<E: Float>(cube: &Cube, q_map: &TensorMap<E, Tiled>, row: u32, #[comptime] form: Form) {
    let map = tma::tensor_map_address::<E, Tiled>(q_map);
    let tiles = comptime!(query_tiles(form));
    mbarrier::arrive_expect(cube.barriers.query_full, comptime!(tiles as u32 * TILE_BYTES).runtime());
    #[unroll]
    for tile in 0..tiles {
        let to = cube.query_at + comptime!(tile as u32 * TILE_BYTES);
        let from = comptime!((HELD as usize * CHUNK_TILES + tile) as i32).runtime();
        tma::load_3d(to, map, cube.barriers.query_full, 0i32, row as i32, from);
    }
}

/// A unit's row of a chunk of the query, when it has come; its place is given back. Layout B wants each row twice, in lanes `r` and
/// `64 + r`: two units read it.
#[cube]
fn read_chunk(
    cube: &Cube,
    places: &Places,
    chunks: &Chunks,
    first_turn: u32,
    items: u32,
    #[comptime] part: u32,
) -> Vector<u32, Const<64>> {
    let row = UNIT_POS % comptime!(ROWS as u32);
    let turn = first_turn + part;
    mbarrier::wait(places.staged + (items % 2 * HELD + part) * 8, items / 2 % 2);
    let mut words = Sequence::<u32>::new();
    #[unroll]
    for tile in 0..comptime!(CHUNK_TILES as u32) {
        let at = slot(turn) * comptime!(CHUNK_BYTES / 16) + comptime!(tile * TILE_BYTES / 16) + row * 8;
        #[unroll]
        for piece in 0..8u32 {
            let four = chunks[(at + (comptime!(piece).runtime() ^ (row % 8))) as usize];
            #[unroll]
            for word in 0..4usize {
                words.push(four.extract(word));
            }
        }
    }
    barrier::sync_at(MEETING.runtime(), UNITS);
    mbarrier::arrive_if(cube.barriers.empty + slot(turn) * 8, cube.warp == QUERIES && cube.lane == 0);
    math::vector::<u32, Const<64>>(&words)
}

/// Moves a chunk to tensor memory and tells the first cube.
#[cube]
fn hold(cube: &Cube, row: Vector<u32, Const<64>>, #[comptime] part: u32) {
    let to = cube.tensor + cube.warp % 4 * comptime!(32 * LANE) + comptime!(HELD_AT + part * HELD_COLUMNS);
    tcgen05::store::<u32, Const<64>>(to, row, comptime!(Shape::Lanes));
    tcgen05::wait_for_stores();
    tcgen05::fence_before();
    sync_plane();
    mbarrier::arrive_at_if(cube.barriers.query_come + comptime!(8 * part), 0u32, cube.lane == 0);
}
