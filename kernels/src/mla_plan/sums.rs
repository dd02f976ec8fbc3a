//! Prefix sums of tiles and items over the batch, and what is found with them.

use cubecl::prelude::*;

use super::cut::{Cut, Lengths, PlanCounts};
use crate::common::scan::sum_before;

/// Units of a cube of the planning kernel.
pub(super) const UNITS: usize = 256;

/// Entries of the prefix sums in shared memory. With more sequences than that, an entry stands for several of them.
pub(super) const GROUPS: usize = 2048;

/// Prefix sums that one unit computes.
const GROUPS_PER_UNIT: usize = GROUPS / UNITS;

/// Tiles and items before each group of sequences, and behind all.
#[derive(CubeType)]
pub(super) struct Sums {
    pub tile_ptr: Shared<[u32]>,
    pub item_ptr: Shared<[u32]>,
}

#[cube]
impl Sums {
    pub fn new() -> Sums {
        Sums { tile_ptr: Shared::new_slice(GROUPS + 1), item_ptr: Shared::new_slice(GROUPS + 1) }
    }

    /// Sums up the tiles. Returns all.
    pub fn add_tiles(&mut self, lens: &Lengths, scratch: &mut Shared<[u32]>, counts: &PlanCounts, group: u32) -> u32 {
        let first_group = UNIT_POS * comptime!(GROUPS_PER_UNIT as u32);
        let end_group = first_group + comptime!(GROUPS_PER_UNIT as u32);
        let mut own_tiles = 0u32;
        for g in first_group..end_group {
            self.tile_ptr[g as usize] = own_tiles;
            for sequence in g * group..min((g + 1) * group, counts.batch) {
                own_tiles += lens.tiles_of(sequence, counts.longest, counts.tile);
            }
        }
        let tiles_before = scan_units(scratch, own_tiles);
        let total_tiles = scratch[comptime!(UNITS - 1)];
        for g in first_group..end_group {
            self.tile_ptr[g as usize] += tiles_before;
        }
        if UNIT_POS == 0 {
            self.tile_ptr[GROUPS] = total_tiles;
        }
        total_tiles
    }

    /// Sums up the items. Returns all. A unit reads only the tile sums that it has written.
    pub fn add_items(&mut self, lens: &Lengths, scratch: &mut Shared<[u32]>, cut: &Cut, batch: u32) -> u32 {
        let first_group = UNIT_POS * comptime!(GROUPS_PER_UNIT as u32);
        let end_group = first_group + comptime!(GROUPS_PER_UNIT as u32);
        let mut own_items = 0u32;
        for g in first_group..end_group {
            self.item_ptr[g as usize] = own_items;
            let mut tiles_until = self.tile_ptr[g as usize];
            for sequence in g * cut.group..min((g + 1) * cut.group, batch) {
                let tiles = cut.tiles(lens, sequence);
                own_items += cut.count(tiles, tiles_until);
                tiles_until += tiles;
            }
        }
        let items_before = scan_units(scratch, own_items);
        let total_items = scratch[comptime!(UNITS - 1)];
        for g in first_group..end_group {
            self.item_ptr[g as usize] += items_before;
        }
        if UNIT_POS == 0 {
            self.item_ptr[GROUPS] = total_items;
        }
        total_items
    }

    /// Writes the items before each sequence.
    pub fn write_splits(&self, lens: &Lengths, split_ptr: &mut [i32], cut: &Cut, batch: u32) {
        let first_group = UNIT_POS * comptime!(GROUPS_PER_UNIT as u32);
        let end_group = first_group + comptime!(GROUPS_PER_UNIT as u32);
        for g in first_group..end_group {
            let mut tiles_until = self.tile_ptr[g as usize];
            let mut items_until = self.item_ptr[g as usize];
            for sequence in g * cut.group..min((g + 1) * cut.group, batch) {
                split_ptr[sequence as usize] = items_until as i32;
                let tiles = cut.tiles(lens, sequence);
                items_until += cut.count(tiles, tiles_until);
                tiles_until += tiles;
            }
        }
    }
}

/// The sum of `own` over the units before this one. The last entry of `scratch` is the sum over all units, and may be read
/// until the next call.
#[cube]
pub(super) fn scan_units(scratch: &mut Shared<[u32]>, own: u32) -> u32 {
    // Others may still read what is there.
    sync_cube();
    sum_before(scratch, own, UNITS)
}

/// The last entry of an ascending list that is at most `target`, as entry `from` is; the one after all groups is greater.
#[cube]
pub(super) fn last_at_most(list: &Shared<[u32]>, from: u32, target: u32) -> u32 {
    let end = comptime!(GROUPS as u32).runtime();
    let mut low = from;
    let mut step = 1u32;
    while list[min(low + step, end) as usize] <= target {
        low += step;
        step *= 2;
    }
    while step > 1 {
        step /= 2;
        if list[min(low + step, end) as usize] <= target {
            low += step;
        }
    }
    low
}

/// A sequence, or the start of an item, and what is before it.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Place {
    pub sequence: u32,
    /// Tiles of the batch before it.
    pub tiles: u32,
    /// Items before it.
    pub items: u32,
}

/// The sequence that an item belongs to.
#[cube]
pub(super) fn place_of_item(lens: &Lengths, sums: &Sums, cut: &Cut, item: u32) -> Place {
    let g = last_at_most(&sums.item_ptr, 0u32, item);
    let mut sequence = g * cut.group;
    let mut tiles_until = sums.tile_ptr[g as usize];
    let mut items_until = sums.item_ptr[g as usize];
    let mut tiles = cut.tiles(lens, sequence);
    let mut count = cut.count(tiles, tiles_until);
    while items_until + count <= item {
        items_until += count;
        tiles_until += tiles;
        sequence += 1;
        tiles = cut.tiles(lens, sequence);
        count = cut.count(tiles, tiles_until);
    }
    Place { sequence, tiles: tiles_until, items: items_until }
}

/// The sequence that a tile of the batch belongs to, which is `from` or a later one.
#[cube]
pub(super) fn place_of_tile(lens: &Lengths, sums: &Sums, cut: &Cut, from: u32, tile: u32) -> Place {
    let g = last_at_most(&sums.tile_ptr, from / cut.group, tile);
    let mut sequence = g * cut.group;
    let mut tiles_until = sums.tile_ptr[g as usize];
    let mut items_until = sums.item_ptr[g as usize];
    let mut tiles = cut.tiles(lens, sequence);
    while tiles_until + tiles <= tile {
        items_until += cut.count(tiles, tiles_until);
        tiles_until += tiles;
        sequence += 1;
        tiles = cut.tiles(lens, sequence);
    }
    Place { sequence, tiles: tiles_until, items: items_until }
}
