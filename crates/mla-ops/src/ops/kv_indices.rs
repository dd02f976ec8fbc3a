//! [`kv_indices`]: page ids of a batch as a compressed sparse row list.

use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

use super::page_table::PagedBatchArgs;
use crate::MlaError;
use crate::backend::{KvIndicesSpec, MlaBackend};

const OP: &str = "kv_indices";

/// What [`kv_indices`] gives, all i32.
#[derive(Debug, Clone)]
pub struct KvIndices {
    /// `[B + 1]`: the pages of sequence `b` are `indices[indptr[b] .. indptr[b + 1]]`. Counts what is needed even where
    /// the capacity is too small.
    pub indptr: Tensor<1, Int>,
    /// `[capacity]`: page ids, -1 in the tail. With page size 1 these are token slots.
    pub indices: Tensor<1, Int>,
    /// `[B]`: tokens in each sequence's last page, 0 for an empty sequence.
    pub last_page_len: Tensor<1, Int>,
    /// `[1]`: 0, or 1 if the capacity was too small; then `indices` has the leading part of the list.
    pub overflow: Tensor<1, Int>,
}

/// Page ids of all sequences, one after the other, at most `capacity` of them.
///
/// # Errors
/// Wrong shapes, dtypes or devices, or a page size that is no power of two: nothing is launched. A capacity that is too
/// small shows in [`KvIndices::overflow`], since the lengths are known on the device only.
pub fn kv_indices(args: PagedBatchArgs, capacity: usize) -> Result<KvIndices, MlaError> {
    let check = args.check(OP)?;
    check.index_range("capacity", capacity)?;
    check.allocation("capacity", DType::I32, [capacity])?;
    if check.sees_values() {
        args.validate_values(OP)?;
    }
    let kv_start = args.kv_start_or_zero();
    let spec = KvIndicesSpec { page_size: args.page_size, capacity };
    let (indptr, indices, last_page_len, overflow) = <Dispatch as MlaBackend>::kv_indices(
        args.req_to_token.into_dispatch(),
        args.req_rows.into_dispatch(),
        args.seq_lens.into_dispatch(),
        kv_start.into_dispatch(),
        spec,
    );
    Ok(KvIndices {
        indptr: Tensor::from_dispatch(indptr),
        indices: Tensor::from_dispatch(indices),
        last_page_len: Tensor::from_dispatch(last_page_len),
        overflow: Tensor::from_dispatch(overflow),
    })
}
