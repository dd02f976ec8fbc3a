//! Which keys a query row sees, and the slots of the paged cache that they are in.

use cubecl::prelude::*;

/// One past the last key of an item that a query row sees: never past the sequence's end, whatever the plan says.
#[cube]
pub(crate) fn visible_end(
    seq_lens: &[i32],
    sequence: usize,
    row: usize,
    end_key: usize,
    query_len: u32,
    heads: u32,
    #[comptime] causal: bool,
) -> usize {
    if comptime!(causal) {
        let token = (row as u32 / heads) as i32;
        let end = seq_lens[sequence] - query_len as i32 + token + 1;
        min(max(end, 0i32) as usize, end_key)
    } else {
        min(max(seq_lens[sequence], 0i32) as usize, end_key)
    }
}

/// Where the pages of a sequence are.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct SequencePages {
    /// Where its row of the page table starts.
    pub table_row: usize,
    /// The logarithm of the page size.
    pub page_shift: u32,
    /// Slots of the cache.
    pub slot_count: u32,
}

#[cube]
impl SequencePages {
    /// The slot of a token; the last one of the cache if the page table names a page that is not there.
    pub fn slot(&self, page_table: &[i32], token: usize) -> u32 {
        let token = token as u32;
        let page = page_table[self.table_row + (token >> self.page_shift) as usize] as u32;
        min((page << self.page_shift) + (token & ((1u32 << self.page_shift) - 1)), self.slot_count - 1)
    }
}
