//! The sizes of the indexer.

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::config::Fields;

/// The indexer of V3.2, which picks the keys of each token. The default is what DeepSeek-V3.2 has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexerConfig {
    /// Query heads of the indexer (`index_n_heads`).
    pub heads: usize,
    /// Channels of a head and of an index key (`index_head_dim`); RoPE applies to the first `qk_rope_head_dim` of them.
    pub head_dim: usize,
    /// Keys that a token sees at most (`index_topk`).
    pub topk: usize,
}

impl Default for IndexerConfig {
    fn default() -> Self {
        Self { heads: 64, head_dim: 128, topk: 2048 }
    }
}

impl IndexerConfig {
    pub(super) fn read(fields: &Fields) -> Result<Self> {
        Ok(Self {
            heads: fields.count("index_n_heads")?,
            head_dim: fields.count("index_head_dim")?,
            topk: fields.count("index_topk")?,
        })
    }
}
