//! The keys that a tile of queries sees.

use cubecl::prelude::*;

use super::{ROWS, Sizes};
use crate::ragged_attention::tiles::{find_tile, keys_of};
use crate::tiles::prefill::mma::form::KEYS;
use crate::tiles::prefill::mma::load::Tile;

/// Which blocks of its sequence's keys the rows of a tile see.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Blocks {
    /// Keys of the sequence.
    pub keys: u32,
    /// How many keys the first row sees, if the sequence has as many; each row sees one more than the one before.
    pub first_sees: i32,
    /// How many a row sees at most, the last ones of these.
    pub most_seen: i32,
    /// Up to the last block that a row sees.
    pub blocks: u32,
    /// Of these the first ones, which no row sees.
    pub hidden_blocks: u32,
}

/// The tile of a slot.
#[cube]
pub(super) fn tile_of(
    cu_seqlens: &[i32],
    cu_seqlens_k: &[i32],
    slot: u32,
    sizes: &Sizes,
    #[comptime] causal: bool,
) -> (Tile, Blocks) {
    let tile = find_tile(cu_seqlens, slot, sizes.tokens, sizes.sequences, comptime!(ROWS as u32));
    let (first_key, end_key) = keys_of(cu_seqlens_k, &tile, sizes.keys, sizes.sequences);
    let keys = end_key - first_key;
    let rows = min(tile.end - tile.query, comptime!(ROWS as u32));
    // One more than the row's position; without causal the number of keys is all that counts.
    let mut first_sees = keys as i32;
    if comptime!(causal) {
        first_sees += (tile.query + 1) as i32 - tile.end as i32;
    }
    let seen = min(max(first_sees + rows as i32 - 1, 0i32), keys as i32) as u32;
    let blocks = seen.div_ceil(comptime!(KEYS as u32));
    let hidden_blocks = hidden_keys(first_sees, sizes.most_seen) / comptime!(KEYS as u32);
    let blocks = Blocks { keys, first_sees, most_seen: sizes.most_seen, blocks, hidden_blocks };
    (Tile { query: tile.query, rows, first_key, keys }, blocks)
}

#[cube]
impl Blocks {
    /// Blocks before this one are seen by all rows as a whole.
    pub fn whole_blocks(&self) -> u32 {
        max(self.first_sees, 0i32) as u32 / comptime!(KEYS as u32)
    }

    /// No row is past a key of this block or a later one.
    pub fn first_whole(&self) -> u32 {
        let hidden = hidden_keys(self.first_sees + comptime!(ROWS as i32 - 1), self.most_seen);
        hidden.div_ceil(comptime!(KEYS as u32))
    }
}

/// The first keys that a row is past which would see `sees` of them, but sees only the last `most_seen` of these.
#[cube]
fn hidden_keys(sees: i32, most_seen: i32) -> u32 {
    max(max(sees, 0i32) - most_seen, 0i32) as u32
}
