//! [`sparse_mla_parts`]: sparse attention before the division by the sum of the weights.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::{DType, Tensor};

use super::backend::SparseMlaBackend;
use super::{SparseMlaArgs, SparseMlaOptions, SparseScope, second_into_backend};
use crate::MlaError;
use crate::check::Check;
use crate::dispatch::tensors;

const OP: &str = "sparse_mla_parts";

/// What [`sparse_mla_parts`] gives, in f32: `acc / row_sum` is the output of [`sparse_mla`](crate::sparse_mla()), and
/// `max + ln(row_sum)` its lse.
#[derive(Debug, Clone)]
pub struct SparseParts {
    /// `[B, Sq, H, Dv]`: the sum of `exp(score - max) * value`; 0 without rows.
    pub acc: Tensor<4>,
    /// `[B, Sq, H]`: the largest score; -inf without rows.
    pub max: Tensor<3>,
    /// `[B, Sq, H]`: the sum of `exp(score - max)`; 0 without rows.
    pub row_sum: Tensor<3>,
}

/// [`sparse_mla`](crate::sparse_mla()) before the division by the sum of the weights: for who continues the softmax over keys
/// that are elsewhere. There must be no sink, and no plan.
///
/// On a Hopper or a Blackwell of data centers rows of 512 or 576 channels are one launch of the kernel of [`sparse_mla`](crate::sparse_mla()), without splits. On
/// other GPUs this is the general form, not the fast one: a kernel of plain arithmetic reads the gathered rows once for every four heads.
/// Two scopes are two launches there, and some elementwise operations.
///
/// ```
/// use burn::tensor::{DType, Device, Int, Tensor};
/// use mla_ops::{SparseMlaArgs, SparseMlaOptions, SparseScope, sparse_mla_parts};
///
/// let device = Device::flex();
/// let (q, rows) = (Tensor::<4>::ones([1, 1, 4, 12], &device), Tensor::<3>::ones([3, 2, 12], &device));
/// let indices = Tensor::<3, Int>::from_data([[[5, 0, 3]]], (&device, DType::I32));
/// let parts = sparse_mla_parts(SparseMlaArgs::new(q, SparseScope::new(rows, indices)), &SparseMlaOptions::new(8, 0.5))?;
/// // Three rows that score alike: 12 channels, times 0.5.
/// assert_eq!((parts.acc.dims(), parts.row_sum.max().into_scalar::<f32>()), ([1, 1, 4, 8], 3.0));
/// assert_eq!(parts.max.max().into_scalar::<f32>(), 6.0);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// As [`sparse_mla`](crate::sparse_mla()); and a sink or a plan; FP8 rows where the device has no kernel of its own.
pub fn sparse_mla_parts(args: SparseMlaArgs, options: &SparseMlaOptions) -> Result<SparseParts, MlaError> {
    let check = args.check_tensors(OP)?;
    args.check_options(&check, options)?;
    check.value("sink", args.sink.is_none(), "a sink", || "none: it belongs to the quotient".into())?;
    check.value("plan", args.plan.is_none(), "a plan", || "none: parts have no splits".into())?;
    let [batch, query_len, heads, _] = args.q.dims();
    check.allocation("q", DType::F32, [batch, query_len, heads, options.value_width])?;
    let in_one_piece = args.problem(options).has_own_kernel(&check);
    if !in_one_piece {
        check.elements("q", &args.q)?;
        args.scope.rows.check_elements(&check, "scope.rows")?;
        args.second.as_ref().map_or(Ok(()), |second| second.rows.check_elements(&check, "second.rows"))?;
    }
    if check.sees_values() {
        args.validate_values(OP)?;
    }
    if in_one_piece {
        let (acc, max, row_sum) = tensors(<Dispatch as SparseMlaBackend>::sparse_mla_parts(
            args.q.into_dispatch(),
            args.scope.into_backend(),
            second_into_backend(args.second),
            options.clone(),
        ));
        return Ok(SparseParts { acc, max, row_sum });
    }
    let first = parts(&check, args.q.clone(), args.scope, options)?;
    match args.second {
        Some(second) => Ok(first.and(parts(&check, args.q, second, options)?)),
        None => Ok(first),
    }
}

