//! Which keys of which sequence are computed where, planned on the device from the sequences' lengths.
//!
//! A sequence is cut into splits (work items), each a run of whole tiles of `tile` keys. The items are ordered by sequence
//! and key, and dealt out to a fixed number of cubes in that order. A sequence without keys counts as one tile, so that
//! somebody writes its output.

use cubecl::prelude::*;
use thiserror::Error;

use crate::common::launch::or_dummy;
use crate::common::scan::sum_before;

/// Units of a cube of the planning kernel.
const UNITS: usize = 256;

/// Entries of the prefix sums in shared memory. With more sequences than that, an entry stands for several of them.
const GROUPS: usize = 2048;

/// Prefix sums that one unit computes.
const GROUPS_PER_UNIT: usize = GROUPS / UNITS;

/// The shared memory of a cube, in bytes.
const SHARED_BYTES: usize = (2 * (GROUPS + 1) + UNITS) * size_of::<u32>();

/// Tiles that a cube may have above its share for sequences to stay whole: writing the splits of 64 query rows and reading
/// them again takes about as long as 8 tiles of keys.
const MAX_SLACK: u32 = 8;

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

/// How a sequence is cut, as far as the kernel's code depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Rule {
    /// At the multiples of the share of a cube, counted over the whole batch.
    Shares,
    /// Into a number of pieces. `wide`: the square of that number does not fit into 32 bits.
    Pieces { wide: bool },
    /// Into pieces of a fixed size.
    Sizes,
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
    // All cubes compute the prefix sums for themselves and then write a share of the rows.
    let writers = capacity.div_ceil(UNITS * ROWS_PER_UNIT).clamp(1, 64);
    plan_kernel::launch(
        client,
        CubeCount::Static(writers as u32, 1, 1),
        CubeDim::new_1d(UNITS as u32),
        or_dummy(client, args.seq_lens, batch),
        or_dummy(client, args.items, capacity),
        args.cube_ptr,
        args.split_ptr,
        batch as u32,
        max_seq_len as u32,
        // A tile longer than any sequence is as good as one of any greater size.
        tile.min(max_seq_len.max(1)) as u32,
        cubes as u32,
        capacity as u32,
        amount as u32,
        heaviest as u32,
        rule,
    );
    Ok(())
}

