//! `config.json` of DeepSeek-V4, in both forms.

use std::path::Path;

use mla_ops::{ExpertScoring, RopeConfig};

use super::hyper_connection::HyperConnectionConfig;
use super::layer_configs::{CompressorConfig, EntryIndexerConfig};
use super::schedule::{AttentionSpec, CompressorSpec, LayerSpec, MlpSpec};
use crate::config::sizes::is_positive;
use crate::config::{
    CONFIG_HINT, Contradiction, Fields, Quantization, read_rope_section, refuse, refuse_unimplemented,
    rope_contradiction,
};
use crate::layers::MoeConfig;
use crate::{ModelError, Result};

/// The `model_type`s of the files that are read here.
pub(crate) const MODEL_TYPES: [&str; 1] = ["deepseek_v4"];

/// The dimensions and layer schedule of DeepSeek-V4, by their names in `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct DeepseekV4Config {
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Width of a residual stream.
    pub hidden_size: usize,
    /// Hidden width of one expert, and of the shared one.
    pub moe_intermediate_size: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Channels of a query head, and of the one key that is also the value.
    pub head_dim: usize,
    /// Trailing channels of a head with rotation.
    pub qk_rope_head_dim: usize,
    /// Width of the query latent.
    pub q_lora_rank: usize,
    /// Groups of neighbouring heads that the output projection treats alike.
    pub o_groups: usize,
    /// Width that each group is projected to first.
    pub o_lora_rank: usize,
    /// Tokens that a query sees uncompressed, its own included.
    pub sliding_window: usize,
    /// Query heads of the indexer.
    pub index_n_heads: usize,
    /// Channels of an index head.
    pub index_head_dim: usize,
    /// Entries that the indexer picks for a query.
    pub index_topk: usize,
    /// Routed experts of a layer.
    pub n_routed_experts: usize,
    /// Routed experts that a token goes to.
    pub num_experts_per_tok: usize,
    /// Factor on the routed experts' weights.
    pub routed_scaling_factor: f64,
    /// Bound of the gate (from above) and of the other factor (both ways) in every expert.
    pub swiglu_limit: f64,
    /// Residual streams.
    pub hc_mult: usize,
    /// Rounds of row and column normalisation of the hyper-connections' mixing matrices.
    pub hc_sinkhorn_iters: usize,
    /// Epsilon of the hyper-connections.
    pub hc_eps: f64,
    /// Epsilon of all norms.
    pub rms_norm_eps: f64,
    /// Longest context in tokens.
    pub max_position_embeddings: usize,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// Rotary embedding of the layers without compression.
    pub rope: RopeConfig,
    /// Rotary embedding of the layers with compression, for everything in them.
    pub compress_rope: RopeConfig,
    /// Tokens that end a text; empty if the file names none.
    pub eos_token_ids: Vec<u32>,
    /// Token that begins a text.
    pub bos_token_id: Option<u32>,
    /// How the files store weights in 8 bits or fewer, if they do.
    pub quantization: Option<Quantization>,
}

impl DeepseekV4Config {
    /// Reads a configuration file. Fields that it does not know are ignored; the layer schedule must be there, as
    /// `layer_types`, `compress_rates` and `mlp_layer_types` or as `compress_ratios` and `num_hash_layers`.
    ///
    /// # Errors
    /// As [`DeepseekV3Config::read`](crate::DeepseekV3Config::read).
    pub fn read(path: &Path) -> Result<Self> {
        let fields = Fields::read(path, CONFIG_HINT)?;
        refuse_unimplemented(&fields)?;
        for (field, implemented) in [("scoring_func", "sqrtsoftplus"), ("topk_method", "noaux_tc")] {
            fields.only(field, fields.word_or(field, implemented)?, implemented.to_string())?;
        }
        for field in ["num_key_value_heads", "n_shared_experts"] {
            fields.only(field, fields.count_or(field, 1)?, 1)?;
        }
        let config = Self::from_fields(&fields)?;
        config.validate().map_err(|error| match error {
            ModelError::Config { field, actual, expected, .. } => fields.error(&field, actual, expected),
            other => other,
        })?;
        Ok(config)
    }

