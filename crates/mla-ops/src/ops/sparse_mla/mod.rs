//! [`sparse_mla`]: attention of each query token over rows that are named one by one.

mod backend;
mod checks;
mod compact_slots;
#[cfg(feature = "_gpu")]
mod cube;
mod parts;
mod plan;
mod problem;
#[cfg(feature = "flex")]
mod reference;

pub use self::parts::{SparseParts, sparse_mla_parts};
pub use self::plan::{ListLengths, SparseMlaPlan, SparseMlaPlanArgs, sparse_mla_plan};
pub use self::problem::SparseMlaProblem;

use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor, activation::sigmoid};

use self::backend::{BackendPlan, BackendScope, BackendSecond, BackendSink, SparseMlaBackend};
use self::compact_slots::compact_slots;
use super::merge_state::{MergeStateArgs, merge_state};
use super::mla_decode::{MlaDecodeArgs, MlaDecodeOptions, MlaQuery, mla_decode};
use super::mla_plan::MlaPlan;
use crate::cache::Pool;
use crate::dispatch::tensors;
use crate::{Determinism, MlaError, Splits};

const OP: &str = "sparse_mla";

/// Numbers of the results of query tokens that are computed together, at most: their parts are f32, in a buffer of 256 MiB.
const MAX_RESULTS: usize = 1 << 26;

/// Rows of a split where the result of a token must not depend on the batch.
const SPLIT_ROWS: usize = 1024;

/// Rows, and which of them each query token sees.
#[derive(Debug, Clone)]
pub struct SparseScope {
    /// `[P, S, D]` of the query's dtype, dense or in FP8; a row is a key, its first `Dv` channels are the value. On a GPU rows that
    /// are not contiguous are copied in every call.
    pub rows: Pool,
    /// Slots `page * S + offset` i32 `[B, Sq, K]`; -1, anywhere, for none. A slot that is named twice counts twice.
    pub indices: Tensor<3, Int>,
    /// i32 `[B, Sq]`: only so many entries of a row of `indices` count, the others may hold anything. Absent: all.
    pub lengths: Option<Tensor<2, Int>>,
}

/// Arguments of [`sparse_mla`].
#[derive(Debug, Clone)]
pub struct SparseMlaArgs {
    /// The query `[B, Sq, H, D]`, f32, f16 or bf16.
    pub q: Tensor<4>,
    /// What it sees.
    pub scope: SparseScope,
    /// More that it sees, in another pool (DeepSeek-V4: the window's rows beside the compressed entries).
    pub second: Option<SparseScope>,
    /// f32 `[H]`: the logarithm of what joins the denominator of each head (DeepSeek-V4). -inf is the same as none.
    pub sink: Option<Tensor<1>>,
    /// How the lists are divided on a GPU that has a kernel of its own for this, made by [`sparse_mla_plan`] of the lengths that the
    /// scopes have now. Without it each query token has as many splits as the others. Not where a token's bits must not depend on the
    /// others.
    pub plan: Option<SparseMlaPlan>,
}

/// Options of [`sparse_mla`].
#[derive(Debug, Clone)]
pub struct SparseMlaOptions {
    /// `Dv`: how many leading channels of a row are the value.
    pub value_width: usize,
    /// The factor of the scores before the softmax.
    pub softmax_scale: f32,
    /// Whether the bits of a query token may depend on the others.
    pub determinism: Determinism,
}

impl SparseScope {
    /// All entries of `indices` count; dense rows may be a tensor `[P, S, D]`.
    pub fn new(rows: impl Into<Pool>, indices: Tensor<3, Int>) -> Self {
        Self { rows: rows.into(), indices, lengths: None }
    }
}

impl SparseMlaArgs {
    /// One scope, no sink, and no plan.
    pub fn new(q: Tensor<4>, scope: SparseScope) -> Self {
        Self { q, scope, second: None, sink: None, plan: None }
    }
}

impl SparseMlaOptions {
    /// The fastest kernel, whose bits may depend on the other query tokens.
    pub fn new(value_width: usize, softmax_scale: f32) -> Self {
        Self { value_width, softmax_scale, determinism: Determinism::Fast }
    }
}

