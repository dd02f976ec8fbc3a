//! The loads of rows: their slots are anywhere, so a unit copies 16 bytes at a time.

use cubecl::prelude::*;

use super::cube::Cube;
use super::form::{PART_KEYS, PARTS};
use crate::ptx::copy::{arrive_with_copies, copy_or_zero};
use crate::tiles::form::{KEYS, TILE_BYTES, TILE_WIDTH, VALUE_WIDTH};

/// Numbers of a copy, of 16 bytes.
pub(super) const VECTOR: usize = 8;
/// Copies of a row in a tile of 64 channels, one for each of eight lanes.
const VECTORS: u32 = 8;
/// Rows of a part that a warp copies: four lots of eight lanes have one each.
const OWN_ROWS: u32 = PART_KEYS / 4;
/// Tiles of a half of the values, and bytes of a row in a tile.
const HALF_TILES: u32 = VALUE_WIDTH as u32 / TILE_WIDTH as u32 / 2;
const ROW_BYTES: u32 = 2 * TILE_WIDTH as u32;

/// What a warpgroup copies: a half of the channels of the values, and some parts of the rows' last tile, if they have a ninth.
#[derive(CubeType)]
pub(super) struct Gather<'a, E: Float, V: Size> {
    rows_a: &'a [Vector<E, V>],
    rows_b: &'a [Vector<E, V>],
    /// Which half.
    half: u32,
    /// Of this unit: its row of the first part, which copy of a row is its first, and where that goes in a stage.
    row: u32,
    vector: u32,
    to: u32,
}

#[cube]
impl<'a, E: Float, V: Size> Gather<'a, E, V> {
    pub fn new(
        rows_a: &'a [Vector<E, V>],
        rows_b: &'a [Vector<E, V>],
        half: u32,
        warp: u32,
        lane: u32,
    ) -> Gather<'a, E, V> {
        let row = warp * OWN_ROWS + lane / VECTORS;
        let column = lane % VECTORS;
        let vector = half * comptime!(HALF_TILES * VECTORS) + column;
        // With the swizzle of 128 bytes.
        let to = half * comptime!(HALF_TILES * TILE_BYTES) + row * ROW_BYTES + (column ^ (row % VECTORS)) * 16;
        Gather::<'a, E, V> { rows_a, rows_b, half, row, vector, to }
    }

    /// The slot of this unit's row of a part of a block.
    pub fn slot(&self, slots: &Shared<[i32]>, place: u32, #[comptime] part: u32) -> i32 {
        slots[(place * comptime!(KEYS as u32) + comptime!(part * PART_KEYS) + self.row) as usize]
    }

    /// Starts to copy a part of the rows of a block into a stage, if there is such a block: if it is of list 1 or 2. Zeros stand for
    /// rows that are none.
    pub fn load_part(&self, cube: &Cube, list: u32, slot: i32, stage: u32, #[comptime] part: u32) {
        if list > 0 {
            if comptime!(cube.form.second) && list == 2 {
                self.copy_row(self.rows_b, cube, slot, stage, part);
            } else {
                self.copy_row(self.rows_a, cube, slot, stage, part);
            }
            arrive_with_copies(cube.barriers.full + stage * comptime!(8 * PARTS) + comptime!(8 * part));
        }
    }

    /// Tiles are constants of the instructions: what is computed beside the products waits for them.
    fn copy_row(&self, rows: &[Vector<E, V>], cube: &Cube, slot: i32, stage: u32, #[comptime] part: u32) {
        let tiles = comptime!(cube.form.tile.tiles as u32);
        let first = usize::cast_from(max(slot, 0i32)) * comptime!((tiles * VECTORS) as usize) + self.vector as usize;
        let bytes = select(slot >= 0, 16u32, 0u32);
        let to = cube.keys_at + stage * comptime!(cube.form.tile.stage_bytes()) + self.to;
        let part_at = comptime!(part * PART_KEYS * ROW_BYTES);
        #[unroll]
        for tile in 0..HALF_TILES {
            let place = comptime!(tile * TILE_BYTES + part_at);
            copy_or_zero(&rows[first..first + 1], comptime!(tile * ROW_BYTES), to, place, bytes);
        }
        // The ninth tile.
        if comptime!(tiles == 9) && self.half == comptime!(part % 2) {
            let beyond = comptime!(HALF_TILES * (2 - part % 2));
            let place = comptime!(beyond * TILE_BYTES + part_at);
            copy_or_zero(&rows[first..first + 1], comptime!(beyond * ROW_BYTES), to, place, bytes);
        }
    }
}
