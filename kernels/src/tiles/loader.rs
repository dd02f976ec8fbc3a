//! Items of the plan, and the loads of their blocks of keys.

use cubecl::prelude::*;

use super::form::{Form, HALF_KEYS, KEYS, STAGES, TILE_BYTES};
use crate::common::keys::visible_end;
use crate::ptx::{mbarrier, tma, warp};

/// What all items of a cube have in common.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Tile {
    pub query_len: u32,
    pub heads: u32,
    /// The last query row of the tile.
    pub last_row: u32,
    #[cube(comptime)]
    pub causal: bool,
}

/// The items that the planner has made of a batch, and the sequences that they are of.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Plan<'a> {
    /// Rows of four numbers.
    pub items: &'a [i32],
    /// The first item of each sequence, and one past the last.
    pub split_ptr: &'a [i32],
    pub seq_lens: &'a [i32],
    pub page_table: &'a [i32],
}

#[cube]
impl<'a> Plan<'a> {
    pub fn new(items: &'a [i32], split_ptr: &'a [i32], seq_lens: &'a [i32], page_table: &'a [i32]) -> Plan<'a> {
        Plan::<'a> { items, split_ptr, seq_lens, page_table }
    }

    /// Whether a sequence is one item, whose result needs no merge.
    pub fn is_whole(&self, sequence: u32) -> bool {
        let at = sequence as usize;
        self.split_ptr[at + 1] - self.split_ptr[at] == 1
    }
}

/// Some keys of a sequence.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Item {
    pub sequence: u32,
    pub first_key: u32,
    /// One past the last key of the item.
    pub end_key: u32,
    /// One past the last key that any row of the tile sees.
    pub tile_end: u32,
    /// Blocks of keys up to there.
    pub blocks: u32,
}

#[cube]
impl Tile {
    /// One past the last key of an item that a query row sees.
    pub fn visible_end(&self, plan: &Plan, sequence: u32, row: u32, end_key: u32) -> u32 {
        let (sequence, row, end_key) = (sequence as usize, row as usize, end_key as usize);
        visible_end(plan.seq_lens, sequence, row, end_key, self.query_len, self.heads, self.causal) as u32
    }
}

#[cube]
impl Item {
    pub fn none() -> Item {
        Item { sequence: 0u32, first_key: 0u32, end_key: 0u32, tile_end: 0u32, blocks: 0u32 }
    }

    /// Row `index` of the plan's items.
    pub fn read(&mut self, plan: &Plan, index: u32, tile: &Tile) {
        let at = index as usize * 4;
        self.sequence = plan.items[at] as u32;
        self.first_key = plan.items[at + 1] as u32;
        self.end_key = plan.items[at + 2] as u32;
        self.tile_end = tile.visible_end(plan, self.sequence, tile.last_row, self.end_key);
        self.blocks = 0u32;
        if self.tile_end > self.first_key {
            self.blocks = (self.tile_end - self.first_key + comptime!(KEYS as u32 - 1)) / comptime!(KEYS as u32);
        }
    }
}

/// Where keys come from.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct PagedKeys {
    /// Of the cache, by the tile map.
    pub map: u64,
    pub page_shift: u32,
    pub max_pages: u32,
}

/// Where blocks of keys come to in shared memory, and the barriers of their halves: loaded, and no longer needed.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Stages {
    pub keys_at: u32,
    pub full: u32,
    pub empty: u32,
}

/// Loads the blocks of all items of a cube, one after the other; all its functions are called by a whole warp.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Loader {
    keys: PagedKeys,
    stages: Stages,
    /// The item whose blocks are loaded, or the one after the last.
    index: u32,
    end_index: u32,
    item: Item,
    /// The next block of it.
    block: u32,
    /// Blocks of all items that have been loaded.
    turn: u32,
    /// Pages of 32 boxes of keys, one in each lane, and of the 32 after them.
    pages: u32,
    next_pages: u32,
    /// Whether zeros come for boxes past the end, otherwise nothing.
    #[cube(comptime)]
    fill: bool,
}

/// A row of no cache. A box that starts there ends before row 0, and is filled with zeros.
pub(crate) const NO_ROW: i32 = -1024;

