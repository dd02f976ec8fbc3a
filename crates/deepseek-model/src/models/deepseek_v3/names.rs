//! How DeepSeek publishes V3 and its relatives: what is quantised, and what inference does not use.

use safetensors::Dtype;

use super::config::{DeepseekV3Config, ModelType};
use crate::weights::{Published, WeightLoader};

/// The modules whose weights are quantised: `Linear` in `inference/model.py` and `convert.py` of DeepSeek-V3 and V3.2-Exp, but
/// for those that are made with a dtype of their own.
const PROJECTIONS: [&str; 11] = [
    "q_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "indexer.wq_b",
    "indexer.wk",
];

/// How weights are published.
pub(crate) const PUBLISHED: Published = Published {
    layers: "model.layers.",
    projections: &PROJECTIONS,
    fp4_experts: false,
    power_of_two_scales: false,
    scale_suffix: "_scale_inv",
    scale_dtype: Dtype::F32,
    renaming: None,
};

/// How those of a model with this configuration are.
pub(super) fn published(config: &DeepseekV3Config) -> Published {
    Published { power_of_two_scales: config.model_type == ModelType::DeepseekV32, ..PUBLISHED }
}

/// Leaves out what published checkpoints carry and inference does not use: the multi-token-prediction layers after the last
/// layer, if the configuration counts any, and rotary frequencies, which are computed.
pub(crate) fn skip_unused(loader: &mut WeightLoader, config: &DeepseekV3Config) {
    loader.skip("rotary frequencies are computed", |name| name.ends_with(".rotary_emb.inv_freq"));
    let layers = config.num_hidden_layers..config.num_hidden_layers + config.num_nextn_predict_layers;
    loader.skip("multi-token-prediction layers are not used", |name| {
        layer_of(name).is_some_and(|layer| layers.contains(&layer))
    });
}

/// The `N` of `model.layers.N.…`.
fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn projections_are_those_that_are_published_in_fp8() {
        let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/v3-tiny/config.json");
        let published = published(&DeepseekV3Config::read(Path::new(fixture)).unwrap());
        for module in
            ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.indexer.wk", "mlp.experts.3.up_proj"]
        {
            assert!(published.is_projection(&format!("model.layers.7.{module}.weight")), "{module}");
        }
        for module in ["self_attn.indexer.weights_proj", "mlp.gate", "self_attn.q_a_layernorm", "eh_proj"] {
            assert!(!published.is_projection(&format!("model.layers.7.{module}.weight")), "{module}");
        }
        assert!(!published.is_projection("lm_head.weight"));
    }
}
