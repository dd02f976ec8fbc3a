//! Which tile a pair of cubes computes when.

use cubecl::prelude::*;

use super::{CUBES, Form, Rows, Shares};
use crate::experts_mlp::sort::{EVEN, TILE, pairs_of_tile};

/// Tokens whose tiles meet all weights before the next tiles do: these and the weights that are in use stay in the L2 cache.
const TOGETHER: usize = 2048;

/// The tiles of a launch. They are numbered so that those which run at the same time share tokens and weights.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Schedule {
    /// Tiles, each of a pair of cubes.
    pub count: u32,
    /// Pairs of cubes that all outputs take.
    pairs: u32,
    rows: u32,
    heads: u32,
    /// Tiles of tokens, or pairs of tiles that share weights.
    token_tiles: u32,
    blocks: u32,
    splits: u32,
}

#[cube]
impl Schedule {
    pub fn new(
        blocks: u32,
        outputs: u32,
        rows: u32,
        heads: u32,
        token_tiles: u32,
        splits: u32,
        #[comptime] form: Form,
    ) -> Schedule {
        let shares_tokens = comptime!(form.shares == Shares::Tokens);
        let pairs = outputs.div_ceil(comptime!(form.outputs() as u32 * if shares_tokens { CUBES } else { 1 }));
        let token_tiles = token_tiles.div_ceil(comptime!(if shares_tokens { 1u32 } else { CUBES }));
        Schedule { count: splits * token_tiles * pairs, pairs, rows, heads, token_tiles, blocks, splits }
    }
}

/// A tile of the output.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Place {
    /// The matrix: of an expert or head.
    pub expert: u32,
    /// The head of the rows of x.
    pub head: u32,
    /// The first of the cube's outputs.
    pub output: u32,
    /// The first row of x.
    pub first: u32,
    /// How many rows there are; none in a tile past the last one.
    pub tokens: u32,
    /// The part of the channels, and its blocks: all between these, or every so many, as `parts.rs` deals them.
    pub split: u32,
    pub first_block: u32,
    pub end_block: u32,
}

#[cube]
impl Place {
    /// Tile `number` of the schedule, as the cube of this rank has it.
    pub fn read(tiles: &[i32], schedule: &Schedule, number: u32, rank: u32, #[comptime] form: Form) -> Place {
        let mut number = number;
        let mut split = 0u32;
        let mut first_block = 0u32;
        let mut end_block = schedule.blocks;
        if comptime!(form.split) {
            split = number % schedule.splits;
            number /= schedule.splits;
            if comptime!(form.in_parts) {
                first_block = split;
            } else {
                let together = comptime!(form.blocks_together());
                let count = schedule.blocks / together;
                first_block = split * count / schedule.splits * together;
                end_block = (split + 1) * count / schedule.splits * together;
            }
        }
        if comptime!(form.is_grouped()) {
            // An expert's tiles meet all of its weights before the next expert's do.
            let at = (number / schedule.pairs) as usize * TILE;
            let (expert, first_tile, count) = (tiles[at] as u32, tiles[at + 3] as u32, tiles[at + 4] as u32);
            let each = pairs_of_tile(count, comptime!(form.tokens as u32));
            let before = number / schedule.pairs - first_tile;
            let own_tiles = max(count.div_ceil(comptime!(form.tokens as u32)), 1u32);
            let within = number - first_tile * schedule.pairs;
            let Spot { tile, output } = Spot::find(within, schedule.pairs, own_tiles, rank, form);
            let first = tiles[at + 1] as u32 - before * each + tile * each;
            // Tiles without pairs have an expert without any.
            let tokens = min(each, count - min(tile * each, count));
            Place { expert, head: 0u32, output, first, tokens, split, first_block, end_block }
        } else {
            let Spot { tile, output } = Spot::find(number, schedule.pairs, schedule.token_tiles, rank, form);
            if comptime!(form.rows == Rows::Heads) {
                let tiles_of_head = schedule.token_tiles / schedule.heads;
                let head = tile / tiles_of_head;
                let first = tile % tiles_of_head * comptime!(form.tokens as u32);
                let tokens = min(comptime!(form.tokens as u32), schedule.rows - first);
                Place { expert: head, head, output, first, tokens, split, first_block, end_block }
            } else {
                let first = tile * comptime!(form.tokens as u32);
                // The second of a pair's tiles may be past the last one.
                let tokens = min(comptime!(form.tokens as u32), schedule.rows - min(first, schedule.rows));
                Place { expert: 0u32, head: 0u32, output, first, tokens, split, first_block, end_block }
            }
        }
    }

    /// Tokens that are loaded.
    pub fn loaded(&self, #[comptime] form: Form) -> u32 {
        let piece = comptime!(form.loaded_tokens() as u32);
        if comptime!(form.is_trimmed()) { self.width(form).div_ceil(piece) * piece } else { self.width(form) }
    }

    /// Tokens that the tile is multiplied for.
    pub fn width(&self, #[comptime] form: Form) -> u32 {
        let tokens = comptime!(form.tokens as u32);
        if comptime!(form.is_trimmed()) {
            let least = comptime!(form.widths()[0] as u32);
            max(self.tokens.div_ceil(comptime!(EVEN as u32)) * comptime!(EVEN as u32), least)
        } else {
            tokens.runtime()
        }
    }

    /// Whether the pair of cubes has anything to compute. Of a pair that shares weights either loads them for both.
    pub fn has_work(&self, #[comptime] form: Form) -> bool {
        if comptime!(form.is_grouped()) { self.tokens > 0 } else { true.runtime() }
    }
}

/// Which tile of tokens, and which of the outputs.
#[derive(CubeType, Clone, Copy)]
struct Spot {
    tile: u32,
    /// The first of the cube's outputs.
    output: u32,
}

#[cube]
impl Spot {
    /// Number `number` of so many tiles of tokens, each with all outputs.
    fn find(number: u32, pairs: u32, token_tiles: u32, rank: u32, #[comptime] form: Form) -> Spot {
        let together = comptime!((TOGETHER / form.tokens) as u32);
        let super_tile = number / (together * pairs);
        let place = number % (together * pairs);
        let first_tile = super_tile * together;
        let height = min(together, token_tiles - first_tile);
        let mut tile = first_tile + place % height;
        let mut output = place / height;
        if comptime!(form.shares == Shares::Weights) {
            tile = tile * CUBES + rank;
        } else {
            output = output * CUBES + rank;
        }
        Spot { tile, output: output * comptime!(form.outputs() as u32) }
    }
}
