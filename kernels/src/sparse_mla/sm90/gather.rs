//! The loads of rows: their slots are anywhere, so a unit copies 16 bytes at a time.

use cubecl::prelude::*;

use super::cube::Cube;
use super::form::{PART_KEYS, PARTS};
use crate::ptx::copy::{arrive_with_copies, copy_or_zero};
use crate::ptx::matrix;
use crate::tiles::form::{KEYS, TILE_BYTES};

/// Numbers of a copy, of 16 bytes.
pub(super) const VECTOR: usize = 8;
/// Copies of a row in a tile of 64 channels.
const VECTORS: u32 = 8;
/// Of a row in the tiles of a warpgroup, one for each lane: a warp copies a row at a time.
const OWN_VECTORS: u32 = 32;
/// Rows of a part that a warp copies.
const OWN_ROWS: u32 = PART_KEYS / 4;

/// What a warpgroup copies: a half of the channels of the values, and some parts of the rows' last tile, if they have a ninth.
#[derive(CubeType)]
pub(super) struct Gather<'a, E: Float, V: Size> {
    rows_a: &'a [Vector<E, V>],
    rows_b: &'a [Vector<E, V>],
    /// Where the slots are in shared memory.
    slots_at: u32,
    /// Which half.
    half: u32,
    /// Of this unit: which copy of a row, and where that of its first row goes in a stage.
    vector: u32,
    to: u32,
}

#[cube]
impl<'a, E: Float, V: Size> Gather<'a, E, V> {
    pub fn new(
        rows_a: &'a [Vector<E, V>],
        rows_b: &'a [Vector<E, V>],
        slots_at: u32,
        half: u32,
        warp: u32,
        lane: u32,
    ) -> Gather<'a, E, V> {
        let vector = half * OWN_VECTORS + lane;
        let to = place_of(warp * OWN_ROWS, vector);
        Gather::<'a, E, V> { rows_a, rows_b, slots_at, half, vector, to }
    }

    /// The slots of this warp's rows of a part of a block.
    pub fn slots(&self, cube: &Cube, place: u32, #[comptime] part: u32) -> Vector<u32, Const<4>> {
        let first = place * comptime!(KEYS as u32) + comptime!(part * PART_KEYS) + cube.warp * OWN_ROWS;
        matrix::load_16(self.slots_at + 4 * first, 0u32)
    }

    /// Starts to copy a part of the rows of a block into a stage, if there is such a block: if it is of list 1 or 2. Zeros stand for
    /// rows that are none.
    pub fn load_part(&self, cube: &Cube, list: u32, slots: Vector<u32, Const<4>>, stage: u32, #[comptime] part: u32) {
        if list > 0 {
            if comptime!(cube.form.second) && list == 2 {
                self.copy_rows(self.rows_b, cube, slots, stage, part);
            } else {
                self.copy_rows(self.rows_a, cube, slots, stage, part);
            }
            arrive_with_copies(cube.barriers.full + stage * comptime!(8 * PARTS) + comptime!(8 * part));
        }
    }

    fn copy_rows(
        &self,
        rows: &[Vector<E, V>],
        cube: &Cube,
        slots: Vector<u32, Const<4>>,
        stage: u32,
        #[comptime] part: u32,
    ) {
        let tiles = comptime!(cube.form.tile.tiles);
        let part_at =
            cube.keys_at + stage * comptime!(cube.form.tile.stage_bytes()) + comptime!(part * PART_KEYS * 128);
        let first = part_at + self.to;
        #[unroll]
        for row in 0..OWN_ROWS {
            // The first row of a warp is a multiple of four: of the swizzle, the next three differ in two bits.
            let to = (first ^ comptime!(16 * row)) + comptime!(128 * row);
            copy::<E, V>(rows, slots.extract(comptime!(row as usize)), self.vector, to, tiles);
        }
        // The ninth tile, eight lanes for a row.
        if comptime!(tiles == 9) && self.half == comptime!(part % 2) {
            let lane_row = cube.lane / VECTORS;
            let mut slot = slots.extract(0usize);
            #[unroll]
            for row in 1..OWN_ROWS {
                slot = select(lane_row == row, slots.extract(comptime!(row as usize)), slot);
            }
            let vector = comptime!(8 * VECTORS) + cube.lane % VECTORS;
            let to = part_at + place_of(cube.warp * OWN_ROWS + lane_row, vector);
            copy::<E, V>(rows, slot, vector, to, tiles);
        }
    }
}

/// Where vector `vector` of row `row` of a block lies, in bytes: in tiles of 64 channels, with the swizzle of 128 bytes.
#[cube]
fn place_of(row: u32, vector: u32) -> u32 {
    let (tile, column) = (vector / VECTORS, vector % VECTORS);
    tile * TILE_BYTES + row * 128 + (column ^ (row % VECTORS)) * 16
}

#[cube]
fn copy<E: Float, V: Size>(rows: &[Vector<E, V>], slot: u32, vector: u32, to: u32, #[comptime] tiles: usize) {
    let slot = slot as i32;
    let from = usize::cast_from(max(slot, 0i32)) * comptime!(tiles * VECTORS as usize) + vector as usize;
    copy_or_zero(&rows[from..from + 1], to, select(slot >= 0, 16u32, 0u32));
}
