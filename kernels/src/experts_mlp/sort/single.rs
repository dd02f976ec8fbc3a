//! Few pairs: a single cube.

use cubecl::prelude::*;

use super::places::{count_pairs, load_pairs, place_in_order, write_places};
use super::problem::{SortArgs, max_tiles};
use super::select::{self, FEW, UNITS};
use crate::common::launch::or_dummy;

/// Writes `order` and `tiles`.
pub(super) fn launch(client: &Client, args: SortArgs) {
    let SortArgs { pairs, experts, tile, .. } = args;
    let run = select::run(experts);
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

/// A unit has a run of experts, and goes over all pairs, which the cube loads together once: to count, and to write.
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
    let mut loaded = Shared::<[i32]>::new_slice(FEW);
    let mut scratch = Shared::<[u32]>::new_slice(UNITS);
    let mut counts = Array::<u32>::new(run);
    load_pairs(experts_of, &mut loaded, 0u32, pairs, FEW);
    count_pairs(&loaded, &mut counts, pairs, experts, run);
    let mut places = Array::<u32>::new(run);
    places[0] = write_places(order, tiles, &counts, &mut scratch, pairs, tile, max_tiles, run);
    #[unroll]
    for e in 1..run {
        places[e] = places[e - 1] + counts[e - 1];
    }
    place_in_order(&loaded, order, &mut places, 0u32, pairs, experts, run);
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, form};
    let cube = CubeDim::new_1d(UNITS as u32);
    vec![Entry::new("sort_pairs", form!(sort_kernel, cube, [_, _, _, 1, 1, 1, 1, 1]))]
}
