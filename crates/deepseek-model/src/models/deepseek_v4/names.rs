//! How DeepSeek-V4 is published, and the two names of each tensor: that of the published files, and that of the module in
//! transformers.

use safetensors::Dtype;

use crate::weights::{Published, Renaming, WeightLoader};

/// The modules whose weights are quantised: `Linear` in `inference/model.py` and `convert.py` of DeepSeek-V4, but for those that
/// are made with a dtype of their own.
const PROJECTIONS: [&str; 9] =
    ["attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "indexer.wq_b", "w1", "w2", "w3"];

/// How the weights are published.
pub(super) const PUBLISHED: Published = Published {
    layers: "layers.",
    projections: &PROJECTIONS,
    fp4_experts: true,
    power_of_two_scales: true,
    scale_suffix: ".scale",
    scale_dtype: Dtype::F8_E8M0,
    renaming: Some(Renaming { probe: "embed.weight", rename: transformers_name }),
};

/// Reads files whose tensors have published names or those of transformers' modules: from now on tensors are asked for by
/// their published names. Leaves out the multi-token-prediction layers, and rotary frequencies.
pub(crate) fn expect(loader: &mut WeightLoader) {
    loader.rename(PUBLISHED.renaming);
    loader.skip("rotary frequencies are computed", |name| name.ends_with("inv_freq"));
    loader.skip("multi-token-prediction layers are not used", |name| {
        name.strip_prefix("model.").unwrap_or(name).starts_with("mtp.")
    });
}

/// Outside the layers.
const TOP: [(&str, &str); 6] = [
    ("embed", "model.embed_tokens"),
    ("head", "lm_head"),
    ("norm", "model.norm"),
    ("hc_head_fn", "model.hc_head.hc_fn"),
    ("hc_head_base", "model.hc_head.hc_base"),
    ("hc_head_scale", "model.hc_head.hc_scale"),
];

/// In a layer, after `layers.N.`; whatever follows stays.
const IN_LAYER: [(&str, &str); 34] = [
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("hc_attn_fn", "attn_hc.fn"),
    ("hc_attn_base", "attn_hc.base"),
    ("hc_attn_scale", "attn_hc.scale"),
    ("hc_ffn_fn", "ffn_hc.fn"),
    ("hc_ffn_base", "ffn_hc.base"),
    ("hc_ffn_scale", "ffn_hc.scale"),
    ("attn.attn_sink", "self_attn.sinks"),
    ("attn.wq_a", "self_attn.q_a_proj"),
    ("attn.q_norm", "self_attn.q_a_norm"),
    ("attn.wq_b", "self_attn.q_b_proj"),
    ("attn.wkv", "self_attn.kv_proj"),
    ("attn.kv_norm", "self_attn.kv_norm"),
    ("attn.wo_a", "self_attn.o_a_proj"),
    ("attn.wo_b", "self_attn.o_b_proj"),
    ("attn.compressor.wkv", "self_attn.compressor.kv_proj"),
    ("attn.compressor.wgate", "self_attn.compressor.gate_proj"),
    ("attn.compressor.ape", "self_attn.compressor.position_bias"),
    ("attn.compressor.norm", "self_attn.compressor.kv_norm"),
    ("attn.indexer.compressor.wkv", "self_attn.compressor.indexer.kv_proj"),
    ("attn.indexer.compressor.wgate", "self_attn.compressor.indexer.gate_proj"),
    ("attn.indexer.compressor.ape", "self_attn.compressor.indexer.position_bias"),
    ("attn.indexer.compressor.norm", "self_attn.compressor.indexer.kv_norm"),
    ("attn.indexer.wq_b", "self_attn.compressor.indexer.q_b_proj"),
    ("attn.indexer.weights_proj", "self_attn.compressor.indexer.scorer.weights_proj"),
    ("ffn.gate.weight", "mlp.gate.weight"),
    ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
    ("ffn.gate.tid2eid", "mlp.gate.tid2eid"),
    ("ffn.shared_experts.w1", "mlp.shared_experts.gate_proj"),
    ("ffn.shared_experts.w2", "mlp.shared_experts.down_proj"),
    ("ffn.shared_experts.w3", "mlp.shared_experts.up_proj"),
    ("ffn.experts.gate_up_proj", "mlp.experts.gate_up_proj"),
    ("ffn.experts.down_proj", "mlp.experts.down_proj"),
];

/// transformers' name of the tensor with this published name.
fn transformers_name(published: &str) -> String {
    let in_layer = published.strip_prefix("layers.").and_then(|rest| rest.split_once('.'));
    let renamed = match in_layer {
        Some((layer, rest)) => renamed(&IN_LAYER, rest).map(|name| format!("model.layers.{layer}.{name}")),
        None => renamed(&TOP, published),
    };
    renamed.unwrap_or_else(|| published.to_string())
}

/// Replaces the first of these that `name` begins with, as whole words between dots.
fn renamed(names: &[(&str, &str)], name: &str) -> Option<String> {
    names.iter().find_map(|(published, transformers)| {
        let rest = name.strip_prefix(published)?;
        (rest.is_empty() || rest.starts_with('.')).then(|| format!("{transformers}{rest}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn projections_are_those_that_are_published_in_fp8_or_fp4() {
        for module in ["attn.wkv", "attn.indexer.wq_b", "ffn.experts.0.w2", "ffn.shared_experts.w1"] {
            assert!(PUBLISHED.is_projection(&format!("layers.7.{module}.weight")), "{module}");
        }
        for module in ["attn.compressor.wkv", "attn.indexer.compressor.wkv", "ffn.gate", "attn.kv_norm"] {
            assert!(!PUBLISHED.is_projection(&format!("layers.7.{module}.weight")), "{module}");
        }
        assert!(!PUBLISHED.is_projection("head.weight"));
    }

    #[test]
    fn names_are_those_of_the_modules() {
        for (published, transformers) in [
            ("embed.weight", "model.embed_tokens.weight"),
            ("norm.weight", "model.norm.weight"),
            ("hc_head_fn", "model.hc_head.hc_fn"),
            ("layers.7.attn_norm.weight", "model.layers.7.input_layernorm.weight"),
            ("layers.12.attn.indexer.compressor.ape", "model.layers.12.self_attn.compressor.indexer.position_bias"),
            ("layers.0.ffn.experts.gate_up_proj", "model.layers.0.mlp.experts.gate_up_proj"),
            ("elsewhere.weight", "elsewhere.weight"),
        ] {
            assert_eq!(transformers_name(published), transformers);
        }
    }
}
