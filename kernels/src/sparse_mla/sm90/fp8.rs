//! The loads of FP8 rows: a unit reads codes into registers, and writes what they stand for into a stage.
//!
//! A row of 576 channels is 41 vectors of 16 bytes: 32 of codes, one of four scales, 8 of rotary channels in bf16.

use cubecl::prelude::*;

use super::cube::Cube;
use super::form::{PART_KEYS, PARTS};
use crate::cache_rows::Fp8Layout;
use crate::linear::packed::e4m3_pair_bf16;
use crate::ptx::copy::{load_global_4, load_global_16};
use crate::ptx::wgmma::Elem;
use crate::ptx::{math, matrix, mbarrier};
use crate::tiles::form::TILE_BYTES;

/// The rows that this reads.
pub(in crate::sparse_mla) const LAYOUT: Fp8Layout = Fp8Layout { codes: 512, rope: 64 };
/// Vectors of a row, and where in it the scales and the rotary channels begin.
const ROW: usize = 41;
const SCALES: usize = 32;
const ROPE: usize = 33;
/// Vectors of codes of a row that a warpgroup reads: those of its half of the values.
const OWN_VECTORS: u32 = 16;
/// Rows of a part that a warp reads, two at a time.
const OWN_ROWS: u32 = PART_KEYS / 4;

/// Rows of both lists, and what a unit has of each row of its warp.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Codes<'a> {
    rows_a: &'a [u32],
    rows_b: &'a [u32],
    /// Which half of the values.
    half: u32,
    /// Of this unit: which vector of codes in a row, and where that goes in a stage, of the first of two rows.
    vector: u32,
    to: u32,
}

/// What a unit has of a part of a block.
#[derive(CubeType)]
pub(super) struct Fetched {
    codes_a: Vector<u32, Const<4>>,
    codes_b: Vector<u32, Const<4>>,
    scale_a: u32,
    scale_b: u32,
    /// Of one warpgroup in two.
    rope: Vector<u32, Const<4>>,
}

