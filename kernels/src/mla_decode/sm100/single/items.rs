//! The items of a cube, and their products.

use cubecl::prelude::*;

use crate::ptx::warp;
use crate::tiles::form::Form;
use crate::tiles::loader::{Item, Plan, Tile};
use crate::tiles::one_cube::{Cube, Products};

/// The items of a cube.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Items {
    /// Query rows of a sequence.
    pub rows: u32,
    /// All of them. The last one sees all keys.
    pub tile: Tile,
    /// The first item, and one past the last.
    pub first: u32,
    pub end: u32,
}

/// Issues the products of all items. One thread.
#[cube]
pub(super) fn multiply(cube: &Cube, items: &Items, plan: &Plan, #[comptime] form: Form) {
    let mut products = Products::new();
    let mut index = items.first;
    while index < items.end {
        let mut item = Item::none();
        item.read(plan, index, &items.tile);
        products.multiply(cube, item.blocks, form);
        index = warp::next(index);
    }
}
