use std::path::{Path, PathBuf};

use mla_ops::cache::RowFormat;
use rstest::rstest;
use serde_json::{Value, json};

use super::{DeepseekV3Config, IndexerConfig, ModelType, Scoring};
use crate::config::{GenerationDefaults, Quantization};
use crate::models::ModelConfig;
use crate::{ModelError, Result};
use crate::{RopeConfig, YarnConfig};

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures")).join(name)
}

/// The configuration in a folder, of the V3 family.
fn read_config(dir: &Path) -> Result<DeepseekV3Config> {
    let config = ModelConfig::read(dir)?;
    Ok(config.downcast_ref::<DeepseekV3Config>().expect("of the V3 family").clone())
}

/// The published form of a fixture with the fields of `changes` replaced (or removed, by null), read back.
fn changed(name: &str, changes: Value) -> Result<DeepseekV3Config> {
    let text = std::fs::read(fixture(name).join("config.hub.json")).unwrap();
    let mut config: serde_json::Map<String, Value> = serde_json::from_slice(&text).unwrap();
    config.extend(changes.as_object().unwrap().clone());
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), serde_json::to_vec(&config).unwrap()).unwrap();
    read_config(dir.path())
}

fn close(actual: f64, expected: f64) {
    assert!((actual - expected).abs() <= 1e-14 * expected.abs(), "{actual} is not {expected}");
}

fn widths(config: &DeepseekV3Config) -> Vec<usize> {
    config.pools(RowFormat::Dense).iter().map(|pool| pool.width).collect()
}

#[rstest]
fn both_forms_of_a_config_are_equal(#[values("v3-tiny", "v3-realdims", "v2lite-tiny", "v32-tiny")] name: &str) {
    let converted = DeepseekV3Config::read(&fixture(name).join("config.json")).unwrap();
    assert_eq!(converted, DeepseekV3Config::read(&fixture(name).join("config.hub.json")).unwrap());
}

#[test]
fn a_v3_config_is_read_field_by_field() {
    let expected = DeepseekV3Config {
        model_type: ModelType::DeepseekV3,
        vocab_size: 512,
        hidden_size: 128,
        intermediate_size: 192,
        moe_intermediate_size: 24,
        num_hidden_layers: 4,
        num_attention_heads: 8,
        q_lora_rank: Some(64),
        kv_lora_rank: 64,
        qk_nope_head_dim: 32,
        qk_rope_head_dim: 16,
        v_head_dim: 24,
        indexer: None,
        n_routed_experts: 16,
        n_shared_experts: 1,
        num_experts_per_tok: 4,
        n_group: 4,
        topk_group: 2,
        first_k_dense_replace: 1,
        norm_topk_prob: true,
        routed_scaling_factor: 2.5,
        scoring: Scoring::Sigmoid,
        group_limited: true,
        rms_norm_eps: 1e-6,
        max_position_embeddings: 1024,
        rope: tiny_yarn(),
        rope_interleave: true,
        eos_token_ids: vec![1],
        bos_token_id: Some(0),
        num_nextn_predict_layers: 0,
        quantization: None,
    };
    assert_eq!(read_config(&fixture("v3-tiny")).unwrap(), expected);
    assert_eq!(widths(&expected), [80; 4]);
}

#[test]
fn a_v2_lite_config_has_no_query_latent_and_softmax_scores() {
    let config = read_config(&fixture("v2lite-tiny")).unwrap();
    assert_eq!((config.model_type, config.q_lora_rank), (ModelType::DeepseekV2, None));
    assert_eq!((config.scoring, config.group_limited, config.norm_topk_prob), (Scoring::Softmax, false, false));
    close(config.mla().softmax_scale(), 0.17401743871138856);
}

#[test]
fn a_v32_config_has_an_indexer_and_pools_for_its_keys() {
    let config = read_config(&fixture("v32-tiny")).unwrap();
    assert_eq!(config.indexer, Some(IndexerConfig { heads: 16, head_dim: 32, topk: 16 }));
    assert_eq!((config.scoring, config.group_limited, config.norm_topk_prob), (Scoring::Sigmoid, true, true));
    assert_eq!(widths(&config), [80, 80, 80, 32, 32, 32]);
}

