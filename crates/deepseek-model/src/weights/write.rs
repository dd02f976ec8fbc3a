//! Checkpoint folders in the published layout: quantised from another folder, or with random weights.

mod item;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use burn::tensor::FloatDType;
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use self::item::{Blocks, How, Item, Values, WriteFault};
use super::codes::{BlockWeight, Format};
use super::stored::{FP4_BLOCK, Stored, is_routed_expert, scale_names};
use super::v4_names::transformers_name;
use super::{Checkpoint, Entry, INDEX, LoadProgress, SINGLE, WeightRole, WeightSpec, weight_specs};
use crate::config::{ModelConfig, ModelType, Quantization};
use crate::{ModelError, Result, WeightReport};

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

/// Files that a checkpoint has beside configuration and weights.
const COMPANIONS: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"];

/// Writes a checkpoint folder `to`: `config.json`, the tokenizer if there is one, and files of about `shard_bytes` at most
/// (more if a single tensor is larger) with an index, or one file. Weights are written as they are made, some rows at a
/// time.
///
/// Which tensors are quantised is what DeepSeek publishes: the projections of attention, indexer and experts; not
/// embedding, head, router, norms and compressors.
///
/// # Errors
/// Those of reading `from`; [`ModelError::Request`] for a folder `to` that has weights already;
/// [`ModelError::Weights`] for numbers that are not finite; [`ModelError::Write`], after which no shard is left.
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
    prepare(to)?;
    let mut writer = Writer { to, total_bytes, written: 0, on_progress };
    let written = writer.shards(&shards).and_then(|names| writer.finish(&shards, &names, &config_path, layout.config));
    if let Err(error) = written {
        // What is there is of no use, and may be what fills the disk.
        (0..shards.len()).for_each(|shard| drop(std::fs::remove_file(to.join(shard_name(shard, shards.len())))));
        return Err(error);
    }
    let tensors = items.iter().map(|item| item.stored().len()).sum();
    Ok(WriteSummary { shards: shards.len(), tensors, bytes: total_bytes })
}

/// The configuration that is written, and how tensors are stored under it.
struct Layout {
    config: Map<String, Value>,
    form: WeightForm,
    v4: bool,
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
        let text = std::fs::read(path).map_err(|source| ModelError::unreadable(path, source, hint))?;
        let mut json: Map<String, Value> = serde_json::from_slice(&text)
            .map_err(|error| ModelError::Json { path: path.into(), reason: error.to_string() })?;
        let v4 = matches!(config, ModelConfig::V4(_));
        let v32 = matches!(config, ModelConfig::V3(config) if config.model_type == ModelType::DeepseekV32);
        let source = config.quantization();
        let target = source.unwrap_or(Quantization { block: [128, 128], fp4_experts: v4 });
        let given = json.get("quantization_config").and_then(|section| section.get("scale_fmt"));
        let power_of_two = v4 || v32 || given.is_some_and(Value::is_string);
        match form {
            WeightForm::Quantized if source.is_none() => {
                let mut section = json!({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                    "weight_block_size": target.block});
                if power_of_two {
                    section["scale_fmt"] = json!("ue8m0");
                }
                json.insert("quantization_config".into(), section);
                if v4 {
                    json.insert("expert_dtype".into(), json!("fp4"));
                }
            }
            WeightForm::Quantized => {}
            WeightForm::Dequantized(_) => {
                json.remove("quantization_config");
                json.remove("expert_dtype");
            }
        }
        Ok(Self { config: json, form, v4, source, target, power_of_two })
    }

    fn of_checkpoint<'a>(&self, checkpoint: &'a Checkpoint) -> Result<Vec<Item<'a>>> {
        if self.v4 && checkpoint.tensors.contains_key(&transformers_name("embed.weight")) {
            let actual = "a checkpoint with the tensor names of transformers' modules";
            return Err(ModelError::request("from", actual, "one with the published names (`embed.weight`, ...)"));
        }
        let is_scale = |name: &str| name.ends_with("_scale_inv") || name.ends_with(".scale");
        let kept = self.form == WeightForm::Quantized;
        let mut items = Vec::new();
        for (name, entry) in &checkpoint.tensors {
            let codes = matches!(entry.dtype, Dtype::F8_E4M3 | Dtype::I8);
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
        let experts = match config {
            ModelConfig::V3(config) => config.n_routed_experts,
            ModelConfig::V4(config) => config.n_routed_experts,
        };
        let item = |WeightSpec { name, shape, role }: WeightSpec| {
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
        if !is_projection(name, self.v4) {
            return How::Plain(dtype);
        }
        let fp4 = self.v4 && self.target.fp4_experts && is_routed_expert(name) && columns.is_multiple_of(2);
        let (format, block) = if fp4 { (Format::E2m1, [1, FP4_BLOCK]) } else { (Format::E4m3, self.target.block) };
        let blocks = Blocks { format, block, power_of_two: self.power_of_two };
        match self.form {
            WeightForm::Dequantized(to) => How::Dequantized(blocks, plain_dtype(to)),
            WeightForm::Quantized if self.v4 => {
                How::Codes { blocks, scale: scale_names(name).swap_remove(1), of: Dtype::F8_E8M0 }
            }
            WeightForm::Quantized => How::Codes { blocks, scale: scale_names(name).swap_remove(0), of: Dtype::F32 },
        }
    }
}