/// One cube plans; the others help to write the items.
#[cube(launch, create_dummy_kernel)]
fn plan_kernel(
    seq_lens: &[i32],
    items: &mut [i32],
    cube_ptr: &mut [i32],
    split_ptr: &mut [i32],
    batch: u32,
    longest: u32,
    tile: u32,
    cubes: u32,
    capacity: u32,
    amount: u32,
    heaviest: u32,
    #[comptime] rule: Rule,
) {
    let mut tile_ptr = Shared::<[u32]>::new_slice(GROUPS + 1);
    let mut item_ptr = Shared::<[u32]>::new_slice(GROUPS + 1);
    let mut scratch = Shared::<[u32]>::new_slice(UNITS);
    let group = max(batch.div_ceil(comptime!(GROUPS as u32).runtime()), 1u32);
    let first_group = UNIT_POS * comptime!(GROUPS_PER_UNIT as u32);
    let end_group = first_group + comptime!(GROUPS_PER_UNIT as u32);

    // Tiles before each group.
    let mut own_tiles = 0u32;
    for g in first_group..end_group {
        tile_ptr[g as usize] = own_tiles;
        for sequence in g * group..min((g + 1) * group, batch) {
            own_tiles += tiles_of(seq_lens, sequence, longest, tile);
        }
    }
    let tiles_before = scan_units(&mut scratch, own_tiles);
    let total_tiles = scratch[comptime!(UNITS - 1)];
    for g in first_group..end_group {
        tile_ptr[g as usize] += tiles_before;
    }
    if UNIT_POS == 0 {
        tile_ptr[GROUPS] = total_tiles;
    }

    let mut share = max(total_tiles.div_ceil(cubes), 1u32);
    let mut stay_whole = false;
    // Of the cube with the number of this unit.
    let mut first_sequence = 0u32;
    if comptime!(rule == Rule::Shares) {
        let whole = deal_whole(&tile_ptr, &mut item_ptr, &mut scratch, share, total_tiles, batch, cubes);
        stay_whole = whole.fits;
        first_sequence = whole.first_sequence;
        if stay_whole {
            share = total_tiles;
        }
    }

    // Items before each group. A unit reads only the tile sums that it has written.
    let cut = Cut { longest, tile, amount, share, group, rule };
    let mut own_items = 0u32;
    for g in first_group..end_group {
        item_ptr[g as usize] = own_items;
        let mut tiles_until = tile_ptr[g as usize];
        for sequence in g * group..min((g + 1) * group, batch) {
            let tiles = tiles_of(seq_lens, sequence, longest, tile);
            own_items += cut.count(tiles, tiles_until);
            tiles_until += tiles;
        }
    }
    let items_before = scan_units(&mut scratch, own_items);
    let total_items = scratch[comptime!(UNITS - 1)];
    for g in first_group..end_group {
        item_ptr[g as usize] += items_before;
    }
    if UNIT_POS == 0 {
        item_ptr[GROUPS] = total_items;
    }
    sync_cube();

    if CUBE_POS_X == 0 {
        for g in first_group..end_group {
            let mut tiles_until = tile_ptr[g as usize];
            let mut items_until = item_ptr[g as usize];
            for sequence in g * group..min((g + 1) * group, batch) {
                split_ptr[sequence as usize] = items_until as i32;
                let tiles = tiles_of(seq_lens, sequence, longest, tile);
                items_until += cut.count(tiles, tiles_until);
                tiles_until += tiles;
            }
        }
        if UNIT_POS == 0 {
            split_ptr[batch as usize] = total_items as i32;
        }
        if stay_whole {
            if UNIT_POS < cubes {
                cube_ptr[UNIT_POS as usize] = first_sequence as i32;
            }
            if UNIT_POS == 0 {
                cube_ptr[cubes as usize] = batch as i32;
            }
        } else if comptime!(rule == Rule::Shares) {
            // The cubes that have work get their first item from whoever writes it, below.
            let mut cube = UNIT_POS;
            while cube <= cubes {
                if cube * cut.share >= total_tiles {
                    cube_ptr[cube as usize] = total_items as i32;
                }
                cube += comptime!(UNITS as u32);
            }
        } else {
            let bound =
                smallest_bound(seq_lens, &cut, &tile_ptr, &item_ptr, &mut scratch, total_tiles, cubes, heaviest);
            if UNIT_POS == 0 {
                cube_ptr[0] = 0i32;
                let mut start = 0u32;
                let mut sequence = 0u32;
                for cube in 0..cubes {
                    let run = run_end(seq_lens, &cut, &tile_ptr, &item_ptr, sequence, start, bound, total_tiles);
                    start = run.tiles;
                    sequence = run.sequence;
                    cube_ptr[cube as usize + 1] = run.items as i32;
                }
            }
        }
    }

    let mut row = ABSOLUTE_POS as u32;
    while row < capacity {
        let at = row as usize * 4;
        if row < total_items {
            let place = place_of_item(seq_lens, &cut, &tile_ptr, &item_ptr, row);
            let keys = keys_of(seq_lens, place.sequence, longest);
            let tiles = tiles_of(seq_lens, place.sequence, longest, tile);
            let split = row - place.items;
            let first = cut.tile_at(tiles, place.tiles, split);
            let end = cut.tile_at(tiles, place.tiles, split + 1);
            items[at] = place.sequence as i32;
            items[at + 1] = min(first * tile, keys) as i32;
            items[at + 2] = min(end * tile, keys) as i32;
            items[at + 3] = split as i32;
            if comptime!(rule == Rule::Shares) {
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

/// Whether the cubes can take the sequences whole, and where the run of a cube starts then.
#[derive(CubeType, Clone, Copy)]
struct Whole {
    fits: bool,
    /// Of the cube with the number of the unit.
    first_sequence: u32,
}

/// Deals out whole sequences, so that no cube has more than a little above its share. Not tried where sequences share a prefix
/// sum, or cubes a unit. `ends` is scratch.
#[cube]
fn deal_whole(
    tile_ptr: &Shared<[u32]>,
    ends: &mut Shared<[u32]>,
    scratch: &mut Shared<[u32]>,
    share: u32,
    total_tiles: u32,
    batch: u32,
    cubes: u32,
) -> Whole {
    let bound = share + min(share / 16, comptime!(MAX_SLACK).runtime());
    let mut fits = batch > 0 && batch <= comptime!(GROUPS as u32) && cubes <= comptime!(UNITS as u32);
    // All sums are there, and the total of the last scan has been read.
    sync_cube();
    // The end of a run from each sequence on.
    let mut too_long = 0u32;
    if fits {
        let mut sequence = UNIT_POS;
        while sequence < batch {
            let target = tile_ptr[sequence as usize] + bound;
            let mut end = batch;
            if target < total_tiles {
                end = last_at_most(tile_ptr, sequence, target);
            }
            ends[sequence as usize] = end;
            if end == sequence {
                too_long = 1u32;
            }
            sequence += comptime!(UNITS as u32);
        }
    }
    scan_units(scratch, too_long);
    fits = fits && scratch[comptime!(UNITS - 1)] == 0;
    let mut first_sequence = batch;
    if fits {
        // Run after run, but with a load from shared memory alone for each.
        let mut sequence = 0u32;
        let mut runs = 0u32;
        while runs < cubes && sequence < batch {
            if runs == UNIT_POS {
                first_sequence = sequence;
            }
            sequence = ends[sequence as usize];
            runs += 1;
        }
        fits = sequence >= batch;
    }
    // The list is filled anew after this.
    sync_cube();
    Whole { fits, first_sequence }
}

/// How sequences are cut.
#[derive(CubeType, Clone, Copy)]
struct Cut {
    /// The longest sequence.
    longest: u32,
    /// Keys of a tile.
    tile: u32,
    /// Number of pieces, or tiles of a piece.
    amount: u32,
    /// Tiles of a cube, if all have the same.
    share: u32,
    /// Sequences that a prefix sum in shared memory stands for.
    group: u32,
    #[cube(comptime)]
    rule: Rule,
}

/// A sequence, or the start of an item, and what is before it.
#[derive(CubeType, Clone, Copy)]
struct Place {
    sequence: u32,
    /// Tiles of the batch before it.
    tiles: u32,
    /// Items before it.
    items: u32,
}

#[cube]
impl Cut {
    /// Items of a sequence of `tiles` tiles that has `before` tiles of the batch before it.
    fn count(&self, tiles: u32, before: u32) -> u32 {
        if comptime!(self.rule == Rule::Shares) {
            (before + tiles - 1) / self.share - before / self.share + 1
        } else if comptime!(self.rule == Rule::Sizes) {
            tiles.div_ceil(self.amount)
        } else {
            min(tiles, self.amount)
        }
    }

    /// The tile of the sequence at which its split starts; the number of its tiles for the one after the last split.
    fn tile_at(&self, tiles: u32, before: u32, split: u32) -> u32 {
        if comptime!(self.rule == Rule::Shares) {
            let mut tile = 0u32;
            if split > 0 {
                tile = min((before / self.share + split) * self.share - before, tiles);
            }
            tile
        } else if comptime!(self.rule == Rule::Sizes) {
            min(split * self.amount, tiles)
        } else {
            // floor(split * tiles / pieces), without the product of two large numbers.
            let pieces = min(tiles, self.amount);
            split * (tiles / pieces) + scaled(tiles % pieces, split, pieces, self.rule)
        }
    }

    /// How many splits of a sequence lie completely in its first `end` tiles; `end < tiles`. Not for [`Rule::Shares`].
    fn splits_within(&self, tiles: u32, end: u32) -> u32 {
        if comptime!(self.rule == Rule::Sizes) {
            end / self.amount
        } else {
            let mut low = 0u32;
            let mut high = min(tiles, self.amount);
            while high - low > 1 {
                let middle = (low + high) / 2;
                if self.tile_at(tiles, 0u32, middle) <= end {
                    low = middle;
                } else {
                    high = middle;
                }
            }
            low
        }
    }
}

/// floor(a * b / c) for a < c and b <= c.
#[cube]
fn scaled(a: u32, b: u32, c: u32, #[comptime] rule: Rule) -> u32 {
    if comptime!(rule == Rule::Pieces { wide: true }) {
        // Long division, with the product built up bit by bit.
        let mut quotient = 0u32;
        let mut rest = 0u32;
        for i in 0..32u32 {
            quotient *= 2;
            rest *= 2;
            if rest >= c {
                rest -= c;
                quotient += 1;
            }
            if (b >> (31 - i)) & 1 == 1 {
                rest += a;
                if rest >= c {
                    rest -= c;
                    quotient += 1;
                }
            }
        }
        quotient
    } else {
        a * b / c
    }
}

/// Keys of a sequence.
#[cube]
fn keys_of(seq_lens: &[i32], sequence: u32, longest: u32) -> u32 {
    min(max(seq_lens[sequence as usize], 0i32) as u32, longest)
}

/// Tiles of a sequence, at least one.
#[cube]
fn tiles_of(seq_lens: &[i32], sequence: u32, longest: u32, tile: u32) -> u32 {
    max(keys_of(seq_lens, sequence, longest).div_ceil(tile), 1u32)
}

/// The sum of `own` over the units before this one. The last entry of `scratch` is the sum over all units, and may be read
/// until the next call.
#[cube]
fn scan_units(scratch: &mut Shared<[u32]>, own: u32) -> u32 {
    // Others may still read what is there.
    sync_cube();
    sum_before(scratch, own, UNITS)
}

/// The last entry of an ascending list that is at most `target`, as entry `from` is; the one after all groups is greater.
#[cube]
fn last_at_most(list: &Shared<[u32]>, from: u32, target: u32) -> u32 {
    let end = comptime!(GROUPS as u32).runtime();
    let mut low = from;
    let mut step = 1u32;
    while list[min(low + step, end) as usize] <= target {
        low += step;
        step *= 2;
    }
    while step > 1 {
        step /= 2;
        if list[min(low + step, end) as usize] <= target {
            low += step;
        }
    }
    low
}

/// The sequence that an item belongs to.
#[cube]
fn place_of_item(seq_lens: &[i32], cut: &Cut, tile_ptr: &Shared<[u32]>, item_ptr: &Shared<[u32]>, item: u32) -> Place {
    let g = last_at_most(item_ptr, 0u32, item);
    let mut sequence = g * cut.group;
    let mut tiles_until = tile_ptr[g as usize];
    let mut items_until = item_ptr[g as usize];
    let mut tiles = tiles_of(seq_lens, sequence, cut.longest, cut.tile);
    let mut count = cut.count(tiles, tiles_until);
    while items_until + count <= item {
        items_until += count;
        tiles_until += tiles;
        sequence += 1;
        tiles = tiles_of(seq_lens, sequence, cut.longest, cut.tile);
        count = cut.count(tiles, tiles_until);
    }
    Place { sequence, tiles: tiles_until, items: items_until }
}

/// The sequence that a tile of the batch belongs to, which is `from` or a later one.
#[cube]
fn place_of_tile(
    seq_lens: &[i32],
    cut: &Cut,
    tile_ptr: &Shared<[u32]>,
    item_ptr: &Shared<[u32]>,
    from: u32,
    tile: u32,
) -> Place {
    let g = last_at_most(tile_ptr, from / cut.group, tile);
    let mut sequence = g * cut.group;
    let mut tiles_until = tile_ptr[g as usize];
    let mut items_until = item_ptr[g as usize];
    let mut tiles = tiles_of(seq_lens, sequence, cut.longest, cut.tile);
    while tiles_until + tiles <= tile {
        items_until += cut.count(tiles, tiles_until);
        tiles_until += tiles;
        sequence += 1;
        tiles = tiles_of(seq_lens, sequence, cut.longest, cut.tile);
    }
    Place { sequence, tiles: tiles_until, items: items_until }
}

/// The first item that a run of items from tile `start` on, of at most `bound` tiles, leaves out. The run starts in
/// `sequence` or a later one, and so does the place that is returned: the next run may search from there.
#[cube]
fn run_end(
    seq_lens: &[i32],
    cut: &Cut,
    tile_ptr: &Shared<[u32]>,
    item_ptr: &Shared<[u32]>,
    sequence: u32,
    start: u32,
    bound: u32,
    total_tiles: u32,
) -> Place {
    let target = start + bound;
    let mut found = sequence;
    let mut tiles_until = total_tiles;
    let mut items_until = item_ptr[GROUPS];
    if target < total_tiles {
        let place = place_of_tile(seq_lens, cut, tile_ptr, item_ptr, sequence, target);
        let tiles = tiles_of(seq_lens, place.sequence, cut.longest, cut.tile);
        let splits = cut.splits_within(tiles, target - place.tiles);
        found = place.sequence;
        tiles_until = place.tiles + cut.tile_at(tiles, place.tiles, splits);
        items_until = place.items + splits;
    }
    Place { sequence: found, tiles: tiles_until, items: items_until }
}

/// Whether `cubes` runs of at most `bound` tiles take up all items. A bound below the heaviest item is stuck there.
#[cube]
fn is_feasible(
    seq_lens: &[i32],
    cut: &Cut,
    tile_ptr: &Shared<[u32]>,
    item_ptr: &Shared<[u32]>,
    bound: u32,
    total_tiles: u32,
    cubes: u32,
) -> bool {
    let mut start = 0u32;
    let mut sequence = 0u32;
    let mut runs = 0u32;
    while runs < cubes && start < total_tiles {
        let run = run_end(seq_lens, cut, tile_ptr, item_ptr, sequence, start, bound, total_tiles);
        start = run.tiles;
        sequence = run.sequence;
        runs += 1;
    }
    start >= total_tiles
}

/// The smallest load under which the cubes suffice, all units trying different ones. No item has more than `heaviest` tiles.
#[cube]
fn smallest_bound(
    seq_lens: &[i32],
    cut: &Cut,
    tile_ptr: &Shared<[u32]>,
    item_ptr: &Shared<[u32]>,
    scratch: &mut Shared<[u32]>,
    total_tiles: u32,
    cubes: u32,
    heaviest: u32,
) -> u32 {
    let mut found = Shared::<[u32]>::new_slice(2usize);
    let units = comptime!(UNITS as u32).runtime();
    let unit = UNIT_POS as usize;
    // Every run but the last leaves out an item that would exceed the bound. Under the mean load plus all but one tile of
    // that item, all of them have the mean load at least: the cubes suffice.
    let mut low = total_tiles.div_ceil(cubes);
    let mut high = min(low + heaviest - 1, total_tiles);
    // The total of the last scan has been read by then.
    sync_cube();
    while low < high {
        let step = (high - low).div_ceil(units);
        let candidate = low + UNIT_POS * step;
        let mut feasible = 1u32;
        if candidate < high && !is_feasible(seq_lens, cut, tile_ptr, item_ptr, candidate, total_tiles, cubes) {
            feasible = 0u32;
        }
        scratch[unit] = feasible;
        sync_cube();
        if feasible == 1 {
            if unit == 0 {
                found[0] = low;
                found[1] = low;
            } else if scratch[unit - 1] == 0 {
                found[0] = candidate - step + 1;
                found[1] = min(candidate, high);
            }
        } else if unit == comptime!(UNITS - 1) {
            found[0] = candidate + 1;
            found[1] = high;
        }
        sync_cube();
        low = found[0];
        high = found[1];
    }
    low
}

/// One for each rule.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, form};
    let rules = [
        ("shares", Rule::Shares),
        ("pieces", Rule::Pieces { wide: false }),
        ("pieces_wide", Rule::Pieces { wide: true }),
        ("sizes", Rule::Sizes),
    ];
    let dim = CubeDim::new_1d(UNITS as u32);
    let entry = |(name, rule)| {
        Entry::new(format!("mla_plan.{name}"), form!(plan_kernel, dim, [_, _, _, _, 1, 1, 1, 1, 1, 1, 1, rule]))
    };
    rules.map(entry).into()
}
