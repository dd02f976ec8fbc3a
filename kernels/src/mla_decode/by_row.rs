//! A decode step by the kernel of sparse attention: the keys of a sequence are rows that are named by its pages.

use super::problem::{DecodeArgs, DecodeSizes};
use crate::sparse_mla::{Pages, Partials, ScopeArgs, SparseMlaArgs, SparseMlaResults, SparseMlaSizes, SparsePlan};

impl DecodeSizes {
    /// As sparse attention.
    pub(super) fn by_row(&self) -> SparseMlaSizes {
        let &Self { batch, query_len, heads, key_width, value_width, elem, rows, .. } = self;
        SparseMlaSizes { tokens: batch * query_len, heads, key_width, value_width, elem, rows, second_rows: None }
    }
}

impl DecodeArgs {
    /// The same.
    pub(super) fn by_row(self) -> SparseMlaArgs {
        let sizes = self.sizes;
        SparseMlaArgs {
            q: self.q,
            first: ScopeArgs {
                rows: self.kv_cache,
                slots: self.page_table,
                lengths: Some(self.seq_lens),
                row_count: sizes.slots(),
                most: sizes.max_pages * sizes.page_size,
            },
            second: None,
            pages: Some(Pages { query_len: sizes.query_len, page_size: sizes.page_size, causal: sizes.causal }),
            plan: Some(SparsePlan {
                items: self.items,
                cube_ptr: self.cube_ptr,
                split_ptr: self.split_ptr,
                cubes: sizes.cubes,
                capacity: sizes.capacity,
                partials: Some(Partials { out: self.partial_out, lse: self.partial_lse }),
            }),
            results: SparseMlaResults::Output { out: self.out, lse: self.lse, sink: None },
            sizes: sizes.by_row(),
            softmax_scale: self.softmax_scale,
            batch_invariant: false,
        }
    }
}