#[cube]
impl<'a> Codes<'a> {
    pub fn new(rows_a: &'a [u32], rows_b: &'a [u32], half: u32, warp: u32, lane: u32) -> Codes<'a> {
        let vector = lane % OWN_VECTORS;
        let (row, tile) = (warp * OWN_ROWS + lane / OWN_VECTORS, half * 4 + vector / 4);
        // A lane has two vectors of a tile side by side. In one tile of two it writes the second first, so that eight lanes write to all
        // banks.
        let column = vector % 4 * 2 + tile % 2;
        let to = tile * TILE_BYTES + row * 128 + (column ^ (row % 8)) * 16;
        Codes::<'a> { rows_a, rows_b, half, vector: half * OWN_VECTORS + vector, to }
    }

    /// Starts to read a part of the rows of a block of list 1 or 2, given the slots of this warp's rows; the first row for none.
    pub fn fetch(&self, cube: &Cube, list: u32, slots: Vector<u32, Const<4>>, #[comptime] part: u32) -> Fetched {
        let own = self.own_slots(cube, slots);
        let scale = self.vector / 8;
        let mut rope = Vector::<u32, Const<4>>::new(0u32);
        if self.half == comptime!(part % 2) {
            rope = self.vector_of(cube, list, self.rope_slot(cube, slots), cube.lane % 8 + comptime!(ROPE as u32));
        }
        Fetched {
            codes_a: self.vector_of(cube, list, own.extract(0usize), self.vector),
            codes_b: self.vector_of(cube, list, own.extract(1usize), self.vector),
            scale_a: self.scale_of(cube, list, own.extract(0usize), scale),
            scale_b: self.scale_of(cube, list, own.extract(1usize), scale),
            rope,
        }
    }

    /// Writes what was fetched into a stage. Zeros stand for rows that are none: codes are numbers, so that it is enough if their scale is
    /// zero.
    pub fn store(
        &self,
        cube: &Cube,
        fetched: &Fetched,
        slots: Vector<u32, Const<4>>,
        stage: u32,
        #[comptime] part: u32,
    ) {
        let part_at =
            cube.keys_at + stage * comptime!(cube.form.tile.stage_bytes()) + comptime!(part * PART_KEYS * 128);
        let own = self.own_slots(cube, slots);
        let to = part_at + self.to;
        self.store_row(fetched.codes_a, zero_for_none(fetched.scale_a, own.extract(0usize)), to);
        // Two rows on, the swizzle is another.
        self.store_row(fetched.codes_b, zero_for_none(fetched.scale_b, own.extract(1usize)), (to ^ 32u32) + 256);
        if self.half == comptime!(part % 2) {
            let row = cube.warp * OWN_ROWS + cube.lane / 8;
            let to = part_at + comptime!(8 * TILE_BYTES) + row * 128 + ((cube.lane % 8) ^ (row % 8)) * 16;
            let there = zero_for_none(u32::MAX.runtime(), self.rope_slot(cube, slots));
            matrix::store_16(to, 0u32, fetched.rope & Vector::new(there));
        }
        mbarrier::arrive(cube.barriers.full + stage * comptime!(8 * PARTS) + comptime!(8 * part));
    }

    fn store_row(&self, codes: Vector<u32, Const<4>>, scale: u32, to: u32) {
        let scale = f32::reinterpret(scale);
        let scale = math::pack(scale, scale, Elem::Bf16);
        let swapped = self.vector / 4 % 2 == 1;
        let (a, b) = (codes.extract(0usize), codes.extract(1usize));
        let (c, d) = (codes.extract(2usize), codes.extract(3usize));
        matrix::store_16(to, 0u32, dequantised(select(swapped, c, a), select(swapped, d, b), scale));
        matrix::store_16(to ^ 16u32, 0u32, dequantised(select(swapped, a, c), select(swapped, b, d), scale));
    }

    /// The slots of the two rows that this unit has codes of.
    fn own_slots(&self, cube: &Cube, slots: Vector<u32, Const<4>>) -> Vector<u32, Const<2>> {
        let second = cube.lane >= OWN_VECTORS;
        let mut own = Vector::<u32, Const<2>>::new(select(second, slots.extract(1usize), slots.extract(0usize)));
        own.insert(1usize, select(second, slots.extract(3usize), slots.extract(2usize)));
        own
    }

    /// That of the row that it has rotary channels of.
    fn rope_slot(&self, cube: &Cube, slots: Vector<u32, Const<4>>) -> u32 {
        let row = cube.lane / 8;
        let low = select(row == 0, slots.extract(0usize), slots.extract(1usize));
        let high = select(row == 2, slots.extract(2usize), slots.extract(3usize));
        select(row < 2, low, high)
    }

    #[allow(unused_assignments, reason = "the branch is one of the expansion")]
    fn vector_of(&self, cube: &Cube, list: u32, slot: u32, vector: u32) -> Vector<u32, Const<4>> {
        let at = first_of(slot) + vector as usize * 4;
        let mut words = Vector::<u32, Const<4>>::new(0u32);
        if comptime!(cube.form.second) && list == 2 {
            words = load_global_16(&self.rows_b[at..at + 4]);
        } else {
            words = load_global_16(&self.rows_a[at..at + 4]);
        }
        words
    }

    #[allow(unused_assignments, reason = "the branch is one of the expansion")]
    fn scale_of(&self, cube: &Cube, list: u32, slot: u32, scale: u32) -> u32 {
        let at = first_of(slot) + comptime!(SCALES * 4) + scale as usize;
        let mut word = 0u32;
        if comptime!(cube.form.second) && list == 2 {
            word = load_global_4(&self.rows_b[at..at + 1]);
        } else {
            word = load_global_4(&self.rows_a[at..at + 1]);
        }
        word
    }
}

/// The first word of a row.
#[cube]
fn first_of(slot: u32) -> usize {
    usize::cast_from(max(slot as i32, 0i32)) * comptime!(ROW * 4)
}

/// The word of a row; zero where its slot says that there is none.
#[cube]
fn zero_for_none(word: u32, slot: u32) -> u32 {
    select((slot as i32) >= 0, word, 0u32)
}

/// The numbers of eight codes, in bf16.
#[cube]
fn dequantised(first: u32, second: u32, scale: u32) -> Vector<u32, Const<4>> {
    let scale = Vector::<half::bf16, Const<2>>::reinterpret(scale);
    let mut pairs = Sequence::<u32>::new();
    #[unroll]
    for word in 0..2u32 {
        let codes = if comptime!(word == 0) { first } else { second };
        // The codes of neighbours in the upper bytes of the halves of a word.
        pairs.push(u32::reinterpret(e4m3_pair_bf16(math::permute(codes, 0x1404u32)) * scale));
        pairs.push(u32::reinterpret(e4m3_pair_bf16(math::permute(codes, 0x3424u32)) * scale));
    }
    math::vector::<u32, Const<4>>(&pairs)
}