/// Of one scope.
fn parts(check: &Check, q: Tensor<4>, scope: SparseScope, options: &SparseMlaOptions) -> Result<SparseParts, MlaError> {
    let rows = scope.rows.dense_only(check, "scope.rows")?;
    let ([batch, query_len, heads, _], [_, _, most], device) = (q.dims(), scope.indices.dims(), q.device());
    if most == 0 || batch * query_len == 0 {
        let numbers = |value| Tensor::full([batch, query_len, heads], value, (&device, DType::F32));
        let acc = Tensor::zeros([batch, query_len, heads, options.value_width], (&device, DType::F32));
        return Ok(SparseParts { acc, max: numbers(f32::NEG_INFINITY), row_sum: numbers(0.0) });
    }
    let lengths = scope.lengths.unwrap_or_else(|| Tensor::full([batch, query_len], most as i32, (&device, DType::I32)));
    let (acc, max, row_sum) = tensors(<Dispatch as SparsePartsBackend>::sparse_parts(
        q.into_dispatch(),
        rows.into_dispatch(),
        scope.indices.into_dispatch(),
        lengths.into_dispatch(),
        options.clone(),
    ));
    Ok(SparseParts { acc, max, row_sum })
}

impl SparseParts {
    /// Those over the rows of both.
    fn and(self, other: Self) -> Self {
        let max = self.max.clone().max_pair(other.max.clone());
        // The lowest finite number stands in for the maximum of parts without rows, whose sums are 0.
        let [base, own, others] = [max.clone(), self.max, other.max].map(|max| max.clamp_min(f32::MIN));
        let [own, others] = [own, others].map(|part| (part - base.clone()).exp());
        Self {
            acc: self.acc * own.clone().unsqueeze_dim::<4>(3) + other.acc * others.clone().unsqueeze_dim::<4>(3),
            row_sum: self.row_sum * own + other.row_sum * others,
            max,
        }
    }
}

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait SparsePartsBackend: Backend {
    /// [`sparse_mla_parts`] of one scope: acc, max, row_sum.
    #[fusion(meta = |q, _rows, _indices, _lengths, options| {
        let [batch, query_len, heads, _] = q.shape.dims();
        let number = crate::fusion::spec([batch, query_len, heads], DType::F32);
        (crate::fusion::spec([batch, query_len, heads, options.value_width], DType::F32), number.clone(), number)
    })]
    fn sparse_parts(
        q: FloatTensor<Self>,
        rows: FloatTensor<Self>,
        indices: IntTensor<Self>,
        lengths: IntTensor<Self>,
        options: SparseMlaOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}

#[cfg(feature = "_gpu")]
mod cube {
    use burn::tensor::DType;
    use burn_cubecl::{CubeBackend, tensor::CubeTensor};
    use mla_kernels::sparse_parts::{SparsePartsArgs, launch};

    use super::{SparseMlaOptions, SparsePartsBackend};
    use crate::tensors::{buffers, contiguous, dims, elem, empty};

    impl SparsePartsBackend for CubeBackend {
        fn sparse_parts(
            q: CubeTensor,
            rows: CubeTensor,
            indices: CubeTensor,
            lengths: CubeTensor,
            options: SparseMlaOptions,
        ) -> (CubeTensor, CubeTensor, CubeTensor) {
            let [q, rows, slots, lengths] = [q, rows, indices, lengths].map(contiguous);
            let ([batch, query_len, heads, width], [pages, page_size, _]) = (dims(&q), dims(&rows));
            let ([_, _, most], elem) = (dims(&slots), elem(&q));
            let SparseMlaOptions { value_width, softmax_scale, .. } = options;
            let acc = empty(&q, [batch, query_len, heads, value_width], DType::F32);
            let [max, row_sum] = [(); 2].map(|()| empty(&q, [batch, query_len, heads], DType::F32));
            let (tokens, row_count) = (batch * query_len, pages * page_size);
            let args = buffers!(q, rows, slots, lengths, acc, max, row_sum => SparsePartsArgs {
                q, rows, slots, lengths, acc, max, row_sum,
                tokens, heads, row_count, most, width, value_width, softmax_scale, elem,
            });
            launch(&q.client, args);
            (acc, max, row_sum)
        }
    }
}

#[cfg(feature = "flex")]
mod flex {
    use burn::backend::{
        Flex,
        tensor::{FloatTensor, IntTensor},
    };

    use super::super::reference::sparse_mla_parts;
    use super::{SparseMlaOptions, SparseParts, SparsePartsBackend, SparseScope};
    use crate::reference::{IntoFlex, tensor};

    impl SparsePartsBackend for Flex {
        fn sparse_parts(
            q: FloatTensor<Self>,
            rows: FloatTensor<Self>,
            indices: IntTensor<Self>,
            lengths: IntTensor<Self>,
            options: SparseMlaOptions,
        ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
            let scope = SparseScope {
                rows: tensor::<burn::tensor::Tensor<3>>(rows).into(),
                indices: tensor(indices),
                lengths: Some(tensor(lengths)),
            };
            let SparseParts { acc, max, row_sum } = sparse_mla_parts(tensor(q), vec![scope], &options);
            (acc, max, row_sum).into_flex()
        }
    }
}
