//! When a projection is computed by our kernels: those for a small batch (GEMV), which read the weights once for all rows, and
//! those for many rows on tensor cores.

use burn::tensor::{Device, Tensor};

use crate::device::has_kernels;
use crate::{Determinism, Weight};

/// Rows up to which the kernels are the fastest; Burn's product of matrices is for more, unless rows have to be independent: its
/// sums depend on how many rows there are.
pub(crate) const MAX_ROWS: usize = 64;

/// Whether a kernel computes the product of so many rows.
pub(crate) fn has_kernel(rows: usize, device: &Device, determinism: Determinism) -> bool {
    let by_kernel = (1..=MAX_ROWS).contains(&rows) || (rows > MAX_ROWS && determinism.is_batch_invariant());
    by_kernel && has_kernels(device)
}

/// Whether a kernel is made for the product of more rows than a small batch has, all by one weight, `gated` or not.
pub(crate) fn takes_many_rows(x: &Tensor<2>, weight: &Weight, gated: bool) -> bool {
    #[cfg(feature = "_gpu")]
    if let burn::backend::DispatchDevice::Cube(device) = x.device().as_dispatch() {
        use burn::backend::cubecl::dtype_to_elem_type;
        use mla_kernels::linear::{LinearForm, LinearSizes, takes_many_rows};
        let ([rows, inputs], [outputs, _]) = (x.dims(), weight.dims());
        let form = LinearForm { gated, limited: false };
        let sizes = [rows, inputs, if gated { outputs / 2 } else { outputs }];
        let elems = [x.dtype(), weight.dtype()].map(dtype_to_elem_type);
        return !weight.is_empty() && takes_many_rows(&device.client(), &LinearSizes::dense(sizes, form, elems));
    }
    let _ = (x, weight, gated);
    false
}