    fn from_fields(fields: &Fields) -> Result<Self> {
        let head_dim = fields.count("head_dim")?;
        let (rope, compress_rope) = read_ropes(fields)?;
        Ok(Self {
            vocab_size: fields.count("vocab_size")?,
            hidden_size: fields.count("hidden_size")?,
            moe_intermediate_size: fields.count("moe_intermediate_size")?,
            num_attention_heads: fields.count("num_attention_heads")?,
            head_dim,
            qk_rope_head_dim: read_rope_width(fields, head_dim)?,
            q_lora_rank: fields.count("q_lora_rank")?,
            o_groups: fields.count("o_groups")?,
            o_lora_rank: fields.count("o_lora_rank")?,
            sliding_window: fields.count("sliding_window")?,
            index_n_heads: fields.count("index_n_heads")?,
            index_head_dim: fields.count("index_head_dim")?,
            index_topk: fields.count("index_topk")?,
            n_routed_experts: fields.count("n_routed_experts")?,
            num_experts_per_tok: fields.count("num_experts_per_tok")?,
            routed_scaling_factor: fields.required("routed_scaling_factor", "a number")?,
            swiglu_limit: fields.required("swiglu_limit", "a number")?,
            hc_mult: fields.count("hc_mult")?,
            hc_sinkhorn_iters: fields.count("hc_sinkhorn_iters")?,
            hc_eps: fields.required("hc_eps", "a number")?,
            rms_norm_eps: fields.number_or("rms_norm_eps", 1e-6)?,
            max_position_embeddings: fields.count("max_position_embeddings")?,
            layers: read_layers(fields)?,
            rope,
            compress_rope,
            eos_token_ids: fields.token_ids("eos_token_id")?,
            bos_token_id: fields.optional("bos_token_id", "a token id")?,
            quantization: Quantization::read(fields)?,
        })
    }

    /// Whether the fields are in range and agree with one another.
    ///
    /// # Errors
    /// [`ModelError::Config`] naming the first field that is not.
    pub fn validate(&self) -> Result<()> {
        let contradiction = self
            .impossible_size()
            .or_else(|| self.contradicting_widths())
            .or_else(|| self.contradicting_rates())
            .or_else(|| self.contradicting_numbers());
        refuse(contradiction)
    }

    /// The hyper-connections of its layers, and the head behind them.
    pub fn hyper_connection(&self) -> HyperConnectionConfig {
        HyperConnectionConfig {
            hidden_size: self.hidden_size,
            hc_mult: self.hc_mult,
            hc_sinkhorn_iters: self.hc_sinkhorn_iters,
            hc_eps: self.hc_eps,
            rms_norm_eps: self.rms_norm_eps,
        }
    }

    /// A compressor of the layers with entries of this kind.
    pub(crate) fn compressor(&self, spec: CompressorSpec) -> CompressorConfig {
        CompressorConfig {
            hidden_size: self.hidden_size,
            head_dim: spec.width,
            compress_rate: spec.rate,
            qk_rope_head_dim: self.qk_rope_head_dim,
            overlap: spec.overlap,
            rope: self.compress_rope.clone(),
            rms_norm_eps: self.rms_norm_eps,
        }
    }

    /// The indexer of a layer that picks from entries, by keys of this kind.
    pub(crate) fn indexer(&self, keys: CompressorSpec) -> EntryIndexerConfig {
        EntryIndexerConfig {
            compressor: self.compressor(keys),
            q_lora_rank: self.q_lora_rank,
            index_n_heads: self.index_n_heads,
            index_topk: self.index_topk,
        }
    }

    /// The mixture of experts of its layers; the first ones have tables ([`MoeConfig::init_hash`]).
    pub fn moe(&self) -> MoeConfig {
        MoeConfig {
            hidden_size: self.hidden_size,
            moe_intermediate_size: self.moe_intermediate_size,
            n_routed_experts: self.n_routed_experts,
            num_experts_per_tok: self.num_experts_per_tok,
            n_shared_experts: 1,
            scoring: ExpertScoring::SqrtSoftplus,
            n_group: 1,
            topk_group: 1,
            norm_topk_prob: true,
            routed_scaling_factor: self.routed_scaling_factor,
            swiglu_limit: Some(self.swiglu_limit),
            quantization: self.quantization,
        }
    }

