//! The sizes of compressors and indexers.

use burn::config::Config;
use mla_ops::RopeConfig;
use mla_ops::cache::{PoolConfig, RowFormat};

use super::schedule::CompressorSpec;
use crate::config::sizes::{MOST, MOST_CHANNELS, impossible_size, is_positive, product, sum};
use crate::config::{Contradiction, rope_contradiction};

/// The sizes of a [`Compressor`](crate::layers::Compressor), by their names in `config.json`.
#[derive(Config, Debug, PartialEq)]
pub struct CompressorConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Channels of an entry.
    pub head_dim: usize,
    /// Tokens of a window, a power of two.
    pub compress_rate: usize,
    /// Trailing channels of an entry with rotation, an even number.
    pub qk_rope_head_dim: usize,
    /// Whether an entry is made of the window before as well, as in compressed sparse attention (CSA); not so in heavily compressed
    /// attention (HCA).
    #[config(default = false)]
    pub overlap: bool,
    /// Rotary embedding; an entry is at the position of its first token.
    #[config(default = "RopeConfig { rope_theta: 10_000.0, yarn: None }")]
    pub rope: RopeConfig,
    /// Epsilon of the norm.
    #[config(default = 1e-6)]
    pub rms_norm_eps: f64,
}

impl CompressorConfig {
    pub(super) fn wrong(&self) -> Option<Contradiction> {
        let sizes = [
            ("hidden_size", self.hidden_size, MOST),
            ("head_dim", self.head_dim, MOST_CHANNELS),
            ("compress_rate", self.compress_rate, MOST),
            ("qk_rope_head_dim", self.qk_rope_head_dim, MOST_CHANNELS),
        ];
        // Keys and gates, twice as wide with overlap.
        let numbers = || sum([self.hidden_size, self.compress_rate].map(|rows| product(&[4, self.head_dim, rows])));
        impossible_size(&sizes, numbers).or_else(|| self.contradiction())
    }

    fn contradiction(&self) -> Option<Contradiction> {
        let found = |field, actual: String, expected: String| Some((field, actual, expected));
        let (width, dr, rate) = (self.head_dim, self.qk_rope_head_dim, self.compress_rate);
        if !dr.is_multiple_of(2) || dr > width {
            return found(
                "qk_rope_head_dim",
                dr.to_string(),
                format!("an even number of at most `head_dim` = {width}"),
            );
        }
        if !rate.is_power_of_two() {
            return found("compress_rate", rate.to_string(), "a power of two, as page sizes are".into());
        }
        if !is_positive(self.rms_norm_eps) {
            let expected = "a finite number above 0, in f32";
            return found("rms_norm_eps", self.rms_norm_eps.to_string(), expected.into());
        }
        rope_contradiction(&self.rope)
    }

    /// Its pool in a cache, with dense rows; they may be in FP8 as well.
    pub fn pool(&self) -> PoolConfig {
        self.spec().pool(RowFormat::Dense)
    }

    pub(super) fn spec(&self) -> CompressorSpec {
        CompressorSpec { rate: self.compress_rate, width: self.head_dim, overlap: self.overlap }
    }
}

/// The sizes of an [`EntryIndexer`](crate::layers::EntryIndexer); the defaults are DeepSeek-V4-Flash's.
#[derive(Config, Debug, PartialEq)]
pub struct EntryIndexerConfig {
    /// What makes its keys. Their width is that of a query head (`index_head_dim`), RoPE is that of the queries, too.
    pub compressor: CompressorConfig,
    /// Width of the query latent.
    pub q_lora_rank: usize,
    /// Query heads of the indexer.
    #[config(default = 64)]
    pub index_n_heads: usize,
    /// Entries that a token sees at most.
    #[config(default = 512)]
    pub index_topk: usize,
}

impl EntryIndexerConfig {
    /// The pool of its keys in a cache.
    pub fn pool(&self) -> PoolConfig {
        self.compressor.pool()
    }

    pub(super) fn wrong(&self) -> Option<Contradiction> {
        let (heads, rank) = (self.index_n_heads, self.q_lora_rank);
        let sizes =
            [("q_lora_rank", rank, MOST), ("index_n_heads", heads, MOST), ("index_topk", self.index_topk, MOST)];
        let CompressorConfig { hidden_size, head_dim, .. } = self.compressor;
        let numbers = || sum([product(&[heads, head_dim, rank]), product(&[heads, hidden_size])]);
        self.compressor.wrong().or_else(|| impossible_size(&sizes, numbers))
    }
}
