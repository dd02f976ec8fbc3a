//! Which keys of which sequence are computed where, planned on the device from the sequences' lengths.
//!
//! A sequence is cut into splits (work items), each a run of whole tiles of `tile` keys. The items are ordered by sequence
//! and key, and dealt out to a fixed number of cubes in that order. A sequence without keys counts as one tile, so that
//! a cube writes its output.

mod cut;
mod runs;
mod sums;

use cubecl::prelude::*;
use thiserror::Error;

use self::cut::{Cut, Keys, Lengths, PlanCounts, PlanCountsLaunch, Rule};
use self::runs::{deal_whole, write_runs};
use self::sums::{GROUPS, Sums, UNITS, place_of_item};
use crate::common::launch::{dummy, or_dummy};

/// The shared memory of a cube, in bytes.
const SHARED_BYTES: usize = (2 * (GROUPS + 1) + UNITS) * size_of::<u32>();

/// Rows of the item list that one unit should write: decides how many cubes write it.
const ROWS_PER_UNIT: usize = 8;

/// Tiles that the planner can count: sums of two such numbers stay within u32.
const MAX_TILES: usize = i32::MAX as usize;

/// Into how many splits a sequence is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SplitMode {
    /// Every cube takes the same number of consecutive tiles of the batch, its share; sequences are cut where a cube is full.
    /// But if the cubes can take whole sequences without any having more than a sixteenth, and 8 tiles, above its share, then
    /// none is cut: the results of whole sequences need no merge. That is tried for up to 2048 sequences and 256 cubes.
    Auto,
    /// This many, near-equal in size; fewer for a sequence that has fewer tiles. 0 counts as 1.
    Count(usize),
    /// Of this many keys, rounded up to whole tiles and counted from key 0. 0 counts as 1.
    Tokens(usize),
}

impl SplitMode {
    /// The most items that a plan can have.
    pub fn max_items(self, batch: usize, cubes: usize, max_seq_len: usize, tile: usize) -> usize {
        let tile = tile.max(1);
        let max_tiles = max_seq_len.div_ceil(tile).max(1);
        match self {
            SplitMode::Auto => batch.saturating_add(cubes.max(1)).min(batch.saturating_mul(max_tiles)),
            SplitMode::Count(n) => batch.saturating_mul(n.clamp(1, max_tiles)),
            SplitMode::Tokens(n) => batch.saturating_mul(max_tiles.div_ceil(n.max(1).div_ceil(tile))),
        }
    }
}

/// Buffers and sizes of [`launch`].
pub struct PlanArgs {
    /// Keys of each sequence, i32 `[batch]`; clamped to `0 ..= max_seq_len`.
    pub seq_lens: BufferArg,
    /// Where the keys of a sequence are those of two lists, one after the other, each in whole tiles: `seq_lens` are the lengths
    /// of the first.
    pub lists: Option<PlanLists>,
    /// Output, i32 `[capacity, 4]`: sequence, first key, end key, split; -1 in the rows that are not used.
    pub items: BufferArg,
    /// Output, i32 `[cubes + 1]`: cube `c` computes the items `cube_ptr[c] .. cube_ptr[c + 1]`.
    pub cube_ptr: BufferArg,
    /// Output, i32 `[batch + 1]`: the items of sequence `b` are `split_ptr[b] .. split_ptr[b + 1]`.
    pub split_ptr: BufferArg,
    /// Number of sequences.
    pub batch: usize,
    /// Number of cubes that the items are dealt out to, at least 1.
    pub cubes: usize,
    /// Rows of `items`.
    pub capacity: usize,
    /// The longest sequence that is planned for.
    pub max_seq_len: usize,
    /// Keys in a tile, at least 1.
    pub tile: usize,
    /// How sequences are cut.
    pub mode: SplitMode,
}

/// Lists that are the keys of a sequence, or query token; `max_seq_len` is at least both in whole tiles.
pub struct PlanLists {
    /// Entries of each list at most.
    pub most: [usize; 2],
    /// Lengths of the second, i32 `[batch]`. Absent: all have as many entries as there are at most.
    pub second: Option<BufferArg>,
}

/// The sizes of [`PlanArgs`], under the same names: what decides whether a plan can be made.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct PlanSizes {
    pub batch: usize,
    pub cubes: usize,
    pub capacity: usize,
    pub max_seq_len: usize,
    pub tile: usize,
    pub mode: SplitMode,
}

