//! `config.json` of DeepSeek-V2, V2-Lite, V3 and V3.2, in the published form and in that of transformers 5.

use std::fmt;
use std::path::Path;

use mla_ops::cache::{PoolConfig, RowFormat};
use mla_ops::{ExpertScoring, RopeConfig};

use super::indexer_config::IndexerConfig;
use super::mla_config::MlaConfig;
use crate::config::sizes::is_positive;
use crate::config::{
    CONFIG_HINT, Contradiction, Fields, LayerSummary, Quantization, read_rope, refuse, refuse_unimplemented,
};
use crate::layers::MoeConfig;
use crate::models::architecture::Architecture;
use crate::weights::LoadAs;
use crate::{ModelError, Result};

/// A model family, by the `model_type` of its `config.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelType {
    /// DeepSeek-V2 and V2-Lite (arXiv 2405.04434).
    DeepseekV2,
    /// DeepSeek-V3, V3.1 and R1 (arXiv 2412.19437).
    DeepseekV3,
    /// DeepSeek-V3.2: V3 whose attention reads the keys that an indexer picks (DeepSeek sparse attention).
    DeepseekV32,
}

/// The `model_type`s of the files that are read here.
pub(crate) const MODEL_TYPES: [&str; 3] = ["deepseek_v2", "deepseek_v3", "deepseek_v32"];

impl ModelType {
    /// In the order of [`MODEL_TYPES`].
    const ALL: [Self; 3] = [Self::DeepseekV2, Self::DeepseekV3, Self::DeepseekV32];
}

impl fmt::Display for ModelType {
    /// The name in `config.json`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MODEL_TYPES[*self as usize])
    }
}

/// How router logits become expert scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scoring {
    /// V3: a sigmoid per expert; `e_score_correction_bias` is added for the choice only.
    Sigmoid,
    /// V2: a softmax over all experts, no bias.
    Softmax,
}

/// The dimensions and switches of DeepSeek-V2, V2-Lite, V3 and V3.2, by their names in `config.json`.
///
/// Weight shapes and formulas are those of the papers' section 2.1 (MLA) and of transformers' `deepseek_v2`, `deepseek_v3` and
/// `deepseek_v32`.
#[derive(Debug, Clone, PartialEq)]
pub struct DeepseekV3Config {
    /// The family: it decides the router.
    pub model_type: ModelType,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Hidden width of the dense feed-forward layers.
    pub intermediate_size: usize,
    /// Hidden width of one expert.
    pub moe_intermediate_size: usize,
    /// Layers, without the multi-token-prediction ones.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Width of the query latent; `None` projects queries directly (V2-Lite).
    pub q_lora_rank: Option<usize>,
    /// Width of the key-value latent.
    pub kv_lora_rank: usize,
    /// Channels of a head without rotation.
    pub qk_nope_head_dim: usize,
    /// Channels of a head with rotation; one key of this width serves all heads.
    pub qk_rope_head_dim: usize,
    /// Channels of a value head.
    pub v_head_dim: usize,
    /// The indexer, in V3.2.
    pub indexer: Option<IndexerConfig>,
    /// Routed experts of a layer.
    pub n_routed_experts: usize,
    /// Shared experts, fused into one of width `n_shared_experts * moe_intermediate_size`.
    pub n_shared_experts: usize,
    /// Routed experts that a token goes to.
    pub num_experts_per_tok: usize,
    /// Groups that the routed experts form; 1 if the file says nothing.
    pub n_group: usize,
    /// Groups that a token may choose from; 1 if the file says nothing.
    pub topk_group: usize,
    /// Leading layers with a dense feed-forward part.
    pub first_k_dense_replace: usize,
    /// Whether the chosen experts' weights are divided by their sum; always false for V2, whose router never does.
    pub norm_topk_prob: bool,
    /// Factor on the routed experts' weights.
    pub routed_scaling_factor: f64,
    /// Router scores.
    pub scoring: Scoring,
    /// Whether only the best `topk_group` groups are chosen from; always true for V3, `group_limited_greedy` for V2.
    pub group_limited: bool,
    /// Epsilon of the layer norms; the two norms inside MLA use 1e-6 whatever this is.
    pub rms_norm_eps: f64,
    /// Longest context in tokens.
    pub max_position_embeddings: usize,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Whether RoPE is interleaved, channels `(2i, 2i + 1)`, as always in V2; otherwise `(i, i + d/2)`.
    pub rope_interleave: bool,
    /// Tokens that end a text; empty if the file names none.
    pub eos_token_ids: Vec<u32>,
    /// Token that begins a text.
    pub bos_token_id: Option<u32>,
    /// Multi-token-prediction layers in the checkpoint; they are not loaded.
    pub num_nextn_predict_layers: usize,
    /// How the files store weights in 8 bits or fewer, if they do.
    pub quantization: Option<Quantization>,
}

