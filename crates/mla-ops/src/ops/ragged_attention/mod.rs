//! [`ragged_attention`]: prefill attention over packed sequences.

mod backend;
#[cfg(feature = "_gpu")]
mod cube;
#[cfg(feature = "flex")]
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use self::backend::RaggedAttentionBackend;
use crate::MlaError;
use crate::check::{Check, check_cu_seqlens};
use crate::dispatch::tensors;

const OP: &str = "ragged_attention";

/// Arguments of [`ragged_attention`]. The tokens of all sequences stand one after the other, without padding.
#[derive(Debug, Clone)]
pub struct RaggedAttentionArgs {
    /// Queries `[N, H, dqk]` (dqk = 192 in DeepSeek-V3), f32, f16 or bf16.
    pub q: Tensor<3>,
    /// Keys `[N, H, dqk]`.
    pub k: Tensor<3>,
    /// Values `[N, H, dv]` (dv = 128 in DeepSeek-V3).
    pub v: Tensor<3>,
    /// i32 `[B + 1]`, ascending, from 0: sequence `b` is the tokens `cu_seqlens[b] .. cu_seqlens[b + 1]`. Tokens past
    /// the last entry belong to no sequence and may hold anything.
    pub cu_seqlens: Tensor<1, Int>,
}

/// Options of [`ragged_attention`].
#[derive(Debug, Clone)]
pub struct RaggedAttentionOptions {
    /// The factor of the scores before the softmax.
    pub softmax_scale: f32,
    /// A token sees itself and the tokens of its sequence before it; otherwise its whole sequence.
    pub causal: bool,
}

/// Attention of every token over its own sequence.
///
/// Returns `out [N, H, dv]` in the query's dtype and `lse` f32 `[N, H]` (natural logarithm). Sums are in f32, scores
/// exist for one tile at a time. Tokens that belong to no sequence give `out = 0` and `lse = -inf`.
///
/// # Errors
/// Wrong shapes, dtypes or devices: nothing is launched.
pub fn ragged_attention(
    args: RaggedAttentionArgs,
    options: &RaggedAttentionOptions,
) -> Result<(Tensor<3>, Tensor<2>), MlaError> {
    let check = args.check_tensors()?;
    let scale = options.softmax_scale;
    check.value("softmax_scale", scale.is_finite(), scale, || "a finite number".into())?;
    if check.sees_values() {
        args.validate_values()?;
    }
    Ok(tensors(<Dispatch as RaggedAttentionBackend>::ragged_attention(
        args.q.into_dispatch(),
        args.k.into_dispatch(),
        args.v.into_dispatch(),
        args.cu_seqlens.into_dispatch(),
        options.clone(),
    )))
}

impl RaggedAttentionArgs {
    fn check_tensors(&self) -> Result<Check, MlaError> {
        let check = Check::new(OP, "q", &self.q)?;
        check.float("q", &self.q)?;
        let dtype = self.q.dtype();
        check.float_as("k", &self.k, dtype, "the dtype of `q`")?;
        check.float_as("v", &self.v, dtype, "the dtype of `q`")?;
        check.int("cu_seqlens", &self.cu_seqlens)?;
        let [tokens, heads, width] = self.q.dims();
        let (value_width, actual) = (self.v.dims()[2], format!("a query of {heads} heads of width {width}"));
        check.value("q", heads > 0 && width > 0, actual, || "at least 1 head, and 1 channel".into())?;
        check.value("v", value_width > 0, format!("values of width {value_width}"), || "at least 1 channel".into())?;
        let words = || format!("[N, H, dqk] = [{tokens}, {heads}, {width}], the shape of `q`");
        check.dims("k", self.k.dims(), [Some(tokens), Some(heads), Some(width)], words)?;
        let words = || format!("[N, H, dv] with N = {tokens}, H = {heads}");
        check.dims("v", self.v.dims(), [Some(tokens), Some(heads), None], words)?;
        let [entries] = self.cu_seqlens.dims();
        check.value("cu_seqlens", entries > 0, format!("{entries} entries"), || {
            "B + 1 entries: at least the leading 0".into()
        })?;
        #[cfg(feature = "_gpu")]
        cube::check_limits(&check, &self.q, value_width, entries - 1)?;
        Ok(check)
    }

    /// Reads `cu_seqlens` back and checks that it starts at 0, ascends, and ends at `N` at most.
    ///
    /// # Errors
    /// [`MlaError::DeviceValue`] for the first entry that breaks the rule. Before that, wrong shapes and dtypes as in
    /// [`ragged_attention`].
    pub fn validate_device_inputs(&self) -> Result<(), MlaError> {
        self.check_tensors()?;
        self.validate_values()
    }

    fn validate_values(&self) -> Result<(), MlaError> {
        let [tokens, ..] = self.q.dims();
        check_cu_seqlens(OP, "cu_seqlens", &self.cu_seqlens, tokens).map(|_| ())
    }
}