    fn contradicting_widths(&self) -> Option<Contradiction> {
        let found = |field, actual: usize, expected: String| Some((field, actual.to_string(), expected));
        let width = self.head_dim.min(self.index_head_dim);
        if !self.qk_rope_head_dim.is_multiple_of(2) || self.qk_rope_head_dim > width {
            let expected = format!("an even number of at most {width} (`head_dim` and `index_head_dim`)");
            return found("qk_rope_head_dim", self.qk_rope_head_dim, expected);
        }
        if !self.num_attention_heads.is_multiple_of(self.o_groups) {
            let expected = format!("a divisor of `num_attention_heads` = {}", self.num_attention_heads);
            return found("o_groups", self.o_groups, expected);
        }
        if self.num_experts_per_tok > self.n_routed_experts {
            let expected = format!("at most `n_routed_experts` = {}", self.n_routed_experts);
            return found("num_experts_per_tok", self.num_experts_per_tok, expected);
        }
        None
    }

    /// Rates are powers of two, as the sizes of pages are: a page of tokens then holds whole entries of every layer.
    fn contradicting_rates(&self) -> Option<Contradiction> {
        let mut rates = self.layers.iter().filter_map(|layer| layer.attention.rate());
        let rate = rates.find(|rate| !rate.is_power_of_two())?;
        Some(("compress_rates", format!("{rate} tokens per entry"), "powers of two, which divide one another".into()))
    }

    fn contradicting_numbers(&self) -> Option<Contradiction> {
        let found = |field, actual: f64, expected: &str| Some((field, actual.to_string(), expected.to_string()));
        let positive = [("routed_scaling_factor", self.routed_scaling_factor), ("swiglu_limit", self.swiglu_limit)];
        if let Some((field, value)) = positive.into_iter().find(|&(_, value)| !is_positive(value)) {
            return found(field, value, "a finite number above 0, in f32");
        }
        let connection = self.hyper_connection().contradiction();
        connection.or_else(|| rope_contradiction(&self.rope)).or_else(|| rope_contradiction(&self.compress_rope))
    }
}

/// The rotary width: given outright, or as a fraction of the head.
fn read_rope_width(fields: &Fields, head_dim: usize) -> Result<usize> {
    let fraction = fields.optional::<f64>("partial_rotary_factor", "a number")?;
    let width = fraction.map(|fraction| (head_dim as f64 * fraction) as usize);
    match (fields.optional_count("qk_rope_head_dim")?, width) {
        (Some(given), Some(width)) if given != width => {
            let expected = format!("{width}, as `partial_rotary_factor` of `head_dim` = {head_dim} says");
            Err(fields.error("qk_rope_head_dim", given.to_string(), expected))
        }
        (Some(width), _) | (None, Some(width)) => Ok(width),
        (None, None) => fields.count("qk_rope_head_dim"),
    }
}

/// The rotary embeddings without and with compression: the sections of `rope_parameters` (transformers 5; a `rope_theta`
/// beside them says nothing new), or `rope_theta` and `compress_rope_theta` with `rope_scaling` (published files), which
/// holds for compression only.
fn read_ropes(fields: &Fields) -> Result<(RopeConfig, RopeConfig)> {
    let thetas = (fields.number_or("rope_theta", 10_000.0)?, fields.number_or("compress_rope_theta", 160_000.0)?);
    let (main, mut compress) = match fields.object("rope_parameters")? {
        Some(sections) => {
            let section = |name: &str, theta| match sections.object(name)? {
                Some(section) => read_rope_section(&section, &format!("rope_parameters.{name}"), theta),
                None => Err(fields.error(&format!("rope_parameters.{name}"), "missing".into(), "an object".into())),
            };
            (section("main", thetas.0)?, section("compress", thetas.1)?)
        }
        None => {
            let plain = |rope_theta| RopeConfig { rope_theta, yarn: None };
            let compress = match fields.object("rope_scaling")? {
                Some(scaling) => read_rope_section(&scaling, "rope_scaling", thetas.1)?,
                None => plain(thetas.1),
            };
            (plain(thetas.0), compress)
        }
    };
    // The compressed layers' cos and sin carry no factor unless the file asks for one.
    if let Some(yarn) = &mut compress.yarn {
        yarn.attention_factor.get_or_insert(1.0);
    }
    Ok((main, compress))
}

