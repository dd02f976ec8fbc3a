//! The loads: the first warp brings blocks of rows as they are stored, a page or 64 rows of one at a time.

use cubecl::prelude::*;

use super::cube::Cube;
use super::form::{ROW_BYTES, STAGE_BYTES, STAGES};
use crate::ptx::{fence, matrix, mbarrier, read, tma, warp};
use crate::tiles::form::KEYS;
use crate::tiles::loader::{Item, Plan};

/// The cache, and how its pages lie.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Pages<'a> {
    pub words: &'a [u32],
    /// The logarithm of the page size.
    pub page_shift: u32,
    pub max_pages: u32,
    /// Pages of the cache.
    pub page_count: u32,
}

#[cube]
impl<'a> Pages<'a> {
    pub fn new(words: &'a [u32], page_shift: u32, max_pages: u32, page_count: u32) -> Pages<'a> {
        Pages::<'a> { words, page_shift, max_pages, page_count }
    }
}

#[cube]
impl Pages<'_> {
    /// The slot of a key, or of the item's last one. A page that the cache has not becomes its last one.
    fn slot(&self, plan: &Plan, item: &Item, key: u32) -> u32 {
        let key = min(key, item.tile_end - 1);
        let at = item.sequence * self.max_pages + (key >> self.page_shift);
        let page = min(plan.page_table[at as usize] as u32, self.page_count - 1);
        (page << self.page_shift) + (key & ((1u32 << self.page_shift) - 1))
    }

    /// Starts to copy rows that lie one behind the other.
    fn copy(&self, slot: u32, to: u32, rows: u32, full: u32) {
        let at = slot as usize * comptime!(ROW_BYTES as usize / 4);
        tma::load_bytes(to, &self.words[at..at + 4], rows * ROW_BYTES, full);
    }
}

/// The blocks of all items, one after the other. All its functions are called by a whole warp.
#[derive(CubeType)]
pub(super) struct Loads {
    /// The item of the next block, or the one after the last.
    index: u32,
    item: Item,
    /// The next block of it.
    block: u32,
    /// Blocks of all items that have been loaded.
    turn: u32,
    /// Where this lane's rows of the next block begin, and of pages of one row those of the second half. They are read one block
    /// ahead, so that nobody waits for the page table.
    near: u32,
    far: u32,
}

#[cube]
impl Loads {
    pub fn none() -> Loads {
        Loads { index: 0u32, item: Item::none(), block: 0u32, turn: 0u32, near: 0u32, far: 0u32 }
    }

    /// Loads as many blocks as there are stages.
    pub fn fill(&mut self, pages: &Pages, cube: &Cube, plan: &Plan) {
        self.index = cube.first;
        self.open(pages, cube, plan);
        let mut blocks = 0u32;
        while blocks < STAGES {
            self.next(pages, cube, plan);
            blocks = warp::next(blocks);
        }
    }

    /// Loads the next block, if there is one. All have computed what was in its stage. Rows past the end are not read.
    pub fn next(&mut self, pages: &Pages, cube: &Cube, plan: &Plan) {
        if self.index < cube.end {
            let rows = min(self.item.tile_end - self.base(), comptime!(KEYS as u32));
            let (near, far) = (read::<u32>(self.near), read::<u32>(self.far));
            let stage = self.turn % STAGES;
            // First of all where the block after it is: copies make lanes part.
            self.turn += 1;
            self.block = warp::next(self.block);
            if self.block == self.item.blocks {
                self.index = warp::next(self.index);
                self.open(pages, cube, plan);
            } else {
                self.find(pages, cube, plan);
            }
            load(pages, cube, stage, rows, near, far);
        }
    }

    /// Goes to the first block of the next item that has one.
    fn open(&mut self, pages: &Pages, cube: &Cube, plan: &Plan) {
        let mut blocks = 0u32;
        while blocks == 0 && self.index < cube.end {
            self.item.read(plan, self.index, &cube.tile);
            blocks = self.item.blocks;
            if blocks == 0 {
                self.index = warp::next(self.index);
            }
        }
        self.block = 0u32;
        if blocks > 0 {
            self.find(pages, cube, plan);
        }
    }

    /// The first key of the next block.
    fn base(&self) -> u32 {
        self.item.first_key + self.block * comptime!(KEYS as u32)
    }

    fn find(&mut self, pages: &Pages, cube: &Cube, plan: &Plan) {
        let shift = piece_shift(pages);
        self.near = pages.slot(plan, &self.item, self.base() + (cube.lane << shift));
        if shift == 0 {
            self.far = pages.slot(plan, &self.item, self.base() + 32 + cube.lane);
        }
    }
}

/// Loads so many rows of a block into a stage, from the slots that lanes have on.
#[cube]
fn load(pages: &Pages, cube: &Cube, stage: u32, rows: u32, near: u32, far: u32) {
    let (stage_at, full) = (cube.keys_at + stage * STAGE_BYTES, cube.full + stage * 8);
    mbarrier::expect_if(full, rows * ROW_BYTES, cube.lane == 0);
    let shift = piece_shift(pages);
    let pieces = (rows + (1u32 << shift) - 1) >> shift;
    let mut piece = 0u32;
    while piece < pieces {
        let slot = warp::shuffle::<u32>(select(piece < 32, near, far), piece % 32);
        let place = piece << shift;
        if warp::elect() {
            pages.copy(slot, stage_at + place * ROW_BYTES, min(rows - place, 1u32 << shift), full);
        }
        sync_plane();
        piece = warp::next(piece);
    }
    if warp::uniform(rows) < comptime!(KEYS as u32) {
        clear(stage_at, rows, cube.lane);
    }
    mbarrier::arrive_if(full, cube.lane == 0);
}

/// Zeros for the rows of a stage from `count` on: their weights are zero, but what is there may be NaN.
#[cube]
fn clear(stage_at: u32, count: u32, lane: u32) {
    let mut at = count * ROW_BYTES;
    while at < STAGE_BYTES {
        let own = at + lane * 16;
        if own < STAGE_BYTES {
            matrix::store_16(stage_at + own, 0u32, Vector::new(0u32));
        }
        at += 512u32;
    }
    // A later copy overwrites them.
    fence::async_shared();
    sync_plane();
}

/// The logarithm of the rows that a copy brings.
#[cube]
fn piece_shift(pages: &Pages) -> u32 {
    min(pages.page_shift, comptime!(KEYS.ilog2()))
}
