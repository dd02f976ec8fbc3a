//! [`compress_kv`]: windows of tokens pooled into entries, in any chunking.

pub(crate) mod backend;
mod check;
#[cfg(feature = "_gpu")]
pub(crate) mod cube;
#[cfg(feature = "flex")]
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{DType, FloatDType, Int, Tensor};
use thiserror::Error;

use self::backend::{
    BackendCompressed, BackendCompressor, BackendEntryCache, BackendStep, BackendTokens, BackendWrittenCache,
    CompressKvBackend,
};
use super::write_latent::{BackendRows, write_rows};
use crate::MlaError;
use crate::cache::{Pool, RowFormat};
use crate::dispatch::tensors;

const OP: &str = "compress_kv";

/// Arguments of [`compress_kv`]: windows of `m` tokens, entries of `d` channels, `C = d`, or `2 d` with overlap, and
/// `L = m`, or `2 m` with overlap.
#[derive(Debug, Clone)]
pub struct CompressKvArgs {
    /// Keys and gates of the new tokens before they are pooled, side by side, `[N, 2 C]` in f32, f16 or bf16; the tokens of a sequence
    /// one after the other.
    pub kv_gates: Tensor<2>,
    /// What is carried of each sequence: the rows of its last `L` tokens, f32 `[R, L, 2 C]`, row after row in memory; that of
    /// position `p` is row `p % L` of the sequence's block. This must be its only handle.
    pub state: Tensor<3>,
    /// i32 `[B]`: the block of `state` of each sequence: a sequence with new tokens has one of its own.
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
    /// Where entries go, if they are to be kept.
    pub cache: Option<EntryCache>,
}

/// A cache of entries.
#[derive(Debug, Clone)]
pub struct EntryCache {
    /// `[P, S, d]` of the dtype of the entries, dense or in FP8, as [`write_latent`](crate::write_latent) wants it.
    pub cache: Pool,
    /// i32 `[B n]`: where each entry goes, `page * S + offset`; -1 skips it. No slot occurs twice.
    pub slots: Tensor<1, Int>,
}

/// What [`compress_kv`] computed.
#[derive(Debug, Clone)]
pub struct CompressedKv {
    /// `[B, n, d]`.
    pub entries: Tensor<3>,
    /// The state's own buffer.
    pub state: Tensor<3>,
    /// The own buffer of the cache of entries, if there is one.
    pub cache: Option<Pool>,
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

impl CompressKvOptions {
    /// Windows that do not overlap (HCA).
    pub fn new(norm_eps: f32, dtype: FloatDType) -> Self {
        Self { overlap: false, norm_eps, dtype }
    }
}

/// A refused [`compress_kv`], with state and cache as they were.
#[derive(Debug, Error)]
#[error("{error}")]
pub struct CompressKvError {
    /// Why.
    pub error: MlaError,
    /// The state, unchanged.
    pub state: Tensor<3>,
    /// The cache of entries, unchanged.
    pub cache: Option<Pool>,
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
/// hold anything. Afterwards the rows of the new tokens are written into it, and entries into the cache: the same buffers, in place,
/// never a copy. Any division of a sequence into calls gives the same entries, bit for bit. On a GPU a decode step, with an entry and
/// about a token of each sequence, is one launch, and one more that quantises entries where the cache is in FP8.
///
/// ```
/// use burn::tensor::{Device, FloatDType, Tensor};
/// use mla_ops::batch::index_tensor;
/// use mla_ops::cache::new_pool;
/// use mla_ops::{CompressKvArgs, CompressKvOptions, compress_kv};
///
/// let device = Device::flex();
/// // Windows of 4 tokens, entries of 8 channels. A sequence begins with 5 tokens, which fill one window.
/// let args = CompressKvArgs {
///     kv_gates: Tensor::ones([5, 2 * 8], &device),
///     state: new_pool([1, 4, 2 * 8], FloatDType::F32, &device)?,
///     state_rows: index_tensor(vec![0], &device),
///     state_slots: index_tensor(vec![-1, 1, 2, 3, 0], &device), // of the fifth token, where the first one would be
///     cu_seqlens: index_tensor(vec![0, 5], &device),
///     starts: index_tensor(vec![0], &device),
///     position_bias: Tensor::zeros([4, 8], &device),
///     norm_weight: Tensor::ones([8], &device),
///     cos: Tensor::ones([1, 1, 2], &device),
///     sin: Tensor::zeros([1, 1, 2], &device),
///     cache: None,
/// };
/// let options = CompressKvOptions::new(0.0, FloatDType::F32);
/// let compressed = compress_kv(args, &options)?;
/// assert_eq!(compressed.entries.dims(), [1, 1, 8]);
/// assert!((compressed.entries.min().into_scalar::<f32>() - 1.0).abs() < 1e-6);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes or devices; a state or cache that is a strided view; [`MlaError::CacheShared`] if another handle of either
/// exists; more than the device can do ([`MlaError::DeviceLimit`]). Both come back in the error, unchanged. Blocks, slots,
/// lengths and positions that are out of range are on the device and cannot be seen;
/// [`CompressKvArgs::validate_device_inputs`] looks.
pub fn compress_kv(args: CompressKvArgs, options: &CompressKvOptions) -> Result<CompressedKv, Box<CompressKvError>> {
    match args.check_call(options) {
        Ok(()) => Ok(args.compress(options)),
        Err(error) => Err(Box::new(args.refuse(error))),
    }
}

impl CompressKvArgs {
    /// Whether a cube of each sequence could write all that there is to write, after it has read what it needs: with more entries of a
    /// sequence others would still read; more tokens are too many for one.
    pub(super) fn is_step(&self) -> bool {
        let ([batch, entries, _], [tokens, row]) = (self.cos.dims(), self.kv_gates.dims());
        let empty = |dims: [usize; 3]| dims.contains(&0);
        let is_empty = tokens * row == 0
            || empty(self.state.dims())
            || self.cache.as_ref().is_some_and(|to| empty(to.cache.dims()));
        entries == 1 && tokens <= batch && !is_empty
    }

