//! What is sorted, and the tiles that come of it.

use cubecl::prelude::*;

/// Numbers of a tile: its expert, its first pair in the order, its pairs.
pub const TILE: usize = 3;

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
