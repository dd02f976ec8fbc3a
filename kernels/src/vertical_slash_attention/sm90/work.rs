//! Which parts of block rows a cube computes, and in which order.

use cubecl::prelude::*;

use super::form::{GROUP_ROWS, GROUPS};
use crate::vertical_slash_attention::rows::{KeyList, Queries, Sizes, parts};

/// The bounds of the sequences, and the lists of keys.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Index<'a> {
    pub q_bounds: &'a [i32],
    pub kv_bounds: &'a [i32],
    pub block_count: &'a [i32],
    pub block_offset: &'a [i32],
    pub column_count: &'a [i32],
    pub column_index: &'a [i32],
    #[cube(comptime)]
    pub packed: bool,
}

#[cube]
impl<'a> Index<'a> {
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        q_bounds: &'a [i32],
        kv_bounds: &'a [i32],
        block_count: &'a [i32],
        block_offset: &'a [i32],
        column_count: &'a [i32],
        column_index: &'a [i32],
        #[comptime] packed: bool,
    ) -> Index<'a> {
        Index::<'a> { q_bounds, kv_bounds, block_count, block_offset, column_count, column_index, packed }
    }
}

/// All work of a launch: for each head of each sequence the parts of its block rows, two at a time.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Schedule {
    /// Numbers of work.
    pub count: u32,
    pairs: u32,
    heads: u32,
    cube: u32,
    cubes: u32,
}

#[cube]
impl Schedule {
    pub fn new(sizes: &Sizes, heads: u32, sequences: u32) -> Schedule {
        let pairs = parts(sizes).div_ceil(GROUPS);
        Schedule { count: pairs * heads * sequences, pairs, heads, cube: CUBE_POS_X, cubes: CUBE_COUNT_X }
    }

    /// Whether there is work in a round, in which each cube has one.
    pub fn has_round(&self, round: u32) -> bool {
        round * self.cubes < self.count
    }

    /// The number of this cube's work in a round; none in the last one if it is not less than [`count`](Schedule::count).
    ///
    /// Every other round goes backwards: the rows that a cube has are not always the longest of a round.
    pub fn number(&self, round: u32) -> u32 {
        let backwards = round % 2;
        round * self.cubes + select(backwards == 0, self.cube, self.cubes - 1 - self.cube)
    }
}

/// Two neighbouring parts of the block rows of a head, one for each warpgroup.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Work {
    pub head: u32,
    /// The number of the head among those of all sequences.
    lists: u32,
    sequence: u32,
    /// The first part.
    part: u32,
}

#[cube]
impl Work {
    /// Of a number. The last rows come first: where queries see only what precedes them, these have the most keys. Cubes that run at the
    /// same time have neighbouring rows of a head, and so much the same keys.
    pub fn new(schedule: &Schedule, number: u32) -> Work {
        let lists = number / schedule.pairs;
        let pair = schedule.pairs - 1 - number % schedule.pairs;
        Work { head: lists % schedule.heads, lists, sequence: lists / schedule.heads, part: pair * GROUPS }
    }

    /// The queries of a warpgroup; none past the last part.
    pub fn queries(&self, index: &Index<'_>, sizes: &Sizes, group: u32) -> Queries {
        let part = self.part + group;
        let mut queries = Queries::of_part(index.q_bounds, index.kv_bounds, sizes, self.sequence, part, index.packed);
        if part >= parts(sizes) {
            queries.end = queries.first;
            // One that has lists.
            queries.row = 0u32;
        }
        queries
    }

    /// The keys of a warpgroup; none without queries.
    pub fn list<'a>(&self, queries: &Queries, index: &Index<'a>, sizes: &Sizes) -> KeyList<'a> {
        let mut list = KeyList::new(
            queries,
            self.lists as usize,
            index.block_count,
            index.block_offset,
            index.column_count,
            index.column_index,
            sizes,
        );
        if queries.first >= queries.end {
            list.in_blocks = 0u32;
            list.columns = 0u32;
        }
        list
    }
}

/// Queries of a warpgroup.
#[cube]
pub(super) fn rows(queries: &Queries) -> u32 {
    min(max(queries.end, queries.first) - queries.first, comptime!(GROUP_ROWS as u32))
}
