//! [`ragged_attention`]: prefill attention over packed sequences.

mod backend;
#[cfg(feature = "_gpu")]
mod cube;
mod problem;
#[cfg(feature = "flex")]
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use self::backend::{BackendKeys, RaggedAttentionBackend};
pub use self::problem::RaggedAttentionProblem;
use crate::MlaError;
use crate::check::{Check, check_cu_seqlens};
use crate::dispatch::tensors;

const OP: &str = "ragged_attention";

/// Arguments of [`ragged_attention`]. The tokens of all sequences stand one after the other, without padding.
#[derive(Debug, Clone)]
pub struct RaggedAttentionArgs {
    /// Queries `[N, H, dqk]` (dqk = 192 in DeepSeek-V3), f32, f16 or bf16.
    pub q: Tensor<3>,
    /// Keys `[M, Hkv, dqk]`, or `[M, Hkv, dqk - dr]` beside `k_pe`. H is a multiple of Hkv: query head `h` reads head
    /// `h / (H / Hkv)`.
    pub k: Tensor<3>,
    /// The last channels of the keys, which all heads share, `[M, dr]`: in MLA the rotary part (dr = 64 in DeepSeek-V3).
    pub k_pe: Option<Tensor<2>>,
    /// Values `[M, Hkv, dv]` (dv = 128 in DeepSeek-V3).
    pub v: Tensor<3>,
    /// i32 `[B + 1]`, ascending, from 0: sequence `b` is the query tokens `cu_seqlens[b] .. cu_seqlens[b + 1]`. Tokens past
    /// the last entry belong to no sequence and may hold anything.
    pub cu_seqlens: Tensor<1, Int>,
    /// The same of the key tokens. None where they are those of the queries, M = N.
    pub cu_seqlens_k: Option<Tensor<1, Int>>,
}

/// Options of [`ragged_attention`].
#[derive(Debug, Clone)]
pub struct RaggedAttentionOptions {
    /// The factor of the scores before the softmax.
    pub softmax_scale: f32,
    /// `c` > 0: a score `s`, after the factor, becomes `c tanh(s / c)` before the softmax (logit soft-capping, as in Gemma 2).
    pub softcap: Option<f32>,
    /// Query `i` of a sequence sees the keys up to position `i + keys - queries`: where it has as many of both, itself and what
    /// precedes it. Otherwise a query sees all keys of its sequence.
    pub causal: bool,
    /// Sliding-window attention: a query sees only so many keys, the last ones up to its position, its own among them. At least
    /// 1, and only with `causal`.
    pub window: Option<usize>,
}

impl RaggedAttentionOptions {
    /// Causal attention over whole sequences, without a cap.
    pub fn new(softmax_scale: f32) -> Self {
        Self { softmax_scale, softcap: None, causal: true, window: None }
    }
}

/// Attention of every token over the keys of its own sequence.
///
/// Returns `out [N, H, dv]` in the query's dtype and `lse` f32 `[N, H]` (natural logarithm). Sums are in f32, scores
/// exist for one tile at a time. Tokens that see no key, or belong to no sequence, give `out = 0` and `lse = -inf`.
///
/// [`explain_path`](crate::explain_path) of a [`RaggedAttentionProblem`] says which implementation runs.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use mla_ops::batch::{cu_seqlens, index_tensor};
/// use mla_ops::{RaggedAttentionArgs, RaggedAttentionOptions, ragged_attention};
///
/// let device = Device::flex();
/// // Prompts of 3 and 2 tokens, 2 heads.
/// let random = |width| Tensor::<3>::random([5, 2, width], Distribution::Default, &device);
/// let (q, k, v) = (random(12), random(12), random(8));
/// let cu_seqlens = index_tensor(cu_seqlens(&[3, 2])?, &device);
/// let args = RaggedAttentionArgs::new(q, k, v.clone(), cu_seqlens);
/// let (out, lse) = ragged_attention(args, &RaggedAttentionOptions::new(0.3))?;
/// assert_eq!((out.dims(), lse.dims()), ([5, 2, 8], [5, 2]));
/// // The first token of a prompt sees itself alone.
/// let difference = (out.narrow(0, 3, 1) - v.narrow(0, 3, 1)).abs().max();
/// assert!(difference.into_scalar::<f32>() < 1e-6);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes or devices: nothing is launched.
pub fn ragged_attention(
    args: RaggedAttentionArgs,
    options: &RaggedAttentionOptions,
) -> Result<(Tensor<3>, Tensor<2>), MlaError> {
    let check = args.check_tensors()?;
    options.check(&check)?;
    if check.sees_values() {
        args.validate_values()?;
    }
    let RaggedAttentionArgs { q, k, k_pe, v, cu_seqlens, cu_seqlens_k } = args;
    let k = match k_pe {
        None => BackendKeys::Whole(k.into_dispatch()),
        Some(k_pe) => BackendKeys::Shared(k.into_dispatch(), k_pe.into_dispatch()),
    };
    let cu_seqlens_k = cu_seqlens_k.unwrap_or_else(|| cu_seqlens.clone());
    let [cu_seqlens, cu_seqlens_k] = [cu_seqlens, cu_seqlens_k].map(Tensor::into_dispatch);
    let attend = <Dispatch as RaggedAttentionBackend>::ragged_attention;
    Ok(tensors(attend(q.into_dispatch(), k, v.into_dispatch(), cu_seqlens, cu_seqlens_k, options.clone())))
}

