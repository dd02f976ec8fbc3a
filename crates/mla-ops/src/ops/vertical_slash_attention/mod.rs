//! [`vertical_slash_attention`]: attention to the keys of a vertical-slash index.

mod backend;
#[cfg(feature = "_gpu")]
mod cube;
mod problem;
#[cfg(feature = "flex")]
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use self::backend::{AttentionSpec, BackendKeyLists, VerticalSlashAttentionBackend};
pub use self::problem::VerticalSlashAttentionProblem;
use super::vertical_slash_index::{VerticalSlashIndex, check_each};
use crate::MlaError;
use crate::check::{Check, check_cu_seqlens, read_i32};
use crate::dispatch::tensors;

const OP: &str = "vertical_slash_attention";
const PACKED: &str = "packed_vertical_slash_attention";

/// Arguments of [`vertical_slash_attention`]. Rows past a sequence's length may hold anything.
#[derive(Debug, Clone)]
pub struct VerticalSlashAttentionArgs {
    /// Queries `[B, Sq, H, d]`, f32, f16 or bf16.
    pub q: Tensor<4>,
    /// Keys `[B, Sk, Hkv, d]`. H is a multiple of Hkv: query head `h` reads head `h / (H / Hkv)`.
    pub k: Tensor<4>,
    /// Values `[B, Sk, Hkv, dv]`; dv is usually d.
    pub v: Tensor<4>,
    /// i32 `[B]`: queries of each sequence, at most Sq, and at most what the index has rows for.
    pub q_lens: Tensor<1, Int>,
    /// i32 `[B]`: keys of each sequence, at most Sk.
    pub kv_lens: Tensor<1, Int>,
    /// What each block row attends to: from [`vertical_slash_index`](crate::vertical_slash_index), or made by hand.
    pub index: VerticalSlashIndex,
}

/// Arguments of [`packed_vertical_slash_attention`]. The tokens of all sequences stand one after the other.
#[derive(Debug, Clone)]
pub struct PackedVerticalSlashArgs {
    /// Queries `[Nq, H, d]`, f32, f16 or bf16.
    pub q: Tensor<3>,
    /// Keys `[Nk, Hkv, d]`, with H a multiple of Hkv.
    pub k: Tensor<3>,
    /// Values `[Nk, Hkv, dv]`; dv is usually d.
    pub v: Tensor<3>,
    /// i32 `[B + 1]`, ascending, from 0: sequence `b` is the queries `cu_seqlens_q[b] .. cu_seqlens_q[b + 1]`. Queries
    /// past the last entry belong to no sequence and may hold anything.
    pub cu_seqlens_q: Tensor<1, Int>,
    /// i32 `[B + 1]`: the same of the keys.
    pub cu_seqlens_k: Tensor<1, Int>,
    /// As in [`VerticalSlashAttentionArgs`].
    pub index: VerticalSlashIndex,
}

/// Options of [`vertical_slash_attention`] and [`packed_vertical_slash_attention`].
#[derive(Debug, Clone)]
pub struct VerticalSlashAttentionOptions {
    /// The factor of the scores before the softmax.
    pub softmax_scale: f32,
    /// Scaled scores `s` become `softcap * tanh(s / softcap)`. None or 0 leaves them as they are.
    pub softcap: Option<f32>,
    /// Query `i` sees the keys up to position `i + kv_len - q_len`; otherwise all that its block row attends to.
    pub causal: bool,
}

impl VerticalSlashAttentionOptions {
    /// Causal attention without a cap.
    pub fn new(softmax_scale: f32) -> Self {
        Self { softmax_scale, softcap: None, causal: true }
    }
}

