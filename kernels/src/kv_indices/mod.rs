//! Page ids of a batch as a compressed sparse row list.
//!
//! Two kernels: a scan of the page counts (`indptr`) in one cube, then a gather with a unit per entry of the list, which
//! finds its sequence in `indptr` by bisection. The work of the second is spread evenly however uneven the lengths are,
//! and writes each entry of the list once: no page passes the capacity, and the tail is -1 without a pass of its own.

use cubecl::prelude::*;

use crate::common::launch::{address_type, share};
use crate::common::scan::sum_before;
use crate::page_table::{PagedBatch, UNITS, page_count, page_id};

/// What [`launch_kv_indices`] writes, all i32.
pub struct KvIndicesOut {
    /// `[batch + 1]`: the pages of sequence `b` are `indices[indptr[b] .. indptr[b + 1]]`. Counts what is needed even
    /// where the capacity is too small. The total must fit in i32.
    pub indptr: BufferArg,
    /// `[capacity]`: page ids, -1 in the tail.
    pub indices: BufferArg,
    /// `[batch]`: tokens in each sequence's last page, 0 for an empty sequence.
    pub last_page_len: BufferArg,
    /// `[1]`: 0, or 1 if the capacity was too small; then `indices` has the leading part of the list.
    pub overflow: BufferArg,
    /// Length of `indices`, below 2^31.
    pub capacity: usize,
}

/// Writes the page ids of all sequences, one after the other, at most `capacity` of them. A token outside the map, from
/// a row, start or length that is none of the map's, has page -1.
pub fn launch_kv_indices(client: &Client, batch: PagedBatch, out: KvIndicesOut) {
    let bits = address_type(client, &[&batch.req_to_token]);
    page_indptr_kernel::launch(
        client,
        CubeCount::new_single(),
        CubeDim::new_1d(SCAN_UNITS as u32),
        bits,
        batch.seq_lens,
        share(&out.indptr),
        out.last_page_len,
        out.overflow,
        batch.batch,
        batch.page_size,
        out.capacity,
        SCAN_UNITS,
    );
    if out.capacity == 0 {
        return;
    }
    let cube_dim = CubeDim::new_1d(UNITS);
    page_indices_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, out.capacity, cube_dim),
        cube_dim,
        bits,
        batch.req_to_token,
        batch.req_rows,
        batch.kv_start,
        out.indptr,
        out.indices,
        batch.requests,
        batch.tokens,
        batch.batch,
        batch.page_size,
        out.capacity,
    );
}

/// Units of the scan. Every runtime has this many.
const SCAN_UNITS: usize = 256;

/// Exclusive prefix sums of the page counts: one cube, in which each unit owns a run of consecutive sequences.
///
/// A unit sums the pages of its run, the sums are scanned in shared memory, and the unit walks through its run again.
/// Hence one scan for any batch size, and for a common batch a run of one sequence.
#[allow(clippy::needless_range_loop, reason = "kernels have no iterator that skips")]
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn page_indptr_kernel(
    seq_lens: &[i32],
    indptr: &mut [i32],
    last_page_len: &mut [i32],
    overflow: &mut [i32],
    batch: usize,
    page_size: usize,
    capacity: usize,
    #[comptime] units: usize,
) {
    let unit = UNIT_POS as usize;
    let run = batch.div_ceil(units);
    let first = min(unit * run, batch);
    let end = min(first + run, batch);

    let mut pages = 0usize.runtime();
    for sequence in first..end {
        pages += page_count(seq_lens[sequence], page_size);
    }
    let mut scratch = Shared::<[u32]>::new_slice(units);
    let mut total = sum_before(&mut scratch, pages as u32, units) as usize;
    for sequence in first..end {
        let len = seq_lens[sequence];
        indptr[sequence] = i32::cast_from(total);
        last_page_len[sequence] = last_page_len_of(len, page_size);
        total += page_count(len, page_size);
    }
    // The last unit's run, which may be empty, ends where the batch ends.
    if unit == units - 1 {
        indptr[batch] = i32::cast_from(total);
        overflow[0] = i32::cast_from(total > capacity);
    }
}

/// Tokens in the last page of a sequence of `len` tokens.
#[cube]
fn last_page_len_of(len: i32, page_size: usize) -> i32 {
    let mut tokens = i32::new(0);
    if len > 0 {
        tokens = i32::cast_from((usize::cast_from(len) - 1) % page_size + 1);
    }
    tokens
}

/// A unit per entry of `indices`.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn page_indices_kernel(
    req_to_token: &[i32],
    req_rows: &[i32],
    kv_start: &[i32],
    indptr: &[i32],
    indices: &mut [i32],
    requests: usize,
    tokens: usize,
    batch: usize,
    page_size: usize,
    capacity: usize,
) {
    let entry = ABSOLUTE_POS;
    if entry < capacity {
        let mut id = i32::new(-1);
        if i32::cast_from(entry) < indptr[batch] {
            let sequence = sequence_of(i32::cast_from(entry), indptr, batch);
            let page = entry - usize::cast_from(indptr[sequence]);
            id = page_id(req_to_token, req_rows[sequence], kv_start[sequence], page, requests, tokens, page_size);
        }
        indices[entry] = id;
    }
}

/// The sequence whose pages include this entry of the list: the last one that starts at or before it. Sequences with no
/// page start where the next one starts, so that the last has a page.
#[cube]
fn sequence_of(entry: i32, indptr: &[i32], batch: usize) -> usize {
    let mut sequence = 0usize.runtime();
    let mut past = batch;
    while past - sequence > 1 {
        let middle = (sequence + past) / 2;
        if indptr[middle] <= entry {
            sequence = middle;
        } else {
            past = middle;
        }
    }
    sequence
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, form};
    let (scan, gather) = (CubeDim::new_1d(SCAN_UNITS as u32), CubeDim::new_1d(UNITS));
    let bits = AddressType::U32;
    vec![
        Entry::new("kv_indices.indptr", form!(page_indptr_kernel, scan, [bits, _, _, _, _, 1, 1, 1, SCAN_UNITS])),
        Entry::new("kv_indices.indices", form!(page_indices_kernel, gather, [bits, _, _, _, _, _, 1, 1, 1, 1, 1])),
    ]
}
