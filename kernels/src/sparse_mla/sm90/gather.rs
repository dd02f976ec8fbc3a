//! The loads of rows: their slots are anywhere, so a unit copies 16 bytes at a time.

use cubecl::prelude::*;

use super::cube::Cube;
use super::form::{PART_KEYS, PARTS};
use super::scores::Exchange;
use crate::ptx::copy::{arrive_with_copies, copy_or_zero};
use crate::ptx::warp;
use crate::tiles::form::{HALF_KEYS, KEYS};

/// Numbers of a copy, of 16 bytes.
pub(super) const VECTOR: usize = 8;
/// Copies of a row in a tile of 64 channels.
const VECTORS: usize = 8;
/// Of a row in the tiles of a warpgroup, one for each lane: a warp copies a row at a time.
const OWN_VECTORS: u32 = 32;
/// Rows that the warps of a warpgroup copy at a time.
const WARPS: u32 = 4;

/// What a warpgroup copies: a half of the channels of the values, and half of the rows' last tile, if they have a ninth.
#[derive(CubeType)]
pub(super) struct Gather<'a, E: Float, V: Size> {
    rows_a: &'a [Vector<E, V>],
    rows_b: &'a [Vector<E, V>],
    /// Which half.
    half: u32,
}

#[cube]
impl<'a, E: Float, V: Size> Gather<'a, E, V> {
    pub fn new(rows_a: &'a [Vector<E, V>], rows_b: &'a [Vector<E, V>], half: u32) -> Gather<'a, E, V> {
        Gather::<'a, E, V> { rows_a, rows_b, half }
    }

    /// Starts to copy a part of the rows of a block into a stage, if there is such a block. Zeros stand for rows that are none.
    pub fn load_part(&self, cube: &Cube, exchange: &Exchange, place: u32, stage: u32, #[comptime] part: u32) {
        let list = exchange.kinds[place as usize];
        if list > 0 {
            if comptime!(cube.form.second) && list == 2 {
                copy_rows::<E, V>(self.rows_b, exchange, cube, self.half, place, stage, part);
            } else {
                copy_rows::<E, V>(self.rows_a, exchange, cube, self.half, place, stage, part);
            }
            arrive_with_copies(cube.barriers.full + stage * comptime!(8 * PARTS) + comptime!(8 * part));
        }
    }
}

/// Of a part. The ninth tile of all rows comes with the first: no product with weights reads it.
#[cube]
fn copy_rows<E: Float, V: Size>(
    rows: &[Vector<E, V>],
    exchange: &Exchange,
    cube: &Cube,
    half: u32,
    place: u32,
    stage: u32,
    #[comptime] part: u32,
) {
    let tiles = comptime!(cube.form.tile.tiles);
    let stage_at = cube.keys_at + stage * comptime!(cube.form.tile.stage_bytes());
    let slots_at = place * comptime!(KEYS as u32);
    // A lane has the slot of one of the rows.
    let slot = exchange.slots[(slots_at + comptime!(part * PART_KEYS) + cube.lane % PART_KEYS) as usize];
    let vector = half * OWN_VECTORS + cube.lane;
    #[unroll]
    for pass in 0..comptime!(PART_KEYS / WARPS) {
        let row = cube.warp + comptime!(pass * WARPS);
        let to = stage_at + 16 * place_of(comptime!(part * PART_KEYS) + row, vector);
        copy::<E, V>(rows, warp::shuffle::<i32>(slot, row), vector, to, tiles);
    }
    if comptime!(tiles == 9 && part == 0) {
        // Half of the rows for each warpgroup, four of them for a warp at a time, eight lanes for a row.
        let slot = exchange.slots[(slots_at + half * comptime!(HALF_KEYS as u32) + cube.lane) as usize];
        let vector = comptime!(2 * OWN_VECTORS) + cube.lane % comptime!(VECTORS as u32);
        #[unroll]
        for pass in 0..2u32 {
            let row = comptime!(16 * pass) + cube.warp * 4 + cube.lane / comptime!(VECTORS as u32);
            let to = stage_at + 16 * place_of(half * comptime!(HALF_KEYS as u32) + row, vector);
            copy::<E, V>(rows, warp::shuffle::<i32>(slot, row), vector, to, tiles);
        }
    }
}

/// Where vector `vector` of row `row` of a block lies: in tiles of 64 channels, with the swizzle of 128 bytes.
#[cube]
fn place_of(row: u32, vector: u32) -> u32 {
    let (tile, column) = (vector / comptime!(VECTORS as u32), vector % comptime!(VECTORS as u32));
    (tile * comptime!(KEYS as u32) + row) * comptime!(VECTORS as u32) + (column ^ (row % comptime!(VECTORS as u32)))
}

#[cube]
fn copy<E: Float, V: Size>(rows: &[Vector<E, V>], slot: i32, vector: u32, to: u32, #[comptime] tiles: usize) {
    let from = usize::cast_from(max(slot, 0i32)) * comptime!(tiles * VECTORS) + vector as usize;
    copy_or_zero(&rows[from..from + 1], to, select(slot >= 0, 16u32, 0u32));
}
