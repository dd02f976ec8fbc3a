//! The queries of a cube, and the keys of their block row.

use cubecl::prelude::*;

use super::problem::{Layout, ROWS, VerticalSlashSizes};

/// Where there is no key.
const NO_KEY: i64 = -1;

/// The sizes of a launch.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Sizes {
    query_tokens: u32,
    key_tokens: u32,
    query_stride: u32,
    key_stride: u32,
    rows: u32,
    max_blocks: u32,
    max_columns: u32,
    block_size_m: u32,
    block_size_n: u32,
}

impl VerticalSlashSizes {
    pub(super) fn of_kernel(&self) -> SizesLaunch {
        let (query_stride, key_stride) = match self.layout {
            Layout::Padded { query_stride, key_stride } => (query_stride, key_stride),
            Layout::Packed => (0, 0),
        };
        SizesLaunch::new(
            self.query_tokens as u32,
            self.key_tokens as u32,
            query_stride as u32,
            key_stride as u32,
            self.rows as u32,
            self.max_blocks as u32,
            self.max_columns as u32,
            self.block_size_m as u32,
            self.block_size_n as u32,
        )
    }
}

/// Any sizes, for the offline check.
#[cfg(feature = "offline")]
pub(super) fn offline_sizes() -> SizesLaunch {
    SizesLaunch::new(1, 1, 1, 1, 1, 1, 1, 1, 1)
}

/// Rows of a tensor that belong to a sequence.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Span {
    pub first: u32,
    pub len: u32,
}

#[cube]
fn span(bounds: &[i32], sequence: u32, stride: u32, tokens: u32, #[comptime] packed: bool) -> Span {
    let entry = u32::cast_from(max(bounds[sequence as usize], 0));
    let mut first = sequence * stride;
    let mut len = min(entry, stride);
    if packed {
        first = min(entry, tokens);
        let end = min(u32::cast_from(max(bounds[sequence as usize + 1], 0)), tokens);
        len = max(end, first) - first;
    }
    Span { first, len }
}

/// The queries of a cube: those of a block row, or [`ROWS`] of them.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Queries {
    /// The first one, in the sequence.
    pub first: u32,
    /// What is after the last one of the block row; `first` or less where there is none.
    pub end: u32,
    /// The block row.
    pub row: u32,
    /// The queries and the keys of the sequence.
    pub all: Span,
    pub kv: Span,
}

#[cube]
impl Queries {
    /// Parts of block rows are along x, from the last one or the first one on, sequences along z.
    pub fn of_cube(
        q_bounds: &[i32],
        kv_bounds: &[i32],
        sizes: &Sizes,
        #[comptime] packed: bool,
        #[comptime] last_first: bool,
    ) -> Queries {
        let part = if comptime!(last_first) { parts(sizes) - 1 - CUBE_POS_X } else { CUBE_POS_X };
        Queries::of_part(q_bounds, kv_bounds, sizes, CUBE_POS_Z, part, packed)
    }

    /// Part `part` of a sequence's block rows.
    pub fn of_part(
        q_bounds: &[i32],
        kv_bounds: &[i32],
        sizes: &Sizes,
        sequence: u32,
        part: u32,
        #[comptime] packed: bool,
    ) -> Queries {
        let of_row = parts_of_row(sizes);
        let row = part / of_row;
        let all = span(q_bounds, sequence, sizes.query_stride, sizes.query_tokens, packed);
        let kv = span(kv_bounds, sequence, sizes.key_stride, sizes.key_tokens, packed);
        let first = row * sizes.block_size_m + part % of_row * comptime!(ROWS as u32);
        let end = min((row + 1) * sizes.block_size_m, all.len);
        Queries { first, end, row, all, kv }
    }

    /// The key position of the first one.
    pub fn position(&self) -> i32 {
        i32::cast_from(self.first) + i32::cast_from(self.kv.len) - i32::cast_from(self.all.len)
    }
}

/// Parts of a block row.
#[cube]
fn parts_of_row(sizes: &Sizes) -> u32 {
    (sizes.block_size_m - 1) / comptime!(ROWS as u32) + 1
}

/// Those of all block rows of a sequence.
#[cube]
pub(super) fn parts(sizes: &Sizes) -> u32 {
    sizes.rows * parts_of_row(sizes)
}

/// The keys of a block row, in the order in which they are looked at: those of its key blocks, then its columns.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct KeyList<'a> {
    block_offset: &'a [i32],
    column_index: &'a [i32],
    /// Where in `block_offset` the row's blocks are.
    first_block: usize,
    /// Keys in blocks.
    pub in_blocks: u32,
    block_size: u32,
    /// Where in `column_index` the row's columns are.
    first_column: usize,
    pub columns: u32,
    /// Keys of the sequence.
    end: u32,
}

#[cube]
impl<'a> KeyList<'a> {
    /// That of the queries and of this cube's head.
    pub fn of_cube(
        queries: &Queries,
        block_count: &[i32],
        block_offset: &'a [i32],
        column_count: &[i32],
        column_index: &'a [i32],
        sizes: &Sizes,
    ) -> KeyList<'a> {
        let lists = CUBE_POS_Z as usize * CUBE_COUNT_Y as usize + CUBE_POS_Y as usize;
        KeyList::new(queries, lists, block_count, block_offset, column_count, column_index, sizes)
    }

    /// That of a head; `lists` is the number of the head among those of all sequences.
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        queries: &Queries,
        lists: usize,
        block_count: &[i32],
        block_offset: &'a [i32],
        column_count: &[i32],
        column_index: &'a [i32],
        sizes: &Sizes,
    ) -> KeyList<'a> {
        let at = lists * sizes.rows as usize + queries.row as usize;
        KeyList::<'a> {
            block_offset,
            column_index,
            first_block: at * sizes.max_blocks as usize,
            in_blocks: min(u32::cast_from(max(block_count[at], 0)), sizes.max_blocks) * sizes.block_size_n,
            block_size: sizes.block_size_n,
            first_column: at * sizes.max_columns as usize,
            columns: min(u32::cast_from(max(column_count[at], 0)), sizes.max_columns),
            end: queries.kv.len,
        }
    }

    /// How many places it has.
    pub fn places(&self) -> u32 {
        self.in_blocks + self.columns
    }

    /// The position of the key in place `place`, -1 if the sequence has no such key.
    pub fn position(&self, place: u32) -> i32 {
        self.position_of(place, self.entry(place))
    }

    /// What [`position_of`](KeyList::position_of) takes for a place, as it is in memory: nothing waits for it here.
    pub fn entry(&self, place: u32) -> i32 {
        let mut entry = i32::new(NO_KEY);
        if place < self.in_blocks {
            entry = self.block_offset[self.first_block + (place / self.block_size) as usize];
        } else if place - self.in_blocks < self.columns {
            entry = self.column_index[self.first_column + (place - self.in_blocks) as usize];
        }
        entry
    }

    /// The position of the key in a place that has this entry, -1 if the sequence has no such key.
    pub fn position_of(&self, place: u32, entry: i32) -> i32 {
        let mut position = entry;
        // An offset of -1 marks no block, although some of its keys would be there.
        if place < self.in_blocks && entry >= 0 {
            position += i32::cast_from(place % self.block_size);
        }
        if position < 0 || u32::cast_from(position) >= self.end {
            position = i32::new(NO_KEY);
        }
        position
    }
}
