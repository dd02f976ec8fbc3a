//! [`linear`] and [`linear_each`]: projections without bias.

mod backend;
#[cfg(feature = "_gpu")]
pub(crate) mod cube;
pub(crate) mod in_memory;
pub(crate) mod reference;

use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

pub(crate) use self::backend::*;
use super::norm_rope::checks::check_norm;
use super::products::is_small_batch;
use super::residual_norm::{BackendProducts, BackendReader, Normed, Pending, ResidualNormBackend, Rows};
use crate::check::Check;
use crate::device::has_kernels;
use crate::weight::BackendWeight;
use crate::{Determinism, MlaError, Weight};

/// The product of `x [N, in]` and the transpose of a weight `[out, in]` of the dtype of `x`, or of f32: `[N, out]` of the dtype of
/// the weight.
///
/// On a GPU, a few rows are computed by a small-batch kernel (GEMV), as fast as the weights come from memory; a row's bits do not
/// depend on the others there. More rows than 8 take Hopper's tensor cores where x and weight are f16 or bf16 and `in` and `out`
/// multiples of 8 (to be [batch-invariant](Determinism::BatchInvariant): `in` of 32); more than 64 are a
/// [`matmul`](crate::matmul) elsewhere, unless they have to be batch-invariant. Sums are f32; the CPU rounds those of f16 to f16 now and then.
/// [`explain_path`](crate::explain_path) says what runs for [`LinearProblem::dense`](crate::LinearProblem::dense).
///
/// `x` may be a [`Normed`](crate::Normed) that is not in memory yet: a small f32 weight (a router) is read in the launch of the
/// residual sum and its norm. The bits are the same, and the norm is in memory afterwards. Where no sum waits, the launch for a single
/// row may compute the norm for itself, and it is not.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use mla_ops::{Determinism, Weight, linear};
///
/// let device = Device::flex();
/// let weight = Weight::from(Tensor::<2>::ones([4, 3], &device)); // [out, in]
/// let x = Tensor::<2>::ones([2, 3], &device); // [N, in]
/// let y = linear(x, &weight, Determinism::Fast)?;
/// assert_eq!((y.dims(), y.max().into_scalar::<f32>()), ([2, 4], 3.0));
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes or devices, or more than the device can do: nothing is launched.
pub fn linear<'a, 'r: 'a>(
    x: impl Into<Rows<'a, 'r>>,
    weight: &Weight,
    determinism: Determinism,
) -> Result<Tensor<2>, MlaError> {
    let x = x.into();
    let check = x.check("linear")?;
    check_weight(&check, ("weight", weight), &x, weight.dtype() == DType::F32)?;
    let normed = match x {
        Rows::InMemory(x) => return Ok(in_memory::linear(x, weight, determinism)),
        Rows::Normed(normed) => normed,
    };
    if let Some(BackendProducts::One(out)) =
        of_single_row(normed, &check, [weight], |[weight]| BackendReader::Linear(weight, determinism))
    {
        return Ok(Tensor::from_dispatch(out));
    }
    let ([rows, _], device) = (normed.dims(), check.device());
    // The launch of a sum and its norm reads a matrix for a few rows alone, also where rows have to be independent.
    let few = is_small_batch(rows, device);
    let reads = few && weight.dtype() == DType::F32 && !weight.is_empty();
    if reads && matches!(normed.pending(), Pending::Rows) {
        match normed.read_by(BackendReader::Linear(weight.clone().into_backend(), determinism)) {
            BackendProducts::One(out) => return Ok(Tensor::from_dispatch(out)),
            _ => unreachable!("a reader has its products"),
        }
    }
    Ok(in_memory::linear(normed.tensor(), weight, determinism))
}