/// Whether a tensor is quantised in the published files: `inference/convert.py` and `model.py` of DeepSeek-V3, V3.2-Exp
/// and V4, where `Linear` layers are, but for those that are made with a dtype of their own.
fn is_projection(name: &str, v4: bool) -> bool {
    const V3: [&str; 11] = [
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
    const V4: [&str; 9] =
        ["attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "indexer.wq_b", "w1", "w2", "w3"];
    let (prefix, modules) = if v4 { ("layers.", V4.as_slice()) } else { ("model.layers.", V3.as_slice()) };
    let Some(module) = name.strip_suffix(".weight").filter(|_| name.starts_with(prefix)) else { return false };
    modules.iter().any(|projection| module.strip_suffix(projection).is_some_and(|rest| rest.ends_with('.')))
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
        (Dtype::I8, &[rows, columns]) => vec![rows, 2 * columns],
        (_, shape) => shape.to_vec(),
    };
    let wrong = match Stored::find(checkpoint, name, &shape, Some(quantization), &mut report) {
        Some(stored) if stored.is_sound => {
            match stored.blocks(checkpoint, shape.last().copied().unwrap_or(1), FloatDType::F32) {
                Ok(Some(weight)) => return Ok(weight),
                Ok(None) => None,
                Err(wrong) => Some(wrong),
            }
        }
        _ => None,
    };
    report.wrong_quantization.extend(wrong);
    Err(ModelError::Weights(Box::new(report)))
}

/// The items of each file, in order.
fn assign<'i, 'a>(items: &'i [Item<'a>], shard_bytes: u64) -> Vec<Vec<&'i Item<'a>>> {
    let mut shards: Vec<Vec<&Item>> = vec![Vec::new()];
    let mut filled = 0;
    for item in items {
        let bytes = item.bytes();
        if filled > 0 && filled + bytes > shard_bytes {
            shards.push(Vec::new());
            filled = 0;
        }
        if let Some(shard) = shards.last_mut() {
            shard.push(item);
        }
        filled += bytes;
    }
    shards
}

fn shard_name(shard: usize, shards: usize) -> String {
    match shards {
        1 => SINGLE.to_string(),
        _ => format!("model-{:05}-of-{shards:05}.safetensors", shard + 1),
    }
}