impl DeepseekV3Config {
    /// Reads a configuration file. Fields that it does not know are ignored; optional ones default as in transformers.
    ///
    /// # Errors
    /// [`ModelError::Config`] naming the field that is missing, of another type, not implemented, or contradicts another;
    /// [`ModelError::UnsupportedQuantization`] for a `quantization_config` of another form than [`Quantization`]; and those
    /// of reading the file.
    pub fn read(path: &Path) -> Result<Self> {
        let fields = Fields::read(path, CONFIG_HINT)?;
        let model_type = read_model_type(&fields)?;
        refuse_unimplemented(&fields)?;
        let config = Self::from_fields(&fields, model_type)?;
        config.check_schedule(&fields)?;
        config.validate().map_err(|error| match error {
            ModelError::Config { field, actual, expected, .. } => fields.error(&field, actual, expected),
            other => other,
        })?;
        Ok(config)
    }

    fn from_fields(fields: &Fields, model_type: ModelType) -> Result<Self> {
        let v3 = model_type != ModelType::DeepseekV2;
        Ok(Self {
            model_type,
            vocab_size: fields.count("vocab_size")?,
            hidden_size: fields.count("hidden_size")?,
            intermediate_size: fields.count("intermediate_size")?,
            moe_intermediate_size: fields.count("moe_intermediate_size")?,
            num_hidden_layers: fields.count("num_hidden_layers")?,
            num_attention_heads: fields.count("num_attention_heads")?,
            q_lora_rank: fields.optional_count("q_lora_rank")?,
            kv_lora_rank: fields.count("kv_lora_rank")?,
            qk_nope_head_dim: fields.count("qk_nope_head_dim")?,
            qk_rope_head_dim: fields.count("qk_rope_head_dim")?,
            v_head_dim: fields.count("v_head_dim")?,
            indexer: (model_type == ModelType::DeepseekV32).then(|| IndexerConfig::read(fields)).transpose()?,
            n_routed_experts: fields.count("n_routed_experts")?,
            n_shared_experts: fields.count("n_shared_experts")?,
            num_experts_per_tok: fields.count("num_experts_per_tok")?,
            n_group: fields.count_or("n_group", 1)?,
            topk_group: fields.count_or("topk_group", 1)?,
            first_k_dense_replace: fields.count_or("first_k_dense_replace", if v3 { 3 } else { 0 })?,
            norm_topk_prob: v3 && fields.flag_or("norm_topk_prob", true)?,
            routed_scaling_factor: fields.number_or("routed_scaling_factor", if v3 { 2.5 } else { 1.0 })?,
            scoring: read_scoring(fields, v3)?,
            group_limited: read_group_limited(fields, v3)?,
            rms_norm_eps: fields.number_or("rms_norm_eps", 1e-6)?,
            max_position_embeddings: fields.count_or("max_position_embeddings", if v3 { 4096 } else { 2048 })?,
            rope: read_rope(fields)?,
            rope_interleave: !v3 || fields.flag_or("rope_interleave", true)?,
            eos_token_ids: fields.token_ids("eos_token_id")?,
            bos_token_id: fields.optional("bos_token_id", "a token id")?,
            num_nextn_predict_layers: fields.count_or("num_nextn_predict_layers", 0)?,
            quantization: Quantization::read(fields)?,
        })
    }

    /// Whether the fields are in range and agree with one another.
    ///
    /// # Errors
    /// [`ModelError::Config`] naming the first field that is not.
    pub fn validate(&self) -> Result<()> {
        refuse(
            self.impossible_size()
                .or_else(|| self.contradicting_numbers())
                .or_else(|| self.moe().contradicting_groups()),
        )
    }

    /// Files of transformers 5 list the kind of every layer: it must be that of the family and of `first_k_dense_replace`.
    fn check_schedule(&self, fields: &Fields) -> Result<()> {
        let mlp = |layer| if layer < self.first_k_dense_replace { "dense" } else { "sparse" };
        let layers = 0..self.num_hidden_layers;
        if self.indexer.is_some() {
            fields.schedule("layer_types", layers.clone().map(|_| "indexed_attention"))?;
        }
        fields.schedule("mlp_layer_types", layers.map(mlp))
    }

