//! [`compress_kv`]: windows of tokens pooled into entries, in any chunking.

mod backend;
#[cfg(feature = "_gpu")]
mod cube;
#[cfg(feature = "flex")]
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{DType, FloatDType, Int, Tensor};
use thiserror::Error;

use self::backend::{BackendCompressor, BackendTokens, CompressKvBackend};
use super::write_latent::{BackendRows, write_rows};
use crate::MlaError;
use crate::check::{Check, check_cu_seqlens, check_slots, read_i32};
use crate::dispatch::tensors;

const OP: &str = "compress_kv";

/// Arguments of [`compress_kv`]: windows of `m` tokens, entries of `d` channels, `C = d`, or `2 d` with overlap, and
/// `L = m`, or `2 m` with overlap.
#[derive(Debug, Clone)]
pub struct CompressKvArgs {
    /// Keys and gates of the new tokens before they are pooled, side by side, f32 `[N, 2 C]`; the tokens of a sequence one
    /// after the other.
    pub kv_gates: Tensor<2>,
    /// What is carried of each sequence: the rows of its last `L` tokens, f32 `[R, L, 2 C]`, row after row in memory; that of
    /// position `p` is row `p % L` of the sequence's block. This must be its only handle.
    pub state: Tensor<3>,
    /// i32 `[B]`: the block of `state` of each sequence.
    pub state_rows: Tensor<1, Int>,
    /// i32 `[N]`: where the row of each new token goes, `block * L + position % L`; -1 for a token that `L` or more others of
    /// its sequence follow. No slot occurs twice.
    pub state_slots: Tensor<1, Int>,
    /// i32 `[B + 1]`, from 0 to N: sequence `b` has the new tokens `cu_seqlens[b] .. cu_seqlens[b + 1]`.
    pub cu_seqlens: Tensor<1, Int>,
    /// i32 `[B]`: the position of the first new token of each sequence.
    pub starts: Tensor<1, Int>,
    /// f32 `[m, C]`: added to the gates, by the place in the window.
    pub position_bias: Tensor<2>,
    /// f32 `[d]`: the weight of the norm of an entry.
    pub norm_weight: Tensor<1>,
    /// f32 `[B, n, dr / 2]`: RoPE of the last `dr` channels of each entry, in pairs of neighbours. Entry `j` of sequence `b`
    /// has the position `(starts[b] / m + j) * m`. Those of entries that are not full may hold anything.
    pub cos: Tensor<3>,
    /// f32 `[B, n, dr / 2]`, as `cos`.
    pub sin: Tensor<3>,
}

/// Options of [`compress_kv`].
#[derive(Debug, Clone)]
pub struct CompressKvOptions {
    /// Whether an entry pools the window before its own, too: that one's tokens by their first `d` channels, those of its own
    /// window by their last `d` (DeepSeek-V4's CSA; otherwise HCA).
    pub overlap: bool,
    /// Added to the mean square in the norm of an entry.
    pub norm_eps: f32,
    /// Of the entries: f32, f16 or bf16.
    pub dtype: FloatDType,
}

/// A refused [`compress_kv`], with the state as it was.
#[derive(Debug, Error)]
#[error("{error}")]
pub struct CompressKvError {
    /// Why.
    pub error: MlaError,
    /// The state, unchanged.
    pub state: Tensor<3>,
}

impl From<Box<CompressKvError>> for MlaError {
    fn from(refused: Box<CompressKvError>) -> Self {
        refused.error
    }
}

