//! What multi-head latent attention is made of, for a model or alone.

use burn::config::Config;
use mla_ops::RopeConfig;
use mla_ops::cache::{PoolConfig, RowFormat};

use super::indexer_config::IndexerConfig;
use super::rotary::RotaryEmbedding;
use crate::Result;
use crate::cache::index_key_format;
use crate::config::sizes::{Bound, MOST, MOST_CHANNELS, impossible_size, product, sum};
use crate::config::{Contradiction, Quantization, rope_contradiction};

/// The sizes of a [`MultiHeadLatentAttention`](crate::layers::MultiHeadLatentAttention), by their names in `config.json`. Without `q_lora_rank` that of DeepSeek-V2-Lite, with it
/// that of V3, with an indexer, too, that of V3.2; [`DeepseekV3Config::mla`](crate::DeepseekV3Config::mla) has that of a model.
#[derive(Config, Debug, PartialEq)]
pub struct MlaConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Width of the key-value latent.
    pub kv_lora_rank: usize,
    /// Channels of a head without rotation.
    pub qk_nope_head_dim: usize,
    /// Channels of a head with rotation, an even number; one key of this width serves all heads.
    pub qk_rope_head_dim: usize,
    /// Channels of a value head.
    pub v_head_dim: usize,
    /// Width of the query latent; `None` projects queries directly.
    pub q_lora_rank: Option<usize>,
    /// The indexer that picks the keys of each token, from its query latent.
    pub indexer: Option<IndexerConfig>,
    /// Rotary embedding.
    #[config(default = "RopeConfig { rope_theta: 10_000.0, yarn: None }")]
    pub rope: RopeConfig,
    /// Whether RoPE is interleaved, channels `(2i, 2i + 1)`; otherwise `(i, i + d/2)`.
    #[config(default = true)]
    pub rope_interleave: bool,
    /// Whether projections are in FP8, as DeepSeek publishes V3.
    pub quantization: Option<Quantization>,
}

impl MlaConfig {
    pub(super) fn wrong(&self) -> Option<Contradiction> {
        impossible_size(&self.bounds(), || self.most_parameters()).or_else(|| self.contradiction())
    }

    /// Sizes of which none may be zero.
    pub(super) fn bounds(&self) -> [Bound; 10] {
        let indexer = |size: fn(&IndexerConfig) -> usize| self.indexer.as_ref().map_or(1, size);
        [
            ("hidden_size", self.hidden_size, MOST),
            ("num_attention_heads", self.num_attention_heads, MOST),
            ("q_lora_rank", self.q_lora_rank.unwrap_or(1), MOST),
            ("kv_lora_rank", self.kv_lora_rank, MOST),
            ("qk_nope_head_dim", self.qk_nope_head_dim, MOST_CHANNELS),
            ("qk_rope_head_dim", self.qk_rope_head_dim, MOST_CHANNELS),
            ("v_head_dim", self.v_head_dim, MOST_CHANNELS),
            ("index_n_heads", indexer(|indexer| indexer.heads), MOST),
            ("index_head_dim", indexer(|indexer| indexer.head_dim), MOST_CHANNELS),
            ("index_topk", indexer(|indexer| indexer.topk), MOST),
        ]
    }

    pub(super) fn contradiction(&self) -> Option<Contradiction> {
        let found = |field, actual: String, expected: String| Some((field, actual, expected));
        let dr = self.qk_rope_head_dim;
        if !dr.is_multiple_of(2) {
            return found("qk_rope_head_dim", dr.to_string(), "an even number (RoPE rotates pairs of channels)".into());
        }
        if let Some(indexer) = self.indexer {
            if indexer.head_dim < dr {
                let expected = format!("at least `qk_rope_head_dim` = {dr}");
                return found("index_head_dim", indexer.head_dim.to_string(), expected);
            }
            if self.q_lora_rank.is_none() {
                let expected = "a rank: the indexer reads the query latent";
                return found("q_lora_rank", "null".into(), expected.into());
            }
        }
        rope_contradiction(&self.rope)
    }

    /// Numbers of the weights and of a token's rows in the cache, or somewhat more.
    pub(super) fn most_parameters(&self) -> u128 {
        let (hidden, heads, rank) = (self.hidden_size, self.num_attention_heads, self.kv_lora_rank);
        let (dn, dr, dv) = (self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim);
        let attention = [
            product(&[self.q_lora_rank.unwrap_or(0), hidden + 1]),
            product(&[heads, dn + dr, self.q_lora_rank.unwrap_or(hidden)]),
            product(&[rank + dr, hidden + 2]),
            // Its keys are there twice.
            product(&[2, heads, dn + dv, rank]),
            product(&[hidden, heads, dv]),
        ];
        let indexer = self.indexer.iter().map(|indexer| {
            let query = product(&[indexer.heads, indexer.head_dim, self.q_lora_rank.unwrap_or(0)]);
            query.saturating_add(product(&[indexer.head_dim + indexer.heads, hidden + 3]))
        });
        sum(attention.into_iter().chain(indexer))
    }

    /// Channels of a query head.
    pub fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// Factor on the attention logits: `(qk_nope_head_dim + qk_rope_head_dim)^(-1/2)`, times YaRN's `m²`.
    pub fn softmax_scale(&self) -> f64 {
        (self.qk_head_dim() as f64).sqrt().recip() * self.rope.softmax_factor()
    }

    /// Numbers that a token takes in the cache: the latent and the rotated key.
    pub fn cache_width(&self) -> usize {
        self.kv_lora_rank + self.qk_rope_head_dim
    }

    /// The pools of one layer in a cache: of the latents, in this format, and of the index keys, if there is an indexer; beside latents in
    /// FP8 they are in FP8, too.
    pub fn pools(&self, format: RowFormat) -> Vec<PoolConfig> {
        let latents = PoolConfig { format, ..PoolConfig::per_token(self.cache_width()) };
        let index_keys = self
            .indexer
            .map(|indexer| PoolConfig { format: index_key_format(format), ..PoolConfig::per_token(indexer.head_dim) });
        [latents].into_iter().chain(index_keys).collect()
    }

    pub(super) fn rotary(&self) -> RotaryEmbedding {
        RotaryEmbedding::new(&self.rope, self.qk_rope_head_dim, self.rope_interleave)
    }
}
