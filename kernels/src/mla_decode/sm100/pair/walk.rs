//! The items of a pair's cubes, and the walk through their blocks.

use cubecl::prelude::*;

use super::places::{HELD, PARTS};
use crate::ptx::warp;
use crate::tiles::loader::{Item, Plan, Tile};

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

/// A block of 128 keys of an item.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Walk {
    /// The item, or one past the last.
    index: u32,
    end: u32,
    pub item: Item,
    /// The block of the item, and that of all items.
    pub block: u32,
    pub count: u32,
    blocks: u32,
    /// Of the block's first chunk. The chunks of an item's query have the turns before those of its first block.
    pub turn: u32,
}

#[cube]
impl Walk {
    /// At the first block of all.
    pub fn new(range: &Range, plan: &Plan) -> Walk {
        let item = Item::none();
        let (index, end) = (range.first, range.end);
        let mut walk = Walk { index, end, item, block: 0u32, count: 0u32, blocks: 0u32, turn: 0u32 };
        walk.open(range, plan);
        walk
    }

    pub fn has_block(&self) -> bool {
        self.index < self.end
    }

    /// Whether it is the last block of the item.
    pub fn is_last(&self) -> bool {
        self.block + 1 == self.blocks
    }

    /// Goes on to the first item with blocks, from this one on.
    fn open(&mut self, range: &Range, plan: &Plan) {
        self.block = 0u32;
        self.blocks = 0u32;
        while self.blocks == 0 && self.index < self.end {
            self.item.read(plan, self.index, &range.tile);
            self.blocks = self.item.blocks.div_ceil(2u32);
            if self.blocks == 0 {
                self.index = warp::next(self.index);
            }
        }
        self.turn += HELD;
    }

    /// The next block.
    pub fn advance(&mut self, range: &Range, plan: &Plan) {
        self.turn += PARTS;
        self.block = warp::next(self.block);
        self.count = warp::next(self.count);
        if self.block == self.blocks {
            self.index = warp::next(self.index);
            self.open(range, plan);
        }
    }
}