/// Entries of the windows that new tokens fill, `[B, n, d]`, and the state with these tokens in it (DeepSeek-V4, compressed
/// attention: CSA with overlap, HCA without).
///
/// Window `w` of a sequence has the tokens of the positions `w m .. (w + 1) m`. Entry `j` of sequence `b` is that of window
/// `starts[b] / m + j` if the new tokens fill it, and otherwise 0. For each channel it is the mean of the tokens' keys,
/// weighted by a softmax of their gates with the bias of their places; then comes a norm over the channels, and the rotation
/// of the last ones. All in f32. With overlap the window before joins in, with its first channels; window 0 has none.
///
/// Tokens before the new ones are read from the state, where only the rows of windows that are now filled are read: others may
/// hold anything. Afterwards the rows of the new tokens are written into it: the same buffer, in place, never a copy. Any
/// division of a sequence into calls gives the same entries, bit for bit.
///
/// # Errors
/// Wrong shapes, dtypes or devices; a state that is a strided view; [`MlaError::CacheShared`] if another handle of the state
/// exists; more than the device can do ([`MlaError::DeviceLimit`]). The state comes back in the error, unchanged. Blocks, slots,
/// lengths and positions that are out of range are on the device and cannot be seen;
/// [`CompressKvArgs::validate_device_inputs`] looks.
pub fn compress_kv(
    args: CompressKvArgs,
    options: &CompressKvOptions,
) -> Result<(Tensor<3>, Tensor<3>), Box<CompressKvError>> {
    if let Err(error) = args.check_call(options) {
        return Err(Box::new(CompressKvError { error, state: args.state }));
    }
    let ([batch, entries, _], [width]) = (args.cos.dims(), args.norm_weight.dims());
    let pooled = if batch * entries == 0 {
        Tensor::empty([batch, entries, width], (&args.state.device(), DType::from(options.dtype)))
    } else {
        let tokens = BackendTokens {
            kv_gates: args.kv_gates.clone().into_dispatch(),
            state: args.state.clone().into_dispatch(),
            state_rows: args.state_rows.into_dispatch(),
            cu_seqlens: args.cu_seqlens.into_dispatch(),
            starts: args.starts.into_dispatch(),
        };
        let compressor = BackendCompressor {
            position_bias: args.position_bias.into_dispatch(),
            norm_weight: args.norm_weight.into_dispatch(),
            cos: args.cos.into_dispatch(),
            sin: args.sin.into_dispatch(),
            options: options.clone(),
        };
        tensors(<Dispatch as CompressKvBackend>::compress_kv(tokens, compressor))
    };
    if args.kv_gates.shape().num_elements() == 0 || args.state.shape().num_elements() == 0 {
        return Ok((pooled, args.state));
    }
    let rows = BackendRows::Whole(args.kv_gates.into_dispatch());
    Ok((pooled, write_rows(args.state, args.state_slots, rows)))
}

impl CompressKvArgs {
    /// Everything that a call must fulfil.
    fn check_call(&self, options: &CompressKvOptions) -> Result<(), MlaError> {
        let check = self.check_tensors()?;
        self.check_options(&check, options)?;
        #[cfg(feature = "_gpu")]
        cube::check_limits(&check, self, options)?;
        check.contiguous("state", &self.state)?;
        check.only_handle("state", &self.state)?;
        if check.sees_values() { self.validate_values() } else { Ok(()) }
    }

    /// Dtypes, devices, and that the tensors fit together.
    fn check_tensors(&self) -> Result<Check, MlaError> {
        let check = Check::new(OP, "kv_gates", &self.kv_gates)?;
        for (name, float) in [("kv_gates", &self.kv_gates), ("position_bias", &self.position_bias)] {
            check.float_as(name, float, DType::F32, "always")?;
        }
        for (name, float) in [("state", &self.state), ("cos", &self.cos), ("sin", &self.sin)] {
            check.float_as(name, float, DType::F32, "always")?;
        }
        check.float_as("norm_weight", &self.norm_weight, DType::F32, "always")?;
        let (rows, slots) = (&self.state_rows, &self.state_slots);
        for (name, int) in
            [("state_rows", rows), ("state_slots", slots), ("cu_seqlens", &self.cu_seqlens), ("starts", &self.starts)]
        {
            check.int(name, int)?;
        }
        self.check_windows(&check)?;
        self.check_batch(&check)?;
        Ok(check)
    }

    /// Sizes of windows, rows and state.
    fn check_windows(&self, check: &Check) -> Result<(), MlaError> {
        let ([window, channels], [width]) = (self.position_bias.dims(), self.norm_weight.dims());
        check.value("norm_weight", width > 0, format!("{width} channels"), || "at least 1".into())?;
        check.value("position_bias", window > 0, format!("{window} tokens"), || "at least 1".into())?;
        let words = || format!("[m, C] with C = {width}, the channels of `norm_weight`, or {} with overlap", 2 * width);
        let known = channels == width || channels == 2 * width;
        check.dims("position_bias", [window, channels], [None, Some(if known { channels } else { width })], words)?;
        let (carried, row) = (window * (channels / width), 2 * channels);
        let words = || format!("[N, 2 C] with 2 C = {row}: keys and gates, each as wide as `position_bias`");
        check.dims("kv_gates", self.kv_gates.dims(), [None, Some(row)], words)?;
        let words = || format!("[R, L, 2 C] with L = {carried}, the tokens of an entry's windows, and 2 C = {row}");
        check.dims("state", self.state.dims(), [None, Some(carried), Some(row)], words)?;
        let [tokens, _] = self.kv_gates.dims();
        check.index_range("kv_gates", tokens)?;
        check.index_range("position_bias", window)?;
        check.index_range("state", self.state.dims()[0].saturating_mul(carried))
    }

