//! The keys of each block of queries, from columns and diagonals.
//!
//! Three steps. The entries of each head are sorted once for all its rows: a unit per entry counts the entries before it,
//! which takes no shared memory and hence any number of entries. Then a unit per block row walks over both lists and
//! writes what the row attends to. Last, a unit per entry of the lists clears the tails: most lists are much shorter than
//! their capacity, and neighbouring units write neighbouring entries.

use cubecl::prelude::*;

use crate::common::launch::{address_type, share};
use crate::page_table::UNITS;

/// Arguments of [`launch`]. B sequences, H heads, `rows = ceil(max_query_len / block_size_m)`; all buffers are i32.
pub struct IndexArgs {
    /// `[B]`: queries of each sequence; taken as within `0 ..= max_query_len`.
    pub q_lens: BufferArg,
    /// `[B]`: keys of each sequence; taken as within `0 ..= 2^29`.
    pub kv_lens: BufferArg,
    /// `[B, H, verticals]`: columns; negative ones are none.
    pub vertical: BufferArg,
    /// `[B, H, slashes]`: diagonals; negative ones are none.
    pub slash: BufferArg,
    /// `[H]`: the entries of `vertical` that each head uses.
    pub vertical_counts: BufferArg,
    /// `[H]`: the entries of `slash` that each head uses.
    pub slash_counts: BufferArg,
    /// `[B, H, verticals]`, for intermediate results.
    pub sorted_vertical: BufferArg,
    /// `[B, H, slashes]`, for intermediate results.
    pub sorted_slash: BufferArg,
    /// `[B, H, rows]`, written: key blocks of the row.
    pub block_count: BufferArg,
    /// `[B, H, rows, slashes * ceil(block_size_m / block_size_n)]`, written: first keys of the blocks, -1 in the tail.
    pub block_offset: BufferArg,
    /// `[B, H, rows]`, written: columns of the row.
    pub column_count: BufferArg,
    /// `[B, H, rows, verticals]`, written: the columns, -1 in the tail.
    pub column_index: BufferArg,
    /// B.
    pub batch: usize,
    /// H.
    pub heads: usize,
    /// Columns of a head.
    pub verticals: usize,
    /// Diagonals of a head.
    pub slashes: usize,
    /// The most queries of a sequence, at most 2^29.
    pub max_query_len: usize,
    /// Queries in a block row, 1 to 65536.
    pub block_size_m: usize,
    /// Keys in a key block, 1 to 65536.
    pub block_size_n: usize,
    /// A query sees the keys up to its own position; otherwise all keys.
    pub causal: bool,
}

/// The longest sequence: sums of two positions and a block fit in an i32.
const MAX_TOKENS: i32 = 1 << 29;
/// An entry that is none, in the sorted list of columns: behind all others.
const NO_COLUMN: i32 = i32::MAX;
/// An entry that is none, in the sorted list of diagonals: before all others.
const NO_DIAGONAL: i32 = -1;

