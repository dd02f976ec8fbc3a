//! The order of many pairs: chunks of them are counted by a cube each, a cube adds up what lies before each chunk, and each chunk
//! is written by a cube. A single cube goes over all pairs one by one, which takes longer from some hundreds on.

use cubecl::prelude::*;

use super::places::{count_pairs, place_in_order, write_places};
use super::problem::{SortArgs, max_tiles};
use super::select::{self, CHUNK, UNITS};
use crate::common::launch::share;

/// Writes `order` and `tiles`.
pub(super) fn launch(client: &Client, args: SortArgs) {
    let SortArgs { experts_of, order, tiles, pairs, experts, tile } = args;
    let (chunks, run) = (pairs.div_ceil(CHUNK), select::run(experts));
    let counts = client.empty(chunks * experts * size_of::<u32>());
    // SAFETY: the buffer has been made for so many numbers.
    let counts = || unsafe { BufferArg::from_raw_parts(counts.clone(), chunks * experts) };
    let (cubes, units) = (CubeCount::Static(chunks as u32, 1, 1), CubeDim::new_1d(UNITS as u32));
    let (first, second) = (share(&experts_of), experts_of);
    count_kernel::launch(client, cubes.clone(), units, first, counts(), pairs as u32, experts as u32, run);
    scan_kernel::launch(
        client,
        CubeCount::new_single(),
        units,
        counts(),
        share(&order),
        tiles,
        pairs as u32,
        chunks as u32,
        experts as u32,
        tile as u32,
        max_tiles(pairs, experts, tile) as u32,
        run,
    );
    place_kernel::launch(client, cubes, units, second, counts(), order, pairs as u32, experts as u32, run);
}

/// How many pairs of a chunk each expert has. A unit has a run of experts.
#[cube(launch, create_dummy_kernel)]
fn count_kernel(experts_of: &[i32], counts: &mut [u32], pairs: u32, experts: u32, #[comptime] run: usize) {
    let first_expert = UNIT_POS * run as u32;
    let mut loaded = Shared::<[i32]>::new_slice(UNITS);
    let mut own = Array::<u32>::new(run);
    #[unroll]
    for e in 0..run {
        own[e] = 0u32;
    }
    let start = CUBE_POS_X * comptime!(CHUNK as u32);
    let end = min(start + comptime!(CHUNK as u32), pairs);
    count_pairs(experts_of, &mut loaded, &mut own, start, end, experts, run);
    #[unroll]
    for e in 0..run {
        let expert = first_expert + e as u32;
        if expert < experts {
            counts[(CUBE_POS_X * experts + expert) as usize] = own[e];
        }
    }
}

/// From how many pairs of each expert a chunk has to where the first of them goes; the tiles, and what is behind the last pair.
#[cube(launch, create_dummy_kernel)]
fn scan_kernel(
    counts: &mut [u32],
    order: &mut [i32],
    tiles: &mut [i32],
    pairs: u32,
    chunks: u32,
    experts: u32,
    tile: u32,
    max_tiles: u32,
    #[comptime] run: usize,
) {
    let first_expert = UNIT_POS * run as u32;
    let mut scratch = Shared::<[u32]>::new_slice(UNITS);
    let mut totals = Array::<u32>::new(run);
    #[unroll]
    for e in 0..run {
        totals[e] = 0u32;
        let expert = first_expert + e as u32;
        if expert < experts {
            for chunk in 0..chunks {
                totals[e] += counts[(chunk * experts + expert) as usize];
            }
        }
    }
    let mut place = write_places(order, tiles, &totals, &mut scratch, pairs, tile, max_tiles, run);
    #[unroll]
    for e in 0..run {
        let expert = first_expert + e as u32;
        if expert < experts {
            for chunk in 0..chunks {
                let at = (chunk * experts + expert) as usize;
                let count = counts[at];
                counts[at] = place;
                place += count;
            }
        }
    }
}

/// Writes the pairs of a chunk. A unit has a run of experts.
#[cube(launch, create_dummy_kernel)]
fn place_kernel(
    experts_of: &[i32],
    firsts: &[u32],
    order: &mut [i32],
    pairs: u32,
    experts: u32,
    #[comptime] run: usize,
) {
    let first_expert = UNIT_POS * run as u32;
    let mut loaded = Shared::<[i32]>::new_slice(UNITS);
    let mut places = Array::<u32>::new(run);
    #[unroll]
    for e in 0..run {
        let expert = first_expert + e as u32;
        places[e] = 0u32;
        if expert < experts {
            places[e] = firsts[(CUBE_POS_X * experts + expert) as usize];
        }
    }
    let start = CUBE_POS_X * comptime!(CHUNK as u32);
    let end = min(start + comptime!(CHUNK as u32), pairs);
    place_in_order(experts_of, order, &mut loaded, &mut places, start, end, experts, run);
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, form};
    let cube = CubeDim::new_1d(UNITS as u32);
    vec![
        Entry::new("sort_pairs.count", form!(count_kernel, cube, [_, _, 1, 1, 1])),
        Entry::new("sort_pairs.scan", form!(scan_kernel, cube, [_, _, _, 1, 1, 1, 1, 1, 1])),
        Entry::new("sort_pairs.place", form!(place_kernel, cube, [_, _, _, 1, 1, 1])),
    ]
}
