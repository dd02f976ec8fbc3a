//! What a model asks for and what a folder has, without loading anything: names, shapes, dtypes, and the memory they need.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use burn::tensor::Device;

use crate::models::ModelConfig;
use crate::parallel::Parallel;
use crate::weights::{Checkpoint, Listed, LoadAs, WeightLoader, WeightSpec};
use crate::{ModelError, Result, WeightReport};

/// Every tensor that a model of this configuration asks for, in the order of loading, by its published name.
pub fn weight_specs(config: &ModelConfig) -> Vec<WeightSpec> {
    let (listed, _) = list(config, None, Parallel::single(), &for_nothing());
    listed.into_iter().map(|listed| listed.spec).collect()
}

/// Every tensor that a model of this configuration asks for, and its bytes on a device: of what is published in blocks, if the
/// configuration has a `quantization_config`, those of codes and scales, unless `load_as` says otherwise.
pub fn weight_sizes(config: &ModelConfig, load_as: impl Into<LoadAs>) -> Vec<(WeightSpec, u64)> {
    let load_as = load_as.into();
    let (listed, _) = list(config, None, Parallel::single(), &for_nothing());
    listed
        .into_iter()
        .map(|listed| {
            let bytes = listed.device_bytes(load_as);
            (listed.spec, bytes)
        })
        .collect()
}

/// What a checkpoint folder holds for its model.
#[derive(Debug)]
pub struct Inspection {
    /// The configuration.
    pub config: ModelConfig,
    /// The weights by what they are for, in the order of the model.
    pub groups: Vec<WeightGroup>,
    /// Files that are missing or damaged. Their tensors are in the report, too.
    pub damaged: Vec<ModelError>,
    /// All that is wrong with the tensors.
    pub report: WeightReport,
}

/// The weights of one part of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightGroup {
    /// What they are for.
    pub name: &'static str,
    /// Tensors that the model asks for.
    pub tensors: usize,
    /// Numbers in them.
    pub parameters: u64,
    /// Their bytes in the files, scales included; 0 for those that are missing.
    pub file_bytes: u64,
    /// Their bytes on a device; of several ranks on that of the first, which has as much as any.
    pub device_bytes: u64,
    /// What they are stored as in the files.
    pub stored_as: BTreeSet<String>,
}

impl Inspection {
    /// Compares the headers of the files in `dir` with what its `config.json` asks for, loaded as this says. The weights
    /// themselves are not read: scales are looked up, and their shapes checked, not their numbers.
    ///
    /// # Errors
    /// A configuration that cannot be used, a folder without weights or with an unreadable index. What is wrong with files
    /// and tensors is in the result.
    pub fn of(dir: &Path, load_as: impl Into<LoadAs>) -> Result<Self> {
        Self::of_ranks(dir, load_as, 1)
    }

    /// [`Self::of`] for a model that is divided among so many ranks. What does not divide is in the report.
    ///
    /// # Errors
    /// As [`Self::of`].
    pub fn of_ranks(dir: &Path, load_as: impl Into<LoadAs>, ranks: usize) -> Result<Self> {
        let config = ModelConfig::read(dir)?;
        let (checkpoint, damaged) = Checkpoint::open_readable(dir)?;
        let (listed, report) = list(&config, Some(&checkpoint), Parallel::pretended(0, ranks), &for_nothing());
        Ok(Self { groups: groups(&listed, load_as.into(), ranks), config, damaged, report })
    }

    /// Whether nothing is wrong.
    pub fn is_sound(&self) -> bool {
        self.damaged.is_empty() && self.report.is_empty()
    }

    /// Bytes of all weights on a device, or on that of a rank.
    pub fn device_bytes(&self) -> u64 {
        self.groups.iter().map(|group| group.device_bytes).sum()
    }
}

/// Every tensor that a rank asks for, if it can have its part of all of them, and the headers of the files have what the model asks
/// for: before gigabytes are read.
///
/// # Errors
/// [`ModelError::Weights`] with all that is wrong.
pub(crate) fn check_headers<'a>(
    config: &ModelConfig,
    checkpoint: Option<&'a Checkpoint>,
    parallel: &Parallel,
    device: &Device,
) -> Result<Vec<Listed<'a>>> {
    let (listed, report) = list(config, checkpoint, parallel.clone(), device);
    match report.is_empty() {
        true => Ok(listed),
        false => Err(ModelError::Weights(Box::new(report))),
    }
}