#[test]
fn softmax_scales_carry_mscale_squared() {
    close(read_config(&fixture("v3-tiny")).unwrap().mla().softmax_scale(), 0.1871303351950243);
    close(read_config(&fixture("v3-realdims")).unwrap().mla().softmax_scale(), 0.1352337788608801);
}

#[test]
fn end_tokens_may_be_a_list_and_groups_may_be_null() {
    let config = changed("v3-tiny", json!({"eos_token_id": [1, 2], "n_group": null, "topk_group": null})).unwrap();
    assert_eq!((config.eos_token_ids, config.n_group, config.topk_group), (vec![1, 2], 1, 1));
    assert_eq!(changed("v3-tiny", json!({"eos_token_id": null})).unwrap().eos_token_ids, Vec::<u32>::new());
}

#[rstest]
#[case("v3-tiny", "n_group", json!({"n_group": 3}))]
#[case("v3-tiny", "n_group", json!({"n_group": 16, "topk_group": 8}))]
#[case("v3-tiny", "topk_group", json!({"topk_group": 5}))]
#[case("v3-tiny", "num_experts_per_tok", json!({"num_experts_per_tok": 9}))]
#[case("v2lite-tiny", "num_experts_per_tok", json!({"num_experts_per_tok": 17}))]
#[case("v2lite-tiny", "n_group", json!({"topk_method": "group_limited_greedy", "n_group": 5}))]
#[case("v3-tiny", "hidden_size", json!({"hidden_size": 0}))]
#[case("v3-tiny", "hidden_size", json!({"hidden_size": null}))]
#[case("v3-tiny", "hidden_size", json!({"hidden_size": "128"}))]
#[case("v3-tiny", "vocab_size", json!({"vocab_size": -1}))]
#[case("v3-tiny", "qk_rope_head_dim", json!({"qk_rope_head_dim": 15}))]
#[case("v3-tiny", "first_k_dense_replace", json!({"first_k_dense_replace": 5}))]
#[case("v3-tiny", "rms_norm_eps", json!({"rms_norm_eps": 0.0}))]
#[case("v3-tiny", "hidden_act", json!({"hidden_act": "gelu"}))]
#[case("v3-tiny", "attention_bias", json!({"attention_bias": true}))]
#[case("v3-tiny", "tie_word_embeddings", json!({"tie_word_embeddings": true}))]
#[case("v3-tiny", "moe_layer_freq", json!({"moe_layer_freq": 2}))]
#[case("v3-tiny", "scoring_func", json!({"scoring_func": "softmax"}))]
#[case("v2lite-tiny", "scoring_func", json!({"scoring_func": "sigmoid"}))]
#[case("v3-tiny", "topk_method", json!({"topk_method": "greedy"}))]
#[case("v3-tiny", "rope_theta", json!({"rope_theta": 0.0}))]
#[case("v3-tiny", "rope_scaling.rope_type", json!({"rope_scaling": {"type": "linear", "factor": 2.0}}))]
#[case("v3-tiny", "factor", json!({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 256}}))]
#[case("v3-tiny", "factor", json!({"rope_scaling": {"type": "yarn", "factor": 0.5, "original_max_position_embeddings": 9}}))]
#[case("v3-tiny", "original_max_position_embeddings", json!({"rope_scaling": {"type": "yarn", "factor": 2}}))]
#[case("v3-tiny", "eos_token_id", json!({"eos_token_id": -1}))]
#[case("v32-tiny", "index_topk", json!({"index_topk": 0}))]
#[case("v32-tiny", "index_n_heads", json!({"index_n_heads": null}))]
#[case("v32-tiny", "index_head_dim", json!({"index_head_dim": 8}))]
#[case("v32-tiny", "q_lora_rank", json!({"q_lora_rank": null}))]
#[case("v32-tiny", "layer_types", json!({"layer_types": ["indexed_attention"]}))]
#[case("v32-tiny", "layer_types[1]", json!({"layer_types": ["indexed_attention", "full_attention", "indexed_attention"]}))]
#[case("v32-tiny", "mlp_layer_types[0]", json!({"mlp_layer_types": ["sparse", "sparse", "sparse"]}))]
fn a_contradiction_is_refused_by_field(#[case] name: &str, #[case] field: &str, #[case] changes: Value) {
    let message = changed(name, changes).unwrap_err().to_string();
    assert!(message.contains("config.json: `") && message.contains(&format!("`{field}` is ")), "{message}");
}

