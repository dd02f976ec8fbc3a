//! Which cube computes which items: runs of them, as even as possible, or of whole sequences.

use cubecl::prelude::*;

use super::cut::{Cut, Lengths, PlanCounts};
use super::sums::{GROUPS, Place, Sums, UNITS, last_at_most, place_of_tile, scan_units};

/// Tiles that a cube may have above its share for sequences to stay whole: writing the splits of 64 query rows and reading
/// them again takes about as long as 8 tiles of keys.
const MAX_SLACK: u32 = 8;

/// Whether the cubes can take the sequences whole, and where the run of a cube starts then.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Whole {
    pub fits: bool,
    /// Of the cube with the number of the unit.
    pub first_sequence: u32,
}

/// Deals out whole sequences, so that no cube has more than a little above its share. Not tried where sequences share a prefix
/// sum, or cubes a unit. The sums of items come later: their place is scratch.
#[cube]
pub(super) fn deal_whole(
    sums: &mut Sums,
    scratch: &mut Shared<[u32]>,
    share: u32,
    total_tiles: u32,
    batch: u32,
    cubes: u32,
) -> Whole {
    let bound = share + min(share / 16, comptime!(MAX_SLACK).runtime());
    let mut fits = batch > 0 && batch <= comptime!(GROUPS as u32) && cubes <= comptime!(UNITS as u32);
    // All sums are there, and the total of the last scan has been read.
    sync_cube();
    // The end of a run from each sequence on.
    let mut too_long = 0u32;
    if fits {
        let mut sequence = UNIT_POS;
        while sequence < batch {
            let target = sums.tile_ptr[sequence as usize] + bound;
            let mut end = batch;
            if target < total_tiles {
                end = last_at_most(&sums.tile_ptr, sequence, target);
            }
            sums.item_ptr[sequence as usize] = end;
            if end == sequence {
                too_long = 1u32;
            }
            sequence += comptime!(UNITS as u32);
        }
    }
    scan_units(scratch, too_long);
    fits = fits && scratch[comptime!(UNITS - 1)] == 0;
    let mut first_sequence = batch;
    if fits {
        // Run after run, but with a load from shared memory alone for each.
        let mut sequence = 0u32;
        let mut runs = 0u32;
        while runs < cubes && sequence < batch {
            if runs == UNIT_POS {
                first_sequence = sequence;
            }
            sequence = sums.item_ptr[sequence as usize];
            runs += 1;
        }
        fits = sequence >= batch;
    }
    // The list is filled anew after this.
    sync_cube();
    Whole { fits, first_sequence }
}

/// Writes where the run of each cube starts, for items that were cut without regard to the cubes.
#[cube]
pub(super) fn write_runs(
    lens: &Lengths,
    cube_ptr: &mut [i32],
    sums: &Sums,
    cut: &Cut,
    scratch: &mut Shared<[u32]>,
    counts: &PlanCounts,
    total_tiles: u32,
) {
    let bound = smallest_bound(lens, sums, cut, scratch, total_tiles, counts.cubes, counts.heaviest);
    if UNIT_POS == 0 {
        cube_ptr[0] = 0i32;
        let mut start = 0u32;
        let mut sequence = 0u32;
        for cube in 0..counts.cubes {
            let run = run_end(lens, sums, cut, sequence, start, bound, total_tiles);
            start = run.tiles;
            sequence = run.sequence;
            cube_ptr[cube as usize + 1] = run.items as i32;
        }
    }
}

/// The first item that a run of items from tile `start` on, of at most `bound` tiles, leaves out. The run starts in
/// `sequence` or a later one, and so does the place that is returned: the next run may search from there.
#[cube]
fn run_end(lens: &Lengths, sums: &Sums, cut: &Cut, sequence: u32, start: u32, bound: u32, total_tiles: u32) -> Place {
    let target = start + bound;
    let mut found = sequence;
    let mut tiles_until = total_tiles;
    let mut items_until = sums.item_ptr[GROUPS];
    if target < total_tiles {
        let place = place_of_tile(lens, sums, cut, sequence, target);
        let tiles = cut.tiles(lens, place.sequence);
        let splits = cut.splits_within(tiles, target - place.tiles);
        found = place.sequence;
        tiles_until = place.tiles + cut.tile_at(tiles, place.tiles, splits);
        items_until = place.items + splits;
    }
    Place { sequence: found, tiles: tiles_until, items: items_until }
}

/// Whether `cubes` runs of at most `bound` tiles take up all items. A bound below the heaviest item is stuck there.
#[cube]
fn is_feasible(lens: &Lengths, sums: &Sums, cut: &Cut, bound: u32, total_tiles: u32, cubes: u32) -> bool {
    let mut start = 0u32;
    let mut sequence = 0u32;
    let mut runs = 0u32;
    while runs < cubes && start < total_tiles {
        let run = run_end(lens, sums, cut, sequence, start, bound, total_tiles);
        start = run.tiles;
        sequence = run.sequence;
        runs += 1;
    }
    start >= total_tiles
}

/// The smallest load under which the cubes suffice, all units trying different ones. No item has more than `heaviest` tiles.
#[cube]
fn smallest_bound(
    lens: &Lengths,
    sums: &Sums,
    cut: &Cut,
    scratch: &mut Shared<[u32]>,
    total_tiles: u32,
    cubes: u32,
    heaviest: u32,
) -> u32 {
    let mut found = Shared::<[u32]>::new_slice(2usize);
    let units = comptime!(UNITS as u32).runtime();
    let unit = UNIT_POS as usize;
    // Every run but the last leaves out an item that would exceed the bound. Under the mean load plus all but one tile of
    // that item, all of them have the mean load at least: the cubes suffice.
    let mut low = total_tiles.div_ceil(cubes);
    let mut high = min(low + heaviest - 1, total_tiles);
    // The total of the last scan has been read by then.
    sync_cube();
    while low < high {
        let step = (high - low).div_ceil(units);
        let candidate = low + UNIT_POS * step;
        let mut feasible = 1u32;
        if candidate < high && !is_feasible(lens, sums, cut, candidate, total_tiles, cubes) {
            feasible = 0u32;
        }
        scratch[unit] = feasible;
        sync_cube();
        if feasible == 1 {
            if unit == 0 {
                found[0] = low;
                found[1] = low;
            } else if scratch[unit - 1] == 0 {
                found[0] = candidate - step + 1;
                found[1] = min(candidate, high);
            }
        } else if unit == comptime!(UNITS - 1) {
            found[0] = candidate + 1;
            found[1] = high;
        }
        sync_cube();
        low = found[0];
        high = found[1];
    }
    low
}
