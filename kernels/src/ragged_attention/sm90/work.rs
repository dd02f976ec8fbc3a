//! Which tile and head a cube computes when, and the slot of shared memory in which its loading thread tells the others.
//!
//! Numbers of work count the heads of a group first, then the tiles, then the groups: cubes that run at the same time have the
//! same heads, whose keys and values stay in the L2 cache, and the tiles with most keys come first.

use cubecl::prelude::*;

use super::form::{KEYS, WARPS};
use super::plan::PlannedTile;
use crate::ptx::mbarrier;

/// Numbers in the slot.
pub(super) const SLOT_WORDS: usize = 8;

/// All work of a launch.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Schedule {
    /// Numbers of work.
    pub count: u32,
    tiles: u32,
    heads: u32,
    /// Heads of a group.
    together: u32,
}

#[cube]
impl Schedule {
    pub fn new(tiles: &[i32], heads: u32, together: u32) -> Schedule {
        let count = tiles[0] as u32;
        Schedule { count: count * heads, tiles: count, heads, together }
    }

    /// Work `number`.
    pub fn read(&self, tiles: &[i32], number: u32) -> Work {
        let of_group = self.tiles * self.together;
        let first_head = number / of_group * self.together;
        let place = number % of_group;
        let heads = min(self.together, self.heads - first_head);
        Work { tile: PlannedTile::read(tiles, place / heads), head: first_head + place % heads }
    }
}

/// A tile of the queries of one head.
#[derive(CubeTypeMut, CubeType, Clone, Copy)]
pub(super) struct Work {
    pub tile: PlannedTile,
    pub head: u32,
}

#[cube]
impl Work {
    /// What says that there is no more.
    pub fn none() -> Work {
        let tile = PlannedTile {
            query: 0u32,
            rows: 0u32,
            first_key: 0u32,
            keys: 0u32,
            first_sees: 0i32,
            blocks: 0u32,
            hidden_blocks: 0u32,
        };
        Work { tile, head: 0u32 }
    }

    pub fn is_some(&self) -> bool {
        self.tile.rows > 0
    }

    /// Rows of the last block of values that hold no value of the sequence; 0 for none. Their weights are zero, but what is
    /// there may be NaN.
    pub fn values_of_last(&self) -> u32 {
        self.tile.keys - (self.tile.blocks - 1) * comptime!(KEYS as u32)
    }

    /// Whether the last block has rows past the end of the sequence.
    pub fn has_tail(&self) -> bool {
        self.tile.blocks * comptime!(KEYS as u32) > self.tile.keys
    }
}

/// Where the loading thread writes what is next, with the barriers that say that it is there, with its queries, and that nobody
/// needs both any longer.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Slot {
    pub full: u32,
    empty: u32,
    /// Works so far.
    turn: u32,
}

#[cube]
impl Slot {
    pub fn new(barriers_at: u32) -> Slot {
        Slot { full: barriers_at, empty: barriers_at + 8, turn: 0u32 }
    }

    /// Initialises the barriers. One thread, before all synchronise.
    pub fn init(&self) {
        mbarrier::init(self.full, 1u32);
        // The warps that compute, and the one that clears values.
        mbarrier::init(self.empty, comptime!(WARPS + 1));
    }

    /// Waits until it may be written, and does so. The loading thread, which then arrives at `full`.
    pub fn write(&mut self, words: &mut Shared<[u32]>, work: &Work) {
        mbarrier::wait(self.empty, (self.turn % 2) ^ 1);
        words[0] = work.tile.query;
        words[1] = work.tile.rows;
        words[2] = work.tile.first_key;
        words[3] = work.tile.keys;
        words[4] = work.tile.first_sees as u32;
        words[5] = work.tile.blocks;
        words[6] = work.head;
        words[7] = work.tile.hidden_blocks;
        self.turn += 1;
    }

    /// Waits for the next work.
    pub fn read(&self, words: &Shared<[u32]>) -> Work {
        mbarrier::wait(self.full, self.turn % 2);
        let tile = PlannedTile {
            query: words[0],
            rows: words[1],
            first_key: words[2],
            keys: words[3],
            first_sees: words[4] as i32,
            blocks: words[5],
            hidden_blocks: words[7],
        };
        Work { tile, head: words[6] }
    }

    /// Gives it back. A warp that has read it, and needs the queries no longer.
    pub fn release(&mut self, lane: u32) {
        // All lanes have read it.
        sync_plane();
        mbarrier::arrive_if(self.empty, lane == 0);
        self.turn += 1;
    }
}

/// Heads whose keys and values stay in the L2 cache together: of so many bytes for each of their heads. Groups are of one size where
/// that costs less than half of them: after a small last one many cubes have nothing to do.
pub(super) fn heads_together(heads: usize, kv_heads: usize, head_bytes: usize) -> usize {
    /// Of 50 MiB, beside queries and outputs.
    const CACHE_BYTES: usize = 32 << 20;
    let most = (CACHE_BYTES / head_bytes.max(1)).clamp(1, kv_heads);
    let equal = (most / 2 + 1..=most).rev().find(|&together| kv_heads.is_multiple_of(together));
    equal.unwrap_or(most) * (heads / kv_heads)
}

/// Cubes of a launch: one on each multiprocessor, where there is as much work.
pub(super) fn cubes(multiprocessors: usize, tiles: usize, heads: usize) -> usize {
    multiprocessors.min(tiles * heads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_heads_are_of_one_size_where_that_costs_little() {
        let of_cache = |together: usize| (32 << 20) / together;
        assert_eq!(heads_together(16, 16, of_cache(12)), 8);
        assert_eq!(heads_together(16, 16, of_cache(3)), 2);
        assert_eq!(heads_together(13, 13, of_cache(5)), 5, "13 has no divisor from 3 to 5");
        assert_eq!(heads_together(32, 8, of_cache(5)), 16, "4 query heads for each of 4");
        assert_eq!(heads_together(4, 4, usize::MAX), 1);
        assert_eq!(heads_together(4, 2, 0), 4);
    }
}
