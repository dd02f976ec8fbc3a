//! When a projection is computed by the small-batch kernels (GEMV and its kin), which read the weights once for all rows.

use burn::tensor::Device;

use crate::Determinism;
use crate::device::has_kernels;

/// Rows up to which the kernels are the fastest; Burn's product of matrices is for more, unless rows have to be independent: its
/// sums depend on how many rows there are.
pub(crate) const MAX_ROWS: usize = 64;

/// Whether a kernel computes the product of so many rows.
pub(crate) fn has_kernel(rows: usize, device: &Device, determinism: Determinism) -> bool {
    let by_kernel = (1..=MAX_ROWS).contains(&rows) || (rows > MAX_ROWS && determinism.is_batch_invariant());
    by_kernel && has_kernels(device)
}
