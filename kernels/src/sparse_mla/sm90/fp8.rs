//! The fourth warpgroup, of FP8 rows: its units read codes into registers, and write what they stand for into a stage.
//!
//! A row of 576 channels is 656 bytes: 512 codes, four scales, 64 rotary channels in bf16. One of 512 channels is 448 codes and 64 rotary
//! channels, with its eight bytes of scales behind the rows of its page. A warp has two rows of each eight, and reads them in
//! eight parts of two; four parts are on their way at any time. Of one row a lane has two vectors of 16 codes, in tiles four apart; of 448
//! codes a quarter of the lanes have one. Eight lanes that write together have the four vectors of a tile of both rows, whose swizzles
//! differ: they write to all banks. Rows of a list that is dense are copied as rotary channels are.
//!
//! The cubes of a pair read half of the FP8 rows each, and copy what they have written of a block to the other cube.

use cubecl::prelude::*;

use super::cube::Cube;
use super::list::List;
use super::scores::Exchange;
use crate::ptx::copy::{arrive_with_copies, load_global_4_or_zero, load_global_16};
use crate::ptx::{barrier, cluster, fence, mbarrier, warp};
use crate::sparse_mla::codes::{scale_pair, scale_step, store_vector};
use crate::sparse_mla::form::{Form, Stored};
use crate::sparse_mla::work::{Ahead, Lists};
use crate::tiles::form::{GROUP, KEYS, STAGES, TILE_BYTES, TILE_WIDTH};

/// Bytes of a row in a tile.
const ROW_BYTES: u32 = 2 * TILE_WIDTH as u32;

/// Rows of a part of a warp.
const PART_ROWS: u32 = 2;
/// Rows of a block that a warp has, and those that it reads in a pair.
const OWN_ROWS: u32 = 16;
const PAIR_ROWS: u32 = 8;
/// Rows of a part of all warps: a swizzle's.
const GROUP_ROWS: u32 = 8;

/// Rows of both lists.
#[derive(CubeType)]
pub(super) struct Rows<'a, E: Float, V: Size> {
    list_a: List<'a, E, V>,
    list_b: List<'a, E, V>,
    /// Of this unit: its row of the first part, counted among the warp's, and where the first vector of that goes in a stage. All its
    /// rows have the same swizzle.
    own_row: u32,
    to: u32,
    /// Words of a row before that vector, and its tile, which says which scale it has.
    vector: usize,
    tile: u32,
    /// The cube's number in its pair.
    rank: u32,
}

/// The slots of a warp's rows of a block, one in each of 16 lanes.
#[derive(CubeType)]
struct Slots {
    slot: i32,
    /// Of which list they are, 0 if there is no block.
    list: u32,
}

/// Where a block goes.
#[derive(CubeType)]
struct Place {
    at: u32,
    /// Barriers: its rows are there, and its stage is free.
    full: u32,
    empty: u32,
    /// Whether its rows are codes.
    is_codes: bool,
}

/// What a unit has of a part.
#[derive(CubeType)]
struct Part {
    codes_a: Vector<u32, Const<4>>,
    codes_b: Vector<u32, Const<4>>,
    scale_a: u32,
    scale_b: u32,
}

