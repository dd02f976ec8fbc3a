//! The order of many pairs: chunks of them are counted by a cube each, a cube adds up what lies before each chunk, and each chunk
//! is written by a cube. A single cube goes over all pairs one by one, which takes longer from some hundreds on.

use cubecl::prelude::*;

use super::places::{count_pairs, load_pairs, place_in_order, write_places};
use super::problem::{SortArgs, max_tiles};
use super::select::{AHEAD, CHUNK, UNITS, run};
use crate::common::launch::share;

/// Writes `order` and `tiles`.
pub(super) fn launch(client: &Client, args: SortArgs) {
    let SortArgs { experts_of, order, tiles, pairs, experts, tile } = args;
    let (chunks, run) = (pairs.div_ceil(CHUNK), run(experts));
    let [counts, firsts] = [(); 2].map(|()| client.empty(chunks * experts * size_of::<u32>()));
    // SAFETY: the buffers have been made for so many numbers.
    let [counts, firsts] =
        [counts, firsts].map(|buffer| unsafe { BufferArg::from_raw_parts(buffer, chunks * experts) });
    let (cubes, units) = (CubeCount::Static(chunks as u32, 1, 1), CubeDim::new_1d(UNITS as u32));
    let (first, second) = (share(&experts_of), experts_of);
    count_kernel::launch(client, cubes.clone(), units, first, share(&counts), pairs as u32, experts as u32, run);
    scan_kernel::launch(
        client,
        CubeCount::new_single(),
        units,
        counts,
        share(&firsts),
        share(&order),
        tiles,
        pairs as u32,
        chunks as u32,
        experts as u32,
        tile as u32,
        max_tiles(pairs, experts, tile) as u32,
        run,
    );
    place_kernel::launch(client, cubes, units, second, firsts, order, pairs as u32, experts as u32, run);
}

/// How many pairs of a chunk each expert has. A unit has a run of experts.
#[cube(launch, create_dummy_kernel)]
fn count_kernel(experts_of: &[i32], counts: &mut [u32], pairs: u32, experts: u32, #[comptime] run: usize) {
    let first_expert = UNIT_POS * run as u32;
    let mut loaded = Shared::<[i32]>::new_slice(CHUNK);
    let mut own = Array::<u32>::new(run);
    let start = CUBE_POS_X * comptime!(CHUNK as u32);
    let count = min(comptime!(CHUNK as u32), pairs - start);
    load_pairs(experts_of, &mut loaded, start, count, CHUNK);
    count_pairs(&loaded, &mut own, count, experts, run);
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
    counts: &[u32],
    firsts: &mut [u32],
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
            let mut chunk = 0u32;
            while chunk < chunks {
                let read = ChunkCounts::read(counts, chunk, chunks, expert, experts);
                #[unroll]
                for i in 0..AHEAD {
                    totals[e] += read.counts[i];
                }
                chunk += AHEAD as u32;
            }
        }
    }
    let mut place = write_places(order, tiles, &totals, &mut scratch, pairs, tile, max_tiles, run);
    #[unroll]
    for e in 0..run {
        let expert = first_expert + e as u32;
        if expert < experts {
            let mut chunk = 0u32;
            while chunk < chunks {
                let read = ChunkCounts::read(counts, chunk, chunks, expert, experts);
                #[unroll]
                for i in 0..AHEAD {
                    let next = chunk + i as u32;
                    if next < chunks {
                        firsts[(next * experts + expert) as usize] = place;
                    }
                    place += read.counts[i];
                }
                chunk += AHEAD as u32;
            }
        }
    }
}

/// How many pairs of an expert some chunks have. All loads stand before the first is used: a unit would wait for each otherwise.
#[derive(CubeType)]
struct ChunkCounts {
    counts: Sequence<u32>,
}

#[cube]
impl ChunkCounts {
    /// From chunk `first` on; 0 behind the last one.
    fn read(counts: &[u32], first: u32, chunks: u32, expert: u32, experts: u32) -> ChunkCounts {
        let mut read = Sequence::<u32>::new();
        #[unroll]
        for i in 0..AHEAD {
            let chunk = first + i as u32;
            let count = counts[(min(chunk, chunks - 1) * experts + expert) as usize];
            read.push(select(chunk < chunks, count, 0u32));
        }
        ChunkCounts { counts: read }
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
    let mut loaded = Shared::<[i32]>::new_slice(CHUNK);
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
    let count = min(comptime!(CHUNK as u32), pairs - start);
    load_pairs(experts_of, &mut loaded, start, count, CHUNK);
    place_in_order(&loaded, order, &mut places, start, count, experts, run);
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, form};
    let cube = CubeDim::new_1d(UNITS as u32);
    vec![
        Entry::new("sort_pairs.count", form!(count_kernel, cube, [_, _, 1, 1, 1])),
        Entry::new("sort_pairs.scan", form!(scan_kernel, cube, [_, _, _, _, 1, 1, 1, 1, 1, 1])),
        Entry::new("sort_pairs.place", form!(place_kernel, cube, [_, _, _, 1, 1, 1])),
    ]
}
