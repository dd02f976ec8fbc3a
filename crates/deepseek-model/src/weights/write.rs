//! Checkpoint folders in the published layout: quantised from another folder, or with random weights.

mod files;
mod folder;
mod item;

use std::path::Path;

use burn::tensor::FloatDType;
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use self::files::{Writer, assign};
use self::folder::Folder;
use self::item::{Blocks, How, Item, Values};
use super::codes::{BlockWeight, Format};
use super::stored::{FP4_BLOCK, Stored, is_codes, is_routed_expert, scale_names};
use super::{Checkpoint, Entry, LoadProgress, Published, WeightRole, WeightSpec};
use crate::config::Quantization;
use crate::inspection::weight_specs;
use crate::models::ModelConfig;
use crate::{ModelError, Result, WeightReport, memory};

/// Where the weights of a written checkpoint come from.
#[derive(Debug, Clone, Copy)]
pub enum WeightsFrom<'a> {
    /// A checkpoint folder, whose tensors have their published names.
    Folder(&'a Path),
    /// Nowhere: they are random.
    Random {
        /// The configuration file.
        config: &'a Path,
        /// The seed.
        seed: u64,
    },
}

/// How the projections of a written checkpoint are stored; other tensors stay as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightForm {
    /// As published: FP8 blocks, DeepSeek-V4's routed experts in FP4. A folder that is quantised already is copied.
    Quantized,
    /// The numbers that the quantised weights stand for, in f32 or bf16.
    Dequantized(FloatDType),
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteSummary {
    /// Safetensors files.
    pub shards: usize,
    /// Tensors in them.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// Writes a checkpoint folder `to`: `config.json`, the tokenizer if there is one, and files of about `shard_bytes` at most
/// (more if a single tensor is larger) with an index, or one file. Weights are written as they are made, some rows at a
/// time.
///
/// Which tensors are quantised is what DeepSeek publishes: the projections of attention, indexer and experts; not
/// embedding, head, router, norms and compressors.
///
/// # Errors
/// Those of reading `from`; [`ModelError::Request`] for a folder `to` that has weights already, or is where there is less space than
/// the weights take; [`ModelError::OutOfMemory`] for rows that do not fit into the memory; [`ModelError::Weights`] for numbers that are
/// not finite; [`ModelError::Write`]. Nothing of what was written is left then, and what was there before is as it was.
pub fn write_checkpoint(
    from: WeightsFrom<'_>,
    to: &Path,
    form: WeightForm,
    shard_bytes: u64,
    on_progress: &mut dyn FnMut(LoadProgress<'_>),
) -> Result<WriteSummary> {
    let config_path = match from {
        WeightsFrom::Folder(dir) => dir.join("config.json"),
        WeightsFrom::Random { config, .. } => config.into(),
    };
    let config = ModelConfig::read_file(&config_path)?;
    let layout = Layout::new(&config, &config_path, form)?;
    let checkpoint = match from {
        WeightsFrom::Folder(dir) => Some(Checkpoint::open(dir)?),
        WeightsFrom::Random { .. } => None,
    };
    let items = match (&checkpoint, from) {
        (Some(checkpoint), _) => layout.of_checkpoint(checkpoint)?,
        (None, WeightsFrom::Random { seed, .. }) => layout.of_specs(weight_specs(&config), seed, &config),
        (None, WeightsFrom::Folder(_)) => Vec::new(),
    };
    let shards = assign(&items, shard_bytes);
    let total_bytes = items.iter().map(Item::bytes).sum();
    memory::check_host("rows of a tensor", items.iter().map(Item::bytes_in_memory).max().unwrap_or(0))?;
    let mut writer = Writer { folder: Folder::prepare(to, total_bytes)?, total_bytes, written: 0, on_progress };
    let names = writer.shards(&shards)?;
    writer.finish(&shards, &names, &config_path, layout.config)?;
    let tensors = items.iter().map(|item| item.stored().len()).sum();
    Ok(WriteSummary { shards: shards.len(), tensors, bytes: total_bytes })
}

/// The configuration that is written, and how tensors are stored under it.
struct Layout {
    config: Map<String, Value>,
    form: WeightForm,
    published: Published,
    /// Of the source, if it is quantised.
    source: Option<Quantization>,
    /// Of what is written, or was before it was dequantised.
    target: Quantization,
    /// Whether scales are powers of two.
    power_of_two: bool,
}

impl Layout {
    fn new(config: &ModelConfig, path: &Path, form: WeightForm) -> Result<Self> {
        let hint = "it describes the model to write";
        let mut json: Map<String, Value> = crate::files::json(path, hint)?;
        let published = config.published();
        let source = config.quantization();
        let target = source.unwrap_or(Quantization { block: [128, 128], fp4_experts: published.fp4_experts });
        let given = json.get("quantization_config").and_then(|section| section.get("scale_fmt"));
        let power_of_two = published.power_of_two_scales || given.is_some_and(Value::is_string);
        match form {
            WeightForm::Quantized if source.is_none() => {
                let mut section = json!({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                    "weight_block_size": target.block});
                if power_of_two {
                    section["scale_fmt"] = json!("ue8m0");
                }
                json.insert("quantization_config".into(), section);
                if published.fp4_experts {
                    json.insert("expert_dtype".into(), json!("fp4"));
                }
            }
            WeightForm::Quantized => {}
            WeightForm::Dequantized(_) => {
                json.remove("quantization_config");
                json.remove("expert_dtype");
            }
        }
        Ok(Self { config: json, form, published, source, target, power_of_two })
    }

    fn of_checkpoint<'a>(&self, checkpoint: &'a Checkpoint) -> Result<Vec<Item<'a>>> {
        if self.published.renaming.is_some_and(|names| names.is_of(checkpoint)) {
            let actual = "a checkpoint with the tensor names of transformers' modules";
            return Err(ModelError::request("from", actual, "one with the published names (`embed.weight`, ...)"));
        }
        let ends = ["_scale_inv", ".scale", ".weight_scale", ".weight_scale_2", ".input_scale"];
        let is_scale = |name: &str| ends.iter().any(|end| name.ends_with(end));
        let kept = self.form == WeightForm::Quantized;
        let mut items = Vec::new();
        for (name, entry) in &checkpoint.tensors {
            let codes = is_codes(entry.dtype);
            let values = match self.source {
                Some(_) if is_scale(name) && !kept => continue,
                Some(source) if codes && !kept => Values::Codes(stored_codes(checkpoint, name, entry, source)?),
                _ => Values::Stored { bytes: checkpoint.bytes(entry), dtype: entry.dtype },
            };
            let how = match (&values, self.form) {
                (Values::Codes(_), WeightForm::Dequantized(to)) => How::Plain(plain_dtype(to)),
                _ if self.source.is_some() => How::Plain(entry.dtype),
                _ => self.how(name, &entry.shape, entry.dtype),
            };
            let shape = match &values {
                Values::Codes(weight) => vec![entry.shape[0], weight.columns],
                _ => entry.shape.clone(),
            };
            items.push(Item { name: name.clone(), shape, values, how });
        }
        Ok(items)
    }

    fn of_specs(&self, specs: Vec<WeightSpec>, seed: u64, config: &ModelConfig) -> Vec<Item<'static>> {
        let experts = config.n_routed_experts();
        let item = |WeightSpec { name, shape, role, .. }: WeightSpec| {
            let is_norm = name.ends_with("norm.weight") && !name.contains(".indexer.");
            let (values, dtype) = match role {
                WeightRole::Table => (Values::Table { below: experts }, Dtype::I64),
                WeightRole::F32 if !is_norm && !name.ends_with(".gate.weight") => {
                    (Values::random(seed, &name, &shape), Dtype::F32)
                }
                _ => (Values::random(seed, &name, &shape), Dtype::BF16),
            };
            let how = self.how(&name, &shape, dtype);
            Item { name, shape, values, how }
        };
        specs.into_iter().map(item).collect()
    }

    /// How a tensor that has plain numbers of `dtype` is written.
    fn how(&self, name: &str, shape: &[usize], dtype: Dtype) -> How {
        let &[_, columns] = shape else { return How::Plain(dtype) };
        if !self.published.is_projection(name) {
            return How::Plain(dtype);
        }
        let fp4 = self.published.fp4_experts
            && self.target.fp4_experts
            && is_routed_expert(name)
            && columns.is_multiple_of(2);
        let (format, block) = if fp4 { (Format::E2m1, [1, FP4_BLOCK]) } else { (Format::E4m3, self.target.block) };
        let blocks = Blocks { format, block, power_of_two: self.power_of_two };
        match self.form {
            WeightForm::Dequantized(to) => How::Dequantized(blocks, plain_dtype(to)),
            WeightForm::Quantized => {
                let Published { scale_suffix, scale_dtype, .. } = self.published;
                // A projection's name has either form.
                let scale =
                    scale_names(name).into_iter().find(|scale| scale.ends_with(scale_suffix)).unwrap_or_default();
                How::Codes { blocks, scale, of: scale_dtype }
            }
        }
    }
}

