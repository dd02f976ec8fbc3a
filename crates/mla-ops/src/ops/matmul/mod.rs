//! [`matmul`]: matrix products in the precision of their dtype.

mod backend;
mod blocks;

use burn::backend::Dispatch;
#[cfg(feature = "_gpu")]
use burn::backend::DispatchDevice;
#[cfg(feature = "_gpu")]
use burn::tensor::DType;
use burn::tensor::Tensor;
#[cfg(feature = "_gpu")]
use cubecl::ir::{ElemType, FloatKind};

use self::backend::MatmulBackend;
use self::blocks::matmul_in_blocks;
use super::linear_by_head::backend::{BackendHeadRows, LinearByHeadBackend};
use super::products::LinearProblem;
use crate::check::Check;
use crate::{Determinism, MlaError, StackedWeight};

/// The product of `lhs [.., M, K]` and `rhs [.., K, N]` of one float dtype, whose leading dimensions are equal: `[.., M, N]`.
///
/// As [`Tensor::matmul`], but f32 is f32: on NVIDIA GPUs, Burn's own product rounds both sides to TF32, 10 bits of
/// fraction. That is too coarse for a router, whose scores decide which experts run, and for logits that are compared with
/// those of other programs. With [`Determinism::BatchInvariant`], a row of the result depends on no other row.
/// [`explain_path`](crate::explain_path) says what runs for [`LinearProblem::matmul`](crate::LinearProblem::matmul).
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use mla_ops::{Determinism, matmul};
///
/// let device = Device::flex();
/// let (lhs, rhs) = (Tensor::<3>::ones([2, 5, 8], &device), Tensor::<3>::ones([2, 8, 3], &device));
/// let product = matmul(lhs, rhs, Determinism::BatchInvariant)?;
/// assert_eq!((product.dims(), product.max().into_scalar::<f32>()), ([2, 5, 3], 8.0));
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Fewer than two dimensions; wrong shapes, dtypes or devices: nothing is launched.
pub fn matmul<const D: usize>(lhs: Tensor<D>, rhs: Tensor<D>, determinism: Determinism) -> Result<Tensor<D>, MlaError> {
    let check = Check::new("matmul", "lhs", &lhs)?;
    check.float("lhs", &lhs)?;
    check.float_as("rhs", &rhs, lhs.dtype(), "that of `lhs`")?;
    check.value("lhs", D >= 2, format!("{D} dimensions"), || "at least two".into())?;
    let dims = lhs.dims();
    let mut expected = dims.map(Some);
    (expected[D - 2], expected[D - 1]) = (Some(dims[D - 1]), None);
    check.dims("rhs", rhs.dims(), expected, || format!("[.., K, N] for `lhs` [.., M, K] = {dims:?}"))?;
    check.elements("lhs", &lhs)?;
    check.elements("rhs", &rhs)?;
    Ok(product(lhs, rhs, determinism))
}

/// [`matmul`] of checked sides.
pub(crate) fn product<const D: usize>(lhs: Tensor<D>, rhs: Tensor<D>, determinism: Determinism) -> Tensor<D> {
    if LinearProblem::of_sides(&lhs, &rhs, determinism).has_small_batch_kernel(&lhs.device()) {
        return product_by_kernel(lhs, rhs);
    }
    let (l, r) = (lhs.dims(), rhs.dims());
    if determinism.is_batch_invariant() && l.iter().chain(&r).all(|&len| len > 0) {
        match D {
            2 => return matmul_in_blocks::<D, 3>(lhs, rhs),
            3 => return matmul_in_blocks::<D, 4>(lhs, rhs),
            _ => {}
        }
    }
    if is_rounded(&lhs) {
        return Tensor::from_dispatch(Dispatch::matmul(lhs.into_dispatch(), rhs.into_dispatch()));
    }
    lhs.matmul(rhs)
}

/// The same by the small-batch kernel, whose rows do not depend on one another. There is no dimension of length 0.
fn product_by_kernel<const D: usize>(lhs: Tensor<D>, rhs: Tensor<D>) -> Tensor<D> {
    let (mut shape, [depth, width]) = (lhs.dims(), [D - 2, D - 1].map(|dim| rhs.dims()[dim]));
    let (products, rows) = (shape[..D - 2].iter().product(), shape[D - 2]);
    shape[D - 1] = width;
    let lhs: Tensor<3> = lhs.reshape([products, rows, depth]).swap_dims(0, 1);
    let rhs: Tensor<3> = rhs.reshape([products, depth, width]).swap_dims(1, 2);
    let (lhs, rhs) = (BackendHeadRows::InMemory(lhs.into_dispatch()), StackedWeight::from(rhs).into_backend());
    let out = <Dispatch as LinearByHeadBackend>::linear_by_head(lhs, rhs, Determinism::BatchInvariant);
    Tensor::<3>::from_dispatch(out).swap_dims(0, 1).reshape(shape)
}

/// Whether Burn would round the factors to TF32.
fn is_rounded<const D: usize>(tensor: &Tensor<D>) -> bool {
    #[cfg(feature = "_gpu")]
    if let DispatchDevice::Cube(device) = tensor.device().as_dispatch() {
        return tensor.dtype() == DType::F32
            && tensor.shape().num_elements() > 0
            && device.client().properties().supports_type(ElemType::Float(FloatKind::TF32));
    }
    let _ = tensor;
    false
}
