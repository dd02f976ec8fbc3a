//! How large DeepSeek-V3 may be.

use super::config::DeepseekV3Config;
use crate::config::Contradiction;
use crate::config::sizes::{
    Bound, MOST, MOST_CHANNELS, MOST_LAYERS, out_of_range, product, sum, too_many_experts, unaddressable,
};

impl DeepseekV3Config {
    /// The first size that is zero, too large, or asks for too much memory together with the others.
    pub(super) fn impossible_size(&self) -> Option<Contradiction> {
        let sizes = self.bounds();
        out_of_range(&sizes)
            .or_else(|| (self.num_nextn_predict_layers > MOST_LAYERS).then(|| self.too_many_predictions()))
            .or_else(|| too_many_experts(self.num_hidden_layers, self.n_routed_experts))
            .or_else(|| unaddressable(&sizes, "the weights", self.most_parameters()))
    }

    fn too_many_predictions(&self) -> Contradiction {
        let actual = self.num_nextn_predict_layers.to_string();
        ("num_nextn_predict_layers", actual, format!("at most {MOST_LAYERS}"))
    }

    /// Sizes of which none may be zero.
    fn bounds(&self) -> [Bound; 20] {
        let indexer = |size: fn(&super::config::IndexerConfig) -> usize| self.indexer.as_ref().map_or(1, size);
        [
            ("vocab_size", self.vocab_size, MOST),
            ("hidden_size", self.hidden_size, MOST),
            ("intermediate_size", self.intermediate_size, MOST),
            ("moe_intermediate_size", self.moe_intermediate_size, MOST),
            ("num_hidden_layers", self.num_hidden_layers, MOST_LAYERS),
            ("num_attention_heads", self.num_attention_heads, MOST),
            ("q_lora_rank", self.q_lora_rank.unwrap_or(1), MOST),
            ("kv_lora_rank", self.kv_lora_rank, MOST),
            ("qk_nope_head_dim", self.qk_nope_head_dim, MOST_CHANNELS),
            ("qk_rope_head_dim", self.qk_rope_head_dim, MOST_CHANNELS),
            ("v_head_dim", self.v_head_dim, MOST_CHANNELS),
            ("index_n_heads", indexer(|indexer| indexer.heads), MOST),
            ("index_head_dim", indexer(|indexer| indexer.head_dim), MOST_CHANNELS),
            ("index_topk", indexer(|indexer| indexer.topk), MOST),
            ("n_routed_experts", self.n_routed_experts, MOST),
            ("n_shared_experts", self.n_shared_experts, MOST),
            ("num_experts_per_tok", self.num_experts_per_tok, MOST),
            ("n_group", self.n_group, MOST),
            ("topk_group", self.topk_group, MOST),
            ("max_position_embeddings", self.max_position_embeddings, MOST),
        ]
    }

    /// Numbers of all weights and of a token's rows in the cache, or somewhat more: as if every layer were dense and had
    /// experts, too.
    fn most_parameters(&self) -> u128 {
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
        let mlp = |count, width| product(&[3, count, hidden, width]);
        let experts = [
            product(&[self.n_routed_experts, hidden + 1]),
            mlp(self.n_routed_experts, self.moe_intermediate_size),
            mlp(self.n_shared_experts, self.moe_intermediate_size),
            mlp(1, self.intermediate_size),
        ];
        let layer = sum(attention.into_iter().chain(indexer).chain(experts).chain([product(&[2, hidden])]));
        let layers = layer.saturating_mul(self.num_hidden_layers as u128);
        sum([layers, product(&[2, self.vocab_size, hidden]), product(&[hidden])])
    }
}
