//! The fourth warpgroup, of FP8 rows: its units read codes into registers, and write what they stand for into a stage.
//!
//! A row of 576 channels is 656 bytes: 512 codes, four scales, 64 rotary channels in bf16. A warp has 16 rows of a block, and reads them in
//! eight parts of two; four parts are on their way at any time. Of one row a lane has two vectors of 16 codes, in tiles four apart.
//! Eight lanes that write together have the four vectors of a tile of both rows, whose swizzles differ: they write to all banks.
//!
//! The cubes of a pair read half of the rows each, and copy what they have written of a block to the other cube.

use cubecl::prelude::*;

use super::cube::Cube;
use super::scores::Exchange;
use crate::cache_rows::Fp8Layout;
use crate::linear::packed::e4m3_pairs_bf16;
use crate::ptx::copy::{arrive_with_copies, copy_or_zero, load_global_4_or_zero, load_global_16};
use crate::ptx::wgmma::Elem;
use crate::ptx::{barrier, cluster, fence, math, matrix, mbarrier, warp};
use crate::sparse_mla::form::Form;
use crate::sparse_mla::work::{Ahead, Lists};
use crate::tiles::form::{GROUP, KEYS, STAGES, TILE_BYTES, TILE_WIDTH};

/// The rows that this reads.
pub(in crate::sparse_mla) const LAYOUT: Fp8Layout = Fp8Layout { codes: 512, rope: 64 };
/// Words of a row, and where in it the scales and the rotary channels begin.
const ROW: usize = 164;
const SCALES: usize = 128;
const ROPE: usize = 132;
/// Bytes of a row in a tile.
const ROW_BYTES: u32 = 2 * TILE_WIDTH as u32;

/// Rows of a part of a warp.
const PART_ROWS: u32 = 2;
/// Rows of a block that a warp has, and those that it reads in a pair: one swizzle's.
const OWN_ROWS: u32 = 16;
const PAIR_ROWS: u32 = 8;
/// Tiles of codes, and the bytes that a cube of a pair gets from the other: half of the rows of all.
const CODE_TILES: u32 = 8;
const HALF_BYTES: u32 = CODE_TILES * TILE_BYTES / 2;

/// Rows of both lists.
#[derive(CubeType)]
pub(super) struct Rows<'a> {
    rows_a: &'a [u32],
    rows_b: &'a [u32],
    /// Of this unit: its row of the first part, counted among the warp's, and where the first vector of that goes in a stage.
    own_row: u32,
    to: u32,
    /// Words of a row before that vector, and before its scale.
    vector: usize,
    scale: usize,
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

/// What a unit has of a part.
#[derive(CubeType)]
struct Part {
    codes_a: Vector<u32, Const<4>>,
    codes_b: Vector<u32, Const<4>>,
    scale_a: u32,
    scale_b: u32,
}

#[cube]
impl<'a> Rows<'a> {
    pub fn new(rows_a: &'a [u32], rows_b: &'a [u32], warp: u32, lane: u32, #[comptime] form: Form) -> Rows<'a> {
        let rank = if comptime!(form.pair) { CUBE_POS_CLUSTER } else { 0u32.runtime() };
        let (tile, row_of_part, vector) = (lane / 8, lane / 4 % 2, lane % 4);
        let first = rank * PAIR_ROWS;
        let row = row_of(first, warp, form) + row_of_part;
        let to = tile * TILE_BYTES + row * ROW_BYTES + ((2 * vector) ^ row_of_part) * 16;
        let (vector, scale) = ((tile * 16 + vector * 4) as usize, SCALES + (tile / 2) as usize);
        Rows::<'a> { rows_a, rows_b, own_row: first + row_of_part, to, vector, scale, rank }
    }

    /// The blocks of all work, from the first on, as far as this warp's rows are concerned.
    pub fn ahead(&self, cube: &Cube, lists: &Lists) -> Ahead {
        let place = row_of(cube.lane % OWN_ROWS, cube.warp, cube.form);
        Ahead::new(lists, cube.first, cube.end, cube.step, place, cube.lane < OWN_ROWS)
    }

