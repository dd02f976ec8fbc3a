//! The fourth warpgroup, of FP8 rows: its units read codes into registers, and write what they stand for into a stage.
//!
//! A row of 576 channels is 656 bytes: 512 codes, four scales, 64 rotary channels in bf16. A block is read in eight parts of eight rows,
//! of which a warp has two; four parts are on their way at any time. Of one row a lane has two vectors of 16 codes, in tiles four apart.
//! Eight lanes that write together have the four vectors of a tile of both rows, whose swizzles differ: they write to all banks.

use cubecl::prelude::*;

use super::cube::Cube;
use super::scores::Exchange;
use super::work::{Ahead, Lists};
use crate::cache_rows::Fp8Layout;
use crate::linear::packed::e4m3_pairs_bf16;
use crate::ptx::copy::{arrive_with_copies, copy_or_zero, load_global_4_or_zero, load_global_16};
use crate::ptx::wgmma::Elem;
use crate::ptx::{math, matrix, mbarrier, warp};
use crate::tiles::form::{STAGES, TILE_BYTES};

/// The rows that this reads.
pub(in crate::sparse_mla) const LAYOUT: Fp8Layout = Fp8Layout { codes: 512, rope: 64 };
/// Words of a row, and where in it the scales and the rotary channels begin.
const ROW: usize = 164;
const SCALES: usize = 128;
const ROPE: usize = 132;

/// Rows of a part.
const PART_ROWS: u32 = 8;
/// Rows of a block that a warp has.
const OWN_ROWS: u32 = 16;

/// Rows of both lists.
#[derive(CubeType)]
pub(super) struct Rows<'a> {
    rows_a: &'a [u32],
    rows_b: &'a [u32],
    /// Of this unit: which of the warp's two rows of a part is its own, and where the first vector of that of the first part goes in a stage.
    own_row: u32,
    to: u32,
    /// Words of a row before that vector, and before its scale.
    vector: usize,
    scale: usize,
}

/// The slots of a warp's rows of a block, one in each of 16 lanes, two for each part.
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
    pub fn new(rows_a: &'a [u32], rows_b: &'a [u32], warp: u32, lane: u32) -> Rows<'a> {
        let (tile, own_row) = (lane / 8, lane / 4 % 2);
        let (row, vector) = (warp * 2 + own_row, lane % 4);
        let to = tile * TILE_BYTES + row * 128 + ((2 * vector) ^ row) * 16;
        let (vector, scale) = ((tile * 16 + vector * 4) as usize, SCALES + (tile / 2) as usize);
        Rows::<'a> { rows_a, rows_b, own_row, to, vector, scale }
    }

    /// The blocks of all work, from the first on, as far as this warp's rows are concerned.
    pub fn ahead(&self, cube: &Cube, lists: &Lists) -> Ahead {
        let place = cube.lane % OWN_ROWS / 2 * PART_ROWS + cube.warp * 2 + cube.lane % 2;
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
            self.copy_rope(cube, &slots, stage_at);
            arrive_with_copies(cube.barriers.full + stage * 8);
            let to = stage_at + self.to;
            part_0.store(to, 0u32);
            part_0.fetch(self, cube, &slots, 4u32);
            part_1.store(to, 1u32);
            part_1.fetch(self, cube, &slots, 5u32);
            part_2.store(to, 2u32);
            part_2.fetch(self, cube, &slots, 6u32);
            part_3.store(to, 3u32);
            part_3.fetch(self, cube, &slots, 7u32);
            // Of the next block.
            slots.set(ahead.slot(lists), ahead.list);
            part_0.store(to, 4u32);
            part_0.fetch(self, cube, &slots, 0u32);
            part_1.store(to, 5u32);
            part_1.fetch(self, cube, &slots, 1u32);
            part_2.store(to, 6u32);
            part_2.fetch(self, cube, &slots, 2u32);
            part_3.store(to, 7u32);
            part_3.fetch(self, cube, &slots, 3u32);
            mbarrier::arrive(cube.barriers.full + stage * 8);
            turn += 1;
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
            let row = own / 2 * PART_ROWS + cube.warp * 2 + own % 2;
            let to = stage_at + comptime!(8 * TILE_BYTES) + row * 128 + (vector ^ (row % 8)) * 16;
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
        let slot = warp::shuffle::<i32>(slots.slot, rows.own_row + comptime!(2 * part));
        let row = first_of(slot);
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

    /// Writes what was read into a stage.
    fn store(&self, to: u32, #[comptime] part: u32) {
        let offset = comptime!(part * PART_ROWS * 128);
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
