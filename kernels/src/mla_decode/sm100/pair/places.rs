//! Where the chunks and the query of a cube of the pair lie, and the barriers that say what is there.

use cubecl::prelude::*;

use crate::ptx::mbarrier;
use crate::tiles::form::Form;
use crate::tiles::pair::{Barriers, CHUNK_BYTES};

/// Chunks of the channels of a value, 128 each. Tiles behind them are of keys alone.
pub(super) const PARTS: u32 = 4;
/// Places for chunks in shared memory. A block has four, so long as its keys are needed, and as values.
pub(super) const SLOTS: u32 = 11;
/// Chunks of the query that are in tensor memory, the first ones; they come through places for keys.
pub(super) const HELD: u32 = 3;
/// Their columns of tensor memory, after the output and one block of scores.
pub(super) const HELD_AT: u32 = 320;
pub(super) const HELD_COLUMNS: u32 = 64;
/// Tiles of a chunk.
pub(super) const CHUNK_TILES: usize = 2;

/// Barriers.
pub(super) const BARRIERS: usize = 3 * SLOTS as usize + 7 + 6 * PARTS as usize + 6 + 3 * HELD as usize;

/// Tiles of the query that stay in shared memory.
pub(super) fn query_tiles(form: Form) -> usize {
    form.tiles - HELD as usize * CHUNK_TILES
}

/// Whether keys have a tile that values have not.
pub(super) fn has_key_tile(form: Form) -> bool {
    form.tiles > PARTS as usize * CHUNK_TILES
}

/// What a cube has beside what [`crate::tiles::pair::Cube`] knows.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Places {
    /// Of the cube in the pair.
    pub rank: u32,
    /// The tile of the keys alone in shared memory: loaded here, in both cubes (in the first cube), and no longer needed.
    pub key_tile_at: u32,
    pub key_tile_full: u32,
    pub key_tile_come: u32,
    pub key_tile_empty: u32,
    /// In the first cube: the scores of a block have been read in both.
    pub scores_read: u32,
    /// The factors of an item's rows are there, for each of two items.
    pub factored: u32,
    /// Of each chunk of a query that will be in tensor memory, for each of two queries: loaded here.
    pub staged: u32,
    /// In the first cube: the output of an item has been read in both.
    pub output_read: u32,
    /// Of each chunk of a block, for each of two blocks: its keys are no longer needed, the other cube's rows have come in
    /// their place, and (in the first cube) they have come there.
    pub keys_read: u32,
    pub values_full: u32,
    pub values_come: u32,
}

#[cube]
impl Places {
    /// Behind the barriers that all kernels have.
    pub fn new(rank: u32, key_tile_at: u32, barriers: &Barriers) -> Places {
        let keys_read = barriers.query_empty + 8;
        let values_full = keys_read + comptime!(16 * PARTS);
        let values_come = values_full + comptime!(16 * PARTS);
        let key_tile_full = values_come + comptime!(16 * PARTS);
        let key_tile_come = key_tile_full + 8;
        let key_tile_empty = key_tile_come + 8;
        let scores_read = key_tile_empty + 8;
        let factored = scores_read + 8;
        let output_read = factored + 16;
        let staged = output_read + 8;
        Places {
            rank,
            key_tile_at,
            key_tile_full,
            key_tile_come,
            key_tile_empty,
            scores_read,
            factored,
            output_read,
            staged,
            keys_read,
            values_full,
            values_come,
        }
    }

    /// One thread, before all of both cubes synchronise.
    pub fn init(&self, barriers: &Barriers) {
        #[unroll]
        for i in 0..SLOTS {
            mbarrier::init(barriers.full + i * 8, 1u32);
            mbarrier::init(barriers.come + i * 8, 2u32);
            mbarrier::init(barriers.empty + i * 8, 1u32);
        }
        mbarrier::init(barriers.scored, 1u32);
        mbarrier::init(barriers.scored + 8, 1u32);
        mbarrier::init(barriers.weighed, 8u32);
        mbarrier::init(barriers.summed, 1u32);
        mbarrier::init(barriers.query_full, 1u32);
        mbarrier::init(barriers.query_empty, 1u32);
        #[unroll]
        for i in 0..HELD {
            mbarrier::init(barriers.query_come + i * 8, 8u32);
            mbarrier::init(self.staged + i * 8, 1u32);
            mbarrier::init(self.staged + (i + HELD) * 8, 1u32);
        }
        #[unroll]
        for i in 0..comptime!(2 * PARTS) {
            mbarrier::init(self.keys_read + i * 8, 1u32);
            mbarrier::init(self.values_full + i * 8, 1u32);
            mbarrier::init(self.values_come + i * 8, 1u32);
        }
        mbarrier::init(self.key_tile_full, 1u32);
        mbarrier::init(self.key_tile_come, 2u32);
        mbarrier::init(self.key_tile_empty, 1u32);
        mbarrier::init(self.scores_read, 8u32);
        mbarrier::init(self.factored, 2u32);
        mbarrier::init(self.factored + 8, 2u32);
        mbarrier::init(self.output_read, 8u32);
        mbarrier::fence_init();
    }
}

/// The barriers that all kernels of a pair have, from `full` on; a query comes in as many parts as are in tensor memory.
#[cube]
pub(super) fn barriers(full: u32) -> Barriers {
    let come = full + comptime!(8 * SLOTS);
    let empty = come + comptime!(8 * SLOTS);
    let scored = empty + comptime!(8 * SLOTS);
    let weighed = scored + 16;
    let summed = weighed + 8;
    let query_full = summed + 8;
    let query_come = query_full + 8;
    let query_empty = query_come + comptime!(8 * HELD);
    Barriers { full, come, empty, scored, weighed, summed, query_full, query_come, query_empty }
}

/// Of a chunk that has the turn `turn`: its place.
#[cube]
pub(super) fn slot(turn: u32) -> u32 {
    turn % SLOTS
}

/// Where the place is in shared memory.
#[cube]
pub(super) fn slot_at(chunks_at: u32, turn: u32) -> u32 {
    chunks_at + slot(turn) * CHUNK_BYTES
}

/// The parity of the phase of the place's barriers.
#[cube]
pub(super) fn parity(turn: u32) -> u32 {
    turn / SLOTS % 2
}

/// Which of the barriers for a chunk of each of two blocks, in bytes from the first.
#[cube]
pub(super) fn of_block(block: u32, part: u32) -> u32 {
    (block % 2 * PARTS + part) * 8
}
