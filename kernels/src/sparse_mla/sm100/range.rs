//! The work of a cube, and the rows that it loads.

use cubecl::prelude::*;

use crate::sparse_mla::form::Form;
use crate::sparse_mla::work::next;
use crate::tiles::form::TILE_WIDTH;

/// Rows that an instruction loads.
pub(super) const GATHERED: u32 = 4;
/// Bytes of a row in a tile.
pub(super) const ROW_BYTES: u32 = 2 * TILE_WIDTH as u32;

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

/// Maps of the rows of both lists.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Maps {
    pub a: u64,
    pub b: u64,
}

#[cube]
impl Maps {
    /// That of the first list, or of the second.
    pub fn of(&self, list: u32, #[comptime] form: Form) -> u64 {
        let mut map = self.a;
        if comptime!(form.second) && list == 2 {
            map = self.b;
        }
        map
    }
}
