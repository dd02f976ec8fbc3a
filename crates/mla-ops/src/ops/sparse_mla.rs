//! [`sparse_mla`]: attention of each query token over rows that are named one by one.

use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor, activation::sigmoid};

use super::merge_state::{MergeStateArgs, merge_state};
use super::mla_decode::{MlaDecodeArgs, MlaDecodeOptions, MlaQuery, mla_decode};
use crate::backend::MlaBackend;
use crate::batch_invariant::is_batch_invariant;
use crate::check::{Check, read_i32};
use crate::{MlaError, Splits};
#[cfg(feature = "flex")]
use crate::{independent::is_flex, reference};

const OP: &str = "sparse_mla";

/// Numbers of the results of query tokens that are computed together, at most: their parts are f32, in a buffer of 256 MiB.
const MAX_RESULTS: usize = 1 << 26;

/// Rows of a split where the result of a token must not depend on the batch.
const SPLIT_ROWS: usize = 1024;

/// Rows, and which of them each query token sees.
#[derive(Debug, Clone)]
pub struct SparseScope {
    /// `[P, S, D]` of the query's dtype; a row is a key, its first `Dv` channels are the value. On a GPU rows that are not
    /// contiguous are copied in every call.
    pub rows: Tensor<3>,
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
}

/// Options of [`sparse_mla`].
#[derive(Debug, Clone)]
pub struct SparseMlaOptions {
    /// `Dv`: how many leading channels of a row are the value.
    pub value_width: usize,
    /// The factor of the scores before the softmax.
    pub softmax_scale: f32,
}