/// Makes the folder `to`, which must have no weights yet.
fn prepare(to: &Path) -> Result<()> {
    let unwritable = |source| ModelError::Write { path: to.into(), source, needed_bytes: 0 };
    std::fs::create_dir_all(to).map_err(unwritable)?;
    for entry in std::fs::read_dir(to).map_err(|source| ModelError::Io { path: to.into(), source })? {
        let path = entry.map_err(|source| ModelError::Io { path: to.into(), source })?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            return Err(ModelError::request("to", format!("a folder with {}", path.display()), "one without weights"));
        }
    }
    Ok(())
}

/// Writes files, and tells how far it has come.
struct Writer<'a> {
    to: &'a Path,
    total_bytes: u64,
    written: u64,
    on_progress: &'a mut dyn FnMut(LoadProgress<'_>),
}

impl Writer<'_> {
    fn shards(&mut self, shards: &[Vec<&Item<'_>>]) -> Result<Vec<String>> {
        let names: Vec<String> = (0..shards.len()).map(|shard| shard_name(shard, shards.len())).collect();
        for (name, items) in names.iter().zip(shards) {
            self.shard(&self.to.join(name), items)?;
        }
        Ok(names)
    }

    /// One safetensors file: the length of its header, the header, the tensors.
    fn shard(&mut self, path: &Path, items: &[&Item<'_>]) -> Result<()> {
        let needed_bytes = self.total_bytes;
        let unwritable = |source| ModelError::Write { path: path.into(), source, needed_bytes };
        let mut out = BufWriter::with_capacity(1 << 20, File::create(path).map_err(unwritable)?);
        let header = header(items);
        out.write_all(&(header.len() as u64).to_le_bytes()).map_err(unwritable)?;
        out.write_all(header.as_bytes()).map_err(unwritable)?;
        for item in items {
            item.write(&mut out).map_err(|fault| match fault {
                WriteFault::Io(source) => unwritable(source),
                WriteFault::Weight(wrong) => ModelError::Weights(Box::new(WeightReport {
                    checkpoint: self.to.into(),
                    wrong_quantization: vec![wrong],
                    ..WeightReport::default()
                })),
            })?;
            self.written += item.bytes();
            let (loaded_bytes, total_bytes) = (self.written, self.total_bytes);
            (self.on_progress)(LoadProgress { loaded_bytes, total_bytes, tensor: &item.name });
        }
        let file = out.into_inner().map_err(|error| unwritable(error.into_error()))?;
        // Some file systems say that they are full only now.
        file.sync_all().map_err(unwritable)
    }

    /// The files beside the weights.
    fn finish(
        &self,
        shards: &[Vec<&Item<'_>>],
        names: &[String],
        config_path: &Path,
        config: Map<String, Value>,
    ) -> Result<()> {
        if names.len() > 1 {
            let mut map = Map::new();
            for (name, items) in names.iter().zip(shards) {
                let tensors = items.iter().flat_map(|item| item.stored());
                map.extend(tensors.map(|(tensor, ..)| (tensor.to_string(), json!(name))));
            }
            let index = json!({"metadata": {"total_size": self.total_bytes}, "weight_map": map});
            self.file(INDEX, &format!("{index:#}"))?;
        }
        self.file("config.json", &format!("{:#}", Value::from(config)))?;
        for name in COMPANIONS {
            let companion: PathBuf = config_path.with_file_name(name);
            if companion.exists() {
                let path = self.to.join(name);
                let unwritable = |source| ModelError::Write { path, source, needed_bytes: self.total_bytes };
                std::fs::copy(companion, self.to.join(name)).map_err(unwritable)?;
            }
        }
        Ok(())
    }

    fn file(&self, name: &str, text: &str) -> Result<()> {
        let path = self.to.join(name);
        std::fs::write(&path, text).map_err(|source| ModelError::Write { path, source, needed_bytes: self.total_bytes })
    }
}

/// The header of a safetensors file, padded with spaces so that the tensors begin at a multiple of 8 bytes.
fn header(items: &[&Item<'_>]) -> String {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut start = 0;
    for (name, dtype, shape, bytes) in items.iter().flat_map(|item| item.stored()) {
        let tensor = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, start + bytes]});
        header.insert(name.to_string(), tensor);
        start += bytes;
    }
    let mut header = Value::from(header).to_string();
    let padding = header.len().next_multiple_of(8) - header.len();
    header.push_str(&" ".repeat(padding));
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that is always full.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_named_with_what_is_needed() {
        for rows in [4, 4_000] {
            let shape = vec![rows, 1000];
            let values = Values::random(1, "w", &shape);
            let item = Item { name: "w".into(), shape, values, how: How::Plain(Dtype::F32) };
            let mut writer =
                Writer { to: Path::new("/dev"), total_bytes: 12_345, written: 0, on_progress: &mut |_| {} };
            let error = writer.shard(Path::new("/dev/full"), &[&item]).unwrap_err();
            let message = error.to_string();
            assert!(matches!(error, ModelError::Write { .. }), "{message}");
            assert!(message.contains("/dev/full") && message.contains("No space left"), "{message}");
            assert!(message.contains("12345 bytes"), "{message}");
        }
    }

    #[test]
    fn projections_are_those_that_are_published_in_fp8() {
        let v3 =
            ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.indexer.wk", "mlp.experts.3.up_proj"];
        for module in v3 {
            assert!(is_projection(&format!("model.layers.7.{module}.weight"), false), "{module}");
        }
        for module in ["self_attn.indexer.weights_proj", "mlp.gate", "self_attn.q_a_layernorm", "eh_proj"] {
            assert!(!is_projection(&format!("model.layers.7.{module}.weight"), false), "{module}");
        }
        assert!(!is_projection("lm_head.weight", false) && !is_projection("head.weight", true));
        for module in ["attn.wkv", "attn.indexer.wq_b", "ffn.experts.0.w2", "ffn.shared_experts.w1"] {
            assert!(is_projection(&format!("layers.7.{module}.weight"), true), "{module}");
        }
        for module in ["attn.compressor.wkv", "attn.indexer.compressor.wkv", "ffn.gate", "attn.kv_norm"] {
            assert!(!is_projection(&format!("layers.7.{module}.weight"), true), "{module}");
        }
    }

    #[test]
    fn files_end_before_they_are_too_large() {
        let item = |name: &str, size: usize| {
            let values = Values::Table { below: 2 };
            Item { name: name.into(), shape: vec![1, size], values, how: How::Plain(Dtype::I64) }
        };
        let items = [item("a", 2), item("b", 1), item("c", 2), item("d", 9), item("e", 1)];
        let shards = assign(&items, 24);
        let names: Vec<Vec<&str>> =
            shards.iter().map(|shard| shard.iter().map(|item| item.name.as_str()).collect()).collect();
        assert_eq!(names, [vec!["a", "b"], vec!["c"], vec!["d"], vec!["e"]]);
        assert_eq!((shard_name(0, 1), shard_name(1, 4)), (SINGLE.into(), "model-00002-of-00004.safetensors".into()));
    }

    /// Published files have headers of megabytes.
    #[test]
    fn headers_of_any_size_are_padded() {
        for count in [1, 2, 3, 2000] {
            let item = |number: usize| {
                let (name, values) = (format!("model.layers.{number}"), Values::Table { below: 2 });
                Item { name, shape: vec![1, 1], values, how: How::Plain(Dtype::I64) }
            };
            let items: Vec<Item> = (0..count).map(item).collect();
            let header = header(&items.iter().collect::<Vec<_>>());
            assert_eq!(header.len() % 8, 0);
            assert!(count < 2000 || header.len() > usize::from(u16::MAX), "{} bytes", header.len());
            let tensors: Value = serde_json::from_str(&header).expect("JSON and spaces");
            assert_eq!(tensors.as_object().map(Map::len), Some(count + 1));
        }
    }
}
