//! Tiles of query tokens, found on the device.
//!
//! The host knows how many tokens and sequences there are, and so how many tiles at most: slots. A slot finds its tile by a search
//! over the ends of the sequences; some have none.

use cubecl::prelude::*;

use super::problem::{RaggedAttentionError, RaggedAttentionSizes};

/// Slots for so many tokens and sequences.
pub(super) fn slots(tokens: usize, sequences: usize, tile: usize) -> usize {
    tokens / tile + sequences + 1
}

/// A cube for each slot and head. Slots go over x, and over z where x is too short.
pub(super) fn cube_count(
    client: &Client,
    sizes: &RaggedAttentionSizes,
    tile: usize,
) -> Result<CubeCount, RaggedAttentionError> {
    let &RaggedAttentionSizes { tokens, sequences, heads, .. } = sizes;
    let max = client.properties().hardware.max_cube_count;
    let slots = slots(tokens, sequences, tile);
    let x = slots.min(max.0 as usize);
    let z = slots.div_ceil(x);
    if heads > max.1 as usize || z > max.2 as usize {
        return Err(RaggedAttentionError::Cubes { tokens, sequences, heads });
    }
    Ok(CubeCount::Static(x as u32, heads as u32, z as u32))
}

/// Query rows of one sequence.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct QueryTile {
    /// The token after the last one of the sequence.
    pub end: u32,
    /// The first query token of the tile; `end` or more where there is none.
    pub query: u32,
    /// The number of the sequence; that of all sequences for tokens that belong to none.
    pub sequence: u32,
}

/// The token where segment `i` begins. Segments are the sequences and, last, the tokens that belong to none.
#[cube]
pub(super) fn boundary(cu_seqlens: &[i32], i: u32, tokens: u32, sequences: u32) -> u32 {
    let mut token = 0u32;
    if i > sequences {
        token = tokens;
    } else if i > 0 {
        let entry = cu_seqlens[i as usize];
        if entry > 0 {
            token = min(u32::cast_from(entry), tokens);
        }
    }
    token
}

/// The query tile of a slot. Segment `i` has the slots from `boundary(i) / tile + i` on: ascending in `i`, so that a
/// binary search finds the segment, and enough, since `ceil(n / tile) <= floor((b + n) / tile) - floor(b / tile) + 1`.
#[cube]
pub(super) fn find_tile(
    cu_seqlens: &[i32],
    slot: u32,
    tokens: u32,
    sequences: u32,
    #[comptime] tile: u32,
) -> QueryTile {
    let mut low = 0u32;
    let mut high = sequences;
    while low < high {
        let middle = high - (high - low) / 2;
        if boundary(cu_seqlens, middle, tokens, sequences) / tile + middle <= slot {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    let first = boundary(cu_seqlens, low, tokens, sequences);
    let end = boundary(cu_seqlens, low + 1, tokens, sequences);
    let index = slot - first / tile - low;
    let mut query = end;
    // Compared before it is multiplied: the slots past the last segment may be many.
    if end > first && index <= (end - first - 1) / tile {
        query = first + index * tile;
    }
    QueryTile { end, query, sequence: low }
}

/// The keys of a segment: `first .. end`. Tokens of no sequence have none.
#[cube]
pub(super) fn keys_of(cu_seqlens_k: &[i32], tile: &QueryTile, keys: u32, sequences: u32) -> (u32, u32) {
    let first = boundary(cu_seqlens_k, tile.sequence, keys, sequences);
    let mut end = first;
    if tile.sequence < sequences {
        // Not before the first, where the entries do not ascend.
        end = max(boundary(cu_seqlens_k, tile.sequence + 1, keys, sequences), first);
    }
    (first, end)
}