    fn contradicting_numbers(&self) -> Option<Contradiction> {
        let found = |field, actual: String, expected: String| Some((field, actual, expected));
        if self.first_k_dense_replace > self.num_hidden_layers {
            let expected = format!("at most `num_hidden_layers` = {}", self.num_hidden_layers);
            return found("first_k_dense_replace", self.first_k_dense_replace.to_string(), expected);
        }
        for (field, value) in
            [("rms_norm_eps", self.rms_norm_eps), ("routed_scaling_factor", self.routed_scaling_factor)]
        {
            if !is_positive(value) {
                return found(field, value.to_string(), "a finite number above 0, in f32".to_string());
            }
        }
        self.mla().contradiction()
    }

    /// The attention of its layers.
    pub fn mla(&self) -> MlaConfig {
        MlaConfig {
            hidden_size: self.hidden_size,
            num_attention_heads: self.num_attention_heads,
            kv_lora_rank: self.kv_lora_rank,
            qk_nope_head_dim: self.qk_nope_head_dim,
            qk_rope_head_dim: self.qk_rope_head_dim,
            v_head_dim: self.v_head_dim,
            q_lora_rank: self.q_lora_rank,
            indexer: self.indexer,
            rope: self.rope.clone(),
            rope_interleave: self.rope_interleave,
            quantization: self.quantization,
        }
    }

    /// The mixture of experts of its layers.
    pub fn moe(&self) -> MoeConfig {
        let v3 = self.scoring == Scoring::Sigmoid;
        let [n_group, topk_group] = if self.group_limited { [self.n_group, self.topk_group] } else { [1, 1] };
        MoeConfig {
            hidden_size: self.hidden_size,
            moe_intermediate_size: self.moe_intermediate_size,
            n_routed_experts: self.n_routed_experts,
            num_experts_per_tok: self.num_experts_per_tok,
            n_shared_experts: self.n_shared_experts,
            scoring: if v3 { ExpertScoring::Sigmoid } else { ExpertScoring::Softmax },
            n_group,
            topk_group,
            // DeepSeek-V2 never renormalises, whatever its config says.
            norm_topk_prob: v3 && self.norm_topk_prob,
            routed_scaling_factor: self.routed_scaling_factor,
            swiglu_limit: None,
            quantization: self.quantization,
        }
    }

    /// The layers in words, with such caches.
    pub(crate) fn layer_summaries(&self, load_as: LoadAs) -> Vec<LayerSummary> {
        let attention = match self.indexer {
            Some(indexer) => format!("MLA, sparse: {} keys", indexer.topk),
            None => "MLA".to_string(),
        };
        let format = self.row_format(load_as.kv_cache).unwrap_or_default();
        let bytes_per_token = self.mla().pools(format).iter().map(|pool| pool.row_bytes(load_as.dtype)).sum();
        let layer = |layer: usize| LayerSummary {
            attention: attention.clone(),
            mlp: if layer < self.first_k_dense_replace { "dense" } else { "MoE" }.to_string(),
            bytes_per_token,
            bytes_per_request: 0,
        };
        (0..self.num_hidden_layers).map(layer).collect()
    }

    /// The cache's pools: the latents of all layers, in this format, and in V3.2 the index keys of all layers, in FP8 beside latents in
    /// FP8.
    pub fn pools(&self, format: RowFormat) -> Vec<PoolConfig> {
        self.mla().pools(format).into_iter().flat_map(|pool| vec![pool; self.num_hidden_layers]).collect()
    }
}

fn read_model_type(fields: &Fields) -> Result<ModelType> {
    let found: String = fields.required("model_type", "the name of a model family")?;
    ModelType::ALL.into_iter().find(|known| known.to_string() == found).ok_or_else(|| ModelError::UnknownModelType {
        path: fields.path.clone(),
        found,
        known: MODEL_TYPES.map(|known| format!("\"{known}\"")).join(", "),
    })
}

fn read_scoring(fields: &Fields, v3: bool) -> Result<Scoring> {
    let (name, scoring) = if v3 { ("sigmoid", Scoring::Sigmoid) } else { ("softmax", Scoring::Softmax) };
    let found = fields.word_or("scoring_func", name)?;
    match found == name {
        true => Ok(scoring),
        false => Err(fields.error("scoring_func", format!("\"{found}\""), format!("\"{name}\" for this model_type"))),
    }
}

fn read_group_limited(fields: &Fields, v3: bool) -> Result<bool> {
    let found = fields.word_or("topk_method", if v3 { "noaux_tc" } else { "greedy" })?;
    match (v3, found.as_str()) {
        (true, "noaux_tc") | (false, "group_limited_greedy") => Ok(true),
        (false, "greedy") => Ok(false),
        _ => {
            let expected = if v3 { "\"noaux_tc\"" } else { "\"greedy\" or \"group_limited_greedy\"" };
            Err(fields.error("topk_method", format!("\"{found}\""), format!("{expected} for this model_type")))
        }
    }
}
