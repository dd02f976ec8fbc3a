//! The keys of a block row, a tile of them at a time.

use cubecl::prelude::*;

use crate::tiles::attention::{TILE, TileKeys, TileKeysExpand, soft_capped};

/// Where there is no key.
const NO_KEY: i64 = -1;

/// The keys of a block row, in the order in which they are looked at.
#[derive(CubeType)]
pub(super) struct KeyList {
    /// Where in `block_offset` the row's blocks are.
    pub first_block: usize,
    /// Keys in blocks.
    pub in_blocks: u32,
    pub block_size: u32,
    /// Where in `column_index` the row's columns are.
    pub first_column: usize,
    pub columns: u32,
    /// Keys of the sequence.
    pub end: u32,
}

#[cube]
impl KeyList {
    /// The position of the key in place `place`, [`NO_KEY`] if the sequence has no such key.
    fn position(&self, block_offset: &[i32], column_index: &[i32], place: u32) -> i32 {
        let mut position = i32::new(NO_KEY);
        if place < self.in_blocks {
            let offset = block_offset[self.first_block + (place / self.block_size) as usize];
            // An offset of -1 marks no block, although some of its keys would be there.
            if offset >= 0 {
                position = offset + i32::cast_from(place % self.block_size);
            }
        } else if place - self.in_blocks < self.columns {
            position = column_index[self.first_column + (place - self.in_blocks) as usize];
        }
        if position < 0 || u32::cast_from(position) >= self.end {
            position = i32::new(NO_KEY);
        }
        position
    }
}

/// A tile of keys, and how the queries see them.
#[derive(CubeType)]
pub(super) struct Keys {
    /// Positions in the sequence, [`NO_KEY`] where there is no key.
    pub positions: Shared<[i32]>,
    /// The place in the row's list that is the tile's first.
    pub place: u32,
    /// Places of the list.
    pub places: u32,
    /// The token that is the sequence's key 0.
    pub first: u32,
    /// The head of k and v.
    pub head: u32,
    /// Heads of k and v.
    pub heads: u32,
    /// The key position of the first query.
    pub query: i32,
    pub softmax_scale: f32,
    pub softcap: f32,
    #[cube(comptime)]
    pub capped: bool,
    #[cube(comptime)]
    pub causal: bool,
}

#[cube]
impl Keys {
    /// Looks up the positions of the tile's keys.
    pub fn find(&mut self, block_offset: &[i32], column_index: &[i32], list: &KeyList) {
        if UNIT_POS < comptime!(TILE as u32) {
            self.positions[UNIT_POS as usize] = list.position(block_offset, column_index, self.place + UNIT_POS);
        }
        sync_cube();
    }
}

#[cube]
impl TileKeys for Keys {
    fn visible_end(&self) -> u32 {
        self.places - self.place
    }

    fn is_key(&self, place: usize) -> bool {
        self.positions[place] >= 0
    }

    fn row(&self, place: usize) -> usize {
        let token = self.first + u32::cast_from(self.positions[place]);
        token as usize * self.heads as usize + self.head as usize
    }

    fn is_visible(&self, query: usize, place: usize) -> bool {
        let position = self.positions[place];
        let mut visible = position >= 0;
        if self.causal {
            visible = visible && position <= self.query + i32::cast_from(query);
        }
        visible
    }

    fn score(&self, product: f32) -> f32 {
        let mut score = product * self.softmax_scale;
        if self.capped {
            score = soft_capped(score, self.softcap);
        }
        score
    }
}
