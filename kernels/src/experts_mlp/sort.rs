//! Pairs of token and expert in the order of the experts, and tiles of them.

use cubecl::prelude::*;

use super::sort_chunks;
use crate::common::launch::or_dummy;
use crate::common::scan::sum_before;

/// Units of a cube. Every runtime has this many.
pub(super) const UNITS: usize = 256;
/// Numbers of a tile: its expert, its first pair in the order, its pairs.
pub const TILE: usize = 3;

/// Arguments of [`launch`], all i32.
pub struct SortArgs {
    /// `[pairs]`: the expert of each pair. Pairs of one that there is not are left out.
    pub experts_of: BufferArg,
    /// `[pairs]`, written: the pairs of the first expert, of the second, ...; of an expert in their own order. -1 behind them.
    pub order: BufferArg,
    /// `[max_tiles(...), TILE]`, written: those without pairs come last.
    pub tiles: BufferArg,
    /// Pairs.
    pub pairs: usize,
    /// Experts.
    pub experts: usize,
    /// Pairs of a tile at most.
    pub tile: usize,
}

/// Tiles that there are at most.
pub fn max_tiles(pairs: usize, experts: usize, tile: usize) -> usize {
    pairs / tile + pairs.min(experts)
}

/// Writes `order` and `tiles`. Without pairs nothing is launched.
pub fn launch(client: &Client, args: SortArgs) {
    let SortArgs { pairs, experts, tile, .. } = args;
    if pairs == 0 {
        return;
    }
    if pairs > sort_chunks::FEW {
        return sort_chunks::launch(client, args);
    }
    let run = experts.div_ceil(UNITS);
    sort_kernel::launch(
        client,
        CubeCount::new_single(),
        CubeDim::new_1d(UNITS as u32),
        or_dummy(client, args.experts_of, pairs),
        args.order,
        args.tiles,
        pairs as u32,
        experts as u32,
        tile as u32,
        max_tiles(pairs, experts, tile) as u32,
        run,
    );
}

/// A unit has a run of experts, and goes over all pairs, which the cube loads together: to count, and to write.
#[cube(launch, create_dummy_kernel)]
fn sort_kernel(
    experts_of: &[i32],
    order: &mut [i32],
    tiles: &mut [i32],
    pairs: u32,
    experts: u32,
    tile: u32,
    max_tiles: u32,
    #[comptime] run: usize,
) {
    let first_expert = UNIT_POS * run as u32;
    let mut loaded = Shared::<[i32]>::new_slice(UNITS);
    let mut scratch = Shared::<[u32]>::new_slice(UNITS);
    let mut counts = Array::<u32>::new(run);
    #[unroll]
    for i in 0..run {
        counts[i] = 0u32;
    }
    let mut start = 0u32;
    while start < pairs {
        load(experts_of, &mut loaded, start, pairs);
        for i in 0..min(UNITS as u32, pairs - start) as usize {
            #[unroll]
            for e in 0..run {
                counts[e] += u32::cast_from(loaded[i] == (first_expert + e as u32) as i32);
            }
        }
        sync_cube();
        start += UNITS as u32;
    }
    #[unroll]
    for e in 0..run {
        if first_expert + e as u32 >= experts {
            counts[e] = 0u32;
        }
    }
    let mut places = Array::<u32>::new(run);
    places[0] = write_places(order, tiles, &counts, &mut scratch, pairs, tile, max_tiles, run);
    #[unroll]
    for e in 1..run {
        places[e] = places[e - 1] + counts[e - 1];
    }
    place_in_order(experts_of, order, &mut loaded, &mut places, 0u32, pairs, experts, run);
}

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
    let mut next_tile = sum_before(scratch, own_tiles, UNITS);
    let mut empty = scratch[UNITS - 1] + UNIT_POS;
    while empty < max_tiles {
        write_tile(tiles, empty, 0u32, 0u32, 0u32);
        empty += UNITS as u32;
    }
    let mut expert_place = place;
    #[unroll]
    for e in 0..run {
        let mut first = 0u32;
        while first < counts[e] {
            write_tile(tiles, next_tile, first_expert + e as u32, expert_place + first, min(tile, counts[e] - first));
            next_tile += 1;
            first += tile;
        }
        expert_place += counts[e];
    }
    place
}

/// Writes the pairs from `start` to `end` to the places of their experts, one after the other. Called by all units of a cube.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn place_in_order(
    experts_of: &[i32],
    order: &mut [i32],
    loaded: &mut Shared<[i32]>,
    places: &mut Array<u32>,
    start: u32,
    end: u32,
    experts: u32,
    #[comptime] run: usize,
) {
    let first_expert = UNIT_POS * run as u32;
    let mut start = start;
    while start < end {
        load(experts_of, loaded, start, end);
        for i in 0..min(UNITS as u32, end - start) as usize {
            #[unroll]
            for e in 0..run {
                let expert = first_expert + e as u32;
                if expert < experts && loaded[i] == expert as i32 {
                    order[places[e] as usize] = start as i32 + i as i32;
                    places[e] += 1;
                }
            }
        }
        sync_cube();
        start += UNITS as u32;
    }
}

/// Loads the experts of the next pairs. Called by all units of a cube.
#[cube]
pub(super) fn load(experts_of: &[i32], loaded: &mut Shared<[i32]>, start: u32, pairs: u32) {
    let pair = start + UNIT_POS;
    if pair < pairs {
        loaded[UNIT_POS as usize] = experts_of[pair as usize];
    }
    sync_cube();
}

#[cube]
fn write_tile(tiles: &mut [i32], tile: u32, expert: u32, first: u32, count: u32) {
    let at = tile as usize * TILE;
    tiles[at] = expert as i32;
    tiles[at + 1] = first as i32;
    tiles[at + 2] = count as i32;
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, form};
    let cube = CubeDim::new_1d(UNITS as u32);
    vec![Entry::new("sort_pairs", form!(sort_kernel, cube, [_, _, _, 1, 1, 1, 1, 1]))]
}