fn plain_dtype(dtype: FloatDType) -> Dtype {
    match dtype {
        FloatDType::BF16 => Dtype::BF16,
        FloatDType::F16 => Dtype::F16,
        _ => Dtype::F32,
    }
}

/// A weight of a quantised checkpoint.
fn stored_codes<'a>(
    checkpoint: &'a Checkpoint,
    name: &str,
    entry: &'a Entry,
    quantization: Quantization,
) -> Result<BlockWeight<'a>> {
    let mut report = WeightReport { checkpoint: checkpoint.dir.clone(), ..WeightReport::default() };
    let shape: Vec<usize> = match (entry.dtype, entry.shape.as_slice()) {
        (Dtype::I8 | Dtype::U8, &[rows, columns]) => vec![rows, 2 * columns],
        (_, shape) => shape.to_vec(),
    };
    let wrong = match Stored::find(checkpoint, name, &shape, Some(quantization), &mut report) {
        Some(stored) if stored.is_sound => {
            let columns = shape.last().copied().unwrap_or(1);
            match (stored.check(checkpoint, columns, FloatDType::F32), stored.blocks(checkpoint, columns)) {
                (Ok(()), Some(weight)) => return Ok(weight),
                (wrong, _) => wrong.err(),
            }
        }
        _ => None,
    };
    report.wrong_quantization.extend(wrong);
    Err(ModelError::Weights(Box::new(report)))
}