/// [`linear`] of `x [N, in]` with each of several weights `[out, in]` of its dtype: the same bits, but for a few rows on a GPU it is
/// one launch. With matrix instructions that has up to five weights of any formats, two of them in blocks; otherwise two of one kind.
///
/// `x` may be a [`Normed`](crate::Normed) that is not in memory yet. Where it waits for the experts of a single token with shared
/// experts, their weighted sum, the residual sum, its norm and the products with two weights are one launch on a GPU with matrix
/// instructions.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use mla_ops::{Determinism, Weight, linear_each};
///
/// let device = Device::flex();
/// let random = |shape| Tensor::<2>::random(shape, Distribution::Default, &device);
/// // The first projections of MLA read the same rows.
/// let (q_a_proj, kv_a_proj) = (Weight::from(random([24, 16])), Weight::from(random([40, 16])));
/// let [q, kv] = linear_each(random([3, 16]), [&q_a_proj, &kv_a_proj], Determinism::Fast)?;
/// assert_eq!((q.dims(), kv.dims()), ([3, 24], [3, 40]));
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// As [`linear`].
pub fn linear_each<'a, 'r: 'a, const N: usize>(
    x: impl Into<Rows<'a, 'r>>,
    weights: [&Weight; N],
    determinism: Determinism,
) -> Result<[Tensor<2>; N], MlaError> {
    let x = x.into();
    let check = x.check("linear_each")?;
    for weight in weights {
        check_weight(&check, ("weights", weight), &x, false)?;
    }
    let products = match x {
        Rows::InMemory(x) => in_memory::linear_each(&x, &weights, None, determinism),
        Rows::Normed(normed) => of_normed(normed, &check, &weights, determinism),
    };
    Ok(products.try_into().expect("a product for each weight"))
}

/// [`linear_each`] with the [`rms_norm`](crate::rms_norm) of the first product in its place, of a weight f32 `[out]` and an epsilon: the
/// same bits, but for a single row on a GPU with matrix instructions it is one launch.
///
/// # Errors
/// As [`linear`] and [`rms_norm`](crate::rms_norm).
pub fn linear_each_normed<const N: usize>(
    x: Tensor<2>,
    weights: [&Weight; N],
    norm: (Tensor<1>, f32),
    determinism: Determinism,
) -> Result<[Tensor<2>; N], MlaError> {
    let x = Rows::from(x);
    let check = x.check("linear_each_normed")?;
    for weight in weights {
        check_weight(&check, ("weights", weight), &x, false)?;
    }
    if let [first, ..] = &weights[..] {
        check_norm(&check, "norm", &norm.0, first.dims()[0], norm.1)?;
    }
    let products = in_memory::linear_each(&x.tensor(), &weights, Some(norm), determinism);
    Ok(products.try_into().expect("a product for each weight"))
}

/// The products of a norm, which the launch of two of them may compute.
fn of_normed(normed: &mut Normed<'_>, check: &Check, weights: &[&Weight], determinism: Determinism) -> Vec<Tensor<2>> {
    let products = match weights {
        [first, second] => read_by_pair(normed, check, [first, second], determinism),
        _ => None,
    };
    match products {
        Some(products) => products.into_vec().into_iter().map(Tensor::from_dispatch).collect(),
        None => in_memory::linear_each(&normed.tensor(), weights, None, determinism),
    }
}

fn read_by_pair(
    normed: &mut Normed<'_>,
    check: &Check,
    weights: [&Weight; 2],
    determinism: Determinism,
) -> Option<BackendProducts<Dispatch>> {
    let reader = |[first, second]: [BackendWeight<Dispatch>; 2]| BackendReader::LinearPair(first, second, determinism);
    let of_row = of_single_row(normed, check, weights, reader);
    let reads = has_kernels(check.device()) && weights.iter().all(|weight| !weight.is_empty());
    if of_row.is_some() || !reads || !matches!(normed.pending(), Pending::ExpertsOfToken) {
        return of_row;
    }
    Some(normed.read_by(reader(weights.map(|weight| weight.clone().into_backend()))))
}

/// What a reader of these weights makes of the norm of a single row that waits for no sum, on a device with kernels.
fn of_single_row<const N: usize>(
    normed: &Normed<'_>,
    check: &Check,
    weights: [&Weight; N],
    reader: impl FnOnce([BackendWeight<Dispatch>; N]) -> BackendReader<Dispatch>,
) -> Option<BackendProducts<Dispatch>> {
    let (x, norm_weight, eps) = normed.single_row()?;
    if !has_kernels(check.device()) || weights.iter().any(|weight| weight.is_empty()) {
        return None;
    }
    let reader = reader(weights.map(|weight| weight.clone().into_backend()));
    Some(Dispatch::norm_linear(x.into_dispatch(), norm_weight.into_dispatch(), eps, reader))
}

/// A weight `[out, in]` of the dtype of x, or of f32 where that may be.
pub(crate) fn check_weight(
    check: &Check,
    (name, weight): (&'static str, &Weight),
    x: &Rows<'_, '_>,
    any_dtype: bool,
) -> Result<(), MlaError> {
    if any_dtype {
        weight.check(check, name, DType::F32, "always")?;
    } else {
        weight.check(check, name, x.dtype(), "that of `x`")?;
    }
    let [_, inputs] = x.dims();
    check.dims(name, weight.dims(), [None, Some(inputs)], || format!("[out, in] with in = {inputs}"))
}
