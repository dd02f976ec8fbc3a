//! How large DeepSeek-V4 may be.

use super::config::DeepseekV4Config;
use crate::config::Contradiction;
use crate::config::sizes::{
    Bound, MOST, MOST_CHANNELS, MOST_LAYERS, out_of_range, product, sum, too_many_experts, unaddressable,
};

impl DeepseekV4Config {
    /// The first size that is zero, too large, or asks for too much memory together with the others.
    pub(super) fn impossible_size(&self) -> Option<Contradiction> {
        let sizes = self.bounds();
        let rate = self.layers.iter().filter_map(|layer| layer.attention.rate()).max().unwrap_or(1);
        out_of_range(&sizes)
            .or_else(|| out_of_range(&[("compress_rates", rate, MOST)]))
            .or_else(|| too_many_experts(self.layers.len(), self.n_routed_experts))
            .or_else(|| unaddressable(&sizes, "the weights", self.most_parameters()))
            .or_else(|| unaddressable(&sizes, "the state of a request", self.most_state(rate)))
    }

    /// Sizes of which none may be zero.
    fn bounds(&self) -> Vec<Bound> {
        let others = [
            ("num_hidden_layers", self.layers.len(), MOST_LAYERS),
            ("vocab_size", self.vocab_size, MOST),
            ("moe_intermediate_size", self.moe_intermediate_size, MOST),
            ("num_attention_heads", self.num_attention_heads, MOST),
            ("head_dim", self.head_dim, MOST_CHANNELS),
            ("qk_rope_head_dim", self.qk_rope_head_dim, MOST_CHANNELS),
            ("q_lora_rank", self.q_lora_rank, MOST),
            ("o_groups", self.o_groups, MOST),
            ("o_lora_rank", self.o_lora_rank, MOST),
            ("sliding_window", self.sliding_window, MOST),
            ("index_n_heads", self.index_n_heads, MOST),
            ("index_head_dim", self.index_head_dim, MOST_CHANNELS),
            ("index_topk", self.index_topk, MOST),
            ("n_routed_experts", self.n_routed_experts, MOST),
            ("num_experts_per_tok", self.num_experts_per_tok, MOST),
            ("max_position_embeddings", self.max_position_embeddings, MOST),
        ];
        self.hyper_connection().bounds().into_iter().chain(others).collect()
    }

    /// Numbers of all weights, or somewhat more: as if every layer had compressors, an indexer, a router and a table.
    fn most_parameters(&self) -> u128 {
        let (hidden, heads, width, rank) =
            (self.hidden_size, self.num_attention_heads, self.head_dim, self.q_lora_rank);
        let group_rank = product(&[self.o_groups, self.o_lora_rank]);
        let rate = self.layers.iter().filter_map(|layer| layer.attention.rate()).max().unwrap_or(1);
        let attention = [
            product(&[rank, hidden + 1]),
            product(&[heads, width + 1, rank]),
            product(&[width, hidden + 1]),
            group_rank.saturating_mul(product(&[heads, width])),
            group_rank.saturating_mul(hidden as u128),
            product(&[self.index_n_heads, self.index_head_dim, rank]),
            product(&[self.index_n_heads, hidden]),
            product(&[4, width + self.index_head_dim, hidden + rate + 1]),
        ];
        let connections = self.hyper_connection().most_parameters().saturating_mul(2);
        let experts = [
            product(&[self.n_routed_experts, hidden + 1]),
            product(&[3, self.n_routed_experts + 1, hidden, self.moe_intermediate_size]),
            product(&[self.vocab_size, self.num_experts_per_tok]),
        ];
        let layer = sum(attention.into_iter().chain(experts).chain([connections, product(&[2, hidden])]));
        let layers = layer.saturating_mul(self.layers.len() as u128);
        sum([layers, product(&[2, self.vocab_size, hidden]), connections, product(&[hidden])])
    }

    /// Numbers that a request keeps in all layers.
    fn most_state(&self, rate: usize) -> u128 {
        let window = product(&[self.sliding_window, self.head_dim]);
        let carried = product(&[8, rate, self.head_dim + self.index_head_dim]);
        sum([window, carried]).saturating_mul(self.layers.len() as u128)
    }
}
