//! What each layer is made of, and what it keeps of a request.

use std::fmt;

use burn::tensor::{DType, FloatDType};

use super::{DeepseekV3Config, DeepseekV4Config, ModelConfig};

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

    /// Tokens whose keys and gates later entries may need.
    pub(crate) fn carried_tokens(&self) -> usize {
        if self.overlap { 2 * self.rate } else { self.rate }
    }
}

/// A layer in words, and its cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerSummary {
    /// Its attention.
    pub attention: String,
    /// Its feed-forward part.
    pub mlp: String,
    /// Bytes of the cache that a token adds, on average, rounded up.
    pub bytes_per_token: usize,
    /// Bytes of the state that a request has whatever its length.
    pub bytes_per_request: usize,
}

impl ModelConfig {
    /// The layers, first to last, with caches of `dtype`.
    pub fn layers(&self, dtype: FloatDType) -> Vec<LayerSummary> {
        match self {
            Self::V3(config) => config.layers(dtype),
            Self::V4(config) => config.layer_summaries(dtype),
        }
    }
}

impl DeepseekV3Config {
    fn layers(&self, dtype: FloatDType) -> Vec<LayerSummary> {
        let (attention, index_width) = match self.indexer {
            Some(indexer) => (format!("MLA, sparse: {} keys", indexer.topk), indexer.head_dim),
            None => ("MLA".to_string(), 0),
        };
        let layer = |layer: usize| LayerSummary {
            attention: attention.clone(),
            mlp: if layer < self.first_k_dense_replace { "dense" } else { "MoE" }.to_string(),
            bytes_per_token: (self.cache_width() + index_width) * DType::from(dtype).size(),
            bytes_per_request: 0,
        };
        (0..self.num_hidden_layers).map(layer).collect()
    }
}

impl DeepseekV4Config {
    /// The compressors of a layer: of its entries, and of its index keys.
    pub(crate) fn layer_compressors(&self, layer: usize) -> Vec<CompressorSpec> {
        let attention = self.layers[layer].attention;
        let Some(rate) = attention.rate() else { return Vec::new() };
        let overlap = matches!(attention, AttentionSpec::Csa { .. });
        let widths = if overlap { vec![self.head_dim, self.index_head_dim] } else { vec![self.head_dim] };
        widths.into_iter().map(|width| CompressorSpec { rate, width, overlap }).collect()
    }

    /// The compressors of all layers, in order.
    pub(crate) fn compressors(&self) -> Vec<CompressorSpec> {
        (0..self.layers.len()).flat_map(|layer| self.layer_compressors(layer)).collect()
    }

    /// The number of a layer's first compressor among those of all layers.
    pub(crate) fn first_compressor(&self, layer: usize) -> usize {
        (0..layer).map(|layer| self.layer_compressors(layer).len()).sum()
    }

    /// Tokens whose entries are whole ones in every layer.
    pub(crate) fn tokens_per_block(&self) -> usize {
        // The rates divide one another.
        self.layers.iter().filter_map(|layer| layer.attention.rate()).max().unwrap_or(1)
    }

    /// Bytes of the states of a request, in all layers together.
    pub(crate) fn bytes_per_request(&self, dtype: FloatDType) -> usize {
        self.layer_summaries(dtype).iter().map(|layer| layer.bytes_per_request).sum()
    }

    fn layer_summaries(&self, dtype: FloatDType) -> Vec<LayerSummary> {
        let (size, carried_size) = (DType::from(dtype).size(), DType::F32.size());
        let layer = |(number, spec): (usize, &LayerSpec)| {
            let compressors = self.layer_compressors(number);
            let per_token = compressors.iter().map(|c| (c.width * size).div_ceil(c.rate));
            let carried = compressors.iter().map(|c| c.carried_tokens() * 2 * c.channels() * carried_size);
            LayerSummary {
                attention: spec.attention.to_string(),
                mlp: spec.mlp.to_string(),
                bytes_per_token: per_token.sum(),
                bytes_per_request: self.sliding_window * self.head_dim * size + carried.sum::<usize>(),
            }
        };
        self.layers.iter().enumerate().map(layer).collect()
    }
}
