//! How large DeepSeek-V3 may be.

use super::config::DeepseekV3Config;
use crate::config::Contradiction;
use crate::config::sizes::{Bound, MOST, MOST_LAYERS, out_of_range, product, sum, too_many_experts, unaddressable};

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
    fn bounds(&self) -> Vec<Bound> {
        let others = [
            ("vocab_size", self.vocab_size, MOST),
            ("intermediate_size", self.intermediate_size, MOST),
            ("moe_intermediate_size", self.moe_intermediate_size, MOST),
            ("num_hidden_layers", self.num_hidden_layers, MOST_LAYERS),
            ("n_routed_experts", self.n_routed_experts, MOST),
            ("n_shared_experts", self.n_shared_experts, MOST),
            ("num_experts_per_tok", self.num_experts_per_tok, MOST),
            ("n_group", self.n_group, MOST),
            ("topk_group", self.topk_group, MOST),
            ("max_position_embeddings", self.max_position_embeddings, MOST),
        ];
        self.mla().bounds().into_iter().chain(others).collect()
    }

    /// Numbers of all weights and of a token's rows in the cache, or somewhat more: as if every layer were dense and had
    /// experts, too.
    fn most_parameters(&self) -> u128 {
        let hidden = self.hidden_size;
        let mlp = |count, width| product(&[3, count, hidden, width]);
        let experts = [
            product(&[self.n_routed_experts, hidden + 1]),
            mlp(self.n_routed_experts, self.moe_intermediate_size),
            mlp(self.n_shared_experts, self.moe_intermediate_size),
            mlp(1, self.intermediate_size),
        ];
        let layer = sum([self.mla().most_parameters(), product(&[2, hidden])].into_iter().chain(experts));
        let layers = layer.saturating_mul(self.num_hidden_layers as u128);
        sum([layers, product(&[2, self.vocab_size, hidden]), product(&[hidden])])
    }
}
