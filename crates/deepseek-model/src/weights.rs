//! The safetensors files of a checkpoint folder: which tensors there are, and where their bytes lie.

mod asked;
mod codes;
mod gather;
mod loader;
mod numbers;
mod packed;
mod published;
mod random;
mod read;
mod spec;
mod stored;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_gather;
#[cfg(test)]
mod tests_packed;
#[cfg(test)]
mod tests_quantized;
#[cfg(test)]
mod tests_ranks;
mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use safetensors::tensor::Metadata;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

pub(crate) use self::loader::contiguous;
pub use self::loader::{LoadProgress, LoadSummary, WeightLoader};
pub use self::packed::{LoadAs, WeightStorage};
pub(crate) use self::published::{Published, Renaming};
pub use self::random::RandomInit;
pub(crate) use self::spec::Listed;
pub use self::spec::{WeightRole, WeightSpec, device_bytes};
pub use self::write::{WeightForm, WeightsFrom, WriteSummary, write_checkpoint};
use crate::{ModelError, Result, files};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The weights of a checkpoint folder, mapped into memory; nothing is read before a [`WeightLoader`] asks for it.
///
/// The files must not be shortened or overwritten while this lives.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    bytes: Arc<Mmap>,
}

/// Where a tensor lies.
#[derive(Debug)]
struct Entry {
    shard: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    start: usize,
    end: usize,
}

/// The part of `model.safetensors.index.json` that is read: tensor name to file name.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens `model.safetensors` of the folder `dir`, or all shards that its `model.safetensors.index.json` lists, and
    /// checks that each file is complete.
    ///
    /// # Errors
    /// [`ModelError::MissingFile`] (naming the shard and the index that lists it), [`ModelError::Json`] for the index, also one that
    /// names a file outside the folder, [`ModelError::WrongKind`] for what is no regular file (links are followed),
    /// [`ModelError::Safetensors`] for a truncated or corrupt file, [`ModelError::UnsupportedQuantization`] for a tensor of
    /// 8 bits or fewer that is neither E4M3 nor E8M0, [`ModelError::Io`].
    pub fn open(dir: &Path) -> Result<Self> {
        match Self::open_readable(dir)? {
            (checkpoint, damaged) if damaged.is_empty() => Ok(checkpoint),
            (_, mut damaged) => Err(damaged.swap_remove(0)),
        }
    }

    /// The files that can be read, and what is wrong with the others.
    pub(crate) fn open_readable(dir: &Path) -> Result<(Self, Vec<ModelError>)> {
        let mut checkpoint = Self { dir: dir.into(), shards: Vec::new(), tensors: BTreeMap::new() };
        // A link into a cache whose file is gone is missing as well, and is named.
        if dir.join(SINGLE).symlink_metadata().is_ok() {
            let damaged = checkpoint.add_shard(dir.join(SINGLE), "the weights are read from there").err();
            return Ok((checkpoint, damaged.into_iter().collect()));
        }
        let hint = format!("listed in {}; download the missing shard", dir.join(INDEX).display());
        let shards = listed_shards(dir)?;
        let damaged = shards.into_iter().filter_map(|shard| checkpoint.add_shard(dir.join(shard), &hint).err());
        let damaged = damaged.collect();
        Ok((checkpoint, damaged))
    }

    /// Names of all tensors, in alphabetical order.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Bytes of all tensors in the files.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.values().map(Entry::len).sum()
    }

    fn add_shard(&mut self, path: PathBuf, missing_hint: &str) -> Result<()> {
        let file = files::open(&path, missing_hint)?;
        // SAFETY: the mapping is only read. A file that shrinks while it is mapped would fault; the type's documentation
        // asks that this not happen, as for every reader of mapped checkpoints.
        let bytes =
            unsafe { Mmap::map(&file) }.map_err(|source| ModelError::unreadable(&path, source, missing_hint))?;
        let corrupt = |reason| ModelError::Safetensors { path: path.clone(), reason };
        let (header, metadata) = SafeTensors::read_metadata(&bytes).map_err(|error| corrupt(error.to_string()))?;
        let tensors: Vec<(String, Entry)> = entries(&metadata, self.shards.len(), size_of::<u64>() + header).collect();
        for (name, entry) in &tensors {
            if is_unsupported(entry.dtype) {
                let what = format!("tensor {name} is {:?}", entry.dtype);
                return Err(ModelError::UnsupportedQuantization { path, what });
            }
            if let Some(other) = self.tensors.get(name) {
                let other = self.shards[other.shard].path.display();
                return Err(corrupt(format!("tensor {name} is also in {other}")));
            }
        }
        // Only now: a file that is refused leaves no tensor behind.
        self.tensors.extend(tensors);
        self.shards.push(Shard { path, bytes: Arc::new(bytes) });
        Ok(())
    }

    fn bytes(&self, entry: &Entry) -> &[u8] {
        &self.shards[entry.shard].bytes[entry.start..entry.end]
    }
}

impl Entry {
    fn len(&self) -> u64 {
        (self.end - self.start) as u64
    }
}

fn listed_shards(dir: &Path) -> Result<BTreeSet<String>> {
    let path = dir.join(INDEX);
    let hint = format!("a checkpoint needs this file or {SINGLE}; download the weights in safetensors form");
    let index: Index = files::json(&path, &hint)?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    let is_inside = |shard: &&String| {
        let mut parts = Path::new(shard).components();
        parts.clone().next().is_some() && parts.all(|part| matches!(part, Component::Normal(_)))
    };
    match shards.iter().find(|shard| !is_inside(shard)) {
        None => Ok(shards),
        Some(outside) => {
            let reason = format!("`weight_map` names the file {outside:?}, expected one in the folder");
            Err(ModelError::Json { path, reason })
        }
    }
}

/// The tensors of one shard, whose data begins `data_start` bytes into the file.
fn entries(metadata: &Metadata, shard: usize, data_start: usize) -> impl Iterator<Item = (String, Entry)> {
    metadata.tensors().into_iter().map(move |(name, info)| {
        let (start, end) = info.data_offsets;
        let (start, end) = (data_start + start, data_start + end);
        (name, Entry { shard, dtype: info.dtype, shape: info.shape.clone(), start, end })
    })
}

/// Numbers of 8 bits or fewer that no published checkpoint of these models has.
fn is_unsupported(dtype: Dtype) -> bool {
    use Dtype::{F4, F6_E2M3, F6_E3M2, F8_E4M3FNUZ, F8_E5M2, F8_E5M2FNUZ};
    matches!(dtype, F4 | F6_E2M3 | F6_E3M2 | F8_E4M3FNUZ | F8_E5M2 | F8_E5M2FNUZ)
}
