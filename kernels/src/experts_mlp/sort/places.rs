//! Where pairs go, and their tiles: what the kernels that sort share.

use cubecl::prelude::*;

use super::problem::{TILE, pairs_of_tile};
use super::select::{AHEAD, UNITS};
use crate::common::scan::sum_before;

/// Writes the tiles of all experts, of which a unit has a run with so many pairs, and what is behind the last pair in the order.
/// Where the unit's first pair goes. Called by all units of a cube.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn write_places(
    order: &mut [i32],
    tiles: &mut [i32],
    counts: &Array<u32>,
    scratch: &mut Shared<[u32]>,
    pairs: u32,
    tile: u32,
    max_tiles: u32,
    #[comptime] run: usize,
) -> u32 {
    let first_expert = UNIT_POS * run as u32;
    let mut own_pairs = 0u32;
    let mut own_tiles = 0u32;
    #[unroll]
    for e in 0..run {
        own_pairs += counts[e];
        own_tiles += counts[e].div_ceil(tile);
    }
    let place = sum_before(scratch, own_pairs, UNITS);
    let mut left_out = scratch[UNITS - 1] + UNIT_POS;
    sync_cube();
    while left_out < pairs {
        order[left_out as usize] = -1i32;
        left_out += UNITS as u32;
    }
    let mut first_tile = sum_before(scratch, own_tiles, UNITS);
    let mut empty = scratch[UNITS - 1] + UNIT_POS;
    while empty < max_tiles {
        write_tile(tiles, empty, 0u32, 0u32, 0u32, empty, 0u32);
        empty += UNITS as u32;
    }
    let mut expert_place = place;
    #[unroll]
    for e in 0..run {
        let (expert, count) = (first_expert + e as u32, counts[e]);
        let of_tile = pairs_of_tile(count, tile);
        let mut first = 0u32;
        while first < count {
            let (next_tile, own) = (first_tile + first / of_tile, min(of_tile, count - first));
            write_tile(tiles, next_tile, expert, expert_place + first, own, first_tile, count);
            first += of_tile;
        }
        first_tile += count.div_ceil(tile);
        expert_place += count;
    }
    place
}

/// Writes `count` loaded pairs, the first of which is pair `start`, to the places of their experts, one after the other. Called by all
/// units of a cube.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn place_in_order(
    loaded: &Shared<[i32]>,
    order: &mut [i32],
    places: &mut Array<u32>,
    start: u32,
    count: u32,
    experts: u32,
    #[comptime] run: usize,
) {
    let first_expert = UNIT_POS * run as u32;
    let count = select(first_expert < experts, count, 0u32);
    let mut pair = 0u32;
    while pair < count {
        let expert_of = experts_from(loaded, pair);
        #[unroll]
        for i in 0..AHEAD {
            #[unroll]
            for e in 0..run {
                let expert = first_expert + e as u32;
                if expert < experts && expert_of[i] == expert as i32 {
                    order[places[e] as usize] = (start + pair + i as u32) as i32;
                    places[e] += 1;
                }
            }
        }
        pair += AHEAD as u32;
    }
}

/// How many of `count` loaded pairs each expert of a unit's run has. Called by all units of a cube.
#[cube]
pub(super) fn count_pairs(
    loaded: &Shared<[i32]>,
    counts: &mut Array<u32>,
    count: u32,
    experts: u32,
    #[comptime] run: usize,
) {
    let first_expert = UNIT_POS * run as u32;
    #[unroll]
    for e in 0..run {
        counts[e] = 0u32;
    }
    let count = select(first_expert < experts, count, 0u32);
    let mut pair = 0u32;
    while pair < count {
        let expert_of = experts_from(loaded, pair);
        #[unroll]
        for i in 0..AHEAD {
            #[unroll]
            for e in 0..run {
                let expert = first_expert + e as u32;
                counts[e] += u32::cast_from(expert < experts && expert_of[i] == expert as i32);
            }
        }
        pair += AHEAD as u32;
    }
}

/// The experts of the [`AHEAD`] loaded pairs from `pair` on.
#[cube]
fn experts_from(loaded: &Shared<[i32]>, pair: u32) -> Array<i32> {
    let mut experts = Array::<i32>::new(AHEAD);
    #[unroll]
    for i in 0..AHEAD {
        experts[i] = loaded[pair as usize + i];
    }
    experts
}

/// Loads the experts of `count` pairs from `start` on, at most `most`; behind them there is none. Called by all units of a cube.
#[cube]
pub(super) fn load_pairs(
    experts_of: &[i32],
    loaded: &mut Shared<[i32]>,
    start: u32,
    count: u32,
    #[comptime] most: usize,
) {
    // All loads before the first is looked at.
    let mut expert_of = Array::<i32>::new(comptime!(most / UNITS));
    #[unroll]
    for i in 0..comptime!(most / UNITS) {
        let pair = UNIT_POS + comptime!((i * UNITS) as u32);
        expert_of[i] = -1i32;
        if pair < count {
            expert_of[i] = experts_of[(start + pair) as usize];
        }
    }
    #[unroll]
    for i in 0..comptime!(most / UNITS) {
        loaded[UNIT_POS as usize + comptime!(i * UNITS)] = expert_of[i];
    }
    sync_cube();
}

#[cube]
fn write_tile(tiles: &mut [i32], tile: u32, expert: u32, first: u32, count: u32, first_tile: u32, of_expert: u32) {
    let at = tile as usize * TILE;
    tiles[at] = expert as i32;
    tiles[at + 1] = first as i32;
    tiles[at + 2] = count as i32;
    tiles[at + 3] = first_tile as i32;
    tiles[at + 4] = of_expert as i32;
}
