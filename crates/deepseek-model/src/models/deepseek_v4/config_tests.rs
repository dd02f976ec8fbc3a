use std::path::{Path, PathBuf};

use rstest::rstest;
use serde_json::{Value, json};

use super::{AttentionSpec, DeepseekV4Config, LayerSpec, MlpSpec};
use crate::Result;
use crate::models::ModelConfig;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures")).join(name)
}

fn read(dir: &Path) -> Result<DeepseekV4Config> {
    let config = ModelConfig::read(dir)?;
    Ok(config.downcast_ref::<DeepseekV4Config>().expect("DeepSeek-V4").clone())
}

/// A file of v4-realdims with the fields of `changes` replaced (or removed, by null), read back.
fn changed(file: &str, changes: Value) -> Result<DeepseekV4Config> {
    let text = std::fs::read(fixture("v4-realdims").join(file)).unwrap();
    let mut config: serde_json::Map<String, Value> = serde_json::from_slice(&text).unwrap();
    config.extend(changes.as_object().unwrap().clone());
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), serde_json::to_vec(&config).unwrap()).unwrap();
    read(dir.path())
}

#[test]
fn both_forms_of_a_v4_config_are_equal() {
    let converted = read(&fixture("v4-realdims")).unwrap();
    assert_eq!(converted, DeepseekV4Config::read(&fixture("v4-realdims").join("config.hub.json")).unwrap());
    let expected = [
        LayerSpec { attention: AttentionSpec::Sliding, mlp: MlpSpec::HashMoe },
        LayerSpec { attention: AttentionSpec::Csa { rate: 4 }, mlp: MlpSpec::Moe },
        LayerSpec { attention: AttentionSpec::Hca { rate: 128 }, mlp: MlpSpec::Moe },
    ];
    assert_eq!(converted.layers, expected);
    assert_eq!(converted.compress_rope.attention_factor(), 1.0);
    assert_eq!((converted.rope.rope_theta, converted.compress_rope.rope_theta), (1e4, 1.6e5));
    assert_eq!((converted.rope.yarn, converted.qk_rope_head_dim, converted.index_topk), (None, 64, 16));
}

#[test]
fn other_rates_are_read_by_name() {
    let layers = read(&fixture("v4-tiny")).unwrap().layers;
    let rates: Vec<_> = layers.iter().map(|layer| layer.attention.rate()).collect();
    assert_eq!(rates, [None, Some(4), Some(16), Some(4), Some(16)]);
}

#[test]
fn ratios_of_prediction_layers_and_a_rope_theta_elsewhere_change_nothing() {
    let plain = read(&fixture("v4-realdims")).unwrap();
    let ratios = json!({"compress_ratios": [0, 4, 128, 0], "num_nextn_predict_layers": 1});
    assert_eq!(changed("config.hub.json", ratios).unwrap(), plain);
    assert_eq!(changed("config.json", json!({"rope_theta": 77.0})).unwrap(), plain);
    let by_fraction = json!({"qk_rope_head_dim": null, "partial_rotary_factor": 0.125});
    assert_eq!(changed("config.hub.json", by_fraction).unwrap(), plain);
}

#[rstest]
#[case("config.json", "layer_types[1]", json!({"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}))]
#[case("config.json", "layer_types", json!({"layer_types": ["sliding_attention", "sliding_attention"]}))]
#[case("config.json", "mlp_layer_types[2]", json!({"mlp_layer_types": ["moe", "moe", "dense"]}))]
#[case("config.json", "mlp_layer_types", json!({"mlp_layer_types": ["moe", "moe"]}))]
#[case("config.json", "layer_types", json!({"num_hidden_layers": 4}))]
#[case("config.json", "compress_rates", json!({"compress_rates": null}))]
#[case("config.json", "heavily_compressed_attention", json!({"compress_rates": {"compressed_sparse_attention": 4}}))]
#[case("config.json", "compress_rates",
       json!({"compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 128}}))]
#[case("config.json", "compress_rates",
       json!({"compress_rates": {"compressed_sparse_attention": 0, "heavily_compressed_attention": 128}}))]
#[case("config.json", "rope_parameters.compress", json!({"rope_parameters": {"main": {"rope_theta": 1e4}}}))]
#[case("config.hub.json", "compress_ratios", json!({"compress_ratios": [0, 4]}))]
#[case("config.hub.json", "compress_ratios", json!({"compress_ratios": null}))]
#[case("config.hub.json", "compress_ratios[1]", json!({"compress_ratios": [0, 5, 128]}))]
#[case("config.hub.json", "num_hash_layers", json!({"num_hash_layers": 4}))]
#[case("config.hub.json", "num_hash_layers", json!({"num_hash_layers": null}))]
#[case("config.hub.json", "index_topk", json!({"index_topk": 0}))]
#[case("config.hub.json", "sliding_window", json!({"sliding_window": 0}))]
#[case("config.hub.json", "o_groups", json!({"o_groups": 3}))]
#[case("config.hub.json", "qk_rope_head_dim", json!({"qk_rope_head_dim": 63}))]
#[case("config.hub.json", "qk_rope_head_dim", json!({"qk_rope_head_dim": 256}))]
#[case("config.hub.json", "qk_rope_head_dim", json!({"partial_rotary_factor": 0.25}))]
#[case("config.hub.json", "num_experts_per_tok", json!({"num_experts_per_tok": 5}))]
#[case("config.hub.json", "n_shared_experts", json!({"n_shared_experts": 2}))]
#[case("config.hub.json", "num_key_value_heads", json!({"num_key_value_heads": 8}))]
#[case("config.hub.json", "scoring_func", json!({"scoring_func": "sigmoid"}))]
#[case("config.hub.json", "swiglu_limit", json!({"swiglu_limit": 0.0}))]
#[case("config.hub.json", "hc_mult", json!({"hc_mult": 0}))]
#[case("config.hub.json", "hc_eps", json!({"hc_eps": -1.0}))]
#[case("config.hub.json", "rope_scaling.rope_type", json!({"rope_scaling": {"type": "linear", "factor": 2.0}}))]
#[case("config.hub.json", "tie_word_embeddings", json!({"tie_word_embeddings": true}))]
fn a_contradiction_of_v4_is_refused_by_field(#[case] file: &str, #[case] field: &str, #[case] changes: Value) {
    let message = changed(file, changes).unwrap_err().to_string();
    assert!(message.contains("config.json: `") && message.contains(&format!("`{field}` is ")), "{message}");
}