    /// The rows of all work.
    pub fn run(&self, cube: &Cube, lists: &Lists, ahead: &mut Ahead, exchange: &mut Exchange) {
        let mut slots = Slots::none();
        slots.set(ahead.slot(lists), ahead.list);
        let mut turn = 0u32;
        let (mut part_0, mut part_1) = (Part::nothing(), Part::nothing());
        let (mut part_2, mut part_3) = (Part::nothing(), Part::nothing());
        part_0.fetch(self, cube, &slots, 0u32);
        part_1.fetch(self, cube, &slots, 1u32);
        part_2.fetch(self, cube, &slots, 2u32);
        part_3.fetch(self, cube, &slots, 3u32);
        while slots.list > 0 {
            let stage = turn % STAGES;
            ahead.publish(lists, &mut exchange.slots, &mut exchange.kinds);
            ahead.advance(lists);
            mbarrier::wait(cube.barriers.empty + stage * 8, (turn / STAGES % 2) ^ 1);
            let stage_at = cube.keys_at + stage * comptime!(cube.form.tile.stage_bytes());
            let full = cube.barriers.full + stage * 8;
            self.copy_rope(cube, &slots, stage_at);
            arrive_with_copies(full);
            let to = stage_at + self.to;
            if comptime!(cube.form.pair) {
                mbarrier::expect_if(full, HALF_BYTES.runtime(), cube.warp == 0 && cube.lane == 0);
            } else {
                part_0.store(to, 0u32);
                part_0.fetch(self, cube, &slots, 4u32);
                part_1.store(to, 1u32);
                part_1.fetch(self, cube, &slots, 5u32);
                part_2.store(to, 2u32);
                part_2.fetch(self, cube, &slots, 6u32);
                part_3.store(to, 3u32);
                part_3.fetch(self, cube, &slots, 7u32);
            }
            // The last four, and the first four of the next block.
            let last = comptime!(if cube.form.pair { 0u32 } else { 4u32 });
            part_0.store(to, last);
            // All lanes have the same list, and the loop is one: the compiler would make two of it.
            slots.set(ahead.slot(lists), warp::uniform(ahead.list));
            part_0.fetch(self, cube, &slots, 0u32);
            part_1.store(to, comptime!(last + 1));
            part_1.fetch(self, cube, &slots, 1u32);
            part_2.store(to, comptime!(last + 2));
            part_2.fetch(self, cube, &slots, 2u32);
            part_3.store(to, comptime!(last + 3));
            if comptime!(cube.form.pair) {
                self.copy_to_other(cube, stage_at, full);
            }
            part_3.fetch(self, cube, &slots, 3u32);
            mbarrier::arrive(full);
            turn = warp::next(turn);
        }
    }

    /// Starts to copy what the warpgroup has written of a block into the pair's other cube, two tiles a warp. It stays until that is there,
    /// for the stage is free when both cubes have multiplied it.
    fn copy_to_other(&self, cube: &Cube, stage_at: u32, full: u32) {
        const WARP_TILES: u32 = CODE_TILES * 32 / GROUP;
        fence::async_shared();
        barrier::sync(1u32, GROUP);
        let from = stage_at + cube.warp * comptime!(WARP_TILES * TILE_BYTES) + self.rank * comptime!(TILE_BYTES / 2);
        if warp::elect() {
            #[unroll]
            for tile in 0..WARP_TILES {
                cluster::copy_to(self.rank ^ 1, from + comptime!(tile * TILE_BYTES), comptime!(TILE_BYTES / 2), full);
            }
        }
    }

