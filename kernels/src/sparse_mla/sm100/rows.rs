//! FP8 rows: four warps, of which each has 16 rows of 64, read codes into registers and write what they stand for into tiles. What needs no
//! conversion, the rotary channels and dense rows beside FP8 rows, comes by TMA.
//!
//! A piece is 128 channels of a warp's rows. Of one row eight lanes have 16 codes each, and eight lanes that write together have the four
//! vectors of a tile of two rows, whose swizzles differ: they write to all banks.

use cubecl::prelude::*;

use super::range::{GATHERED, Maps, ROW_BYTES};
use crate::ptx::copy::{load_global_4_or_zero, load_global_16};
use crate::ptx::{fence, mbarrier, tma, warp};
use crate::sparse_mla::codes::{Codes, row_words, scale_pair, store_vector};
use crate::sparse_mla::form::{Form, Stored};
use crate::tiles::form::{TILE_BYTES, TILE_WIDTH};

/// Warps that bring FP8 rows, and the rows of 64 that each has.
pub(super) const WARPS: u32 = 4;
pub(super) const OWN_ROWS: u32 = 16;
/// Tiles of a piece, and pieces of a row.
pub(super) const PIECE_TILES: u32 = 2;
pub(super) const PIECES: u32 = 4;
/// Rows of which a warp reads codes at a time.
const GROUP_ROWS: u32 = 4;

/// The rows of both lists, and what a unit has of a piece.
#[derive(CubeType)]
pub(super) struct Rows<'a> {
    maps: Maps,
    codes_a: Codes<'a>,
    codes_b: Codes<'a>,
    /// Which of the four warps it is.
    pub warp: u32,
    lane: u32,
    /// Of this unit: its row of the first four of its warp, its tile of the two, and its vector of that.
    row: u32,
    tile: u32,
    vector: u32,
    #[cube(comptime)]
    form: Form,
}

#[cube]
impl<'a> Rows<'a> {
    pub fn new(
        maps: Maps,
        codes_a: Codes<'a>,
        codes_b: Codes<'a>,
        warp: u32,
        lane: u32,
        #[comptime] form: Form,
    ) -> Rows<'a> {
        let row = lane / 16 * 2 + lane / 4 % 2;
        Rows::<'a> { maps, codes_a, codes_b, warp, lane, row, tile: lane / 8 % 2, vector: lane % 4, form }
    }
}

#[cube]
impl Rows<'_> {
    /// Whether the rows of a list are codes.
    pub fn are_codes(&self, list: u32) -> bool {
        if comptime!(self.form.dense_list() > 0) { list != comptime!(self.form.dense_list()) } else { true.runtime() }
    }

    /// Starts to load tiles of the warp's rows that nobody converts, from tile `first_tile` on to `to`; lanes from `first_lane` on have their
    /// slots. Zeros come for rows that are none. A whole warp.
    #[allow(clippy::too_many_arguments)]
    pub fn gather(
        &self,
        list: u32,
        slot: i32,
        first_lane: u32,
        first_tile: u32,
        to: u32,
        full: u32,
        #[comptime] tiles: u32,
    ) {
        let mut map = self.maps.a;
        let mut row = self.row_of(&self.codes_a, slot, comptime!(self.form.rows[0]));
        let mut column = first_tile * comptime!(TILE_WIDTH as u32) + comptime!(shift(self.form, self.form.rows[0]));
        if comptime!(self.form.second) && list == 2 {
            map = self.maps.b;
            row = self.row_of(&self.codes_b, slot, comptime!(self.form.rows[1]));
            column = first_tile * comptime!(TILE_WIDTH as u32) + comptime!(shift(self.form, self.form.rows[1]));
        }
        let mut rows = Sequence::<i32>::new();
        #[unroll]
        for i in 0..OWN_ROWS {
            rows.push(warp::shuffle::<i32>(row, first_lane + i));
        }
        // One lane goes on for all.
        sync_plane();
        if warp::elect() {
            mbarrier::expect(full, comptime!(tiles * OWN_ROWS * ROW_BYTES).runtime());
            let to = to + self.warp * comptime!(OWN_ROWS * ROW_BYTES);
            #[unroll]
            for group in 0..comptime!(OWN_ROWS / GATHERED) {
                #[unroll]
                for tile in 0..tiles {
                    let tile_to = to + comptime!(tile * TILE_BYTES + group * GATHERED * ROW_BYTES);
                    let tile_column = (column + comptime!(tile * TILE_WIDTH as u32)) as i32;
                    let first = comptime!((group * GATHERED) as usize);
                    let (row_0, row_1) = (rows[first], rows[comptime!(first + 1)]);
                    let (row_2, row_3) = (rows[comptime!(first + 2)], rows[comptime!(first + 3)]);
                    tma::load_rows(tile_to, map, full, tile_column, row_0, row_1, row_2, row_3);
                }
            }
        }
        sync_plane();
    }

    /// The row of a map.
    fn row_of(&self, codes: &Codes, slot: i32, #[comptime] stored: Stored) -> i32 {
        if comptime!(stored == Stored::Dense) { slot } else { codes.row_of(slot, self.form) }
    }

    /// Says that the warp's part is there, beside what TMA brings. A whole warp.
    pub fn give(&self, full: u32) {
        fence::async_shared();
        sync_plane();
        mbarrier::arrive_if(full, self.lane == 0);
    }
}

