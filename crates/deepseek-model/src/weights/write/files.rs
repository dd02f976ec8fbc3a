//! The files of a written checkpoint: safetensors, their index, and what lies beside them.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::folder::Folder;
use super::item::{Item, WriteFault};
use crate::weights::{INDEX, LoadProgress, SINGLE};
use crate::{ModelError, Result, WeightReport, files};

/// Files that a checkpoint has beside configuration and weights.
const COMPANIONS: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"];

/// The items of each file, in order.
pub(super) fn assign<'i, 'a>(items: &'i [Item<'a>], shard_bytes: u64) -> Vec<Vec<&'i Item<'a>>> {
    let mut shards: Vec<Vec<&Item>> = vec![Vec::new()];
    let mut filled = 0;
    for item in items {
        let bytes = item.bytes();
        if filled > 0 && bytes > shard_bytes.saturating_sub(filled) {
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

pub(super) fn shard_name(shard: usize, shards: usize) -> String {
    match shards {
        1 => SINGLE.to_string(),
        _ => format!("model-{:05}-of-{shards:05}.safetensors", shard + 1),
    }
}

/// Writes files, and tells how far it has come.
pub(super) struct Writer<'a> {
    pub(super) folder: Folder,
    pub(super) total_bytes: u64,
    pub(super) written: u64,
    pub(super) on_progress: &'a mut dyn FnMut(LoadProgress<'_>),
}

impl Writer<'_> {
    pub(super) fn shards(&mut self, shards: &[Vec<&Item<'_>>]) -> Result<Vec<String>> {
        let names: Vec<String> = (0..shards.len()).map(|shard| shard_name(shard, shards.len())).collect();
        for (name, items) in names.iter().zip(shards) {
            let (file, path) = self.folder.create(name)?;
            self.shard(file, &path, items)?;
        }
        Ok(names)
    }

    /// One safetensors file: the length of its header, the header, the tensors.
    fn shard(&mut self, file: File, path: &Path, items: &[&Item<'_>]) -> Result<()> {
        let needed_bytes = self.total_bytes;
        let unwritable = |source| ModelError::Write { path: path.into(), source, needed_bytes };
        let mut out = BufWriter::with_capacity(1 << 20, file);
        let header = header(items);
        out.write_all(&(header.len() as u64).to_le_bytes()).map_err(unwritable)?;
        out.write_all(header.as_bytes()).map_err(unwritable)?;
        for item in items {
            item.write(&mut out).map_err(|fault| match fault {
                WriteFault::Io(source) => unwritable(source),
                WriteFault::Weight(wrong) => ModelError::Weights(Box::new(WeightReport {
                    checkpoint: path.parent().unwrap_or(path).into(),
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

    /// The files beside the weights; all files get their names.
    pub(super) fn finish(
        mut self,
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
            self.folder.write(INDEX, format!("{index:#}").as_bytes())?;
        }
        self.folder.write("config.json", format!("{:#}", Value::from(config)).as_bytes())?;
        for name in COMPANIONS {
            let companion: PathBuf = config_path.with_file_name(name);
            if companion.exists() {
                self.folder.write(name, &files::read(&companion, "it lies beside the configuration")?)?;
            }
        }
        self.folder.finish()
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
    use safetensors::Dtype;

    use super::super::item::{How, Values};
    use super::*;

    /// A device that is always full.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_named_with_what_is_needed() {
        for rows in [4, 4_000] {
            let shape = vec![rows, 1000];
            let values = Values::random(1, "w", &shape);
            let item = Item { name: "w".into(), shape, values, how: How::Plain(Dtype::F32) };
            let dir = tempfile::tempdir().unwrap();
            let folder = Folder::prepare(dir.path(), 12_345).unwrap();
            let mut writer = Writer { folder, total_bytes: 12_345, written: 0, on_progress: &mut |_| {} };
            let full = Path::new("/dev/full");
            let error = writer.shard(File::create(full).unwrap(), full, &[&item]).unwrap_err();
            let message = error.to_string();
            assert!(matches!(error, ModelError::Write { .. }), "{message}");
            assert!(message.contains("/dev/full") && message.contains("No space left"), "{message}");
            assert!(message.contains("12345 bytes"), "{message}");
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