    /// Numbers of sequences, tokens and entries.
    fn check_batch(&self, check: &Check) -> Result<(), MlaError> {
        let ([tokens, _], [batch]) = (self.kv_gates.dims(), self.state_rows.dims());
        check.dims("state_slots", self.state_slots.dims(), [Some(tokens)], || format!("[N] = [{tokens}]"))?;
        let words = || format!("[B + 1] = [{}]: `state_rows` names {batch} sequences", batch + 1);
        check.dims("cu_seqlens", self.cu_seqlens.dims(), [Some(batch + 1)], words)?;
        check.dims("starts", self.starts.dims(), [Some(batch)], || format!("[B] = [{batch}]"))?;
        let ([_, entries, pairs], [width]) = (self.cos.dims(), self.norm_weight.dims());
        let words = || format!("[B, n, dr / 2] with B = {batch} and dr at most {width}, the channels of an entry");
        check.dims("cos", self.cos.dims(), [Some(batch), None, Some(pairs.min(width / 2))], words)?;
        check.index_range("cos", entries)?;
        let words = || format!("[B, n, dr / 2] = [{batch}, {entries}, {pairs}], as `cos`");
        check.dims("sin", self.sin.dims(), [Some(batch), Some(entries), Some(pairs)], words)
    }

    fn check_options(&self, check: &Check, options: &CompressKvOptions) -> Result<(), MlaError> {
        let &CompressKvOptions { overlap, norm_eps, dtype } = options;
        let ([_, channels], [width]) = (self.position_bias.dims(), self.norm_weight.dims());
        let channels_of_entry = channels / width;
        check.value("overlap", overlap == (channels_of_entry == 2), overlap, || {
            format!("{}: a token has {channels} keys, and an entry {width} channels", !overlap)
        })?;
        check.value("norm_eps", norm_eps.is_finite() && norm_eps >= 0.0, norm_eps, || {
            "a finite number, at least 0".into()
        })?;
        let known = matches!(dtype, FloatDType::F32 | FloatDType::F16 | FloatDType::BF16);
        let supported = known && check.device().supports_dtype(DType::from(dtype));
        check.value("dtype", supported, format!("{dtype:?}"), || {
            "F32, F16 or BF16, and one that this device can compute with".into()
        })
    }

    /// Reads blocks, slots, lengths and positions back and checks them.
    ///
    /// # Errors
    /// [`MlaError::DeviceValue`] names the first block outside `0 .. R`, slot that is neither -1 nor one of the state or occurs
    /// twice, entry of `cu_seqlens` that is not 0 at first, below the one before it, or not N at last, or negative position.
    /// Before that, wrong shapes and dtypes as in [`compress_kv`].
    pub fn validate_device_inputs(&self) -> Result<(), MlaError> {
        self.check_tensors()?;
        self.validate_values()
    }

    fn validate_values(&self) -> Result<(), MlaError> {
        let ([blocks, carried, _], [tokens, _]) = (self.state.dims(), self.kv_gates.dims());
        let refused = |argument, at: usize, actual, expected| {
            Err(MlaError::DeviceValue { op: OP, argument, index: vec![at], actual, expected })
        };
        let rows = read_i32(OP, "state_rows", &self.state_rows)?;
        if let Some(at) = rows.iter().position(|&row| usize::try_from(row).map_or(true, |row| row >= blocks)) {
            return refused("state_rows", at, rows[at], format!("a block of `state`, 0 to {}", blocks as i64 - 1));
        }
        check_slots(OP, "state_slots", &self.state_slots, blocks * carried)?;
        let ends = check_cu_seqlens(OP, "cu_seqlens", &self.cu_seqlens, tokens)?;
        if let Some((&last, before)) = ends.split_last().filter(|(last, _)| **last as usize != tokens) {
            return refused("cu_seqlens", before.len(), last, format!("{tokens}, the rows of `kv_gates`"));
        }
        let starts = read_i32(OP, "starts", &self.starts)?;
        if let Some(at) = starts.iter().position(|&start| start < 0) {
            return refused("starts", at, starts[at], "at least 0".into());
        }
        Ok(())
    }
}