/// Why a plan cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PlanError {
    /// A size that has to be at least one.
    #[error("{0} is 0, expected at least 1")]
    Zero(&'static str),
    /// The batch may need more items than there is room for.
    #[error("room for {capacity} work items, expected room for {needed}")]
    Capacity {
        /// Rows of `items`.
        capacity: usize,
        /// What the plan may need.
        needed: usize,
    },
    /// More tiles or items than 32-bit numbers can count.
    #[error("{batch} sequences of up to {max_seq_len} keys, in tiles of {tile}, exceed 32-bit counts")]
    TooLarge {
        /// Number of sequences.
        batch: usize,
        /// The longest sequence.
        max_seq_len: usize,
        /// Keys in a tile.
        tile: usize,
    },
    /// The device is too small for the planning kernel.
    #[error("a cube of {UNITS} units with {SHARED_BYTES} bytes of shared memory, the device has {units} and {shared}")]
    Device {
        /// Units of a cube.
        units: u32,
        /// Bytes of shared memory.
        shared: usize,
    },
}

/// Whether [`launch`] would plan this on a device. Reads nothing and launches nothing.
///
/// # Errors
/// What [`launch`] would give.
pub fn check(client: &Client, sizes: &PlanSizes) -> Result<(), PlanError> {
    let &PlanSizes { batch, cubes, capacity, max_seq_len, tile, mode } = sizes;
    let max_seq_len = max_seq_len.min(i32::MAX as usize);
    for (name, value) in [("cubes", cubes), ("tile", tile)] {
        if value == 0 {
            return Err(PlanError::Zero(name));
        }
    }
    let needed = mode.max_items(batch, cubes, max_seq_len, tile);
    let tiles = batch.saturating_mul(max_seq_len.div_ceil(tile).max(1)).saturating_add(cubes);
    if tiles > MAX_TILES || capacity.max(needed) > i32::MAX as usize / 4 {
        return Err(PlanError::TooLarge { batch, max_seq_len, tile });
    }
    if capacity < needed {
        return Err(PlanError::Capacity { capacity, needed });
    }
    let hardware = &client.properties().hardware;
    let (units, shared) = (hardware.max_units_per_cube.min(hardware.max_cube_dim.0), hardware.max_shared_memory_size);
    if (units as usize) < UNITS || shared < SHARED_BYTES {
        return Err(PlanError::Device { units, shared });
    }
    Ok(())
}

/// Plans a decode step. All three outputs are written completely.
///
/// # Errors
/// A size of zero, too little room for the items, a batch that is too large to count, or a device that is too small.
/// Nothing is launched then.
pub fn launch(client: &Client, args: PlanArgs) -> Result<(), PlanError> {
    let PlanArgs { batch, cubes, capacity, max_seq_len, tile, mode, .. } = args;
    check(client, &PlanSizes { batch, cubes, capacity, max_seq_len, tile, mode })?;
    let max_seq_len = max_seq_len.min(i32::MAX as usize);
    let max_tiles = max_seq_len.div_ceil(tile).max(1);
    let (rule, amount, heaviest) = match mode {
        SplitMode::Auto => (Rule::Shares, 1, 1),
        SplitMode::Count(n) => {
            let n = n.clamp(1, max_tiles);
            (Rule::Pieces { wide: n > u16::MAX as usize }, n, max_tiles)
        }
        SplitMode::Tokens(n) => {
            let size = n.max(1).div_ceil(tile).min(max_tiles);
            (Rule::Sizes, size, size)
        }
    };
    let most = args.lists.as_ref().map_or([0; 2], |lists| lists.most.map(|most| most.next_multiple_of(tile)));
    let keys = args.lists.as_ref().map_or(Keys::OfLength, |lists| Keys::OfLists { second: lists.second.is_some() });
    let second = args
        .lists
        .and_then(|lists| lists.second)
        .map_or_else(|| dummy(client), |second| or_dummy(client, second, batch));
    // All cubes compute the prefix sums for themselves and then write a share of the rows.
    let writers = capacity.div_ceil(UNITS * ROWS_PER_UNIT).clamp(1, 64);
    plan_kernel::launch(
        client,
        CubeCount::Static(writers as u32, 1, 1),
        CubeDim::new_1d(UNITS as u32),
        or_dummy(client, args.seq_lens, batch),
        second,
        or_dummy(client, args.items, capacity),
        args.cube_ptr,
        args.split_ptr,
        PlanCountsLaunch::new(
            batch as u32,
            max_seq_len as u32,
            // A tile longer than any sequence is as good as one of any greater size.
            tile.min(max_seq_len.max(1)) as u32,
            cubes as u32,
            capacity as u32,
            amount as u32,
            heaviest as u32,
            most[0] as u32,
            most[1] as u32,
        ),
        rule,
        keys,
    );
    Ok(())
}

