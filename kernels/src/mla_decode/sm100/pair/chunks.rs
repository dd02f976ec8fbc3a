//! The chunks that a cube of a pair loads.

use cubecl::prelude::*;

use crate::ptx::{fence, mbarrier, tma, warp};
use crate::tiles::form::{Form, ROWS, TILE_BYTES};
use crate::tiles::loader::{Item, NO_ROW, PagedKeys, Plan, Tile};
use crate::tiles::pair::{CHUNK_BYTES, PAIR_KEYS, RING, Ring, pass};

/// Loads the chunks of all items of a cube, one after the other; all its functions are called by a whole warp.
#[derive(CubeType, Clone, Copy)]
pub(super) struct ChunkLoader {
    keys: PagedKeys,
    ring: Ring,
    /// Of the cube in the pair.
    rank: u32,
    item: Item,
    /// Chunks of all items that have been loaded.
    turn: u32,
}

#[cube]
impl ChunkLoader {
    pub fn new(keys: PagedKeys, ring: Ring, rank: u32) -> ChunkLoader {
        ChunkLoader { keys, ring, rank, item: Item::none(), turn: 0u32 }
    }

    /// Loads all blocks of an item, in the order of the products: the keys of a block before the values of the one before it.
    pub fn load_item(&mut self, plan: &Plan, index: u32, tile: &Tile, lane: u32, #[comptime] form: Form) {
        self.item.read(plan, index, tile);
        let blocks = self.item.blocks.div_ceil(2u32);
        let mut value_pages = 0u32;
        // Read a block ahead.
        let mut key_pages = self.read_pages(plan, 0u32, lane, form);
        let mut block = 0u32;
        while block < blocks + comptime!(1u32).runtime() {
            let next_pages = self.read_pages(plan, block + 1, lane, form);
            if block < blocks {
                let half = block * 2 + self.rank;
                #[unroll]
                for part in 0..comptime!(form.tiles.div_ceil(2)) {
                    let first_tile = comptime!(2 * part as u32).runtime();
                    self.load(key_pages, half, first_tile, comptime!((form.tiles - 2 * part).min(2)), lane, form);
                }
            }
            if block > 0 {
                let first_half = (block - 1) * 2;
                let end_half = min(self.item.blocks, first_half + 2);
                #[unroll]
                for side in 0..2u32 {
                    let first_tile = comptime!(side * 4) + self.rank * 2;
                    let mut half = first_half;
                    while half < end_half {
                        self.load(value_pages, half, first_tile, 2usize, lane, form);
                        half = warp::next(half);
                    }
                }
            }
            value_pages = key_pages;
            key_pages = next_pages;
            block = warp::next(block);
        }
    }

    /// Starts to load `tiles` tiles of the 64 keys with number `half` of the item, whose block has these pages. Zeros come for
    /// pages past the end.
    fn load(
        &mut self,
        pages: u32,
        half: u32,
        first_tile: u32,
        #[comptime] tiles: usize,
        lane: u32,
        #[comptime] form: Form,
    ) {
        let stage = self.turn % RING;
        let full = self.ring.full + stage * 8;
        mbarrier::wait_cluster(self.ring.empty + stage * 8, (self.turn / RING % 2) ^ 1);
        if lane == 0 {
            mbarrier::arrive_expect(full, comptime!(tiles as u32 * TILE_BYTES).runtime());
        }
        #[unroll]
        for part in 0..comptime!(ROWS / form.box_keys) {
            let key = self.item.first_key + half * comptime!(ROWS as u32) + comptime!((part * form.box_keys) as u32);
            let page = warp::shuffle::<u32>(pages, half % 2 * comptime!((ROWS / form.box_keys) as u32) + part as u32);
            let mut row = ((page << self.keys.page_shift) + (key & ((1u32 << self.keys.page_shift) - 1))) as i32;
            if key >= self.item.tile_end {
                row = NO_ROW.runtime();
            }
            let to = self.ring.chunks_at + stage * CHUNK_BYTES + comptime!((part * form.box_keys * 128) as u32);
            if lane == 0 {
                #[unroll]
                for tile in 0..tiles {
                    let tile_to = to + comptime!(tile as u32 * TILE_BYTES);
                    let tile = first_tile + comptime!(tile as u32);
                    tma::load_3d(tile_to, self.keys.map, full, 0i32, row, tile as i32);
                }
            }
        }
        sync_plane();
        self.turn = warp::next(self.turn);
    }

    /// The pages of a block, in each lane that of one box of keys.
    fn read_pages(&self, plan: &Plan, block: u32, lane: u32, #[comptime] form: Form) -> u32 {
        let key_in_block = lane * comptime!(form.box_keys as u32);
        let key = self.item.first_key + block * PAIR_KEYS + key_in_block;
        let mut page = 0u32;
        if key_in_block < PAIR_KEYS && key < self.item.tile_end {
            page = plan.page_table[(self.item.sequence * self.keys.max_pages + (key >> self.keys.page_shift)) as usize]
                as u32;
        }
        page
    }
}

/// Waits for a chunk in this cube and tells the first cube of the pair, which issues the products. Rows from `count` on are
/// cleared before: as values their weights are zero, but what is there may be NaN. Called by a whole warp.
#[cube]
pub(super) fn passes(chunks: &mut Shared<[u32]>, chunk: u32, full: u32, come: u32, count: u32, lane: u32) {
    let stage = chunk % RING;
    mbarrier::wait(full + stage * 8, chunk / RING % 2);
    let mut row = count;
    if row < comptime!(ROWS as u32) {
        let at = stage * comptime!(CHUNK_BYTES / 4) + lane;
        while row < comptime!(ROWS as u32) {
            chunks[(at + row * 32) as usize] = 0u32;
            chunks[(at + row * 32 + comptime!(TILE_BYTES / 4)) as usize] = 0u32;
            row = warp::next(row);
        }
        fence::async_shared();
    }
    pass(come, stage, lane);
}