/// Writes, for each block row of each head, the key blocks of its diagonals and the columns outside them. With no
/// sequence, head or row nothing is launched.
pub fn launch(client: &Client, args: IndexArgs) {
    let lists = args.batch * args.heads;
    let rows = args.max_query_len.div_ceil(args.block_size_m);
    if lists * rows == 0 {
        return;
    }
    let capacity = args.slashes * args.block_size_m.div_ceil(args.block_size_n);
    let bits = address_type(client, &[&args.block_offset, &args.column_index]);
    let sorts = [
        (args.vertical, args.vertical_counts, &args.sorted_vertical, args.verticals, NO_COLUMN),
        (args.slash, args.slash_counts, &args.sorted_slash, args.slashes, NO_DIAGONAL),
    ];
    for (entries, counts, sorted, width, none) in sorts {
        if width > 0 {
            let (count, dim) = unit_each(client, lists * width);
            let sorted = share(sorted);
            sort_kernel::launch(client, count, dim, bits, entries, counts, sorted, lists, args.heads, width, none);
        }
    }
    let (count, dim) = unit_each(client, lists * rows);
    row_kernel::launch(
        client,
        count,
        dim,
        bits,
        args.q_lens,
        args.kv_lens,
        args.sorted_vertical,
        args.sorted_slash,
        share(&args.block_count),
        share(&args.block_offset),
        share(&args.column_count),
        share(&args.column_index),
        lists,
        args.heads,
        rows,
        args.verticals,
        args.slashes,
        args.max_query_len as i32,
        args.block_size_m as i32,
        args.block_size_n as i32,
        args.causal,
    );
    let tails =
        [(args.block_count, args.block_offset, capacity), (args.column_count, args.column_index, args.verticals)];
    for (counts, values, capacity) in tails {
        let entries = lists * rows * capacity;
        if entries > 0 {
            let (count, dim) = unit_each(client, entries);
            tail_kernel::launch(client, count, dim, bits, counts, values, entries, capacity);
        }
    }
}

fn unit_each(client: &Client, elements: usize) -> (CubeCount, CubeDim) {
    let cube_dim = CubeDim::new_1d(UNITS);
    (cubecl::calculate_cube_count_elemwise(client, elements, cube_dim), cube_dim)
}

/// Sorts each list, ascending. An entry's place is the number of entries before it.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn sort_kernel(
    entries: &[i32],
    counts: &[i32],
    sorted: &mut [i32],
    lists: usize,
    heads: usize,
    width: usize,
    none: i32,
) {
    let at = ABSOLUTE_POS;
    if at < lists * width {
        let list = at / width;
        let own = at % width;
        let used = counts[list % heads];
        let value = entry_or_none(entries[at], own, used, none);
        let mut place = 0usize.runtime();
        for i in 0..width {
            let other = entry_or_none(entries[list * width + i], i, used, none);
            // Of equal entries the earlier one is first, so that each has a place of its own.
            if other < value || (other == value && i < own) {
                place += 1;
            }
        }
        sorted[list * width + place] = value;
    }
}

/// Entry `i` of a list, if it is one of the `used` first ones and not negative.
#[cube]
fn entry_or_none(value: i32, i: usize, used: i32, none: i32) -> i32 {
    let mut entry = none;
    if i32::cast_from(i) < used && value >= 0 {
        entry = value;
    }
    entry
}

/// A unit per block row.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn row_kernel(
    q_lens: &[i32],
    kv_lens: &[i32],
    sorted_vertical: &[i32],
    sorted_slash: &[i32],
    block_count: &mut [i32],
    block_offset: &mut [i32],
    column_count: &mut [i32],
    column_index: &mut [i32],
    lists: usize,
    heads: usize,
    rows: usize,
    verticals: usize,
    slashes: usize,
    max_query_len: i32,
    block_size_m: i32,
    block_size_n: i32,
    #[comptime] causal: bool,
) {
    let at = ABSOLUTE_POS;
    if at < lists * rows {
        let list = at / rows;
        let q_len = clamp(q_lens[list / heads], 0, max_query_len);
        let kv_len = clamp(kv_lens[list / heads], 0, MAX_TOKENS);
        let row = i32::cast_from(at % rows);
        let mut blocks = 0usize.runtime();
        let mut columns = 0usize.runtime();
        if row * block_size_m < q_len {
            // Behind the band of diagonal 0, and behind the last key that a query of the row sees.
            let mut end = (row + 1) * block_size_m + kv_len;
            let mut limit = kv_len;
            if causal {
                end -= q_len;
                limit = min(limit, end);
            }
            let per_band = (block_size_m + block_size_n - 1) / block_size_n;
            let first_block = at * slashes * usize::cast_from(per_band);
            let bands = Bands { end, limit, block_size_m, block_size_n, per_band };
            blocks = write_blocks(sorted_slash, list * slashes, slashes, &bands, block_offset, first_block);
            columns = write_columns(
                sorted_vertical,
                list * verticals,
                verticals,
                &bands,
                &*block_offset,
                first_block,
                blocks,
                column_index,
                at * verticals,
            );
        }
        block_count[at] = i32::cast_from(blocks);
        column_count[at] = i32::cast_from(columns);
    }
}