/// One cube plans; the others help to write the items.
#[cube(launch, create_dummy_kernel)]
fn plan_kernel(
    seq_lens: &[i32],
    second_lens: &[i32],
    items: &mut [i32],
    cube_ptr: &mut [i32],
    split_ptr: &mut [i32],
    counts: PlanCounts,
    #[comptime] rule: Rule,
    #[comptime] keys: Keys,
) {
    let lens = Lengths::new(seq_lens, second_lens, &counts, keys);
    let mut sums = Sums::new();
    let mut scratch = Shared::<[u32]>::new_slice(UNITS);
    let group = max(counts.batch.div_ceil(comptime!(GROUPS as u32).runtime()), 1u32);
    let total_tiles = sums.add_tiles(&lens, &mut scratch, &counts, group);

    let mut share = max(total_tiles.div_ceil(counts.cubes), 1u32);
    let mut stay_whole = false;
    // Of the cube with the number of this unit.
    let mut first_sequence = 0u32;
    if comptime!(rule == Rule::Shares) {
        let whole = deal_whole(&mut sums, &mut scratch, share, total_tiles, counts.batch, counts.cubes);
        stay_whole = whole.fits;
        first_sequence = whole.first_sequence;
        if stay_whole {
            share = total_tiles;
        }
    }
    let cut = Cut { longest: counts.longest, tile: counts.tile, amount: counts.amount, share, group, rule };
    let total_items = sums.add_items(&lens, &mut scratch, &cut, counts.batch);
    sync_cube();

    if CUBE_POS_X == 0 {
        sums.write_splits(&lens, split_ptr, &cut, counts.batch);
        if UNIT_POS == 0 {
            split_ptr[counts.batch as usize] = total_items as i32;
        }
        if stay_whole {
            if UNIT_POS < counts.cubes {
                cube_ptr[UNIT_POS as usize] = first_sequence as i32;
            }
            if UNIT_POS == 0 {
                cube_ptr[counts.cubes as usize] = counts.batch as i32;
            }
        } else if comptime!(rule == Rule::Shares) {
            // The cubes that have work get their first item from the unit that writes it, below.
            let mut cube = UNIT_POS;
            while cube <= counts.cubes {
                if cube * cut.share >= total_tiles {
                    cube_ptr[cube as usize] = total_items as i32;
                }
                cube += comptime!(UNITS as u32);
            }
        } else {
            write_runs(&lens, cube_ptr, &sums, &cut, &mut scratch, &counts, total_tiles);
        }
    }
    write_items(&lens, items, cube_ptr, &sums, &cut, counts.capacity, total_items, stay_whole);
}

/// Writes the item list. Where cubes have equal shares, the first item of each is found here.
#[cube]
fn write_items(
    lens: &Lengths,
    items: &mut [i32],
    cube_ptr: &mut [i32],
    sums: &Sums,
    cut: &Cut,
    capacity: u32,
    total_items: u32,
    stay_whole: bool,
) {
    let mut row = ABSOLUTE_POS as u32;
    while row < capacity {
        let at = row as usize * 4;
        if row < total_items {
            let place = place_of_item(lens, sums, cut, row);
            let keys = lens.keys_of(place.sequence, cut.longest, cut.tile);
            let tiles = cut.tiles(lens, place.sequence);
            let split = row - place.items;
            let first = cut.tile_at(tiles, place.tiles, split);
            let end = cut.tile_at(tiles, place.tiles, split + 1);
            items[at] = place.sequence as i32;
            items[at + 1] = min(first * cut.tile, keys) as i32;
            items[at + 2] = min(end * cut.tile, keys) as i32;
            items[at + 3] = split as i32;
            if comptime!(cut.rule == Rule::Shares) {
                let start = place.tiles + first;
                let cube = start / cut.share;
                if !stay_whole && cube * cut.share == start {
                    cube_ptr[cube as usize] = row as i32;
                }
            }
        } else {
            #[unroll]
            for field in 0..4 {
                items[at + field] = -1i32;
            }
        }
        row += CUBE_COUNT as u32 * comptime!(UNITS as u32);
    }
}

/// One for each rule, and for lists.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, form};
    let forms = [
        ("shares", Rule::Shares, Keys::OfLength),
        ("pieces", Rule::Pieces { wide: false }, Keys::OfLength),
        ("pieces_wide", Rule::Pieces { wide: true }, Keys::OfLength),
        ("sizes", Rule::Sizes, Keys::OfLength),
        ("lists", Rule::Shares, Keys::OfLists { second: true }),
    ];
    let dim = CubeDim::new_1d(UNITS as u32);
    let entry = |(name, rule, keys)| {
        Entry::new(
            format!("mla_plan.{name}"),
            form!(plan_kernel, dim, [_, _, _, _, _, PlanCountsLaunch::new(1, 1, 1, 1, 1, 1, 1, 1, 1), rule, keys]),
        )
    };
    forms.map(entry).into()
}
