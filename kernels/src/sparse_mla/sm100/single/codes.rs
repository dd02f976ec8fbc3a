//! The loads of a cube where there are FP8 rows: four warps bring 16 rows of a block each.

use cubecl::prelude::*;

use super::super::range::Range;
use super::super::rows::{OWN_ROWS, PIECE_TILES, Piece, Rows, WARPS};
use crate::ptx::{mbarrier, warp};
use crate::sparse_mla::work::{Ahead, Lists};
use crate::tiles::form::{HALF_KEYS, STAGES, TILE_BYTES};
use crate::tiles::one_cube::Cube;

/// Loads 16 rows of each block of all work. The four pieces of the next block are on their way while those of this one are written, and the
/// slots of the one behind it. A bit for each entry says whether it is a row. A whole warp.
#[cube]
pub(super) fn load_rows(cube: &Cube, range: &Range, lists: &Lists, rows: &Rows, seen: &mut Shared<[u32]>) {
    let form = comptime!(range.form.tile);
    // Of its half of a block a warp has all slots, a lane each.
    let half = rows.warp / comptime!(WARPS / 2);
    let first_lane = rows.warp % comptime!(WARPS / 2) * OWN_ROWS;
    let place = half * comptime!(HALF_KEYS as u32) + cube.lane;
    let mut ahead = Ahead::new(lists, range.first, range.end, range.step, place, false.runtime());
    let mut turn = 0u32;
    let mut slot = ahead.slot(lists);
    let mut list = warp::uniform(ahead.list);
    ahead.advance(lists);
    let (mut piece_0, mut piece_1, mut piece_2, mut piece_3) =
        (Piece::nothing(), Piece::nothing(), Piece::nothing(), Piece::nothing());
    piece_0.fetch(rows, list, slot, first_lane, 0u32);
    piece_1.fetch(rows, list, slot, first_lane, 1u32);
    piece_2.fetch(rows, list, slot, first_lane, 2u32);
    piece_3.fetch(rows, list, slot, first_lane, 3u32);
    while list > 0 {
        let stage = turn % STAGES;
        let full = cube.barriers.full + stage * 16 + half * 8;
        let to = cube.keys_at + stage * comptime!(form.stage_bytes());
        let found = warp::ballot(slot >= 0);
        mbarrier::wait(cube.barriers.empty + stage * 16 + half * 8, (turn / STAGES % 2) ^ 1);
        if first_lane == 0 && cube.lane == 0 {
            seen[(stage * 2 + half) as usize] = found;
        }
        sync_plane();
        let are_codes = rows.are_codes(list);
        if are_codes {
            let tile = comptime!(range.form.code_tiles());
            rows.gather(list, slot, first_lane, tile.runtime(), to + comptime!(tile * TILE_BYTES), full, 1u32);
        } else {
            rows.gather(list, slot, first_lane, 0u32, to, full, comptime!(form.tiles as u32));
        }
        slot = ahead.slot(lists);
        list = warp::uniform(ahead.list);
        const PIECE_BYTES: u32 = PIECE_TILES * TILE_BYTES;
        if are_codes {
            piece_0.store(rows, to, 0u32);
        }
        piece_0.fetch(rows, list, slot, first_lane, 0u32);
        if are_codes {
            piece_1.store(rows, to + PIECE_BYTES, 1u32);
        }
        piece_1.fetch(rows, list, slot, first_lane, 1u32);
        if are_codes {
            piece_2.store(rows, to + comptime!(2 * PIECE_BYTES), 2u32);
        }
        piece_2.fetch(rows, list, slot, first_lane, 2u32);
        if are_codes {
            piece_3.store(rows, to + comptime!(3 * PIECE_BYTES), 3u32);
        }
        rows.give(full);
        piece_3.fetch(rows, list, slot, first_lane, 3u32);
        ahead.advance(lists);
        turn = warp::next(turn);
    }
}