/// Attention of every query to the keys of its block row (MInference, arXiv 2407.02490, appendix C.4.2).
///
/// Query `i` of a sequence is in block row `i / M` of the index and attends to all keys of that row's key blocks and
/// columns, as far as the sequence has them and, with `causal`, up to position `i + kv_len - q_len`. A list may name
/// keys that the sequence does not have: no query sees them. Rows past a sequence's last query and entries past the counts
/// are not looked at.
///
/// Returns `out [B, Sq, H, dv]` in the query's dtype and `lse` f32 `[B, Sq, H]` (natural logarithm). Sums are in f32,
/// scores exist for one tile at a time. A query that sees no key, or is past its sequence's length, gives `out = 0` and
/// `lse = -inf`.
///
/// [`explain_path`](crate::explain_path) of a [`VerticalSlashAttentionProblem`] says which implementation runs.
///
/// ```
/// use burn::tensor::{DType, Device, Distribution, Int, Tensor};
/// use mla_ops::batch::index_tensor;
/// use mla_ops::{
///     VerticalSlashAttentionArgs, VerticalSlashAttentionOptions, VerticalSlashIndexArgs, VerticalSlashIndexOptions,
///     vertical_slash_attention, vertical_slash_index,
/// };
///
/// let device = Device::flex();
/// // A sequence of 8 tokens, 2 heads: the keys near each query, and the first key.
/// let lens = index_tensor(vec![8], &device);
/// let both = |value| Tensor::<3, Int>::full([1, 2, 1], value, (&device, DType::I32));
/// let options = VerticalSlashIndexOptions { block_size_m: 4, block_size_n: 4, ..VerticalSlashIndexOptions::new(8) };
/// let index = vertical_slash_index(VerticalSlashIndexArgs::new(lens.clone(), lens.clone(), both(0), both(0)), &options)?;
/// let q = Tensor::<4>::random([1, 8, 2, 16], Distribution::Default, &device);
/// let (k, v, kv_lens) = (q.clone(), q.clone(), lens.clone());
/// let args = VerticalSlashAttentionArgs { q, k, v, q_lens: lens, kv_lens, index };
/// let (out, lse) = vertical_slash_attention(args, &VerticalSlashAttentionOptions::new(0.25))?;
/// assert_eq!((out.dims(), lse.dims()), ([1, 8, 2, 16], [1, 8, 2]));
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes or devices, or options out of range: nothing is launched. Where values are not checked, lengths
/// and counts out of range are taken as the nearest that is in range, and a key that is listed twice counts twice.
pub fn vertical_slash_attention(
    args: VerticalSlashAttentionArgs,
    options: &VerticalSlashAttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), MlaError> {
    let check = args.check()?;
    options.check(&check)?;
    if check.sees_values() {
        args.validate_values()?;
    }
    let VerticalSlashAttentionArgs { q, k, v, q_lens, kv_lens, index } = args;
    let ([batch, q_len, heads, width], [_, kv_len, kv_heads, value_width]) = (q.dims(), v.dims());
    let qkv = [
        q.reshape([batch * q_len, heads, width]),
        k.reshape([batch * kv_len, kv_heads, width]),
        v.reshape([batch * kv_len, kv_heads, value_width]),
    ];
    let (out, lse) = attend(qkv, q_lens, kv_lens, index, Some([q_len, kv_len]), options);
    Ok((out.reshape([batch, q_len, heads, value_width]), lse.reshape([batch, q_len, heads])))
}

/// [`vertical_slash_attention`] over packed sequences: `out [Nq, H, dv]` in the query's dtype, `lse` f32 `[Nq, H]`.
///
/// ```
/// use burn::tensor::{DType, Device, Distribution, Int, Tensor};
/// use mla_ops::batch::{cu_seqlens, index_tensor};
/// use mla_ops::{
///     PackedVerticalSlashArgs, VerticalSlashAttentionOptions, VerticalSlashIndexArgs, VerticalSlashIndexOptions,
///     packed_vertical_slash_attention, vertical_slash_index,
/// };
///
/// let device = Device::flex();
/// // A sequence of 8 tokens, 2 heads: the keys near each query, and the first key.
/// let lens = index_tensor(vec![8], &device);
/// let both = |value| Tensor::<3, Int>::full([1, 2, 1], value, (&device, DType::I32));
/// let options = VerticalSlashIndexOptions { block_size_m: 4, block_size_n: 4, ..VerticalSlashIndexOptions::new(8) };
/// let index = vertical_slash_index(VerticalSlashIndexArgs::new(lens.clone(), lens, both(0), both(0)), &options)?;
/// let cu_seqlens_q = index_tensor(cu_seqlens(&[8])?, &device);
/// let q = Tensor::<3>::random([8, 2, 16], Distribution::Default, &device);
/// let (k, v, cu_seqlens_k) = (q.clone(), q.clone(), cu_seqlens_q.clone());
/// let args = PackedVerticalSlashArgs { q, k, v, cu_seqlens_q, cu_seqlens_k, index };
/// let (out, lse) = packed_vertical_slash_attention(args, &VerticalSlashAttentionOptions::new(0.25))?;
/// assert_eq!((out.dims(), lse.dims()), ([8, 2, 16], [8, 2]));
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// As there.
pub fn packed_vertical_slash_attention(
    args: PackedVerticalSlashArgs,
    options: &VerticalSlashAttentionOptions,
) -> Result<(Tensor<3>, Tensor<2>), MlaError> {
    let check = args.check()?;
    options.check(&check)?;
    if check.sees_values() {
        args.validate_values()?;
    }
    let PackedVerticalSlashArgs { q, k, v, cu_seqlens_q, cu_seqlens_k, index } = args;
    Ok(attend([q, k, v], cu_seqlens_q, cu_seqlens_k, index, None, options))
}

