//! Arguments, sizes and errors of ragged attention.

use cubecl::prelude::*;
use thiserror::Error;

use crate::common::device::DeviceError;
use crate::common::select::Path;
#[cfg(feature = "cuda")]
use crate::tiles::prefill::form::Form;

/// `[tokens, heads, channels]`, whose channels lie side by side.
pub struct HeadRows {
    /// The elements.
    pub buffer: BufferArg,
    /// Elements from a token to the next.
    pub token_stride: usize,
    /// Elements from a head to the next.
    pub head_stride: usize,
}

impl HeadRows {
    /// Row-major.
    pub fn contiguous(buffer: BufferArg, heads: usize, width: usize) -> Self {
        Self { buffer, token_stride: heads * width, head_stride: width }
    }

    /// Whether they are row-major, as [`HeadRows::contiguous`] makes them.
    pub(super) fn is_contiguous(&self, heads: usize, width: usize) -> bool {
        self.token_stride == heads * width && (heads == 1 || self.head_stride == width)
    }
}

/// Arguments of [`launch`](super::launch), with the letters of [`RaggedAttentionSizes`]. E is `elem`.
///
/// [`Path::Plain`] takes contiguous tensors and no `k_pe`. [`Path::Mma`] and [`Path::Sm90`] take strides, of multiples of 16 bytes, as is
/// where a tensor begins in its buffer.
pub struct RaggedAttentionArgs {
    /// E `[N, H, dqk]`.
    pub q: HeadRows,
    /// E `[M, Hkv, dqk - dr]`.
    pub k: HeadRows,
    /// E `[M, 1, dr]`: the last channels of the keys of all heads, where dr is not 0.
    pub k_pe: Option<HeadRows>,
    /// E `[M, Hkv, dv]`.
    pub v: HeadRows,
    /// i32 `[B + 1]`, ascending from 0: sequence `b` is the tokens `cu_seqlens[b] .. cu_seqlens[b + 1]`. Tokens past the
    /// last entry belong to no sequence and may hold anything. Values are taken as within 0 ..= N; where they do not
    /// ascend, rows of `out` and `lse` may be left unwritten.
    pub cu_seqlens: BufferArg,
    /// i32 `[B + 1]`: the same of the keys, within 0 ..= M.
    pub cu_seqlens_k: BufferArg,
    /// E `[N, H, dv]`, written: 0 for a token that sees no key.
    pub out: BufferArg,
    /// f32 `[N, H]`, written: the natural logarithm of the sum, -inf for a token that sees no key.
    pub lse: BufferArg,
    /// Sizes and element type.
    pub sizes: RaggedAttentionSizes,
    /// Which keys a query sees, and what becomes of their products.
    pub options: RaggedAttentionOptions,
}

/// Which keys a query sees, and what becomes of their products.
#[derive(Debug, Clone, Copy)]
pub struct RaggedAttentionOptions {
    /// The factor of the scores before the softmax.
    pub softmax_scale: f32,
    /// `c` > 0: a score `s`, after the factor, becomes `c tanh(s / c)`.
    pub softcap: Option<f32>,
    /// Query `i` of a sequence sees the keys up to position `i + keys - queries`; otherwise all of them.
    pub causal: bool,
    /// Only so many keys, the last ones up to that position; at least 1, and only with `causal`.
    pub window: Option<usize>,
}

impl RaggedAttentionOptions {
    /// How many keys a query sees at most.
    pub(super) fn most_seen(&self) -> i32 {
        self.window.map_or(i32::MAX, |window| i32::try_from(window).unwrap_or(i32::MAX))
    }

    /// A form of the kernels for matrix instructions with these options.
    #[cfg(feature = "cuda")]
    pub(super) fn form(&self, form: Form) -> Form {
        Form { windowed: self.window.is_some(), ..form.with_scores(self.softmax_scale, self.softcap) }
    }
}

/// What decides how a device computes it.
#[derive(Debug, Clone, Copy)]
pub struct RaggedAttentionSizes {
    /// Query tokens (N).
    pub tokens: usize,
    /// Key tokens (M).
    pub keys: usize,
    /// Query heads (H).
    pub heads: usize,
    /// Heads of keys and values (Hkv), which divide the query's.
    pub kv_heads: usize,
    /// Channels of query and key (dqk), at least 1.
    pub key_width: usize,
    /// Channels of a value (dv), at least 1.
    pub value_width: usize,
    /// Channels of a key that all heads share (dr); 0 for none.
    pub shared_width: usize,
    /// Sequences (B).
    pub sequences: usize,
    /// f32, f16 or bf16.
    pub elem: ElemType,
}

/// Why [`launch`](super::launch) did not launch anything.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RaggedAttentionError {
    /// The device does not have the element type or the room for a cube.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Keys or values without a channel.
    #[error("a key has {key_width} channels and a value {value_width}: both need at least 1")]
    Width {
        /// dqk.
        key_width: usize,
        /// dv.
        value_width: usize,
    },
    /// More cubes than the device launches at once.
    #[error(
        "{tokens} tokens in {sequences} sequences of {heads} heads need more cubes than the device launches at once"
    )]
    Cubes {
        /// N.
        tokens: usize,
        /// B.
        sequences: usize,
        /// H.
        heads: usize,
    },
    /// More than 2^32 elements in a tensor, on a device with 32-bit offsets.
    #[error("a tensor of {0} elements needs 64-bit offsets, which the device does not have")]
    Offsets(usize),
    /// The device or the kernel does not take the problem.
    #[error("the device has no kernel {0:?} for this problem")]
    NoKernel(Path),
    /// The kernel for all devices was given tensors that are not contiguous, or keys in two parts.
    #[error("the kernel {0:?} takes contiguous tensors, and whole keys")]
    Strides(Path),
}

impl RaggedAttentionSizes {
    /// The form of the kernels for matrix instructions, where they take the problem.
    #[cfg(feature = "cuda")]
    pub(super) fn form(&self, rows: usize) -> Option<Form> {
        let &Self { heads, kv_heads, key_width, value_width, shared_width, elem, .. } = self;
        let grouped = kv_heads > 0 && heads.is_multiple_of(kv_heads);
        if grouped { Form::of(rows, elem, [key_width, value_width, shared_width]) } else { None }
    }

    /// Whether there is nothing to write.
    pub(super) fn is_empty(&self) -> bool {
        self.tokens == 0 || self.heads == 0
    }

    /// Elements of the largest tensor.
    pub(super) fn elements(&self) -> usize {
        let width = self.key_width.max(self.value_width);
        (self.tokens * self.heads).max(self.keys * self.kv_heads) * width
    }

    /// What every kernel needs.
    pub(super) fn check(&self) -> Result<(), RaggedAttentionError> {
        let &Self { tokens, keys, heads, key_width, value_width, sequences, .. } = self;
        if key_width == 0 || value_width == 0 {
            return Err(RaggedAttentionError::Width { key_width, value_width });
        }
        // Tokens are numbered by i32.
        if tokens.max(keys) > i32::MAX as usize {
            return Err(RaggedAttentionError::Cubes { tokens, sequences, heads });
        }
        Ok(())
    }
}