fn list<'a>(
    config: &ModelConfig,
    checkpoint: Option<&'a Checkpoint>,
    parallel: Parallel,
    device: &Device,
) -> (Vec<Listed<'a>>, WeightReport) {
    let loader = WeightLoader::listing(checkpoint, device).with_parallel(parallel);
    let mut loader = loader.with_quantization(config.quantization()).with_published(config.published());
    config.load(&mut loader, device);
    loader.finish_listing()
}

/// A device for tensors that are looked at by their shapes only: the CPU where there is one, so that no GPU is opened.
fn for_nothing() -> Device {
    #[cfg(feature = "flex")]
    return Device::flex();
    #[cfg(not(feature = "flex"))]
    Device::default()
}

fn groups(listed: &[Listed<'_>], load_as: LoadAs, ranks: usize) -> Vec<WeightGroup> {
    let mut places = BTreeMap::new();
    let mut groups: Vec<WeightGroup> = Vec::new();
    for listed in listed {
        let spec = &listed.spec;
        let name = group_of(&spec.name);
        let place = *places.entry(name).or_insert(groups.len());
        if place == groups.len() {
            let stored_as = BTreeSet::new();
            groups.push(WeightGroup { name, tensors: 0, parameters: 0, file_bytes: 0, device_bytes: 0, stored_as });
        }
        let group = &mut groups[place];
        group.tensors += 1;
        group.parameters += spec.len();
        group.device_bytes += listed.rank_bytes(load_as, ranks);
        group.file_bytes += listed.file_bytes();
        group.stored_as.extend(listed.stored_as());
    }
    groups
}

/// What a tensor is for, by its published name.
fn group_of(name: &str) -> &'static str {
    let has = |part: &str| name.contains(part);
    match name {
        _ if has("embed") => "embedding",
        "lm_head.weight" | "head.weight" => "head",
        _ if has(".experts.") => "routed experts",
        _ if has(".shared_experts.") => "shared experts",
        _ if has(".gate.") => "router",
        _ if has(".mlp.") => "dense feed-forward",
        _ if has(".indexer.") => "indexer",
        _ if has(".compressor.") => "compressors",
        _ if has(".self_attn.") || has(".attn.") => "attention",
        _ if has("hc_") => "hyper-connections",
        _ => "norms",
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::FloatDType;
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::weights::device_bytes;

    fn published(changes: Value) -> ModelConfig {
        let mut config = json!({
            "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
            "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "q_lora_rank": 1536,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
            "first_k_dense_replace": 3, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-6, "max_position_embeddings": 163840, "rope_theta": 10000, "bos_token_id": 0,
            "eos_token_id": 1, "hidden_act": "silu", "attention_bias": false, "tie_word_embeddings": false,
            "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
            "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                "weight_block_size": [128, 128]}
        });
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        ModelConfig::read(dir.path()).unwrap()
    }

    fn v2_lite() -> Value {
        json!({
            "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
            "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "q_lora_rank": null,
            "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 1, "norm_topk_prob": false, "routed_scaling_factor": 1.0,
            "scoring_func": "softmax", "topk_method": "greedy", "num_nextn_predict_layers": 0, "bos_token_id": 100_000,
            "eos_token_id": 100_001, "quantization_config": null,
            "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}
        })
    }

    fn v32() -> Value {
        json!({
            "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
            "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
        })
    }

    /// As many parameters as the papers say: 15.7 and 671 milliards. V3.2 has an indexer in each layer beside them.
    #[rstest]
    #[case(v2_lite(), 15_706_484_224, 31_420_037_120)]
    #[case(json!({}), 671_026_419_200, 1_342_267_742_208)]
    #[case(v32(), 671_026_419_200 + 61 * (8192 * 1536 + 128 * 7168 + 64 * 7168 + 2 * 128), 0)]
    fn published_models_have_the_published_sizes(#[case] changes: Value, #[case] parameters: u64, #[case] bytes: u64) {
        let specs = weight_specs(&published(changes));
        assert_eq!(specs.iter().map(WeightSpec::len).sum::<u64>(), parameters);
        if bytes > 0 {
            assert_eq!(device_bytes(&specs, FloatDType::BF16), bytes);
        }
    }

    #[test]
    fn fewer_layers_ask_for_less() {
        let config = published(json!({})).with_layers(2).unwrap();
        let specs = weight_specs(&config);
        assert!(specs.iter().all(|spec| !spec.name.contains("layers.2.") && !spec.name.contains("experts")));
        assert!(specs.iter().any(|spec| spec.name == "model.layers.1.mlp.down_proj.weight"));
        assert!(published(json!({})).with_layers(62).is_err() && published(json!({})).with_layers(0).is_err());
    }
}