#[test]
fn other_models_are_refused() {
    let message = changed("v3-tiny", json!({"model_type": "deepseek_v5"})).unwrap_err().to_string();
    assert!(
        message.contains("deepseek_v5") && message.contains("\"deepseek_v4\"") && message.contains("\"deepseek_v3\""),
        "{message}"
    );
}

#[rstest]
#[case("quantization_config.quant_method", json!({"quant_method": "gptq"}))]
#[case("quantization_config.quant_method", json!({"quant_method": null}))]
#[case("quantization_config.fmt", json!({"fmt": "e5m2"}))]
#[case("quantization_config.activation_scheme", json!({"activation_scheme": "static"}))]
#[case("quantization_config.scale_fmt", json!({"scale_fmt": "log2"}))]
#[case("quantization_config.weight_block_size", json!({"weight_block_size": null}))]
#[case("quantization_config.weight_block_size", json!({"weight_block_size": [128]}))]
#[case("quantization_config.weight_block_size", json!({"weight_block_size": [128, 0]}))]
fn other_quantisations_are_refused_by_field(#[case] field: &str, #[case] change: Value) {
    let mut section = published_quantization();
    for (name, value) in change.as_object().unwrap() {
        section[name] = value.clone();
    }
    let error = changed("v3-tiny", json!({"quantization_config": section})).unwrap_err();
    let message = error.to_string();
    assert!(matches!(error, ModelError::UnsupportedQuantization { .. }), "{message}");
    assert!(message.contains(&format!("`{field}` is ")) && message.contains("expected"), "{message}");
}

#[test]
fn the_published_quantisation_is_read() {
    let config = changed("v3-tiny", json!({"quantization_config": published_quantization()})).unwrap();
    assert_eq!(config.quantization, Some(Quantization { block: [128, 128], fp4_experts: false }));
    let mut ue8m0 = published_quantization();
    ue8m0["scale_fmt"] = json!("ue8m0");
    assert_eq!(changed("v32-tiny", json!({"quantization_config": ue8m0})).unwrap().quantization, config.quantization);
    let message = changed("v3-tiny", json!({"quantization_config": {"quant_method": 8}})).unwrap_err().to_string();
    assert!(message.contains("`quantization_config.quant_method` is 8, expected a string"), "{message}");
}

/// That of DeepSeek-V3.
fn published_quantization() -> Value {
    json!({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]})
}

#[test]
fn missing_and_broken_files_are_named() {
    let message = read_config(&fixture("absent")).unwrap_err().to_string();
    assert!(message.contains("absent does not exist"), "{message}");
    let dir = tempfile::tempdir().unwrap();
    let message = read_config(dir.path()).unwrap_err().to_string();
    assert!(message.contains("config.json does not exist"), "{message}");
    std::fs::write(dir.path().join("config.json"), "{\"model_type\": ").unwrap();
    assert!(matches!(read_config(dir.path()), Err(ModelError::Json { .. })));
    std::fs::write(dir.path().join("config.json"), "[1]").unwrap();
    assert!(matches!(read_config(dir.path()), Err(ModelError::Json { .. })));
}

/// The rope of v3-tiny.
fn tiny_yarn() -> RopeConfig {
    let yarn = YarnConfig {
        factor: 4.0,
        original_max_position_embeddings: 256,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: Some(1.0),
        mscale_all_dim: Some(1.0),
        attention_factor: None,
    };
    RopeConfig { rope_theta: 10_000.0, yarn: Some(yarn) }
}

