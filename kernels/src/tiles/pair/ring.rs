//! A ring of chunks, 64 rows of the cache with 128 channels each, that a cube of a pair loads: first its half of a block's keys,
//! all channels, then all of the block's values, its half of the channels.

use cubecl::prelude::*;

use super::cube::Cube;
use crate::ptx::{mbarrier, warp};
use crate::tiles::form::{self, Form, TILE_BYTES};

/// Keys of a block. Half of them lie in each cube as keys; as values all do, of half the channels.
pub(crate) const PAIR_KEYS: u32 = 128;
/// Two tiles.
pub(crate) const CHUNK_BYTES: u32 = 2 * TILE_BYTES;

/// Where chunks come to in shared memory, and the barriers of each place: loaded, and no longer needed.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Ring {
    pub chunks_at: u32,
    pub full: u32,
    pub empty: u32,
}

#[cube]
impl Ring {
    pub fn of(cube: &Cube) -> Ring {
        Ring { chunks_at: cube.chunks_at, full: cube.barriers.full, empty: cube.barriers.empty }
    }
}

/// Tells the first cube of the pair, which issues the products, that the chunk of this place has come here. A whole warp, which has
/// waited for it.
#[cube]
pub(crate) fn pass(come: u32, stage: u32, lane: u32) {
    sync_plane();
    mbarrier::arrive_at_if(come + stage * 8, 0u32, lane == 0);
}

/// Loads the query rows of a tile, from `first_row` on of a sequence that has `rows`, as soon as the scores of the one before, number
/// `queries - 1`, are done, and tells the first cube. A whole warp.
#[cube]
pub(crate) fn load_query<E: Float>(
    cube: &Cube,
    q_map: &TensorMap<E, Tiled>,
    queries: u32,
    sequence: u32,
    rows: u32,
    first_row: u32,
    #[comptime] form: Form,
) {
    mbarrier::wait_cluster(cube.barriers.query_empty, (queries % 2) ^ 1);
    if warp::elect() {
        let row = sequence * rows + first_row;
        form::load_query::<E>(q_map, cube.query_at, cube.barriers.query_full, row, form);
    }
    sync_plane();
    mbarrier::wait(cube.barriers.query_full, queries % 2);
    mbarrier::arrive_at_if(cube.barriers.query_come, 0u32, cube.lane == 0);
}
