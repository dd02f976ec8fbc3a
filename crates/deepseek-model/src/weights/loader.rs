//! From mapped bytes to tensors on a device, one at a time.

use std::collections::HashSet;

use burn::tensor::{DType, Device, Element, FloatDType, Int, Tensor, TensorData};
use half::{bf16, f16};
use safetensors::Dtype;

use super::v4_names::transformers_name;
use super::{Checkpoint, Entry};
use crate::config::DeepseekV3Config;
use crate::{ModelError, Result, WeightReport, WrongDType, WrongShape};

/// How far loading has come, after each tensor.
#[derive(Debug, Clone, Copy)]
pub struct LoadProgress<'n> {
    /// Bytes of the files that are on the device.
    pub loaded_bytes: u64,
    /// Bytes of the files that will be, when all is done.
    pub total_bytes: u64,
    /// The tensor just loaded.
    pub tensor: &'n str,
}

/// What was loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadSummary {
    /// Tensors that the model took.
    pub tensors: usize,
    /// Their bytes in the files.
    pub bytes: u64,
    /// Tensors that were left out on purpose.
    pub skipped: usize,
}

/// Dtypes that a weight may have in the files.
const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

/// Dtypes that a table of numbers may have in the files.
const INTEGERS: [Dtype; 2] = [Dtype::I64, Dtype::I32];

/// Hands out the tensors of a checkpoint by name.
///
/// A tensor that is missing, or of the wrong shape or dtype, does not stop the loading: it is recorded, zeros take its place,
/// and [`WeightLoader::finish`] reports all of them together. Conversion to the wanted dtype happens on the host, so that
/// the device holds each tensor once.
pub struct WeightLoader<'a> {
    checkpoint: &'a Checkpoint,
    device: Device,
    dtype: FloatDType,
    progress: Option<&'a mut dyn FnMut(LoadProgress<'_>)>,
    /// From the names that are asked for to those in the files, where they differ.
    rename: Option<fn(&str) -> String>,
    asked_for: HashSet<&'a str>,
    skipped: HashSet<&'a str>,
    loaded_bytes: u64,
    total_bytes: u64,
    report: WeightReport,
}