#[cube]
impl<'a, E: Float, V: Size> Rows<'a, E, V> {
    pub fn new(
        list_a: List<'a, E, V>,
        list_b: List<'a, E, V>,
        warp: u32,
        lane: u32,
        #[comptime] form: Form,
    ) -> Rows<'a, E, V> {
        let rank = if comptime!(form.pair) { CUBE_POS_CLUSTER } else { 0u32.runtime() };
        let (tile, row_of_part, vector) = (lane / 8, lane / 4 % 2, lane % 4);
        let first = rank * PAIR_ROWS;
        let row = row_of(first + row_of_part, warp);
        let to = tile * TILE_BYTES + row * ROW_BYTES + ((2 * vector) ^ (row % GROUP_ROWS)) * 16;
        let vector = (tile * 16 + vector * 4) as usize;
        Rows::<'a, E, V> { list_a, list_b, own_row: first + row_of_part, to, vector, tile, rank }
    }

    /// The blocks of all work, from the first on, as far as this warp's rows are concerned.
    pub fn ahead(&self, cube: &Cube, lists: &Lists) -> Ahead {
        let place = row_of(cube.lane % OWN_ROWS, cube.warp);
        Ahead::new(lists, cube.first, cube.end, cube.step, place, cube.lane < OWN_ROWS)
    }

    /// The rows of all work.
    pub fn run(&self, cube: &Cube, lists: &Lists, ahead: &mut Ahead, exchange: &mut Exchange) {
        let mut slots = Slots::none();
        // All lanes have the same list, and the loop below is one: the compiler would make two of it.
        slots.set(ahead.slot(lists), warp::uniform(ahead.list));
        let mut turn = 0u32;
        let (mut part_0, mut part_1) = (Part::nothing(), Part::nothing());
        let (mut part_2, mut part_3) = (Part::nothing(), Part::nothing());
        part_0.fetch(self, cube, &slots, 0u32);
        part_1.fetch(self, cube, &slots, 1u32);
        part_2.fetch(self, cube, &slots, 2u32);
        part_3.fetch(self, cube, &slots, 3u32);
        while slots.list > 0 {
            let place = Place::of(cube, turn, self.is_codes(&slots, cube.form));
            ahead.publish(lists, &mut exchange.slots, &mut exchange.kinds);
            ahead.advance(lists);
            mbarrier::wait(place.empty, (turn / STAGES % 2) ^ 1);
            self.copy_plain(cube, &slots, place.at);
            arrive_with_copies(place.full);
            if comptime!(cube.form.pair) {
                let bytes = comptime!(cube.form.code_tiles() * TILE_BYTES / 2);
                mbarrier::expect_if(place.full, bytes.runtime(), place.is_codes && cube.warp == 0 && cube.lane == 0);
            } else {
                part_0.store(self, cube, &place, 0u32);
                part_0.fetch(self, cube, &slots, 4u32);
                part_1.store(self, cube, &place, 1u32);
                part_1.fetch(self, cube, &slots, 5u32);
                part_2.store(self, cube, &place, 2u32);
                part_2.fetch(self, cube, &slots, 6u32);
                part_3.store(self, cube, &place, 3u32);
                part_3.fetch(self, cube, &slots, 7u32);
            }
            // The last four, and the first four of the next block.
            let last = comptime!(if cube.form.pair { 0u32 } else { 4u32 });
            part_0.store(self, cube, &place, last);
            slots.set(ahead.slot(lists), warp::uniform(ahead.list));
            part_0.fetch(self, cube, &slots, 0u32);
            part_1.store(self, cube, &place, comptime!(last + 1));
            part_1.fetch(self, cube, &slots, 1u32);
            part_2.store(self, cube, &place, comptime!(last + 2));
            part_2.fetch(self, cube, &slots, 2u32);
            part_3.store(self, cube, &place, comptime!(last + 3));
            part_3.fetch(self, cube, &slots, 3u32);
            mbarrier::arrive(place.full);
            turn = warp::next(turn);
        }
    }

    /// Whether the rows of a block are codes, as all are where no list is dense.
    fn is_codes(&self, slots: &Slots, #[comptime] form: Form) -> bool {
        if comptime!(form.dense_list() > 0) { slots.list != comptime!(form.dense_list()) } else { true.runtime() }
    }

    /// Starts to copy what the warpgroup has written by the end of a part, and not yet copied, into the pair's other cube, two tiles a
    /// warp. It stays until that is there, for the stage is free when both cubes have multiplied it.
    fn copy_to_other(&self, cube: &Cube, place: &Place, #[comptime] part: u32) {
        const WARP_TILES: u32 = 2;
        fence::async_shared();
        barrier::sync(1u32, GROUP);
        let first = cube.warp * WARP_TILES;
        let rows = comptime!(rows_of_copy(cube.form));
        let row = self.rank * comptime!(KEYS as u32 / 2) + comptime!((part + 1) * GROUP_ROWS - rows);
        let from = place.at + first * TILE_BYTES + row * ROW_BYTES;
        if warp::elect() {
            #[unroll]
            for tile in 0..WARP_TILES {
                if comptime!(cube.form.code_tiles().is_multiple_of(WARP_TILES))
                    || first + tile < comptime!(cube.form.code_tiles())
                {
                    let from = from + comptime!(tile * TILE_BYTES);
                    cluster::copy_to(self.rank ^ 1, from, comptime!(rows * ROW_BYTES), place.full);
                }
            }
        }
    }

    /// Starts to copy what of this warp's rows of a block nobody converts, when their stage is free: the rotary channels, or all of dense
    /// rows. Eight lanes have a row; zeros stand for rows that are none.
    fn copy_plain(&self, cube: &Cube, slots: &Slots, stage_at: u32) {
        let vector = cube.lane % 8;
        #[unroll]
        for rows in 0..4u32 {
            let own = rows * 4 + cube.lane / 8;
            let slot = warp::shuffle::<i32>(slots.slot, own);
            let row = row_of(own, cube.warp);
            let to = stage_at + row * ROW_BYTES + (vector ^ (row % 8)) * 16;
            if comptime!(cube.form.second) && slots.list == 2 {
                self.list_b.copy_row(slot, vector, to, comptime!(cube.form.rows[1]), cube.form);
            } else {
                self.list_a.copy_row(slot, vector, to, comptime!(cube.form.rows[0]), cube.form);
            }
        }
    }
}

#[cube]
impl Place {
    fn of(cube: &Cube, turn: u32, is_codes: bool) -> Place {
        let stage = turn % STAGES;
        let at = cube.keys_at + stage * comptime!(cube.form.tile.stage_bytes());
        let (full, empty) = (cube.barriers.full + stage * 8, cube.barriers.empty + stage * 8);
        Place { at, full, empty, is_codes }
    }
}