fn read_layers(fields: &Fields) -> Result<Vec<LayerSpec>> {
    let layers = fields.count("num_hidden_layers")?;
    let check_len = |field: &str, len: usize| match len == layers {
        true => Ok(()),
        false => {
            let expected = format!("{layers}, which `num_hidden_layers` says");
            Err(fields.error(field, format!("for {len} layers"), expected))
        }
    };
    let attentions = match fields.optional::<Vec<String>>("layer_types", "a list of layer types")? {
        Some(types) => read_layer_types(fields, &types)?,
        None => read_compress_ratios(fields, layers)?,
    };
    // Before anything else is made for so many layers.
    check_len("layer_types", attentions.len())?;
    let mlps = match fields.optional::<Vec<String>>("mlp_layer_types", "a list of layer types")? {
        Some(types) => read_mlp_layer_types(fields, &types)?,
        None => {
            let hashed = fields.count("num_hash_layers")?;
            if hashed > layers {
                let expected = format!("at most `num_hidden_layers` = {layers}");
                return Err(fields.error("num_hash_layers", hashed.to_string(), expected));
            }
            (0..layers).map(|layer| if layer < hashed { MlpSpec::HashMoe } else { MlpSpec::Moe }).collect()
        }
    };
    check_len("mlp_layer_types", mlps.len())?;
    Ok(attentions.into_iter().zip(mlps).map(|(attention, mlp)| LayerSpec { attention, mlp }).collect())
}

fn read_layer_types(fields: &Fields, types: &[String]) -> Result<Vec<AttentionSpec>> {
    let (csa, hca) = ("compressed_sparse_attention", "heavily_compressed_attention");
    let rate = |name: &str| match fields.object("compress_rates")? {
        Some(rates) => rates.count(name),
        None => Err(fields.error("compress_rates", "missing".into(), format!("an object with \"{name}\""))),
    };
    let read = |(layer, name): (usize, &String)| match name.as_str() {
        "sliding_attention" => Ok(AttentionSpec::Sliding),
        name if name == csa => Ok(AttentionSpec::Csa { rate: rate(csa)? }),
        name if name == hca => Ok(AttentionSpec::Hca { rate: rate(hca)? }),
        other => {
            let expected = format!("\"sliding_attention\", \"{csa}\" or \"{hca}\"");
            Err(fields.error(&format!("layer_types[{layer}]"), format!("\"{other}\""), expected))
        }
    };
    types.iter().enumerate().map(read).collect()
}

/// The published form names rates only; a file may list those of the multi-token-prediction layers at the end.
fn read_compress_ratios(fields: &Fields, layers: usize) -> Result<Vec<AttentionSpec>> {
    let mut ratios: Vec<usize> = fields.required("compress_ratios", "a list of whole numbers (or `layer_types`)")?;
    if ratios.len() == layers + fields.count_or("num_nextn_predict_layers", 0)? {
        ratios.truncate(layers);
    }
    if ratios.len() != layers {
        let expected = format!("one for each of `num_hidden_layers` = {layers}");
        return Err(fields.error("compress_ratios", format!("{} ratios", ratios.len()), expected));
    }
    let read = |(layer, &ratio): (usize, &usize)| match ratio {
        0 => Ok(AttentionSpec::Sliding),
        4 => Ok(AttentionSpec::Csa { rate: 4 }),
        128 => Ok(AttentionSpec::Hca { rate: 128 }),
        other => {
            let expected = "0 (sliding), 4 (sparse) or 128 (heavily compressed); name others by `layer_types`";
            Err(fields.error(&format!("compress_ratios[{layer}]"), other.to_string(), expected.into()))
        }
    };
    ratios.iter().enumerate().map(read).collect()
}

fn read_mlp_layer_types(fields: &Fields, types: &[String]) -> Result<Vec<MlpSpec>> {
    let read = |(layer, name): (usize, &String)| match name.as_str() {
        "hash_moe" => Ok(MlpSpec::HashMoe),
        "moe" => Ok(MlpSpec::Moe),
        other => {
            let expected = "\"hash_moe\" or \"moe\"".to_string();
            Err(fields.error(&format!("mlp_layer_types[{layer}]"), format!("\"{other}\""), expected))
        }
    };
    types.iter().enumerate().map(read).collect()
}
