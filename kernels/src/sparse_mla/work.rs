//! The work: tiles of 64 heads of a query token, the blocks of their lists, and the slots of these.

use cubecl::prelude::*;

use super::form::{Causal, Form, Writes};
use crate::ptx::warp;
use crate::tiles::form::{KEYS, ROWS};
use crate::tiles::loader::{Item, Plan, Tile};
use crate::tiles::output::Target;

/// Blocks whose slots are in shared memory, where they are published.
pub(super) const RING: u32 = 4;

/// The lists of all query tokens.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Lists<'a> {
    pub slots_a: &'a [i32],
    pub lengths_a: &'a [i32],
    pub slots_b: &'a [i32],
    pub lengths_b: &'a [i32],
    /// Entries of a list.
    pub most_a: u32,
    pub most_b: u32,
    /// Tiles of a token, and cubes that share the blocks of a tile.
    pub head_tiles: u32,
    pub splits: u32,
    pub pages: PagedKeys,
    /// How the blocks are divided, if by a plan.
    pub plan: Plan<'a>,
    #[cube(comptime)]
    form: Form,
}

/// How the pages of sequences are found, if the first list is those.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct PagedKeys {
    /// Query tokens of a sequence; 1 where a plan divides lists.
    pub query_len: u32,
    /// Pages of a sequence at most.
    pub max_pages: u32,
    /// The logarithm of the page size.
    pub page_shift: u32,
    /// Slots of the cache.
    pub slot_count: u32,
}

#[cube]
impl<'a> Lists<'a> {
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        slots_a: &'a [i32],
        lengths_a: &'a [i32],
        slots_b: &'a [i32],
        lengths_b: &'a [i32],
        most_a: u32,
        most_b: u32,
        head_tiles: u32,
        splits: u32,
        pages: PagedKeys,
        items: &'a [i32],
        split_ptr: &'a [i32],
        #[comptime] form: Form,
    ) -> Lists<'a> {
        let plan = Plan::new(items, split_ptr, lengths_a, slots_a);
        Lists::<'a> { slots_a, lengths_a, slots_b, lengths_b, most_a, most_b, head_tiles, splits, pages, plan, form }
    }
}

#[cube]
impl Lists<'_> {
    /// The first query row of a work.
    pub fn query_row(&self, index: u32, heads: u32) -> u32 {
        let mut tile = index % self.head_tiles;
        let mut token = index / self.head_tiles / self.splits;
        if comptime!(self.form.planned()) {
            tile = CUBE_POS_X % self.head_tiles;
            token = self.token_of(self.plan.items[index as usize * 4] as u32);
        }
        token * heads + tile * comptime!(ROWS as u32)
    }

    /// The query token of a sequence that is the cube's.
    fn token_of(&self, sequence: u32) -> u32 {
        sequence * self.pages.query_len + CUBE_POS_X / self.head_tiles
    }

    /// The slot of what was found; that of a key on a page that is not there is the last one of the cache.
    pub fn slot_of(&self, found: &Found) -> i32 {
        let mut slot = found.value;
        if comptime!(self.form.pages.is_some()) {
            let PagedKeys { page_shift, slot_count, .. } = self.pages;
            let slot_on_page = found.key & ((1u32 << page_shift) - 1);
            slot = min(((found.value as u32) << page_shift) + slot_on_page, slot_count - 1) as i32;
        }
        select(found.there, slot, i32::new(-1))
    }
}

/// What a list has for an entry, as it was read: nothing waits for it before it is looked at.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Found {
    /// Whether there is such an entry.
    pub there: bool,
    /// A slot, negative for none, or the page of a key.
    value: i32,
    key: u32,
}

#[cube]
impl Found {
    pub fn nothing() -> Found {
        Found { there: false.runtime(), value: i32::new(-1), key: 0u32 }
    }

    /// Reads entry `place` of a block.
    pub fn read(&mut self, lists: &Lists, work: &Work, block: u32, place: u32) {
        let blocks_a = blocks_of(work.len_a);
        let keys = comptime!(KEYS as u32);
        if comptime!(lists.form.second) && block >= blocks_a {
            self.key = (block - blocks_a) * keys + place;
            self.there = self.key < work.len_b;
            if self.there {
                self.value = lists.slots_b[work.token as usize * lists.most_b as usize + self.key as usize];
            }
        } else {
            self.key = block * keys + place;
            if comptime!(lists.form.pages.is_some()) {
                self.key += work.first_key;
            }
            self.there = self.key < work.len_a;
            if self.there {
                let mut at = self.key;
                if comptime!(lists.form.pages.is_some()) {
                    at = self.key >> lists.pages.page_shift;
                }
                self.value = lists.slots_a[work.list_a + at as usize];
            }
        }
    }
}