impl<'a> WeightLoader<'a> {
    /// A loader of tensors of `dtype` (f32, f16 or bf16) onto `device`.
    pub fn new(
        checkpoint: &'a Checkpoint,
        device: &Device,
        dtype: FloatDType,
        progress: Option<&'a mut dyn FnMut(LoadProgress<'_>)>,
    ) -> Self {
        Self {
            checkpoint,
            device: device.clone(),
            dtype,
            progress,
            rename: None,
            asked_for: HashSet::new(),
            skipped: HashSet::new(),
            loaded_bytes: 0,
            total_bytes: checkpoint.total_bytes(),
            report: WeightReport { checkpoint: checkpoint.dir.clone(), ..WeightReport::default() },
        }
    }

    /// The tensor `name`, which must have `shape`, in the loader's dtype.
    pub fn tensor<const D: usize>(&mut self, name: &str, shape: [usize; D]) -> Tensor<D> {
        self.load(&[name], &shape, shape, self.dtype)
    }

    /// The tensor `name` in f32 whatever the loader's dtype is (norm weights, `e_score_correction_bias`).
    pub fn tensor_f32<const D: usize>(&mut self, name: &str, shape: [usize; D]) -> Tensor<D> {
        self.load(&[name], &shape, shape, FloatDType::F32)
    }

    /// The tensors `names` as one, stacked along a new leading axis: `shape` is that of the result,
    /// `[names.len(), ...]`, and each tensor must have `shape[1..]`.
    ///
    /// # Panics
    /// If `shape[0]` is not the number of names.
    pub fn stacked<const D: usize>(&mut self, names: &[String], shape: [usize; D]) -> Tensor<D> {
        assert_eq!(shape[0], names.len(), "the leading axis of a stack counts its tensors");
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        self.load(&names, &shape[1..], shape, self.dtype)
    }

    /// The tensor `name` of whole numbers below `below` (DeepSeek-V4's `tid2eid`), as i32.
    pub fn index_table(&mut self, name: &str, shape: [usize; 2], below: usize) -> Tensor<2, Int> {
        let options = (&self.device.clone(), DType::I32);
        let Some(entry) = self.find(name, &shape, &INTEGERS) else {
            return Tensor::<2, Int>::zeros([1; 2], options).expand(shape);
        };
        let (wide, _) = self.checkpoint.bytes(entry).as_chunks::<8>();
        let (narrow, _) = self.checkpoint.bytes(entry).as_chunks::<4>();
        let values: Vec<i64> = match entry.dtype {
            Dtype::I64 => wide.iter().map(|&bytes| i64::from_le_bytes(bytes)).collect(),
            _ => narrow.iter().map(|&bytes| i64::from(i32::from_le_bytes(bytes))).collect(),
        };
        if let Some(value) = values.iter().find(|&&value| value < 0 || value >= below as i64) {
            self.report.out_of_range.push(format!(
                "{} holds {value}, expected 0 to {}",
                self.in_files(name),
                below - 1
            ));
        }
        self.loaded_bytes += entry.len();
        let values = values.into_iter().map(|value| value as i32).collect::<Vec<_>>();
        Tensor::from_data(TensorData::new(values, shape), options)
    }

    /// Whether the files have a tensor `name`.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.checkpoint.tensors.contains_key(&self.in_files(name))
    }

    /// Reads DeepSeek-V4 files, whose tensors have published names or those of transformers' modules: from now on tensors
    /// are asked for by their published names. Leaves out the multi-token-prediction layers, and rotary frequencies.
    pub(crate) fn expect_v4(&mut self) {
        if self.checkpoint.tensors.contains_key(&transformers_name("embed.weight")) {
            self.rename = Some(transformers_name);
        }
        self.skip("rotary frequencies are computed", |name| name.ends_with("inv_freq"));
        self.skip("multi-token-prediction layers are not used", |name| {
            name.strip_prefix("model.").unwrap_or(name).starts_with("mtp.")
        });
    }

    /// The name that a tensor has in the files.
    fn in_files(&self, name: &str) -> String {
        self.rename.map_or_else(|| name.to_string(), |rename| rename(name))
    }

    /// Leaves out the tensors that `is_unused` picks, so that they are not reported as unexpected; `why` goes to the log.
    pub(super) fn skip(&mut self, why: &str, is_unused: impl Fn(&str) -> bool) {
        let mut count = 0;
        for (name, entry) in &self.checkpoint.tensors {
            if is_unused(name) && self.skipped.insert(name) {
                self.total_bytes -= entry.len();
                count += 1;
            }
        }
        if count > 0 {
            tracing::info!(count, "tensors not loaded: {why}");
        }
    }

    /// Leaves out what published checkpoints carry and inference does not use: the multi-token-prediction layers after the
    /// last layer, if `config` counts any, and rotary frequencies, which are computed.
    pub fn skip_unused(&mut self, config: &DeepseekV3Config) {
        self.skip("rotary frequencies are computed", |name| name.ends_with(".rotary_emb.inv_freq"));
        let layers = config.num_hidden_layers..config.num_hidden_layers + config.num_nextn_predict_layers;
        self.skip("multi-token-prediction layers are not used", |name| {
            layer_of(name).is_some_and(|layer| layers.contains(&layer))
        });
    }

    /// Ends the loading.
    ///
    /// # Errors
    /// [`ModelError::Weights`] listing every tensor that was missing or wrong, and every one that nobody asked for.
    pub fn finish(mut self) -> Result<LoadSummary> {
        let unknown = |name: &&str| !self.asked_for.contains(name) && !self.skipped.contains(name);
        self.report.unexpected = self.checkpoint.tensor_names().filter(unknown).map(str::to_string).collect();
        match self.report.is_empty() {
            true => {
                Ok(LoadSummary { tensors: self.asked_for.len(), bytes: self.loaded_bytes, skipped: self.skipped.len() })
            }
            false => Err(ModelError::Weights(Box::new(self.report))),
        }
    }

    fn load<const D: usize>(
        &mut self,
        names: &[&str],
        each: &[usize],
        shape: [usize; D],
        dtype: FloatDType,
    ) -> Tensor<D> {
        let options = (&self.device.clone(), DType::from(dtype));
        // Every name is looked up, so that one bad expert does not hide the next.
        let found: Vec<Option<&Entry>> = names.iter().map(|name| self.find(name, each, &FLOATS)).collect();
        let Some(parts) = found.into_iter().collect::<Option<Vec<_>>>() else {
            // One zero seen from everywhere: a wrong checkpoint must not fill the memory with placeholders.
            return Tensor::<D>::zeros([1; D], options).expand(shape);
        };
        let data = match dtype {
            FloatDType::F16 => self.gather::<f16, D>(&parts, shape),
            FloatDType::BF16 => self.gather::<bf16, D>(&parts, shape),
            _ => self.gather::<f32, D>(&parts, shape),
        };
        let tensor = Tensor::from_data(data, options);
        self.loaded_bytes += parts.iter().map(|entry| entry.len()).sum::<u64>();
        if let (Some(progress), Some(tensor)) = (&mut self.progress, names.last()) {
            progress(LoadProgress { loaded_bytes: self.loaded_bytes, total_bytes: self.total_bytes, tensor });
        }
        tensor
    }

    /// Where the tensor `name` lies, or `None` after recording what is wrong with it.
    fn find(&mut self, name: &str, shape: &[usize], dtypes: &[Dtype]) -> Option<&'a Entry> {
        let wanted = self.in_files(name);
        let Some((name, entry)) = self.checkpoint.tensors.get_key_value(&wanted) else {
            self.report.missing.push(wanted);
            return None;
        };
        self.asked_for.insert(name);
        if !dtypes.contains(&entry.dtype) {
            let expected = dtypes.iter().map(|dtype| format!("{dtype:?}")).collect::<Vec<_>>().join(" or ");
            let actual = format!("{:?}", entry.dtype);
            self.report.wrong_dtype.push(WrongDType { name: name.clone(), actual, expected });
            return None;
        }
        if entry.shape != shape {
            let (actual, expected) = (entry.shape.clone(), shape.to_vec());
            self.report.wrong_shape.push(WrongShape { name: name.clone(), actual, expected });
            return None;
        }
        Some(entry)
    }

    /// The tensors in one host buffer of element type `T`.
    fn gather<T: Weight, const D: usize>(&self, parts: &[&Entry], shape: [usize; D]) -> TensorData {
        let mut values = Vec::<T>::with_capacity(shape.iter().product());
        for entry in parts {
            append(&mut values, self.checkpoint.bytes(entry), entry.dtype);
        }
        TensorData::new(values, shape)
    }
}

