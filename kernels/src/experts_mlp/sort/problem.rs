//! What is sorted, and the tiles that come of it.

use cubecl::prelude::*;

/// Numbers of a tile: its expert, its first pair in the order, its pairs; the first tile of its expert, the expert's pairs.
pub const TILE: usize = 5;
/// Tiles of an expert have a multiple of so many pairs, but for the last one, and where a tile has fewer at most.
pub(crate) const EVEN: usize = 32;

/// Arguments of [`launch`](super::launch), all i32.
pub struct SortArgs {
    /// `[pairs]`: the expert of each pair. Pairs of one that there is not are left out.
    pub experts_of: BufferArg,
    /// `[pairs]`, written: the pairs of the first expert, of the second, ...; of an expert in their own order. -1 behind them.
    pub order: BufferArg,
    /// `[max_tiles(...), TILE]`, written: those without pairs come last.
    pub tiles: BufferArg,
    /// Pairs.
    pub pairs: usize,
    /// Experts.
    pub experts: usize,
    /// Pairs of a tile at most.
    pub tile: usize,
}

/// Tiles that there are at most.
pub fn max_tiles(pairs: usize, experts: usize, tile: usize) -> usize {
    pairs / tile + pairs.min(experts)
}

/// Pairs of each tile of an expert but the last one: an expert with a few more pairs than a tile has, has two of about half.
#[cube]
pub(crate) fn pairs_of_tile(pairs: u32, tile: u32) -> u32 {
    let tiles = max(pairs.div_ceil(tile), 1u32);
    min(tile, pairs.div_ceil(tiles).div_ceil(comptime!(EVEN as u32)) * comptime!(EVEN as u32))
}