/// Some blocks of a tile.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Work {
    pub token: u32,
    pub head_tile: u32,
    /// Whether it is all of the tile, and which number it has among all splits otherwise.
    pub whole: bool,
    pub part: u32,
    /// Where the first list begins, or the pages of the sequence.
    list_a: usize,
    /// The key of the pages from which on the blocks are counted.
    first_key: u32,
    /// Entries of the lists that count: all up to here.
    len_a: u32,
    len_b: u32,
    /// The blocks, and one past the last: those of the first list and then those of the second.
    pub first: u32,
    pub end: u32,
}

#[cube]
impl Work {
    pub fn none() -> Work {
        Work {
            token: 0u32,
            head_tile: 0u32,
            whole: false.runtime(),
            part: 0u32,
            list_a: 0usize,
            first_key: 0u32,
            len_a: 0u32,
            len_b: 0u32,
            first: 0u32,
            end: 0u32,
        }
    }

    /// Number `index` of the launch, or of the plan.
    pub fn read(&mut self, lists: &Lists, index: u32) {
        if comptime!(lists.form.pages.is_some()) {
            self.read_item(lists, index);
        } else if comptime!(lists.form.planned()) {
            self.read_part(lists, index);
        } else {
            self.read_split(lists, index);
        }
    }

    /// Number `index` of all tiles' splits. The tiles of a token are neighbours: they read the same rows.
    fn read_split(&mut self, lists: &Lists, index: u32) {
        self.head_tile = index % lists.head_tiles;
        let rest = index / lists.head_tiles;
        let split = rest % lists.splits;
        self.token = rest / lists.splits;
        self.whole = comptime!(lists.form.writes == Writes::Whole).runtime();
        self.part = self.token * lists.splits + split;
        let blocks = self.read_lengths(lists);
        let mut each = blocks.div_ceil(lists.splits);
        if comptime!(lists.form.by_two) {
            each += each % 2;
        }
        self.first = min(split * each, blocks);
        self.end = min(self.first + each, blocks);
    }

    /// Item `index` of the plan, whose sequences are query tokens: no more blocks than their lists have now.
    fn read_part(&mut self, lists: &Lists, index: u32) {
        let at = index as usize * 4;
        self.token = lists.plan.items[at] as u32;
        self.head_tile = CUBE_POS_X;
        self.whole = lists.plan.is_whole(self.token);
        self.part = index;
        let blocks = self.read_lengths(lists);
        self.first = blocks_of(lists.plan.items[at + 1] as u32);
        self.end = min(blocks_of(lists.plan.items[at + 2] as u32), blocks);
    }

    /// Where the lists of the token are. Returns their blocks.
    fn read_lengths(&mut self, lists: &Lists) -> u32 {
        self.list_a = self.token as usize * lists.most_a as usize;
        self.len_a = lists.most_a;
        if comptime!(lists.form.lengths[0]) {
            self.len_a = length(lists.lengths_a[self.token as usize], lists.most_a);
        }
        self.len_b = 0u32;
        if comptime!(lists.form.second) {
            self.len_b = lists.most_b;
            if comptime!(lists.form.lengths[1]) {
                self.len_b = length(lists.lengths_b[self.token as usize], lists.most_b);
            }
        }
        blocks_of(self.len_a) + blocks_of(self.len_b)
    }

    /// Item `index` of the plan of sequences, for the query token that is the cube's: as a row of its own, with as many keys as it sees.
    fn read_item(&mut self, lists: &Lists, index: u32) {
        let tile = Tile {
            query_len: lists.pages.query_len,
            heads: 1u32,
            last_row: CUBE_POS_X / lists.head_tiles,
            causal: comptime!(lists.form.pages == Some(Causal(true))),
        };
        let mut item = Item::none();
        item.read(&lists.plan, index, &tile);
        self.head_tile = CUBE_POS_X % lists.head_tiles;
        self.token = lists.token_of(item.sequence);
        self.whole = lists.plan.is_whole(item.sequence);
        self.part = lists.token_of(index);
        self.list_a = item.sequence as usize * lists.pages.max_pages as usize;
        self.first_key = item.first_key;
        self.len_a = item.tile_end;
        self.end = item.blocks;
    }