/// From the channel of the rotary part to its place in an FP8 row, in columns of two bytes; of dense rows channels are columns. It wraps.
fn shift(form: Form, stored: Stored) -> u32 {
    match stored {
        Stored::Dense => 0,
        _ => (2 * row_words(stored)[1] as u32).wrapping_sub(form.code_tiles() * TILE_WIDTH as u32),
    }
}

/// What a unit has of a piece: 16 codes of each of four rows, and their scales.
#[derive(CubeType)]
pub(super) struct Piece {
    codes_0: Vector<u32, Const<4>>,
    codes_1: Vector<u32, Const<4>>,
    codes_2: Vector<u32, Const<4>>,
    codes_3: Vector<u32, Const<4>>,
    scale_0: u32,
    scale_1: u32,
    scale_2: u32,
    scale_3: u32,
}

#[cube]
impl Piece {
    pub fn nothing() -> Piece {
        let codes = Vector::<u32, Const<4>>::new(0u32);
        Piece {
            codes_0: codes,
            codes_1: codes,
            codes_2: codes,
            codes_3: codes,
            scale_0: 0u32,
            scale_1: 0u32,
            scale_2: 0u32,
            scale_3: 0u32,
        }
    }

    /// Starts to read piece `piece` of the rows whose slots the lanes from `first_lane` on have: the first row of all for rows that are none,
    /// with a scale of zero. Codes are numbers, so that this is enough for zeros. Of a list of dense rows nothing is read. A whole warp.
    pub fn fetch(&mut self, rows: &Rows, list: u32, slot: i32, first_lane: u32, piece: u32) {
        let lane = first_lane + rows.row;
        let slot_0 = warp::shuffle::<i32>(slot, lane);
        let slot_1 = warp::shuffle::<i32>(slot, lane + GROUP_ROWS);
        let slot_2 = warp::shuffle::<i32>(slot, lane + comptime!(2 * GROUP_ROWS));
        let slot_3 = warp::shuffle::<i32>(slot, lane + comptime!(3 * GROUP_ROWS));
        // Loads do not move up, before what the registers held has been written.
        sync_plane();
        if comptime!(rows.form.second) && list == 2 {
            if comptime!(rows.form.rows[1] != Stored::Dense) {
                self.fetch_from(rows, &rows.codes_b, piece, slot_0, slot_1, slot_2, slot_3);
            }
        } else if comptime!(rows.form.rows[0] != Stored::Dense) {
            self.fetch_from(rows, &rows.codes_a, piece, slot_0, slot_1, slot_2, slot_3);
        }
        // Nor down behind this.
        sync_plane();
    }

    #[allow(clippy::too_many_arguments)]
    fn fetch_from(
        &mut self,
        rows: &Rows,
        codes: &Codes,
        piece: u32,
        slot_0: i32,
        slot_1: i32,
        slot_2: i32,
        slot_3: i32,
    ) {
        self.codes_0 = codes_of(rows, codes, slot_0, piece);
        self.codes_1 = codes_of(rows, codes, slot_1, piece);
        self.codes_2 = codes_of(rows, codes, slot_2, piece);
        self.codes_3 = codes_of(rows, codes, slot_3, piece);
        self.scale_0 = scale_of(rows, codes, slot_0, piece);
        self.scale_1 = scale_of(rows, codes, slot_1, piece);
        self.scale_2 = scale_of(rows, codes, slot_2, piece);
        self.scale_3 = scale_of(rows, codes, slot_3, piece);
    }

    /// Writes what was read of piece `piece` into two tiles of 64 rows.
    pub fn store(&self, rows: &Rows, to: u32, piece: u32) {
        let row = rows.warp * OWN_ROWS + rows.row;
        let to = to + rows.tile * TILE_BYTES + row * ROW_BYTES + ((2 * rows.vector) ^ rows.row) * 16;
        // The last tile may be the rotary channels.
        if comptime!(rows.form.code_tiles() == PIECES * PIECE_TILES)
            || PIECE_TILES * piece + rows.tile < comptime!(rows.form.code_tiles())
        {
            const GROUP_BYTES: u32 = GROUP_ROWS * ROW_BYTES;
            // Which of the scales of a word.
            let tile = (PIECE_TILES * piece + rows.tile) % 4;
            // The swizzle of every other four rows.
            let odd = to ^ 64u32;
            store_vector(self.codes_0, scale_pair(self.scale_0, tile, rows.form), to, 0u32);
            store_vector(self.codes_1, scale_pair(self.scale_1, tile, rows.form), odd, GROUP_BYTES);
            store_vector(self.codes_2, scale_pair(self.scale_2, tile, rows.form), to, comptime!(2 * GROUP_BYTES));
            store_vector(self.codes_3, scale_pair(self.scale_3, tile, rows.form), odd, comptime!(3 * GROUP_BYTES));
        }
    }
}

#[cube]
fn codes_of(rows: &Rows, codes: &Codes, slot: i32, piece: u32) -> Vector<u32, Const<4>> {
    // Words of a piece, of a tile, of a vector.
    let at = codes.first_of(slot, rows.form) + (piece * 32 + rows.tile * 16 + rows.vector * 4) as usize;
    load_global_16(&codes.words[at..at + 4], 0u32)
}

#[cube]
fn scale_of(rows: &Rows, codes: &Codes, slot: i32, piece: u32) -> u32 {
    let mut at = codes.scale_of(slot, PIECE_TILES * piece, rows.form);
    if comptime!(rows.form.paged_scales()) {
        // A word has those of four tiles.
        at += (piece / 2) as usize;
    }
    load_global_4_or_zero(&codes.words[at..at + 1], 0u32, slot >= 0)
}