fn attend(
    [q, k, v]: [Tensor<3>; 3],
    q_bounds: Tensor<1, Int>,
    kv_bounds: Tensor<1, Int>,
    index: VerticalSlashIndex,
    strides: Option<[usize; 2]>,
    options: &VerticalSlashAttentionOptions,
) -> (Tensor<3>, Tensor<2>) {
    let spec = AttentionSpec {
        strides,
        block_size_m: index.block_size_m,
        block_size_n: index.block_size_n,
        softmax_scale: options.softmax_scale,
        softcap: options.softcap.unwrap_or(0.0),
        causal: options.causal,
    };
    let lists = BackendKeyLists {
        block_count: index.block_count.into_dispatch(),
        block_offset: index.block_offset.into_dispatch(),
        column_count: index.column_count.into_dispatch(),
        column_index: index.column_index.into_dispatch(),
    };
    let [q, k, v] = [q, k, v].map(Tensor::into_dispatch);
    let [q_bounds, kv_bounds] = [q_bounds, kv_bounds].map(Tensor::into_dispatch);
    let attend = <Dispatch as VerticalSlashAttentionBackend>::vertical_slash_attention;
    tensors(attend(q, k, v, q_bounds, kv_bounds, lists, spec))
}

impl VerticalSlashAttentionOptions {
    fn check(&self, check: &Check) -> Result<(), MlaError> {
        let (scale, cap) = (self.softmax_scale, self.softcap.unwrap_or(0.0));
        check.value("softmax_scale", scale.is_finite(), scale, || "a finite number".into())?;
        check.value("softcap", cap.is_finite() && cap >= 0.0, cap, || "a finite number from 0 on".into())
    }
}

impl VerticalSlashAttentionArgs {
    /// What decides which implementation runs.
    pub fn problem(&self) -> VerticalSlashAttentionProblem {
        let ([_, _, heads, key_width], [_, _, kv_heads, value_width]) = (self.q.dims(), self.v.dims());
        VerticalSlashAttentionProblem { heads, kv_heads, key_width, value_width, dtype: self.q.dtype() }
    }

    fn check(&self) -> Result<Check, MlaError> {
        let check = check_qkv(OP, &self.q, &self.k, &self.v)?;
        let ([batch, _, heads, width], [_, kv_len, kv_heads, _]) = (self.q.dims(), self.k.dims());
        check_widths(&check, [heads, kv_heads, width, self.v.dims()[3]])?;
        let words = || format!("[B, Sk, Hkv, d] with B = {batch}, d = {width}, as in `q`");
        check.dims("k", self.k.dims(), [Some(batch), None, None, Some(width)], words)?;
        let words = || format!("[B, Sk, Hkv, dv] with B = {batch}, Sk = {kv_len}, Hkv = {kv_heads}, as in `k`");
        check.dims("v", self.v.dims(), [Some(batch), Some(kv_len), Some(kv_heads), None], words)?;
        let words = || format!("[B] with B = {batch}, as in `q`");
        for (argument, lens) in [("q_lens", &self.q_lens), ("kv_lens", &self.kv_lens)] {
            check.int(argument, lens)?;
            check.dims(argument, lens.dims(), [Some(batch)], words)?;
        }
        self.index.check(&check, batch, heads)?;
        Ok(check)
    }

    /// Reads lengths and index back and checks them.
    ///
    /// # Errors
    /// [`MlaError::DeviceValue`] for the first length that is negative, or greater than Sq, Sk or the queries that the
    /// index has rows for; count that is negative or greater than the list's capacity; or list that is not ascending,
    /// or names a key twice. Before that, wrong shapes and dtypes as in [`vertical_slash_attention`].
    pub fn validate_device_inputs(&self) -> Result<(), MlaError> {
        self.check()?;
        self.validate_values()
    }

    fn validate_values(&self) -> Result<(), MlaError> {
        let ([_, most_queries, ..], [_, most_keys, ..]) = (self.q.dims(), self.k.dims());
        check_each(OP, "q_lens", &self.q_lens, most_queries.min(self.index.queries()))?;
        check_each(OP, "kv_lens", &self.kv_lens, most_keys)?;
        let q_lens = read_i32(OP, "q_lens", &self.q_lens)?;
        self.index.validate_values(OP, &q_lens)
    }
}

