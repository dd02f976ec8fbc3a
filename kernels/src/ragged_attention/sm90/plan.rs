//! The tiles of a launch in the order in which they are taken, those with most keys first: a kernel of one cube, before the
//! attention.

use cubecl::prelude::*;

use super::form::{KEYS, ROWS};
use crate::common::scan::sum_before;
use crate::ptx::{atomic, shared_address};
use crate::ragged_attention::problem::RaggedAttentionOptions;
use crate::ragged_attention::tiles::{QueryTile, find_tile, keys_of, slots};

/// Numbers that describe a tile: see [`PlannedTile`].
pub(super) const WORDS: usize = 8;
/// Units of the cube, and classes of tiles by their number of blocks.
const CLASSES: usize = 512;
/// Up to twice so many blocks, each number is a class of its own.
const EXACT: u32 = 32;

/// What the attention needs of a plan.
pub(super) struct Plan {
    /// i32: how many tiles there are, and from [`WORDS`] on the tiles.
    pub tiles: BufferArg,
    /// u32 `[1]`: 0, for the number of tiles that have been taken.
    pub taken: BufferArg,
    /// Tiles at most.
    pub most: usize,
}

/// Plans `[N, M, B]` query tokens, key tokens and sequences.
pub(super) fn launch(
    client: &Client,
    cu_seqlens: BufferArg,
    cu_seqlens_k: BufferArg,
    [tokens, keys, sequences]: [usize; 3],
    options: &RaggedAttentionOptions,
) -> Plan {
    let most = slots(tokens, sequences, ROWS);
    let len = (1 + most) * WORDS;
    let (tiles, taken) = (client.empty(len * size_of::<i32>()), client.empty(size_of::<u32>()));
    // SAFETY: the buffer has been made for so many numbers.
    let tiles = || unsafe { BufferArg::from_raw_parts(tiles.clone(), len) };
    // SAFETY: and this one for one.
    let taken = || unsafe { BufferArg::from_raw_parts(taken.clone(), 1) };
    plan_tiles::launch(
        client,
        CubeCount::new_single(),
        CubeDim::new_1d(CLASSES as u32),
        cu_seqlens,
        cu_seqlens_k,
        tiles(),
        taken(),
        tokens as u32,
        keys as u32,
        sequences as u32,
        most as u32,
        options.most_seen(),
        options.causal,
    );
    Plan { tiles: tiles(), taken: taken(), most }
}

/// A tile of query rows of one sequence.
#[derive(CubeTypeMut, CubeType, Clone, Copy)]
pub(super) struct PlannedTile {
    /// The first query token.
    pub query: u32,
    /// Query tokens.
    pub rows: u32,
    /// The first key token of the sequence.
    pub first_key: u32,
    /// Keys of the sequence.
    pub keys: u32,
    /// How many keys the first row sees, if the sequence has as many; each row sees one more than the one before.
    pub first_sees: i32,
    /// Blocks of keys up to the last one that a row sees.
    pub blocks: u32,
    /// Of these the first ones, which no row sees.
    pub hidden_blocks: u32,
}

#[cube]
impl PlannedTile {
    fn of(
        tile: &QueryTile,
        cu_seqlens_k: &[i32],
        keys: u32,
        sequences: u32,
        most_seen: i32,
        #[comptime] causal: bool,
    ) -> PlannedTile {
        let (first_key, end_key) = keys_of(cu_seqlens_k, tile, keys, sequences);
        let keys = end_key - first_key;
        let rows = min(tile.end - tile.query, comptime!(ROWS as u32));
        let mut first_sees = keys as i32;
        if comptime!(causal) {
            first_sees += (tile.query + 1) as i32 - tile.end as i32;
        }
        let seen = min(max(first_sees + (rows - 1) as i32, 0i32), keys as i32) as u32;
        let blocks = seen.div_ceil(comptime!(KEYS as u32));
        let hidden_blocks = max(max(first_sees, 0i32) - most_seen, 0i32) as u32 / comptime!(KEYS as u32);
        PlannedTile { query: tile.query, rows, first_key, keys, first_sees, blocks, hidden_blocks }
    }

