//! What a cube loads one after the other where there are FP8 rows: the keys of a block, the values of the one before it, and so on.

use cubecl::prelude::*;

use super::super::range::Range;
use super::super::rows::OWN_ROWS;
use super::{ENTRY_BLOCKS, Entries};
use crate::ptx::{matrix, mbarrier, shared_address, warp};
use crate::sparse_mla::work::{Found, Lists, Work};

/// A block of 128 entries as a warp has it: of each half its 16 rows, a slot in each lane.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Block {
    pub slot: i32,
    /// The lists of its halves, and how many there are.
    list_0: u32,
    list_1: u32,
    pub halves: u32,
}

#[cube]
impl Block {
    pub fn none() -> Block {
        Block { slot: i32::new(-1), list_0: 0u32, list_1: 0u32, halves: 0u32 }
    }

    /// Becomes another. Fields, for CubeCL assigns no structures.
    pub fn set(&mut self, other: &Block) {
        self.slot = other.slot;
        self.list_0 = other.list_0;
        self.list_1 = other.list_1;
        self.halves = other.halves;
    }

    pub fn list(&self, half: u32) -> u32 {
        select(half == 0, self.list_0, self.list_1)
    }
}

/// The keys or values of all blocks of all work: of each work with n blocks 2 n phases, K0, K1, V0, K2, V1, .. , K(n - 1), V(n - 2), V(n - 1),
/// in the order of the products.
#[derive(CubeType)]
pub(super) struct Phases {
    index: u32,
    work: Work,
    /// Halves of blocks and blocks of the work, phases of it that have begun, and blocks of it whose entries have been read.
    halves: u32,
    blocks: u32,
    phase: u32,
    read: u32,
    /// The entry that has been read ahead, and blocks of all work so far.
    found: Found,
    turn: u32,
    /// The last block whose keys have had their turn, and the one before it.
    keys: Block,
    before: Block,
    /// This phase.
    pub are_values: bool,
    pub block: Block,
}

#[cube]
impl Phases {
    /// Before the first phase.
    pub fn new(range: &Range) -> Phases {
        Phases {
            index: range.first,
            work: Work::none(),
            halves: 0u32,
            blocks: 0u32,
            phase: 0u32,
            read: 0u32,
            found: Found::nothing(),
            turn: 0u32,
            keys: Block::none(),
            before: Block::none(),
            are_values: false.runtime(),
            block: Block::none(),
        }
    }

    /// Goes on to the next phase; behind the last one its block has no halves. A whole warp, number `number` of four.
    pub fn advance(&mut self, lists: &Lists, range: &Range, number: u32, lane: u32, entries: &Entries) {
        if self.phase == 2 * self.blocks {
            self.open(lists, range, number, lane);
        }
        if self.blocks == 0 {
            self.block.halves = 0u32;
            self.block.slot = i32::new(-1);
        } else {
            let is_last = self.phase + 1 == 2 * self.blocks;
            self.are_values = is_last || (self.phase > 0 && self.phase % 2 != 1);
            if !self.are_values {
                self.take(lists, number, lane, entries);
                self.block.set(&self.keys);
            } else if is_last {
                self.block.set(&self.keys);
            } else {
                self.block.set(&self.before);
            }
            self.phase = warp::next(self.phase);
        }
    }

    /// Goes on to the next work that has blocks, if there is one, and reads the first entries.
    fn open(&mut self, lists: &Lists, range: &Range, number: u32, lane: u32) {
        self.halves = 0u32;
        while self.halves == 0 && self.index < range.end {
            self.work.read(lists, self.index);
            self.halves = warp::uniform(self.work.blocks());
            self.index = range.next(self.index);
        }
        self.blocks = self.halves.div_ceil(2u32);
        self.phase = 0u32;
        self.read = 0u32;
        self.read_ahead(lists, number, lane);
    }

    /// Starts to read the entries of the next block of the work, if there is one: behind its last half there are none.
    fn read_ahead(&mut self, lists: &Lists, number: u32, lane: u32) {
        let half = self.work.first + self.read * 2 + lane / OWN_ROWS;
        self.found.there = false;
        if half < self.work.end {
            self.found.read(lists, &self.work, half, number * OWN_ROWS + lane % OWN_ROWS);
        }
        self.read = warp::next(self.read);
    }

    /// Takes the slots that have been read of a block, and tells the softmax which of the warp's entries are rows.
    fn take(&mut self, lists: &Lists, number: u32, lane: u32, entries: &Entries) {
        self.before.slot = self.keys.slot;
        self.before.list_0 = self.keys.list_0;
        self.before.list_1 = self.keys.list_1;
        self.before.halves = self.keys.halves;
        let first = (self.read - 1) * 2;
        self.keys.slot = lists.slot_of(&self.found);
        self.keys.list_0 = warp::uniform(self.work.list_of(self.work.first + first));
        self.keys.list_1 = warp::uniform(self.work.list_of(self.work.first + first + 1));
        self.keys.halves = min(self.halves - first, comptime!(2u32).runtime());
        self.read_ahead(lists, number, lane);
        let seen = warp::ballot(self.keys.slot >= 0);
        let at = self.turn % ENTRY_BLOCKS;
        let word = shared_address(&entries.seen) + at * 16 + number * 4;
        matrix::store_4_if(word, 0u32, seen, lane == 0);
        sync_plane();
        mbarrier::arrive_if(entries.published + at * 8, lane == 0);
        self.turn = warp::next(self.turn);
    }
}
