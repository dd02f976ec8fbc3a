//! The work of a cube, its products, and the loads of its queries.

use cubecl::prelude::*;

use crate::ptx::{mbarrier, warp};
use crate::sparse_mla::form::Form;
use crate::sparse_mla::work::{Lists, Work, next};
use crate::tiles::form::load_query;
use crate::tiles::one_cube::{Cube, Products};

/// Every `step`-th work from `first` on.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Range {
    pub first: u32,
    pub end: u32,
    pub step: u32,
    pub heads: u32,
    #[cube(comptime)]
    pub form: Form,
}

#[cube]
impl Range {
    /// The number of the work behind this one.
    pub fn next(&self, index: u32) -> u32 {
        next(index, self.step, self.form)
    }
}

/// Issues the products of all work. One thread.
#[cube]
pub(super) fn multiply(cube: &Cube, range: &Range, lists: &Lists) {
    let mut products = Products::new();
    let mut index = range.first;
    while index < range.end {
        let mut work = Work::none();
        work.read(lists, index);
        products.multiply(cube, work.blocks(), comptime!(range.form.tile));
        index = range.next(index);
    }
}

/// Loads the queries of all work that has blocks, each as soon as the scores of the one before it are done. Past the heads of a token
/// are those of the next, which nobody looks at. A whole warp.
#[cube]
pub(super) fn load_queries<E: Float>(cube: &Cube, range: &Range, lists: &Lists, q_map: &TensorMap<E, Tiled>) {
    let mut queries = 0u32;
    let mut index = range.first;
    while index < range.end {
        let mut work = Work::none();
        work.read(lists, index);
        if work.blocks() > 0 {
            mbarrier::wait(cube.barriers.query_empty, (queries % 2) ^ 1);
            if warp::elect() {
                let row = work.query_row(range.heads);
                load_query::<E>(q_map, cube.query_at, cube.barriers.query_full, row, comptime!(range.form.tile));
            }
            sync_plane();
            queries += 1;
        }
        index = range.next(index);
    }
}