    /// The first query row of the tile.
    pub fn query_row(&self, heads: u32) -> u32 {
        self.token * heads + self.head_tile * comptime!(ROWS as u32)
    }

    /// How many blocks there are.
    pub fn blocks(&self) -> u32 {
        max(self.end, self.first) - self.first
    }

    /// Where the rows of the tile go.
    pub fn target(&self) -> Target {
        Target::new(self.whole, self.token, self.part)
    }

    /// Which list a block is of: 1 or 2.
    pub fn list_of(&self, block: u32) -> u32 {
        select(block < blocks_of(self.len_a), 1u32, 2u32)
    }
}

/// The number of the work behind this one: of a plan's items the next. All lanes are at the same, which the compiler cannot see of
/// numbers that it reads.
#[cube]
pub(super) fn next(index: u32, step: u32, #[comptime] form: Form) -> u32 {
    if comptime!(form.planned()) { warp::next(index) } else { index + step }
}

/// A length of the device, as far as a list goes.
#[cube]
fn length(value: i32, most: u32) -> u32 {
    min(max(value, 0i32) as u32, most)
}

#[cube]
fn blocks_of(len: u32) -> u32 {
    (len + comptime!(KEYS as u32 - 1)) / comptime!(KEYS as u32)
}

/// The blocks of all work of a cube, one after the other, ahead of the scores: their slots, for who loads the rows. Its functions are
/// called by the whole warpgroup of the scores, or by each warp of that of the FP8 rows, for its own.
#[derive(CubeType)]
pub(super) struct Ahead {
    index: u32,
    end: u32,
    step: u32,
    work: Work,
    block: u32,
    /// This unit's entry of a block, and whether it is the one that publishes it.
    place: u32,
    publishes: bool,
    /// Of the next block that is published: what was found for this unit, and of which list it is; 0 where there is none.
    found: Found,
    pub list: u32,
    /// Blocks that have been published.
    turn: u32,
}

#[cube]
impl Ahead {
    pub fn new(lists: &Lists, index: u32, end: u32, step: u32, place: u32, publishes: bool) -> Ahead {
        let (work, found) = (Work::none(), Found::nothing());
        let mut ahead = Ahead { index, end, step, work, block: 0u32, place, publishes, found, list: 0u32, turn: 0u32 };
        ahead.open(lists);
        ahead
    }

    /// Goes on to the first work with blocks, from this one on, and starts to read its first slots.
    fn open(&mut self, lists: &Lists) {
        let mut found = false;
        while !found && self.index < self.end {
            self.work.read(lists, self.index);
            found = self.work.end > self.work.first;
            if !found {
                self.index = next(self.index, self.step, lists.form);
            }
        }
        self.block = self.work.first;
        self.list = 0u32;
        self.found.there = false;
        if found {
            self.read(lists);
        }
    }

    fn read(&mut self, lists: &Lists) {
        self.list = self.work.list_of(self.block);
        self.found.read(lists, &self.work, self.block, self.place);
    }

    /// This unit's slot of the next block.
    pub fn slot(&self, lists: &Lists) -> i32 {
        lists.slot_of(&self.found)
    }

    /// Writes the next block's slots where the loads and its scores find them.
    pub fn publish(&mut self, lists: &Lists, slots: &mut Shared<[i32]>, kinds: &mut Shared<[u32]>) {
        let stage = self.turn % RING;
        if self.publishes {
            slots[(stage * comptime!(KEYS as u32) + self.place) as usize] = self.slot(lists);
        }
        if self.publishes && self.place == 0 {
            kinds[stage as usize] = self.list;
        }
        self.turn += 1;
    }

    /// Goes on to the next block.
    pub fn advance(&mut self, lists: &Lists) {
        if self.list > 0 {
            self.block = warp::next(self.block);
            if self.block == self.work.end {
                self.index = next(self.index, self.step, lists.form);
                self.open(lists);
            } else {
                self.read(lists);
            }
        }
    }
}