impl RaggedAttentionOptions {
    fn check(&self, check: &Check) -> Result<(), MlaError> {
        let &Self { softmax_scale: scale, softcap, causal, window } = self;
        check.value("softmax_scale", scale.is_finite(), scale, || "a finite number".into())?;
        let legal = softcap.is_none_or(|softcap| softcap.is_finite() && softcap > 0.0);
        check.value("softcap", legal, format!("{softcap:?}"), || "None, or a finite number above 0".into())?;
        let legal = window.is_none_or(|window| window > 0 && causal);
        let actual = format!("{window:?}{}", if causal { "" } else { " without `causal`" });
        check.value("window", legal, actual, || "None, or at least 1 with `causal`".into())
    }
}

impl RaggedAttentionArgs {
    /// As many keys as queries, each head with keys of its own width: neither `k_pe` nor `cu_seqlens_k`.
    pub fn new(q: Tensor<3>, k: Tensor<3>, v: Tensor<3>, cu_seqlens: Tensor<1, Int>) -> Self {
        Self { q, k, k_pe: None, v, cu_seqlens, cu_seqlens_k: None }
    }

    /// What decides which implementation runs.
    pub fn problem(&self) -> RaggedAttentionProblem {
        let ([_, heads, key_width], [_, kv_heads, value_width]) = (self.q.dims(), self.v.dims());
        let shared_width = self.k_pe.as_ref().map_or(0, |k_pe| k_pe.dims()[1]);
        RaggedAttentionProblem { heads, kv_heads, key_width, value_width, shared_width, dtype: self.q.dtype() }
    }

    fn check_tensors(&self) -> Result<Check, MlaError> {
        let check = Check::new(OP, "q", &self.q)?;
        check.float("q", &self.q)?;
        let dtype = self.q.dtype();
        check.float_as("k", &self.k, dtype, "the dtype of `q`")?;
        check.float_as("v", &self.v, dtype, "the dtype of `q`")?;
        if let Some(k_pe) = &self.k_pe {
            check.float_as("k_pe", k_pe, dtype, "the dtype of `q`")?;
        }
        self.check_shapes(&check)?;
        self.check_sequences(&check)?;
        #[cfg(feature = "_gpu")]
        cube::check_limits(&check, self)?;
        Ok(check)
    }

    fn check_shapes(&self, check: &Check) -> Result<(), MlaError> {
        let ([tokens, heads, width], [keys, kv_heads, _]) = (self.q.dims(), self.k.dims());
        let (value_width, actual) = (self.v.dims()[2], format!("a query of {heads} heads of width {width}"));
        check.value("q", heads > 0 && width > 0, actual, || "at least 1 head, and 1 channel".into())?;
        check.value("v", value_width > 0, format!("values of width {value_width}"), || "at least 1 channel".into())?;
        let divides = kv_heads > 0 && heads.is_multiple_of(kv_heads);
        check.value("k", divides, format!("keys of {kv_heads} heads"), || {
            format!("a number of heads that divides the {heads} of `q`")
        })?;
        let shared = self.k_pe.as_ref().map_or(0, |k_pe| k_pe.dims()[1]);
        if let Some(k_pe) = &self.k_pe {
            let words = || format!("[M, dr] with M = {keys}, as in `k`");
            check.dims("k_pe", k_pe.dims(), [Some(keys), None], words)?;
            check.value("k_pe", (1..width).contains(&shared), format!("{shared} channels"), || {
                format!("fewer than the {width} of `q`, and at least 1")
            })?;
        }
        let own = width - shared;
        let all = self.cu_seqlens_k.is_none().then_some(tokens);
        let words = || {
            let keys = all.map_or("M".into(), |tokens| format!("{tokens}, as in `q`: there is no `cu_seqlens_k`"));
            format!("[M, Hkv, {own}], the channels of `q` less those of `k_pe`, with M = {keys}")
        };
        check.dims("k", self.k.dims(), [all, None, Some(own)], words)?;
        let words = || format!("[M, Hkv, dv] with M = {keys}, Hkv = {kv_heads}, as in `k`");
        check.dims("v", self.v.dims(), [Some(keys), Some(kv_heads), None], words)
    }

    fn check_sequences(&self, check: &Check) -> Result<(), MlaError> {
        check.int("cu_seqlens", &self.cu_seqlens)?;
        let [entries] = self.cu_seqlens.dims();
        check.value("cu_seqlens", entries > 0, format!("{entries} entries"), || {
            "B + 1 entries: at least the leading 0".into()
        })?;
        let Some(cu_seqlens_k) = &self.cu_seqlens_k else { return Ok(()) };
        check.int("cu_seqlens_k", cu_seqlens_k)?;
        let words = || format!("[B + 1] = [{entries}], the length of `cu_seqlens`");
        check.dims("cu_seqlens_k", cu_seqlens_k.dims(), [Some(entries)], words)
    }

    /// Reads `cu_seqlens` and `cu_seqlens_k` back and checks that they start at 0, ascend, and end at `N` and `M` at most.
    ///
    /// # Errors
    /// [`MlaError::DeviceValue`] for the first entry that breaks the rule. Before that, wrong shapes and dtypes as in
    /// [`ragged_attention`].
    pub fn validate_device_inputs(&self) -> Result<(), MlaError> {
        self.check_tensors()?;
        self.validate_values()
    }

    fn validate_values(&self) -> Result<(), MlaError> {
        let ([tokens, ..], [keys, ..]) = (self.q.dims(), self.k.dims());
        check_cu_seqlens(OP, "cu_seqlens", &self.cu_seqlens, tokens)?;
        let Some(cu_seqlens_k) = &self.cu_seqlens_k else { return Ok(()) };
        check_cu_seqlens(OP, "cu_seqlens_k", cu_seqlens_k, keys).map(|_| ())
    }
}