    /// The class of its number of blocks, less than [`CLASSES`], with the most blocks first.
    fn class(&self) -> u32 {
        let mut blocks = self.blocks - self.hidden_blocks;
        let mut class = 0u32;
        while blocks >= comptime!(2 * EXACT) {
            blocks /= 2;
            class += EXACT;
        }
        comptime!(CLASSES as u32 - 1) - min(class + blocks, comptime!(CLASSES as u32 - 1))
    }

    /// Tile `place` of the plan.
    pub fn read(tiles: &[i32], place: u32) -> PlannedTile {
        let at = (place as usize + 1) * WORDS;
        PlannedTile {
            query: tiles[at] as u32,
            rows: tiles[at + 1] as u32,
            first_key: tiles[at + 2] as u32,
            keys: tiles[at + 3] as u32,
            first_sees: tiles[at + 4],
            blocks: tiles[at + 5] as u32,
            hidden_blocks: tiles[at + 6] as u32,
        }
    }

    fn write(&self, tiles: &mut [i32], place: u32) {
        let at = (place as usize + 1) * WORDS;
        tiles[at] = self.query as i32;
        tiles[at + 1] = self.rows as i32;
        tiles[at + 2] = self.first_key as i32;
        tiles[at + 3] = self.keys as i32;
        tiles[at + 4] = self.first_sees;
        tiles[at + 5] = self.blocks as i32;
        tiles[at + 6] = self.hidden_blocks as i32;
    }
}

/// Counts the tiles of each class, adds up, and writes them.
#[cube(launch, create_dummy_kernel)]
fn plan_tiles(
    cu_seqlens: &[i32],
    cu_seqlens_k: &[i32],
    tiles: &mut [i32],
    taken: &mut [u32],
    tokens: u32,
    keys: u32,
    sequences: u32,
    slots: u32,
    most_seen: i32,
    #[comptime] causal: bool,
) {
    let unit = UNIT_POS as usize;
    let mut places = Shared::<[u32]>::new_slice(CLASSES);
    let places_at = shared_address(&places);
    let mut scratch = Shared::<[u32]>::new_slice(CLASSES);
    places[unit] = 0u32;
    sync_cube();
    let mut slot = UNIT_POS;
    while slot < slots {
        let tile = find_tile(cu_seqlens, slot, tokens, sequences, comptime!(ROWS as u32));
        if tile.query < tile.end {
            let planned = PlannedTile::of(&tile, cu_seqlens_k, keys, sequences, most_seen, causal);
            atomic::add_shared(places_at + planned.class() * 4, 1u32);
        }
        slot += comptime!(CLASSES as u32);
    }
    sync_cube();
    let count = places[unit];
    let before = sum_before(&mut scratch, count, CLASSES);
    places[unit] = before;
    if unit == comptime!(CLASSES - 1) {
        // Fewer than slots, unless the ends of the sequences do not ascend.
        tiles[0] = min(before + count, slots) as i32;
        taken[0] = 0u32;
    }
    sync_cube();
    slot = UNIT_POS;
    while slot < slots {
        let tile = find_tile(cu_seqlens, slot, tokens, sequences, comptime!(ROWS as u32));
        if tile.query < tile.end {
            let planned = PlannedTile::of(&tile, cu_seqlens_k, keys, sequences, most_seen, causal);
            let place = atomic::add_shared(places_at + planned.class() * 4, 1u32);
            planned.write(tiles, place);
        }
        slot += comptime!(CLASSES as u32);
    }
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, form};
    let form = form!(plan_tiles, CubeDim::new_1d(CLASSES as u32), [_, _, _, _, 1, 1, 1, 1, 1, true]);
    vec![Entry::new("ragged_attention.plan", form).on(|arch| arch == Arch::Sm90a)]
}
