//! What a layer is made of.

use std::fmt;

use mla_ops::cache::{PoolConfig, RowFormat};

/// Which keys a layer's queries see besides their neighbours (DeepSeek-V4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionSpec {
    /// None: the window alone.
    Sliding,
    /// Compressed sparse attention: those entries of overlapping windows of `rate` tokens that the indexer picks.
    Csa {
        /// Tokens per entry.
        rate: usize,
    },
    /// Heavily compressed attention: all entries of windows of `rate` tokens.
    Hca {
        /// Tokens per entry.
        rate: usize,
    },
}

impl AttentionSpec {
    /// Tokens per compressed entry, in layers that have entries.
    pub fn rate(self) -> Option<usize> {
        match self {
            Self::Sliding => None,
            Self::Csa { rate } | Self::Hca { rate } => Some(rate),
        }
    }
}

impl fmt::Display for AttentionSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sliding => f.write_str("sliding window"),
            Self::Csa { rate } => write!(f, "window + CSA, {rate} tokens per entry"),
            Self::Hca { rate } => write!(f, "window + HCA, {rate} tokens per entry"),
        }
    }
}

/// How a layer chooses experts (DeepSeek-V4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlpSpec {
    /// By a fixed table, from the token's id.
    HashMoe,
    /// By the router's scores.
    Moe,
}

impl fmt::Display for MlpSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::HashMoe => "hash MoE",
            Self::Moe => "MoE",
        })
    }
}

/// What a layer of DeepSeek-V4 is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSpec {
    /// Its attention.
    pub attention: AttentionSpec,
    /// Its feed-forward part.
    pub mlp: MlpSpec,
}

/// What makes the entries of a layer, or its index keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CompressorSpec {
    /// Tokens per entry.
    pub(crate) rate: usize,
    /// Channels of an entry.
    pub(crate) width: usize,
    /// Whether an entry is made of the window before as well.
    pub(crate) overlap: bool,
}

impl CompressorSpec {
    /// Keys of a token before they are pooled, and as many gates.
    pub(crate) fn channels(&self) -> usize {
        if self.overlap { 2 * self.width } else { self.width }
    }

    /// Its pool in a cache.
    pub(crate) fn pool(&self, format: RowFormat) -> PoolConfig {
        PoolConfig { width: self.width, tokens_per_row: self.rate, format }
    }

    /// Tokens whose keys and gates later entries may need.
    pub(crate) fn carried_tokens(&self) -> usize {
        if self.overlap { 2 * self.rate } else { self.rate }
    }
}
