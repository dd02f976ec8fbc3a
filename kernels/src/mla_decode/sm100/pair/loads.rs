//! The warps that load: one chunks, one queries, and one that tells the first cube which chunks have come.

use cubecl::prelude::*;

use super::chunks::{ChunkLoader, Ring, passes};
use super::cube::Cube;
use crate::ptx::{mbarrier, warp};
use crate::tiles::form::{Form, ROWS, load_query};
use crate::tiles::loader::{Item, PagedKeys, Plan};

/// Loads the chunks of all items.
#[cube]
pub(super) fn load_chunks(cube: &Cube, plan: &Plan, paged: PagedKeys, rank: u32, #[comptime] form: Form) {
    let ring = Ring { chunks_at: cube.chunks_at, full: cube.barriers.full, empty: cube.barriers.empty };
    let mut loader = ChunkLoader::new(paged, ring, rank);
    let mut index = cube.first;
    while index < cube.end {
        loader.load_item(plan, index, &cube.tile, cube.lane, form);
        index = warp::next(index);
    }
}

/// Passes the chunks of all items on to the first cube, as they come.
#[cube]
pub(super) fn pass_chunks(cube: &Cube, plan: &Plan, chunks: &mut Shared<[u32]>, #[comptime] form: Form) {
    let (full, come, lane) = (cube.barriers.full, cube.barriers.come, cube.lane);
    let mut chunk = 0u32;
    let mut index = cube.first;
    while index < cube.end {
        let mut item = Item::none();
        item.read(plan, index, &cube.tile);
        let blocks = item.blocks.div_ceil(2u32);
        let mut block = 0u32;
        while block < blocks + comptime!(1u32).runtime() {
            if block < blocks {
                #[unroll]
                for _ in 0..comptime!(form.tiles.div_ceil(2)) {
                    passes(chunks, chunk, full, come, comptime!(ROWS as u32).runtime(), lane);
                    chunk = warp::next(chunk);
                }
            }
            if block > 0 {
                let first_half = (block - 1) * 2;
                let halves = min(item.blocks - first_half, comptime!(2u32).runtime());
                #[unroll]
                for _ in 0..2u32 {
                    let mut half = 0u32;
                    while half < halves {
                        let first_key = item.first_key + (first_half + half) * comptime!(ROWS as u32);
                        passes(chunks, chunk, full, come, item.tile_end - first_key, lane);
                        chunk = warp::next(chunk);
                        half = warp::next(half);
                    }
                }
            }
            block = warp::next(block);
        }
        index = warp::next(index);
    }
}

/// Loads the queries of all items, each as soon as the scores of the one before it are done, and tells the first cube.
#[cube]
pub(super) fn load_queries<E: Float>(cube: &Cube, plan: &Plan, q_map: &TensorMap<E, Tiled>, #[comptime] form: Form) {
    let mut queries = 0u32;
    let mut index = cube.first;
    while index < cube.end {
        let mut item = Item::none();
        item.read(plan, index, &cube.tile);
        if item.blocks > 0 {
            mbarrier::wait_cluster(cube.barriers.query_empty, (queries % 2) ^ 1);
            if warp::elect() {
                let row = item.sequence * cube.rows + cube.tile_row;
                load_query::<E>(q_map, cube.query_at, cube.barriers.query_full, row, form);
            }
            sync_plane();
            mbarrier::wait(cube.barriers.query_full, queries % 2);
            mbarrier::arrive_at_if(cube.barriers.query_come, 0u32, cube.lane == 0);
            queries += 1;
        }
        index = warp::next(index);
    }
}
