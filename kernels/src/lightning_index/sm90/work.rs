//! Which blocks of keys a cube scores for which query tokens.
//!
//! A tile is as many query tokens of one sequence as two warpgroups have columns for. It has as many blocks as the token of it that
//! sees most keys. All blocks of all tiles are one list, of which each cube has a part of the same length.

use cubecl::prelude::*;

use super::form::{Form, GROUPS, KEYS, UNITS};
use crate::common::scan::sum_before;
use crate::lightning_index::form::LOAD;
use crate::lightning_index::problem::visible_keys;
use crate::ptx::read;

/// The query tokens of a launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Rows {
    /// The first row that is scored, and one past the last.
    pub first_row: u32,
    pub end_row: u32,
    /// The first tile, and how many there are.
    pub first_tile: u32,
    pub tiles: u32,
    pub query_len: u32,
    pub max_keys: u32,
    pub k: u32,
}

/// Query tokens of a sequence that a cube scores together.
#[derive(CubeTypeMut, CubeType, Clone, Copy)]
pub(super) struct Tile {
    pub sequence: u32,
    /// The row of its first token.
    pub row: u32,
    /// The rows of it that belong to the launch end before this one.
    pub end: u32,
    /// One past the last key that a token sees which is scored.
    pub keys: u32,
}

#[cube]
impl Rows {
    /// Keys that a row sees, 0 if it is not scored.
    pub fn scored_keys(&self, visible: &[i32], row: u32) -> u32 {
        let seen = visible_keys(visible, row as usize, self.max_keys) as u32;
        select(seen > self.k, seen, 0u32)
    }

    /// Ranks of a row of a tile, in whole loads; 0 where the row is none of the tile's.
    pub fn ranks(&self, visible: &[i32], tile: &Tile, row: u32) -> u32 {
        let mut ranks = 0u32;
        if row >= self.first_row && row < tile.end {
            ranks = self.scored_keys(visible, row).div_ceil(comptime!(LOAD as u32)) * comptime!(LOAD as u32);
        }
        ranks
    }

    /// Tile `number` of the launch.
    pub fn tile(&self, visible: &[i32], number: u32, #[comptime] form: Form) -> Tile {
        let tokens = comptime!(form.tokens() as u32);
        let per_sequence = self.query_len.div_ceil(tokens);
        let number = self.first_tile + number;
        let sequence = number / per_sequence;
        let first = number % per_sequence * tokens;
        let row = sequence * self.query_len + first;
        let end = min(row + min(self.query_len - first, tokens), self.end_row);
        let start = max(row, self.first_row);
        let mut keys = 0u32;
        #[unroll]
        for i in 0..comptime!(form.tokens()) {
            // Independent loads: of the last row several times.
            let row = min(start + i as u32, end - 1);
            keys = max(keys, self.scored_keys(visible, row));
        }
        Tile { sequence, row, end, keys }
    }
}

#[cube]
impl Tile {
    pub fn blocks(&self) -> u32 {
        self.keys.div_ceil(comptime!(KEYS as u32))
    }

    /// The row of a warpgroup's first token.
    pub fn row_of(&self, group: u32, #[comptime] form: Form) -> u32 {
        self.row + group * comptime!(form.group_tokens() as u32)
    }
}

/// What is left of a cube's part of the list.
#[derive(CubeTypeMut, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Share {
    /// The number of the next tile, and the next block of it.
    tile: u32,
    block: u32,
    /// Blocks.
    pub left: u32,
}

/// Blocks of a tile.
#[derive(CubeTypeMut, CubeType, Clone, Copy)]
pub(super) struct Part {
    pub tile: Tile,
    pub first: u32,
    pub end: u32,
}

#[cube]
impl Share {
    /// The part of this cube. Called by all units; `scratch` has a number for each of them and two more, and is free then.
    pub fn new(rows: &Rows, visible: &[i32], scratch: &mut Shared<[u32]>, #[comptime] form: Form) -> Share {
        // Each unit counts the blocks of some neighbouring tiles.
        let per_unit = rows.tiles.div_ceil(UNITS);
        let first = min(UNIT_POS * per_unit, rows.tiles);
        let end = min(first + per_unit, rows.tiles);
        let mut blocks = 0u32;
        for number in first..end {
            blocks += rows.tile(visible, number, form).blocks();
        }
        // Of a cube without a part, which does not look at them.
        if UNIT_POS == 0 {
            scratch[comptime!(UNITS as usize)] = 0u32;
            scratch[comptime!(UNITS as usize + 1)] = 0u32;
        }
        let before = sum_before(scratch, blocks, comptime!(UNITS as usize));
        let all = scratch[comptime!(UNITS as usize - 1)];
        let (each, rest) = (all / CUBE_COUNT_X, all % CUBE_COUNT_X);
        let start = CUBE_POS_X * each + min(CUBE_POS_X, rest);
        let left = each + u32::cast_from(CUBE_POS_X < rest);
        if start >= before && start < before + blocks {
            let mut number = first;
            let mut block = start - before;
            let mut of_tile = rows.tile(visible, number, form).blocks();
            while block >= of_tile {
                block -= of_tile;
                number += 1;
                of_tile = rows.tile(visible, number, form).blocks();
            }
            scratch[comptime!(UNITS as usize)] = number;
            scratch[comptime!(UNITS as usize + 1)] = block;
        }
        sync_cube();
        let share =
            Share { tile: scratch[comptime!(UNITS as usize)], block: scratch[comptime!(UNITS as usize + 1)], left };
        sync_cube();
        share
    }

    /// The blocks of the next tile that has any. Not called where none are left.
    pub fn next(&mut self, rows: &Rows, visible: &[i32], #[comptime] form: Form) -> Part {
        let mut tile = rows.tile(visible, self.tile, form);
        while tile.keys == 0 {
            self.tile += 1;
            tile = rows.tile(visible, self.tile, form);
        }
        // A copy: the field changes below.
        let first = read::<u32>(self.block);
        let end = min(tile.blocks(), first + self.left);
        self.tile += 1;
        self.block = 0u32;
        self.left -= end - first;
        Part { tile, first, end }
    }
}

/// The tiles of some rows: the first, and how many there are.
pub(super) fn tiles_of([first_row, rows]: [usize; 2], query_len: usize, form: Form) -> [usize; 2] {
    let per_sequence = query_len.div_ceil(form.tokens());
    let tile_of = |row: usize| row / query_len * per_sequence + row % query_len / form.tokens();
    let first = tile_of(first_row);
    [first, tile_of(first_row + rows - 1) - first + 1]
}

const _: () = assert!(GROUPS == 2, "a tile is of two warpgroups");