#[test]
fn yarn_frequencies_are_those_worked_out_by_hand() {
    // The correction range of width 16 is 0 to 4: ramps 0, 1/4, 1/2, 3/4, then 1.
    let expected = [
        1.0,
        0.2569350598886808,
        0.0625,
        0.01383496476323666,
        0.0025,
        0.0007905694150420948,
        0.00025,
        7.905694150420948e-5,
    ];
    let inv_freq = tiny_yarn().inv_freq(16).unwrap();
    assert_eq!(inv_freq.len(), expected.len());
    inv_freq.into_iter().zip(expected).for_each(|(actual, expected)| close(actual, expected));
    // The released V3: width 64, range 10 to 23.
    let released = read_config(&fixture("v3-realdims")).unwrap().rope.inv_freq(64).unwrap();
    for (i, expected) in [(9, 0.07498942093324558), (11, 0.03900692656714386), (15, 0.008334508951020777), (24, 2.5e-5)]
    {
        close(released[i], expected);
    }
}

#[test]
fn plain_frequencies_are_powers_of_the_base() {
    let rope = RopeConfig { rope_theta: 10_000.0, yarn: None };
    rope.inv_freq(8)
        .unwrap()
        .into_iter()
        .zip([1.0, 0.1, 0.01, 0.001])
        .for_each(|(actual, expected)| close(actual, expected));
    assert_eq!((rope.attention_factor(), rope.softmax_factor()), (1.0, 1.0));
}

#[test]
fn the_attention_factor_comes_from_the_mscales() {
    let with = |mscale, mscale_all_dim, attention_factor| {
        let mut rope = tiny_yarn();
        rope.yarn = rope.yarn.map(|yarn| YarnConfig { mscale, mscale_all_dim, attention_factor, ..yarn });
        rope.attention_factor()
    };
    close(with(Some(1.0), Some(0.8), None), 1.0249579607969668);
    close(with(Some(0.707), Some(0.707), None), 1.0);
    let plain = 0.1 * 4f64.ln() + 1.0;
    close(with(None, Some(0.8), None), plain);
    close(with(Some(1.0), Some(0.0), None), plain);
    close(with(Some(1.0), Some(0.8), Some(1.5)), 1.5);
}

#[test]
fn tables_are_rows_of_positions_and_start_anywhere() {
    let (cos, sin) = tiny_yarn().cos_sin(16, &[0, 1, 2, 3, 4, 5, 6, 7]).unwrap();
    assert_eq!((cos.len(), sin.len(), cos[0], sin[0]), (64, 64, 1.0, 0.0));
    for (actual, expected) in [
        (cos[57], -0.22578531478917996),
        (sin[57], 0.9741770843258175),
        (cos[58], 0.9058136834259364),
        (sin[59], 0.09669344134007599),
    ] {
        assert!((f64::from(actual) - expected).abs() < 2e-7, "{actual} is not {expected}");
    }
    assert_eq!(tiny_yarn().cos_sin(16, &[5, 6, 7]).unwrap(), (cos[40..].to_vec(), sin[40..].to_vec()));
}

#[test]
fn generation_defaults_fall_back_to_the_config() {
    let config = read_config(&fixture("v3-tiny")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let absent = GenerationDefaults::read(dir.path(), &config.eos_token_ids).unwrap();
    assert_eq!((absent.eos_token_ids, absent.do_sample), (vec![1], false));
    let file = dir.path().join("generation_config.json");
    std::fs::write(&file, r#"{"do_sample": true, "temperature": 0.5, "top_p": 0.95, "top_k": 0}"#).unwrap();
    let expected = GenerationDefaults {
        eos_token_ids: vec![1],
        do_sample: true,
        temperature: Some(0.5),
        top_p: Some(0.95),
        top_k: None,
    };
    assert_eq!(GenerationDefaults::read(dir.path(), &config.eos_token_ids).unwrap(), expected);
    std::fs::write(&file, r#"{"eos_token_id": [7, 8], "top_k": 40}"#).unwrap();
    let listed = GenerationDefaults::read(dir.path(), &config.eos_token_ids).unwrap();
    assert_eq!((listed.eos_token_ids, listed.top_k), (vec![7, 8], Some(40)));
}
