//! When a projection is computed by our kernels: those for a small batch (GEMV), which read the weights once for all rows, and
//! those for many rows on tensor cores.

use burn::tensor::{DType, Device, Tensor};
#[cfg(feature = "_gpu")]
use cubecl::ir::ElemType;

use crate::device::has_kernels;
use crate::{Determinism, StackedWeight, Weight};

/// Rows up to which the kernels are the fastest; Burn's product of matrices is for more, unless rows have to be independent: its
/// sums depend on how many rows there are.
pub(crate) const MAX_ROWS: usize = 64;

/// Whether a kernel computes the product of so many rows.
pub(crate) fn has_kernel(rows: usize, device: &Device, determinism: Determinism) -> bool {
    let by_kernel = (1..=MAX_ROWS).contains(&rows) || (rows > MAX_ROWS && determinism.is_batch_invariant());
    by_kernel && has_kernels(device)
}

/// Outputs of a router at most.
const ROUTER_OUTPUTS: usize = 512;

/// Whether it is the product of rows and a router's weights, in f32: Burn's takes an order of magnitude longer than the kernel for a
/// few rows.
pub(crate) fn is_router(x: &Tensor<2>, weight: &Weight) -> bool {
    let ([rows, _], [outputs, _]) = (x.dims(), weight.dims());
    let is_f32 = weight.dtype() == DType::F32 && x.dtype() != DType::F32;
    is_f32 && rows > 0 && outputs <= ROUTER_OUTPUTS && has_kernels(&x.device())
}

/// Whether a kernel is made for the product of more rows than a small batch has, all by one weight, `gated` or not.
pub(crate) fn takes_many_rows(x: &Tensor<2>, weight: &Weight, gated: bool) -> bool {
    #[cfg(feature = "_gpu")]
    {
        use mla_kernels::linear::{LinearForm, LinearSizes};
        let ([rows, inputs], [outputs, _]) = (x.dims(), weight.dims());
        let form = LinearForm { gated, limited: false };
        let sizes = [rows, inputs, if gated { outputs / 2 } else { outputs }];
        let sizes = |elems| LinearSizes::dense(sizes, form, elems);
        return !weight.is_empty() && has_many_rows_kernel(&x.device(), [x.dtype(), weight.dtype()], sizes);
    }
    #[allow(unreachable_code)]
    {
        let _ = (x, weight, gated);
        false
    }
}

/// The same of rows `[N, H, d]` by a weight for each head.
pub(crate) fn takes_many_rows_by_head(x: &Tensor<3>, weight: &StackedWeight) -> bool {
    #[cfg(feature = "_gpu")]
    {
        use mla_kernels::linear::LinearSizes;
        let ([rows, heads, width], [_, outputs, inputs]) = (x.dims(), weight.dims());
        let sizes = |elems| LinearSizes::by_head([rows, heads, inputs, outputs, width - inputs], elems);
        return has_many_rows_kernel(&x.device(), [x.dtype(), weight.dtype()], sizes);
    }
    #[allow(unreachable_code)]
    {
        let _ = (x, weight);
        false
    }
}

#[cfg(feature = "_gpu")]
fn has_many_rows_kernel(
    device: &Device,
    dtypes: [DType; 2],
    sizes: impl FnOnce([ElemType; 2]) -> mla_kernels::linear::LinearSizes,
) -> bool {
    let burn::backend::DispatchDevice::Cube(device) = device.as_dispatch() else { return false };
    let elems = dtypes.map(burn::backend::cubecl::dtype_to_elem_type);
    mla_kernels::linear::takes_many_rows(&device.client(), &sizes(elems))
}