    /// Checked.
    pub(super) fn compress(self, options: &CompressKvOptions) -> CompressedKv {
        if !self.is_step() {
            return self.apart(options);
        }
        let (step, quantised) = self.into_step(options);
        CompressedKv::of_step(Dispatch::compress_and_write(step), quantised)
    }

    fn refuse(self, error: MlaError) -> CompressKvError {
        CompressKvError { error, state: self.state, cache: self.cache.map(|to| to.cache) }
    }

    /// A step in one launch, and where its entries are quantised.
    pub(super) fn into_step(self, options: &CompressKvOptions) -> (BackendStep<Dispatch>, Option<EntryCache>) {
        let (tokens, compressor, state_slots, cache) = self.into_backend(options);
        // What is quantised, another launch writes.
        let (quantised, cache) = match cache {
            None => (None, BackendEntryCache::None),
            Some(EntryCache { cache, slots }) if cache.format() == RowFormat::Dense => {
                // Its only handle.
                let rows = cache.dense();
                drop(cache);
                (None, BackendEntryCache::Slots(rows.into_dispatch(), slots.into_dispatch()))
            }
            quantised => (quantised, BackendEntryCache::None),
        };
        (BackendStep { tokens, state_slots: state_slots.into_dispatch(), cache, compressor }, quantised)
    }

    fn apart(self, options: &CompressKvOptions) -> CompressedKv {
        let ([batch, entries, _], [width]) = (self.cos.dims(), self.norm_weight.dims());
        let kv_gates = self.kv_gates.clone().cast(FloatDType::F32);
        let (state, state_slots, cache) = (self.state.clone(), self.state_slots.clone(), self.cache.clone());
        // What is written must have no other handle by then.
        let pooled = if batch * entries == 0 {
            drop(self);
            Tensor::empty([batch, entries, width], (&state.device(), DType::from(options.dtype)))
        } else {
            let (tokens, compressor, ..) = Self { kv_gates: kv_gates.clone(), ..self }.into_backend(options);
            tensors(<Dispatch as CompressKvBackend>::compress_kv(tokens, compressor))
        };
        let state = EntryCache { cache: state.into(), slots: state_slots }.with_rows(kv_gates).dense();
        let cache = cache.map(|to| to.with(&pooled));
        CompressedKv { entries: pooled, state, cache }
    }

    /// Tokens, what makes entries of them, and where they go.
    fn into_backend(
        self,
        options: &CompressKvOptions,
    ) -> (BackendTokens<Dispatch>, BackendCompressor<Dispatch>, Tensor<1, Int>, Option<EntryCache>) {
        let tokens = BackendTokens {
            kv_gates: self.kv_gates.into_dispatch(),
            state: self.state.into_dispatch(),
            state_rows: self.state_rows.into_dispatch(),
            cu_seqlens: self.cu_seqlens.into_dispatch(),
            starts: self.starts.into_dispatch(),
        };
        let compressor = BackendCompressor {
            position_bias: self.position_bias.into_dispatch(),
            norm_weight: self.norm_weight.into_dispatch(),
            cos: self.cos.into_dispatch(),
            sin: self.sin.into_dispatch(),
            options: options.clone(),
        };
        (tokens, compressor, self.state_slots, self.cache)
    }
}

impl CompressedKv {
    pub(super) fn of_step(compressed: BackendCompressed<Dispatch>, quantised: Option<EntryCache>) -> Self {
        let BackendCompressed { entries, state, cache } = compressed;
        let entries: Tensor<3> = tensors(entries);
        let cache = match cache {
            BackendWrittenCache::Cache(cache) => Some(Pool::from(tensors::<Tensor<3>>(cache))),
            BackendWrittenCache::None => quantised.map(|to| to.with(&entries)),
        };
        Self { entries, state: tensors(state), cache }
    }
}

impl EntryCache {
    /// The cache with these entries `[B, n, d]`.
    fn with(self, entries: &Tensor<3>) -> Pool {
        let [batch, count, width] = entries.dims();
        match batch * count {
            0 => self.cache,
            rows => self.with_rows(entries.clone().reshape([rows, width])),
        }
    }

    fn with_rows(self, rows: Tensor<2>) -> Pool {
        if self.cache.dims().contains(&0) || rows.dims().contains(&0) {
            return self.cache;
        }
        write_rows(self.cache, self.slots, BackendRows::Whole(rows.into_dispatch()))
    }
}