/// Attention of each query token over the rows that it is given (DeepSeek-V3.2, sparse attention; DeepSeek-V4).
///
/// Returns `out [B, Sq, H, Dv]` in the query's dtype and `lse` f32 `[B, Sq, H]`, the natural logarithm of the sum of
/// `exp(score)` over all rows of both scopes, without the sink. The sink scales the output: `out * sigmoid(lse - sink)`. A
/// query token that sees no row gives `out = 0` and `lse = -inf`. Rows without an index are not read.
///
/// On a Hopper or a Blackwell of data centers rows of 512 or 576 channels are one launch, and a second one where few tokens are split, or a plan says how. On other GPUs the slots of a
/// query token are read like the page table of a sequence with pages of one row, by the kernels of
/// [`mla_decode`](crate::mla_decode()). [`explain_path`](crate::explain_path) says which one runs for a [`SparseMlaProblem`].
///
/// ```
/// use burn::tensor::{DType, Device, Distribution, Int, Tensor};
/// use mla_ops::{SparseMlaArgs, SparseMlaOptions, SparseScope, sparse_mla};
///
/// let device = Device::flex();
/// let q = Tensor::<4>::random([1, 1, 4, 12], Distribution::Default, &device);
/// let rows = Tensor::<3>::random([3, 2, 12], Distribution::Default, &device); // [P, S, D]
/// // The token sees one row: that at offset 1 of page 2.
/// let indices = Tensor::<3, Int>::from_data([[[5, -1]]], (&device, DType::I32));
/// let args = SparseMlaArgs::new(q, SparseScope::new(rows.clone(), indices));
/// let (out, _) = sparse_mla(args, &SparseMlaOptions::new(8, 0.3))?;
/// let row = rows.reshape([1, 1, 6, 12]).narrow(2, 5, 1).narrow(3, 0, 8);
/// assert!((out - row).abs().max().into_scalar::<f32>() < 1e-6);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes or devices, or more than the device can do ([`MlaError::DeviceLimit`]): nothing is launched. Slots
/// that are out of range are on the device; [`SparseMlaArgs::validate_device_inputs`] looks.
pub fn sparse_mla(args: SparseMlaArgs, options: &SparseMlaOptions) -> Result<(Tensor<4>, Tensor<3>), MlaError> {
    let check = args.check_tensors(OP)?;
    args.check_options(&check, options)?;
    if let Some(plan) = &args.plan {
        let words = || "none where bits must not depend on the batch".into();
        check.value("plan", !options.determinism.is_batch_invariant(), "a plan", words)?;
        plan.check(&check, &args, &args.problem(options))?;
    }
    if check.sees_values() {
        args.validate_values(OP)?;
    }
    let [batch, query_len, heads, width] = args.q.dims();
    let tokens = batch * query_len;
    if tokens == 0 {
        // Burn reshapes no tensor without elements.
        let (out, device) = ([batch, query_len, heads, options.value_width], args.q.device());
        return Ok((
            Tensor::empty(out, (&device, args.q.dtype())),
            Tensor::empty([batch, query_len, heads], (&device, DType::F32)),
        ));
    }
    if args.problem(options).has_own_kernel(&check) {
        return Ok(in_one_piece(args, options));
    }
    let q = args.q.reshape([tokens, 1, heads, width]);
    let mut state = attend(q.clone(), args.scope, options)?;
    if let Some(second) = args.second {
        let (out_b, lse_b) = attend(q, second, options)?;
        state = merge_state(MergeStateArgs { out_a: state.0, lse_a: state.1, out_b, lse_b })?;
    }
    let (mut out, lse) = state;
    if let Some(sink) = args.sink {
        // Where both are -inf the difference is no number, and the output is zero.
        let share = sigmoid(lse.clone() - sink.unsqueeze());
        let share = share.clone().mask_fill(share.is_nan(), 0.0);
        out = out.clone() * share.unsqueeze_dim::<3>(2).cast(out.dtype());
    }
    Ok((out.reshape([batch, query_len, heads, options.value_width]), lse.reshape([batch, query_len, heads])))
}

fn in_one_piece(args: SparseMlaArgs, options: &SparseMlaOptions) -> (Tensor<4>, Tensor<3>) {
    let SparseMlaArgs { q, scope, second, sink, plan } = args;
    tensors(<Dispatch as SparseMlaBackend>::sparse_mla(
        q.into_dispatch(),
        scope.into_backend(),
        second_into_backend(second),
        sink.map_or(BackendSink::None, |sink| BackendSink::Sink(sink.into_dispatch())),
        plan.map_or(BackendPlan::None, |SparseMlaPlan { plan: MlaPlan { items, cube_ptr, split_ptr, .. }, .. }| {
            BackendPlan::Plan(items.into_dispatch(), cube_ptr.into_dispatch(), split_ptr.into_dispatch())
        }),
        options.clone(),
    ))
}