#[cube]
impl Slots {
    fn none() -> Slots {
        Slots { slot: i32::new(-1), list: 0u32 }
    }

    /// Those of another block. Fields, for CubeCL assigns no structures.
    fn set(&mut self, slot: i32, list: u32) {
        self.slot = slot;
        self.list = list;
    }
}

#[cube]
impl Part {
    fn nothing() -> Part {
        let codes = Vector::<u32, Const<4>>::new(0u32);
        Part { codes_a: codes, codes_b: codes, scale_a: 0u32, scale_b: 0u32 }
    }

    /// Starts to read a part of a block: the first row of all for rows that are none, with a scale of zero. Codes are numbers, so that
    /// this is enough for zeros. Of a block of dense rows nothing is read.
    fn fetch<E: Float, V: Size>(&mut self, rows: &Rows<E, V>, cube: &Cube, slots: &Slots, #[comptime] part: u32) {
        let slot = warp::shuffle::<i32>(slots.slot, rows.own_row + comptime!(own_of(part, cube.form)));
        // Loads do not move up, before what the registers held has been written.
        sync_plane();
        if comptime!(cube.form.second) && slots.list == 2 {
            if comptime!(cube.form.rows[1] != Stored::Dense) {
                self.fetch_from(rows, &rows.list_b, slot, cube.form);
            }
        } else if comptime!(cube.form.rows[0] != Stored::Dense) {
            self.fetch_from(rows, &rows.list_a, slot, cube.form);
        }
        // Loads do not move down behind this.
        sync_plane();
    }

    fn fetch_from<E: Float, V: Size>(
        &mut self,
        rows: &Rows<E, V>,
        list: &List<E, V>,
        slot: i32,
        #[comptime] form: Form,
    ) {
        let list = &list.codes;
        let (vector, scale) = (list.first_of(slot, form) + rows.vector, list.scale_of(slot, rows.tile, form));
        let (codes, scales) = (&list.words[vector..vector + 4], &list.words[scale..scale + 1]);
        self.codes_a = load_global_16(codes, 0u32);
        self.codes_b = load_global_16(codes, 256u32);
        self.scale_a = load_global_4_or_zero(scales, 0u32, slot >= 0);
        self.scale_b = load_global_4_or_zero(scales, comptime!(scale_step(form)), slot >= 0);
    }

    /// Writes what was read into a stage, if it is codes, and copies it to the other cube of a pair, or all that is there.
    fn store<E: Float, V: Size>(&self, rows: &Rows<E, V>, cube: &Cube, place: &Place, #[comptime] part: u32) {
        let form = comptime!(cube.form);
        let (to, offset) = (place.at + rows.to, comptime!(row_of_part(part, form) * ROW_BYTES));
        if place.is_codes {
            store_vector(self.codes_a, scale_pair(self.scale_a, rows.tile, form), to, offset);
            // What is four tiles on may be the rotary channels.
            if comptime!(form.code_tiles() == 8) || rows.tile + 4 < comptime!(form.code_tiles()) {
                let scale = scale_pair(self.scale_b, rows.tile, form);
                store_vector(self.codes_b, scale, to, comptime!(offset + 4 * TILE_BYTES));
            }
            if comptime!(form.pair && ((part + 1) * GROUP_ROWS).is_multiple_of(rows_of_copy(form))) {
                rows.copy_to_other(cube, place, part);
            }
        }
    }
}

/// The row of a block that is one of a warp's: of eight neighbours each warp has two, of each half of the block eight; in a pair the
/// first half is the first cube's.
#[cube]
fn row_of(own: u32, warp: u32) -> u32 {
    own / PAIR_ROWS * comptime!(KEYS as u32 / 2)
        + own % PAIR_ROWS / PART_ROWS * GROUP_ROWS
        + warp * PART_ROWS
        + own % PART_ROWS
}

/// The first row of a part, counted among a warp's: without a pair the parts of both halves take turns.
const fn own_of(part: u32, form: Form) -> u32 {
    if form.pair { part * PART_ROWS } else { part % 2 * PAIR_ROWS + part / 2 * PART_ROWS }
}

/// How many rows of the block it is behind the first part's.
const fn row_of_part(part: u32, form: Form) -> u32 {
    let own = own_of(part, form);
    own / PAIR_ROWS * (KEYS as u32 / 2) + own % PAIR_ROWS / PART_ROWS * GROUP_ROWS
}

/// Rows of a block that the cubes of a pair copy at a time. A copy waits for the loads that are under way: those of neighbouring rows, in
/// pages, come soon enough that it pays to copy what there is.
const fn rows_of_copy(form: Form) -> u32 {
    if form.pages.is_some() { GROUP_ROWS } else { KEYS as u32 / 2 }
}