/// Attention of each query token over the rows that it is given (DeepSeek-V3.2, sparse attention; DeepSeek-V4).
///
/// Returns `out [B, Sq, H, Dv]` in the query's dtype and `lse` f32 `[B, Sq, H]`, the natural logarithm of the sum of
/// `exp(score)` over all rows of both scopes, without the sink. The sink scales the output: `out * sigmoid(lse - sink)`. A
/// query token that sees no row gives `out = 0` and `lse = -inf`. Rows that nobody names are not read.
///
/// On a GPU the slots of a query token are read like the page table of a sequence with pages of one row, by the kernels of
/// [`mla_decode`](crate::mla_decode()).
///
/// # Errors
/// Wrong shapes, dtypes or devices, or more than the device can do ([`MlaError::DeviceLimit`]): nothing is launched. Slots
/// that are out of range are on the device; [`SparseMlaArgs::validate_device_inputs`] looks.
pub fn sparse_mla(args: SparseMlaArgs, options: &SparseMlaOptions) -> Result<(Tensor<4>, Tensor<3>), MlaError> {
    let check = args.check_tensors(OP)?;
    args.check_options(&check, options)?;
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
    #[cfg(feature = "flex")]
    if is_flex(check.device()) {
        return Ok(reference::sparse_mla(args, options));
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

/// q `[N, 1, H, D]` over one scope: out `[N, H, Dv]`, lse `[N, H]`.
fn attend(q: Tensor<4>, scope: SparseScope, options: &SparseMlaOptions) -> Result<(Tensor<3>, Tensor<2>), MlaError> {
    let ([tokens, _, heads, _], [pages, page_size, width]) = (q.dims(), scope.rows.dims());
    let ([_, _, most], value_width) = (scope.indices.dims(), options.value_width);
    if most == 0 {
        let out = Tensor::zeros([tokens, heads, value_width], (&q.device(), q.dtype()));
        return Ok((out, Tensor::full([tokens, heads], f32::NEG_INFINITY, (&q.device(), DType::F32))));
    }
    let (slots, counts) = scope.compact(tokens);
    let kv_cache = scope.rows.reshape([pages * page_size, 1, width]);
    let splits = if is_batch_invariant() { Splits::Tokens(SPLIT_ROWS) } else { Splits::Auto };
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
        let (out, lse) = mla_decode(args, &decode, None).map_err(own_error)?;
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

impl SparseScope {
    /// The slots of each of the `tokens` query tokens without gaps, i32 `[tokens, K]`, and how many there are, i32 `[tokens]`.
    fn compact(&self, tokens: usize) -> (Tensor<2, Int>, Tensor<1, Int>) {
        let [_, _, most] = self.indices.dims();
        let indices: Tensor<2, Int> = self.indices.clone().reshape([tokens, most]);
        let lengths = match &self.lengths {
            Some(lengths) => lengths.clone().reshape([tokens]),
            None => Tensor::full([tokens], most as i32, (&indices.device(), indices.dtype())),
        };
        let (slots, counts) = <Dispatch as MlaBackend>::compact_slots(indices.into_dispatch(), lengths.into_dispatch());
        (Tensor::from_dispatch(slots), Tensor::from_dispatch(counts))
    }

    fn check(&self, check: &Check, names: [&'static str; 3], q: &Tensor<4>) -> Result<(), MlaError> {
        let [rows, indices, lengths] = names;
        let [batch, query_len, _, width] = q.dims();
        check.float_as(rows, &self.rows, q.dtype(), "the dtype of `q`")?;
        let words = || format!("[P, S, D] with D = {width}, the width of `q`");
        check.dims(rows, self.rows.dims(), [None, None, Some(width)], words)?;
        let [pages, page_size, _] = self.rows.dims();
        check.index_range(rows, pages.saturating_mul(page_size))?;
        check.int(indices, &self.indices)?;
        let words = || format!("[B, Sq, K] with B = {batch}, Sq = {query_len}");
        check.dims(indices, self.indices.dims(), [Some(batch), Some(query_len), None], words)?;
        check.index_range(indices, self.indices.dims()[2])?;
        if let Some(tensor) = &self.lengths {
            check.int(lengths, tensor)?;
            let words = || format!("[B, Sq] = [{batch}, {query_len}]");
            check.dims(lengths, tensor.dims(), [Some(batch), Some(query_len)], words)?;
        }
        Ok(())
    }

    fn validate_values(
        &self,
        op: &'static str,
        [indices_name, lengths_name]: [&'static str; 2],
    ) -> Result<(), MlaError> {
        let ([pages, page_size, _], [_, query_len, most]) = (self.rows.dims(), self.indices.dims());
        let indices = read_i32(op, indices_name, &self.indices)?;
        let lengths = match &self.lengths {
            Some(lengths) => read_i32(op, lengths_name, lengths)?,
            None => vec![most as i32; indices.len() / most.max(1)],
        };
        for (token, &length) in lengths.iter().enumerate() {
            let place = [token / query_len, token % query_len];
            let wrong = |argument, index: &[usize], actual, expected| {
                let index = place.iter().chain(index).copied().collect();
                Err(MlaError::DeviceValue { op, argument, index, actual, expected })
            };
            if !(0..=most as i32).contains(&length) {
                return wrong(
                    lengths_name,
                    &[],
                    length,
                    format!("0 to {most}, the entries of a row of `{indices_name}`"),
                );
            }
            for (k, &slot) in indices[token * most..][..length as usize].iter().enumerate() {
                if !(-1..(pages * page_size) as i32).contains(&slot) {
                    return wrong(indices_name, &[k], slot, format!("a slot below {}, or -1", pages * page_size));
                }
            }
        }
        Ok(())
    }
}

impl SparseMlaArgs {
    pub(super) fn check_tensors(&self, op: &'static str) -> Result<Check, MlaError> {
        let check = Check::new(op, "q", &self.q)?;
        check.float("q", &self.q)?;
        let [_, _, heads, width] = self.q.dims();
        let actual = format!("a query of {heads} heads of width {width}");
        check.value("q", heads > 0 && width > 0, actual, || "at least 1 head, and 1 channel".into())?;
        self.scope.check(&check, FIRST, &self.q)?;
        if let Some(second) = &self.second {
            second.check(&check, SECOND, &self.q)?;
        }
        if let Some(sink) = &self.sink {
            check.float_as("sink", sink, DType::F32, "sinks are f32")?;
            check.dims("sink", sink.dims(), [Some(heads)], || format!("[H] = [{heads}]"))?;
        }
        Ok(check)
    }

    pub(super) fn check_options(&self, check: &Check, options: &SparseMlaOptions) -> Result<(), MlaError> {
        let (&SparseMlaOptions { value_width, softmax_scale }, [.., width]) = (options, self.q.dims());
        check.value("value_width", (1..=width).contains(&value_width), value_width, || {
            format!("1 to {width}, the width of a row")
        })?;
        check.value("softmax_scale", softmax_scale.is_finite(), softmax_scale, || "a finite number".into())
    }

    /// Reads slots and lengths back and checks every entry that the call would use.
    ///
    /// # Errors
    /// [`MlaError::DeviceValue`] names the first length outside `0 ..= K`, or slot that is neither -1 nor one of the rows.
    /// Before that, wrong shapes and dtypes as in [`sparse_mla`].
    pub fn validate_device_inputs(&self) -> Result<(), MlaError> {
        self.check_tensors(OP)?;
        self.validate_values(OP)
    }

    pub(super) fn validate_values(&self, op: &'static str) -> Result<(), MlaError> {
        self.scope.validate_values(op, [FIRST[1], FIRST[2]])?;
        self.second.as_ref().map_or(Ok(()), |second| second.validate_values(op, [SECOND[1], SECOND[2]]))
    }
}

/// The names of a scope's tensors in errors.
const FIRST: [&str; 3] = ["scope.rows", "scope.indices", "scope.lengths"];
const SECOND: [&str; 3] = ["second.rows", "second.indices", "second.lengths"];