fn second_into_backend(second: Option<SparseScope>) -> BackendSecond<Dispatch> {
    second.map_or(BackendSecond::None, |second| BackendSecond::Scope(second.into_backend()))
}

/// q `[N, 1, H, D]` over one scope: out `[N, H, Dv]`, lse `[N, H]`.
fn attend(q: Tensor<4>, scope: SparseScope, options: &SparseMlaOptions) -> Result<(Tensor<3>, Tensor<2>), MlaError> {
    let [tokens, _, heads, _] = q.dims();
    let ([_, _, most], value_width) = (scope.indices.dims(), options.value_width);
    if most == 0 {
        let out = Tensor::zeros([tokens, heads, value_width], (&q.device(), q.dtype()));
        return Ok((out, Tensor::full([tokens, heads], f32::NEG_INFINITY, (&q.device(), DType::F32))));
    }
    let (slots, counts) = scope.compact(tokens);
    let kv_cache = scope.rows.with_pages_of_one();
    let splits = if options.determinism.is_batch_invariant() { Splits::Tokens(SPLIT_ROWS) } else { Splits::Auto };
    let decode =
        MlaDecodeOptions { value_width, softmax_scale: options.softmax_scale, causal: false, splits, path: None };
    let together = (MAX_RESULTS / (heads * value_width)).max(1);
    let (mut outs, mut lses) = (Vec::new(), Vec::new());
    for first in (0..tokens).step_by(together) {
        let end = tokens.min(first + together);
        let args = MlaDecodeArgs {
            q: MlaQuery::Whole(q.clone().narrow(0, first, end - first)),
            kv_cache: kv_cache.clone(),
            page_table: slots.clone().narrow(0, first, end - first),
            seq_lens: counts.clone().narrow(0, first, end - first),
        };
        let (out, lse) = mla_decode(args, &decode, None).map_err(own_error)?.materialise();
        outs.push(out.reshape([end - first, heads, value_width]));
        lses.push(lse.reshape([end - first, heads]));
    }
    Ok((Tensor::cat(outs, 0), Tensor::cat(lses, 0)))
}

/// A refusal of the decode step, in the words of this operation.
fn own_error(error: MlaError) -> MlaError {
    match error {
        MlaError::DeviceLimit { argument, device, reason, .. } => {
            let argument = match argument {
                "kv_cache" => "rows",
                "page_table" | "plan" | "splits" => "indices",
                other => other,
            };
            MlaError::DeviceLimit { op: OP, argument, device, reason }
        }
        other => other,
    }
}

impl SparseMlaArgs {
    fn problem(&self, options: &SparseMlaOptions) -> SparseMlaProblem {
        let [batch, query_len, heads, key_width] = self.q.dims();
        let (value_width, dtype, rows) = (options.value_width, self.q.dtype(), self.scope.rows.format());
        let second_rows = self.second.as_ref().map(|second| second.rows.format());
        SparseMlaProblem { batch, query_len, heads, key_width, value_width, dtype, rows, second_rows }
    }
}

impl SparseScope {
    fn into_backend(self) -> BackendScope<Dispatch> {
        let (rows, slots) = (self.rows.into_backend(), self.indices.into_dispatch());
        match self.lengths {
            None => BackendScope::Whole(rows, slots),
            Some(lengths) => BackendScope::Lengths(rows, slots, lengths.into_dispatch()),
        }
    }

    /// The slots of each of the `tokens` query tokens without gaps, i32 `[tokens, K]`, and how many there are, i32 `[tokens]`.
    fn compact(&self, tokens: usize) -> (Tensor<2, Int>, Tensor<1, Int>) {
        let [_, _, most] = self.indices.dims();
        let indices: Tensor<2, Int> = self.indices.clone().reshape([tokens, most]);
        let lengths = match &self.lengths {
            Some(lengths) => lengths.clone().reshape([tokens]),
            None => Tensor::full([tokens], most as i32, (&indices.device(), indices.dtype())),
        };
        compact_slots(indices, lengths)
    }
}