    /// Starts to copy the rotary channels of this warp's rows of a block, eight lanes for a row: when their stage is free, for nobody
    /// converts them. Zeros stand for rows that are none.
    fn copy_rope(&self, cube: &Cube, slots: &Slots, stage_at: u32) {
        let vector = cube.lane % 8;
        #[unroll]
        for rows in 0..4u32 {
            let own = rows * 4 + cube.lane / 8;
            let slot = warp::shuffle::<i32>(slots.slot, own);
            let row = row_of(own, cube.warp, cube.form);
            let to = stage_at + comptime!(CODE_TILES * TILE_BYTES) + row * ROW_BYTES + (vector ^ (row % 8)) * 16;
            let at = first_of(slot) + ROPE + vector as usize * 4;
            let bytes = select(slot >= 0, 16u32, 0u32);
            if comptime!(cube.form.second) && slots.list == 2 {
                copy_or_zero(&self.rows_b[at..at + 4], 0u32, to, 0u32, bytes);
            } else {
                copy_or_zero(&self.rows_a[at..at + 4], 0u32, to, 0u32, bytes);
            }
        }
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
    /// this is enough for zeros.
    fn fetch(&mut self, rows: &Rows, cube: &Cube, slots: &Slots, #[comptime] part: u32) {
        let slot = warp::shuffle::<i32>(slots.slot, rows.own_row + comptime!(PART_ROWS * part));
        let row = first_of(slot);
        // Loads do not move up, before what the registers held has been written.
        sync_plane();
        let (vector, scale) = (row + rows.vector, row + rows.scale);
        if comptime!(cube.form.second) && slots.list == 2 {
            self.fetch_from(&rows.rows_b[vector..vector + 4], &rows.rows_b[scale..scale + 1], slot >= 0);
        } else {
            self.fetch_from(&rows.rows_a[vector..vector + 4], &rows.rows_a[scale..scale + 1], slot >= 0);
        }
        // Loads do not move down behind this.
        sync_plane();
    }

    fn fetch_from(&mut self, codes: &[u32], scales: &[u32], there: bool) {
        self.codes_a = load_global_16(codes, 0u32);
        self.codes_b = load_global_16(codes, 256u32);
        self.scale_a = load_global_4_or_zero(scales, 0u32, there);
        self.scale_b = load_global_4_or_zero(scales, 8u32, there);
    }

    /// Writes what was read into a stage, where the first part's first vector goes to this place.
    fn store(&self, to: u32, #[comptime] part: u32) {
        // The swizzle of its row.
        let to = to ^ comptime!(PART_ROWS * part % 8 * 16);
        let offset = comptime!(PART_ROWS * part * ROW_BYTES);
        store_vector(self.codes_a, self.scale_a, to, offset);
        store_vector(self.codes_b, self.scale_b, to, comptime!(offset + 4 * TILE_BYTES));
    }
}

#[cube]
fn store_vector(codes: Vector<u32, Const<4>>, scale: u32, to: u32, #[comptime] offset: u32) {
    let scale = f32::reinterpret(scale);
    let scale = math::pack(scale, scale, Elem::Bf16);
    matrix::store_16(to, offset, dequantised(codes.extract(0usize), codes.extract(1usize), scale));
    matrix::store_16(to ^ 16u32, offset, dequantised(codes.extract(2usize), codes.extract(3usize), scale));
}

/// The row of a block that is one of a warp's; in a pair the first half of these is the first cube's.
#[cube]
fn row_of(own: u32, warp: u32, #[comptime] form: Form) -> u32 {
    if comptime!(form.pair) {
        own / PAIR_ROWS * comptime!(KEYS as u32 / 2) + warp * PAIR_ROWS + own % PAIR_ROWS
    } else {
        warp * OWN_ROWS + own
    }
}

/// The first word of a row.
#[cube]
fn first_of(slot: i32) -> usize {
    usize::cast_from(max(slot, 0i32)) * ROW
}

/// The numbers of eight codes, in bf16.
#[cube]
fn dequantised(first: u32, second: u32, scale: u32) -> Vector<u32, Const<4>> {
    let scale = Vector::<half::bf16, Const<2>>::reinterpret(scale);
    let mut pairs = Sequence::<u32>::new();
    #[unroll]
    for word in 0..2u32 {
        let (low, high) = e4m3_pairs_bf16(if comptime!(word == 0) { first } else { second });
        pairs.push(u32::reinterpret(low * scale));
        pairs.push(u32::reinterpret(high * scale));
    }
    math::vector::<u32, Const<4>>(&pairs)
}