#[cube]
impl Loader {
    /// At the first block of the items `index .. end_index`.
    pub fn new(keys: PagedKeys, stages: Stages, index: u32, end_index: u32, #[comptime] fill: bool) -> Loader {
        let item = Item::none();
        Loader { keys, stages, index, end_index, item, block: 0u32, turn: 0u32, pages: 0u32, next_pages: 0u32, fill }
    }

    /// Whether there is a block left.
    pub fn has_block(&self) -> bool {
        self.index < self.end_index
    }

    /// Goes on to the first item with blocks, from this one on.
    pub fn open(&mut self, plan: &Plan, tile: &Tile, lane: u32, #[comptime] form: Form) {
        let mut blocks = 0u32;
        while blocks == 0 && self.index < self.end_index {
            self.item.read(plan, self.index, tile);
            blocks = self.item.blocks;
            if blocks == 0 {
                self.index = warp::next(self.index);
            }
        }
        self.block = 0u32;
        if blocks > 0 {
            self.pages = self.read_pages(plan, 0u32, lane, form);
            self.next_pages = self.read_pages(plan, 32u32, lane, form);
        }
    }

    /// Starts to load half of the next block; first the first half.
    pub fn load_half(&mut self, plan: &Plan, #[comptime] half: usize, lane: u32, #[comptime] form: Form) {
        let first_box = self.block * comptime!((KEYS / form.box_keys) as u32);
        let place = first_box % 32;
        if comptime!(half == 0) && place == 0 && first_box > 0 {
            self.pages = self.next_pages;
            self.next_pages = self.read_pages(plan, first_box + 32, lane, form);
        }
        let stage = self.turn % STAGES;
        let full = self.stages.full + stage * 16 + comptime!(half as u32 * 8);
        let empty = self.stages.empty + stage * 16 + comptime!(half as u32 * 8);
        mbarrier::wait(empty, (self.turn / STAGES % 2) ^ 1);
        #[unroll]
        for part in 0..comptime!(HALF_KEYS / form.box_keys) {
            let at = comptime!(half * (HALF_KEYS / form.box_keys) + part);
            let key = self.item.first_key + (first_box + at as u32) * comptime!(form.box_keys as u32);
            let mut row = self.row_of(place + at as u32, key) as i32;
            let is_key = key < self.item.tile_end;
            if comptime!(self.fill) && !is_key {
                row = NO_ROW.runtime();
            }
            let to = self.stages.keys_at
                + stage * comptime!(form.stage_bytes())
                + comptime!((at * form.box_keys * 128) as u32);
            if lane == 0 && (comptime!(self.fill) || is_key) {
                mbarrier::expect(full, comptime!((form.tiles * form.box_keys * 128) as u32));
                #[unroll]
                for tile in 0..form.tiles {
                    let tile_to = to + comptime!(tile as u32 * TILE_BYTES);
                    tma::load_3d(tile_to, self.keys.map, full, 0i32, row, comptime!(tile as i32));
                }
            }
        }
        mbarrier::arrive_if(full, lane == 0);
        sync_plane();
    }

    /// Both halves have been loaded: goes on to the next block, of this item or a later one.
    pub fn advance(&mut self, plan: &Plan, tile: &Tile, lane: u32, #[comptime] form: Form) {
        self.turn += 1;
        self.block = warp::next(self.block);
        if self.block == self.item.blocks {
            self.index = warp::next(self.index);
            self.open(plan, tile, lane, form);
        }
    }

    /// The pages of 32 boxes of the item, one for each lane.
    fn read_pages(&self, plan: &Plan, first_box: u32, lane: u32, #[comptime] form: Form) -> u32 {
        let key = self.item.first_key + (first_box + lane) * comptime!(form.box_keys as u32);
        let mut page = 0u32;
        if key < self.item.tile_end {
            page = plan.page_table[(self.item.sequence * self.keys.max_pages + (key >> self.keys.page_shift)) as usize]
                as u32;
        }
        page
    }

    /// The row of the cache that a key is in; `place` counts boxes from those that `pages` has.
    fn row_of(&self, place: u32, key: u32) -> u32 {
        let page = warp::shuffle::<u32>(select(place < 32, self.pages, self.next_pages), place % 32);
        (page << self.keys.page_shift) + (key & ((1u32 << self.keys.page_shift) - 1))
    }
}