impl PackedVerticalSlashArgs {
    /// What decides which implementation runs.
    pub fn problem(&self) -> VerticalSlashAttentionProblem {
        let ([_, heads, key_width], [_, kv_heads, value_width]) = (self.q.dims(), self.v.dims());
        VerticalSlashAttentionProblem { heads, kv_heads, key_width, value_width, dtype: self.q.dtype() }
    }

    fn check(&self) -> Result<Check, MlaError> {
        let check = check_qkv(PACKED, &self.q, &self.k, &self.v)?;
        let ([_, heads, width], [keys, kv_heads, _]) = (self.q.dims(), self.k.dims());
        check_widths(&check, [heads, kv_heads, width, self.v.dims()[2]])?;
        let words = || format!("[Nk, Hkv, d] with d = {width}, as in `q`");
        check.dims("k", self.k.dims(), [None, None, Some(width)], words)?;
        let words = || format!("[Nk, Hkv, dv] with Nk = {keys}, Hkv = {kv_heads}, as in `k`");
        check.dims("v", self.v.dims(), [Some(keys), Some(kv_heads), None], words)?;
        check.int("cu_seqlens_q", &self.cu_seqlens_q)?;
        check.int("cu_seqlens_k", &self.cu_seqlens_k)?;
        let [entries] = self.cu_seqlens_q.dims();
        check.value("cu_seqlens_q", entries > 0, format!("{entries} entries"), || {
            "B + 1 entries: at least the leading 0".into()
        })?;
        let words = || format!("[B + 1] = [{entries}], the length of `cu_seqlens_q`");
        check.dims("cu_seqlens_k", self.cu_seqlens_k.dims(), [Some(entries)], words)?;
        self.index.check(&check, entries - 1, heads)?;
        Ok(check)
    }

    /// Reads the ends of the sequences and the index back and checks them.
    ///
    /// # Errors
    /// [`MlaError::DeviceValue`] for the first entry that does not ascend from 0 or is greater than Nq or Nk; sequence
    /// with more queries than the index has rows for; or list, as in
    /// [`VerticalSlashAttentionArgs::validate_device_inputs`].
    pub fn validate_device_inputs(&self) -> Result<(), MlaError> {
        self.check()?;
        self.validate_values()
    }

    fn validate_values(&self) -> Result<(), MlaError> {
        let ends = check_cu_seqlens(PACKED, "cu_seqlens_q", &self.cu_seqlens_q, self.q.dims()[0])?;
        check_cu_seqlens(PACKED, "cu_seqlens_k", &self.cu_seqlens_k, self.k.dims()[0])?;
        let q_lens: Vec<i32> = ends.windows(2).map(|ends| ends[1] - ends[0]).collect();
        let most = self.index.queries();
        if let Some(b) = q_lens.iter().position(|&len| len as usize > most) {
            let expected =
                format!("at most {} ({most} queries, for which the index has rows)", ends[b] as usize + most);
            return Err(MlaError::DeviceValue {
                op: PACKED,
                argument: "cu_seqlens_q",
                index: vec![b + 1],
                actual: ends[b + 1],
                expected,
            });
        }
        self.index.validate_values(PACKED, &q_lens)
    }
}

/// Dtypes and devices of queries, keys and values.
fn check_qkv<const D: usize>(op: &'static str, q: &Tensor<D>, k: &Tensor<D>, v: &Tensor<D>) -> Result<Check, MlaError> {
    let check = Check::new(op, "q", q)?;
    check.float("q", q)?;
    check.float_as("k", k, q.dtype(), "the dtype of `q`")?;
    check.float_as("v", v, q.dtype(), "the dtype of `q`")?;
    Ok(check)
}

/// There are heads and channels, and the query heads can be dealt out to those of the keys.
fn check_widths(check: &Check, [heads, kv_heads, width, value_width]: [usize; 4]) -> Result<(), MlaError> {
    let actual = format!("a query of {heads} heads of width {width}");
    check.value("q", heads > 0 && width > 0, actual, || "at least 1 head, and 1 channel".into())?;
    let divides = kv_heads > 0 && heads.is_multiple_of(kv_heads);
    check.value("k", divides, format!("keys of {kv_heads} heads"), || {
        format!("a number of heads that divides the {heads} of `q`")
    })?;
    check.value("v", value_width > 0, format!("values of width {value_width}"), || "at least 1 channel".into())
}
