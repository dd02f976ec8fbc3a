//! The items of a cube, their products, and the warps that load: one chunks, one queries, and one that tells the first cube which chunks
//! have come.

use cubecl::prelude::*;

use super::chunks::{ChunkLoader, passes};
use crate::ptx::warp;
use crate::tiles::form::{Form, ROWS};
use crate::tiles::loader::{Item, PagedKeys, Plan, Tile};
use crate::tiles::pair::{Cube, Products, Ring, load_query};

/// The items of a cube, and the query rows that it has of them.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Range {
    /// Query rows of a sequence, and the first of the cube's tile.
    pub rows: u32,
    pub tile_row: u32,
    /// Of both cubes: they do the same blocks. A row past the end sees what the last one sees: all keys.
    pub tile: Tile,
    /// The first item, and one past the last.
    pub first: u32,
    pub end: u32,
}

/// Issues the products of all items. One thread.
#[cube]
pub(super) fn multiply(cube: &Cube, range: &Range, plan: &Plan, #[comptime] form: Form) {
    let mut products = Products::new(form);
    let mut index = range.first;
    while index < range.end {
        let mut item = Item::none();
        item.read(plan, index, &range.tile);
        products.multiply(cube, item.blocks);
        index = warp::next(index);
    }
}

/// Loads the chunks of all items.
#[cube]
pub(super) fn load_chunks(
    cube: &Cube,
    range: &Range,
    plan: &Plan,
    paged: PagedKeys,
    rank: u32,
    #[comptime] form: Form,
) {
    let mut loader = ChunkLoader::new(paged, Ring::of(cube), rank);
    let mut index = range.first;
    while index < range.end {
        loader.load_item(plan, index, &range.tile, cube.lane, form);
        index = warp::next(index);
    }
}

/// Passes the chunks of all items on to the first cube, as they come.
#[cube]
pub(super) fn pass_chunks(cube: &Cube, range: &Range, plan: &Plan, chunks: &mut Shared<[u32]>, #[comptime] form: Form) {
    let (full, come, lane) = (cube.barriers.full, cube.barriers.come, cube.lane);
    let mut chunk = 0u32;
    let mut index = range.first;
    while index < range.end {
        let mut item = Item::none();
        item.read(plan, index, &range.tile);
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
pub(super) fn load_queries<E: Float>(
    cube: &Cube,
    range: &Range,
    plan: &Plan,
    q_map: &TensorMap<E, Tiled>,
    #[comptime] form: Form,
) {
    let mut queries = 0u32;
    let mut index = range.first;
    while index < range.end {
        let mut item = Item::none();
        item.read(plan, index, &range.tile);
        if item.blocks > 0 {
            load_query::<E>(cube, q_map, queries, item.sequence, range.rows, range.tile_row, form);
            queries += 1;
        }
        index = warp::next(index);
    }
}
