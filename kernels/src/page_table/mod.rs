//! Page ids of a batch from the request-to-token map.

use cubecl::prelude::*;

use crate::common::launch::{address_type, is_row};

/// Which tokens of which requests a batch reads.
pub struct PagedBatch {
    /// i32 `[requests, tokens]`: the slot (`page * page_size + offset`) of each token of each request.
    pub req_to_token: BufferArg,
    /// i32 `[batch]`: the rows of `req_to_token` that are in the batch.
    pub req_rows: BufferArg,
    /// i32 `[batch]`: tokens of each, counted from `kv_start`. A negative length is read as 0.
    pub seq_lens: BufferArg,
    /// i32 `[batch]`: the first token of each, a multiple of the page size.
    pub kv_start: BufferArg,
    /// Rows of the map.
    pub requests: usize,
    /// Columns of the map.
    pub tokens: usize,
    /// Sequences.
    pub batch: usize,
    /// Tokens in a page, from 1 to 2^31 - 1.
    pub page_size: usize,
}

/// Writes `table`, i32 `[batch, max_pages]`: entry `p` of sequence `b` is the page of its token
/// `kv_start + p * page_size`, -1 from the sequence's end on. A token outside the map, from a row, start or length that
/// is none of the map's, has page -1; so has one whose slot is no page's first. `overflow`, i32 `[batch]`, gets 0, or 1 where a
/// sequence has more pages than the table. Without sequences nothing is launched; without pages nothing is written to `table`,
/// which must not be a buffer of nothing.
pub fn launch_page_table(client: &Client, batch: PagedBatch, table: BufferArg, overflow: BufferArg, max_pages: usize) {
    // Where the table is empty, a unit for each sequence says whether that is too few.
    let units = batch.batch * max_pages.max(1);
    if units == 0 {
        return;
    }
    let cube_dim = CubeDim::new_1d(UNITS);
    page_table_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, units, cube_dim),
        cube_dim,
        address_type(client, &[&batch.req_to_token, &table]),
        batch.req_to_token,
        batch.req_rows,
        batch.seq_lens,
        batch.kv_start,
        table,
        overflow,
        batch.requests,
        batch.tokens,
        batch.batch,
        max_pages,
        batch.page_size,
    );
}

/// Units of a cube where a unit makes one element. Every runtime has this many.
pub(super) const UNITS: u32 = 128;

/// A unit per entry of the table; that of a sequence's first entry says whether the sequence has more.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn page_table_kernel(
    req_to_token: &[i32],
    req_rows: &[i32],
    seq_lens: &[i32],
    kv_start: &[i32],
    table: &mut [i32],
    overflow: &mut [i32],
    requests: usize,
    tokens: usize,
    batch: usize,
    max_pages: usize,
    page_size: usize,
) {
    let entry = ABSOLUTE_POS;
    let columns = max(max_pages, 1usize);
    if entry < batch * columns {
        let sequence = entry / columns;
        let page = entry % columns;
        let pages = page_count(seq_lens[sequence], page_size);
        if page == 0 {
            overflow[sequence] = i32::cast_from(pages > max_pages);
        }
        if page < max_pages {
            let mut id = i32::new(-1);
            if page < pages {
                let row = req_rows[sequence];
                id = page_id(req_to_token, row, kv_start[sequence], page, requests, tokens, page_size);
            }
            table[entry] = id;
        }
    }
}

/// Pages of a sequence of `len` tokens.
#[cube]
pub(super) fn page_count(len: i32, page_size: usize) -> usize {
    let mut pages = 0usize.runtime();
    if len > 0 {
        // Not `(len + page_size - 1) / page_size`: with pages of nearly 2^31 tokens the sum has 33 bits.
        pages = (usize::cast_from(len) - 1) / page_size + 1;
    }
    pages
}

/// The page of token `start + page * page_size` of a row of the map, -1 if the map has no such token, or if its slot is
/// negative or not the first of a page.
///
/// `page` must be one of the sequence's, so that the token's number fits in 32 bits.
#[cube]
pub(super) fn page_id(
    req_to_token: &[i32],
    row: i32,
    start: i32,
    page: usize,
    requests: usize,
    tokens: usize,
    page_size: usize,
) -> i32 {
    let mut id = i32::new(-1);
    if is_row(row, requests) && start >= 0 {
        let token = usize::cast_from(start) + page * page_size;
        if token < tokens {
            let slot = req_to_token[usize::cast_from(row) * tokens + token];
            let size = i32::cast_from(page_size);
            if slot >= 0 && slot % size == 0 {
                id = slot / size;
            }
        }
    }
    id
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, form};
    let (bits, dim) = (AddressType::U32, CubeDim::new_1d(UNITS));
    vec![Entry::new("page_table", form!(page_table_kernel, dim, [bits, _, _, _, _, _, _, 1, 1, 1, 1, 1]))]
}
