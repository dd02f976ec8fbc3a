//! What the layers keep of a request: windows, and the entries of compressors.

use burn::tensor::{DType, FloatDType};
use mla_ops::Determinism;

use mla_ops::cache::{PoolConfig, RowFormat};

use super::config::DeepseekV4Config;
use super::schedule::{AttentionSpec, CompressorSpec, LayerSpec};
use crate::cache::index_key_format;
use crate::config::LayerSummary;
use crate::models::architecture::Architecture;
use crate::weights::LoadAs;

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

    /// The pools of all compressors. In FP8 are the entries that an indexer picks from, and its keys: other entries are few.
    pub(crate) fn pools(&self, entries: RowFormat) -> Vec<PoolConfig> {
        (0..self.layers.len()).flat_map(|layer| self.layer_pools(layer, entries)).collect()
    }

    fn layer_pools(&self, layer: usize, entries: RowFormat) -> Vec<PoolConfig> {
        let pool = |(number, of): (usize, CompressorSpec)| {
            of.pool(match number {
                _ if !of.overlap => RowFormat::Dense,
                0 => entries,
                _ => index_key_format(entries),
            })
        };
        self.layer_compressors(layer).into_iter().enumerate().map(pool).collect()
    }

    /// The number of a layer's first compressor among those of all layers.
    pub(crate) fn first_compressor(&self, layer: usize) -> usize {
        (0..layer).map(|layer| self.layer_compressors(layer).len()).sum()
    }

    /// The kinds of layers that have entries, each with what makes them.
    pub(crate) fn entry_kinds(&self) -> Vec<(AttentionSpec, CompressorSpec)> {
        let mut kinds: Vec<(AttentionSpec, CompressorSpec)> = Vec::new();
        for (layer, spec) in self.layers.iter().enumerate() {
            if let (Some(&of), false) =
                (self.layer_compressors(layer).first(), kinds.iter().any(|(known, _)| *known == spec.attention))
            {
                kinds.push((spec.attention, of));
            }
        }
        kinds
    }

    /// Whether tokens that see so many entries at most, made by this compressor, attend to those that an indexer picks. A token may
    /// not see by its neighbours whether it picks all entries.
    pub(crate) fn picks(&self, of: &CompressorSpec, most: usize, determinism: Determinism) -> bool {
        of.overlap && (most > self.index_topk || determinism.is_batch_invariant())
    }

    /// Tokens whose entries are whole ones in every layer.
    pub(crate) fn tokens_per_block(&self) -> usize {
        // The rates divide one another.
        self.layers.iter().filter_map(|layer| layer.attention.rate()).max().unwrap_or(1)
    }

    /// Tokens that the state of a request has something of, at most.
    pub(crate) fn state_tokens(&self) -> usize {
        self.compressors().iter().map(CompressorSpec::carried_tokens).fold(self.sliding_window, usize::max)
    }

    /// Bytes of the states of a request, in all layers together.
    pub(crate) fn bytes_per_request(&self, dtype: FloatDType) -> usize {
        self.layer_summaries(LoadAs::from(dtype)).iter().map(|layer| layer.bytes_per_request).sum()
    }

    /// The layers in words, with the caches of a model that is loaded so.
    pub(crate) fn layer_summaries(&self, load_as: LoadAs) -> Vec<LayerSummary> {
        let (dtype, entries) = (load_as.dtype, self.row_format(load_as.kv_cache).unwrap_or_default());
        let (size, carried_size) = (DType::from(dtype).size(), DType::F32.size());
        let layer = |(number, spec): (usize, &LayerSpec)| {
            let compressors = self.layer_compressors(number);
            let pools = self.layer_pools(number, entries);
            let per_token = pools.iter().map(|pool| pool.row_bytes(dtype).div_ceil(pool.tokens_per_row));
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
