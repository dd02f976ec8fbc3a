//! The products of a cube, and its loads: of rows four of any slots at a time, in tiles of 64 channels, and of queries.

use cubecl::prelude::*;

use super::super::range::{GATHERED, Maps, ROW_BYTES, Range};
use crate::ptx::{mbarrier, tma, warp};
use crate::sparse_mla::work::{Ahead, Lists, Work};
use crate::tiles::form::{HALF_KEYS, STAGES, TILE_BYTES, TILE_WIDTH, load_query};
use crate::tiles::one_cube::{Cube, Products};

/// Loads a half of each block of all work, a row a lane: the slots of the block behind it are on their way then. Zeros come for entries
/// that are none, whose rows are outside of the tensor; a bit for each entry says whether it is a row. A whole warp.
#[cube]
pub(super) fn load_half(
    cube: &Cube,
    range: &Range,
    lists: &Lists,
    maps: &Maps,
    seen: &mut Shared<[u32]>,
    #[comptime] half: u32,
) {
    let form = comptime!(range.form.tile);
    let place = cube.lane + comptime!(half * HALF_KEYS as u32);
    let mut ahead = Ahead::new(lists, range.first, range.end, range.step, place, false.runtime());
    let mut turn = 0u32;
    let mut slot = ahead.slot(lists);
    let mut list = warp::uniform(ahead.list);
    ahead.advance(lists);
    while list > 0 {
        let stage = turn % STAGES;
        let (full, empty) = (cube.barriers.full + stage * 16, cube.barriers.empty + stage * 16);
        let (full, empty) = (full + comptime!(half * 8), empty + comptime!(half * 8));
        let to = cube.keys_at + stage * comptime!(form.stage_bytes()) + comptime!(half * HALF_KEYS as u32 * ROW_BYTES);
        let rows = warp::ballot(slot >= 0);
        let map = maps.of(list, range.form);
        mbarrier::wait(empty, (turn / STAGES % 2) ^ 1);
        // One lane goes on for all.
        sync_plane();
        let elected = warp::elect();
        if elected {
            seen[(stage * 2 + half) as usize] = rows;
            mbarrier::arrive_expect(full, comptime!(form.tiles as u32 * HALF_KEYS as u32 * ROW_BYTES));
        }
        #[unroll]
        for group in 0..comptime!(HALF_KEYS as u32 / GATHERED) {
            let first = comptime!(group * GATHERED).runtime();
            let (row_0, row_1) = (warp::shuffle::<i32>(slot, first), warp::shuffle::<i32>(slot, first + 1));
            let (row_2, row_3) = (warp::shuffle::<i32>(slot, first + 2), warp::shuffle::<i32>(slot, first + 3));
            if elected {
                #[unroll]
                for tile in 0..form.tiles {
                    let tile_to = to + comptime!(tile as u32 * TILE_BYTES + group * GATHERED * ROW_BYTES);
                    let channel = comptime!((tile * TILE_WIDTH) as i32).runtime();
                    tma::load_rows(tile_to, map, full, channel, row_0, row_1, row_2, row_3);
                }
            }
        }
        sync_plane();
        slot = ahead.slot(lists);
        list = warp::uniform(ahead.list);
        ahead.advance(lists);
        turn = warp::next(turn);
    }
}

/// Issues the products of all work. One thread.
#[cube]
pub(super) fn multiply(cube: &Cube, range: &Range, lists: &Lists) {
    let mut products = Products::new();
    let mut index = range.first;
    while index < range.end {
        let mut work = Work::none();
        work.read(lists, index);
        products.multiply(cube, work.blocks(), comptime!(range.form.tile));
        index = range.next(index);
    }
}

/// Loads the queries of all work that has blocks, each as soon as the scores of the one before it are done. Past the heads of a token
/// are those of the next, which nobody looks at. A whole warp.
#[cube]
pub(super) fn load_queries<E: Float>(cube: &Cube, range: &Range, lists: &Lists, q_map: &TensorMap<E, Tiled>) {
    let mut queries = 0u32;
    let mut index = range.first;
    while index < range.end {
        let mut work = Work::none();
        work.read(lists, index);
        if work.blocks() > 0 {
            mbarrier::wait(cube.barriers.query_empty, (queries % 2) ^ 1);
            if warp::elect() {
                let row = work.query_row(range.heads);
                load_query::<E>(q_map, cube.query_at, cube.barriers.query_full, row, comptime!(range.form.tile));
            }
            sync_plane();
            queries += 1;
        }
        index = range.next(index);
    }
}