/// The `N` of `model.layers.N.…`.
fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}

/// An element type that weights are converted to; a conversion to the same type keeps every bit.
trait Weight: Element {
    fn from_f32(value: f32) -> Self;
    fn from_f16(value: f16) -> Self;
    fn from_bf16(value: bf16) -> Self;
}

impl Weight for f32 {
    fn from_f32(value: f32) -> Self {
        value
    }
    fn from_f16(value: f16) -> Self {
        value.to_f32()
    }
    fn from_bf16(value: bf16) -> Self {
        value.to_f32()
    }
}

impl Weight for f16 {
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }
    fn from_f16(value: f16) -> Self {
        value
    }
    fn from_bf16(value: bf16) -> Self {
        f16::from_f32(value.to_f32())
    }
}

impl Weight for bf16 {
    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }
    fn from_f16(value: f16) -> Self {
        bf16::from_f32(value.to_f32())
    }
    fn from_bf16(value: bf16) -> Self {
        value
    }
}

/// Appends the elements in `bytes`, little-endian and of any alignment as safetensors has them.
fn append<T: Weight>(values: &mut Vec<T>, bytes: &[u8], dtype: Dtype) {
    let (pairs, _) = bytes.as_chunks::<2>();
    match dtype {
        Dtype::F16 => values.extend(pairs.iter().map(|&pair| T::from_f16(f16::from_le_bytes(pair)))),
        Dtype::BF16 => values.extend(pairs.iter().map(|&pair| T::from_bf16(bf16::from_le_bytes(pair)))),
        _ => {
            let (quads, _) = bytes.as_chunks::<4>();
            values.extend(quads.iter().map(|&quad| T::from_f32(f32::from_le_bytes(quad))));
        }
    }
}