/// Where the bands of a block row are.
#[derive(CubeType)]
struct Bands {
    /// Behind the band of diagonal 0.
    end: i32,
    /// Behind the last key that a query of the row sees.
    limit: i32,
    block_size_m: i32,
    block_size_n: i32,
    /// Key blocks that a band adds at most.
    per_band: i32,
}

/// Writes the first keys of the blocks of all bands, and returns how many these are.
#[cube]
fn write_blocks(
    diagonals: &[i32],
    first_diagonal: usize,
    slashes: usize,
    bands: &Bands,
    block_offset: &mut [i32],
    first_block: usize,
) -> usize {
    let mut blocks = 0usize.runtime();
    let mut covered = i32::new(0);
    // The greatest diagonal is the lowest band.
    let mut left = slashes;
    while left > 0 {
        left -= 1;
        let diagonal = diagonals[first_diagonal + left];
        let band_end = bands.end - diagonal;
        if diagonal < 0 {
            left = 0usize.runtime();
        } else if band_end > covered {
            let mut offset = max(band_end - bands.block_size_m, covered);
            for _ in 0..bands.per_band {
                if offset < bands.limit {
                    block_offset[first_block + blocks] = offset;
                    blocks += 1;
                }
                offset += bands.block_size_n;
            }
            covered = offset;
        }
    }
    blocks
}

/// Writes the columns that some query sees and that are in no block, and returns how many these are.
#[cube]
fn write_columns(
    sorted: &[i32],
    first_entry: usize,
    verticals: usize,
    bands: &Bands,
    block_offset: &[i32],
    first_block: usize,
    blocks: usize,
    column_index: &mut [i32],
    first_column: usize,
) -> usize {
    let mut columns = 0usize.runtime();
    let mut block = 0usize.runtime();
    let mut before = i32::new(-1);
    let mut i = 0usize.runtime();
    while i < verticals {
        let column = sorted[first_entry + i];
        i += 1;
        if column >= bands.limit {
            i = verticals;
        } else if column > before {
            before = column;
            let mut free = true;
            // The first block that ends behind the column.
            let mut searching = block < blocks;
            while searching {
                let offset = block_offset[first_block + block];
                if offset + bands.block_size_n <= column {
                    block += 1;
                    searching = block < blocks;
                } else {
                    free = column < offset;
                    searching = false;
                }
            }
            if free {
                column_index[first_column + columns] = column;
                columns += 1;
            }
        }
    }
    columns
}

/// -1 behind the used part of each list. A unit per entry.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn tail_kernel(counts: &[i32], values: &mut [i32], entries: usize, capacity: usize) {
    let at = ABSOLUTE_POS;
    if at < entries && at % capacity >= usize::cast_from(counts[at / capacity]) {
        values[at] = -1i32;
    }
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, form};
    let (bits, dim) = (AddressType::U32, CubeDim::new_1d(UNITS));
    let rows = |causal: bool| {
        let name = if causal { "vertical_slash_index.rows.causal" } else { "vertical_slash_index.rows.full" };
        let args = form!(row_kernel, dim, [bits, _, _, _, _, _, _, _, _, 1, 1, 1, 1, 1, 1, 1, 1, causal]);
        Entry::new(name, args)
    };
    vec![
        Entry::new("vertical_slash_index.sort", form!(sort_kernel, dim, [bits, _, _, _, 1, 1, 1, 1])),
        rows(true),
        rows(false),
        Entry::new("vertical_slash_index.tails", form!(tail_kernel, dim, [bits, _, _, 1, 1])),
    ]
}
