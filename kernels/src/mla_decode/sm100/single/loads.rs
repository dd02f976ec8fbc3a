//! The warps that load: one keys, one queries.

use cubecl::prelude::*;

use super::items::Items;
use crate::ptx::{mbarrier, warp};
use crate::tiles::form::{Form, load_query};
use crate::tiles::loader::{Item, Loader, PagedKeys, Plan, Stages};
use crate::tiles::one_cube::Cube;

/// Loads the keys of all items.
#[cube]
pub(super) fn load_keys(cube: &Cube, items: &Items, plan: &Plan, paged: PagedKeys, #[comptime] form: Form) {
    let stages = Stages { keys_at: cube.keys_at, full: cube.barriers.full, empty: cube.barriers.empty };
    let mut loader = Loader::new(paged, stages, items.first, items.end, true);
    loader.open(plan, &items.tile, cube.lane, form);
    while loader.has_block() {
        loader.load_half(plan, 0usize, cube.lane, form);
        loader.load_half(plan, 1usize, cube.lane, form);
        loader.advance(plan, &items.tile, cube.lane, form);
    }
}

/// Loads the queries of all items, each as soon as the scores of the one before it are done.
#[cube]
pub(super) fn load_queries<E: Float>(
    cube: &Cube,
    items: &Items,
    plan: &Plan,
    q_map: &TensorMap<E, Tiled>,
    #[comptime] form: Form,
) {
    let mut queries = 0u32;
    let mut index = items.first;
    while index < items.end {
        let mut item = Item::none();
        item.read(plan, index, &items.tile);
        if item.blocks > 0 {
            mbarrier::wait(cube.barriers.query_empty, (queries % 2) ^ 1);
            if warp::elect() {
                let row = item.sequence * items.rows;
                load_query::<E>(q_map, cube.query_at, cube.barriers.query_full, row, form);
            }
            sync_plane();
            queries += 1;
        }
        index = warp::next(index);
    }
}
