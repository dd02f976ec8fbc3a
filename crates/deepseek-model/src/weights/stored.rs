//! How a weight is stored: as plain numbers, or as codes with a tensor of scales beside them.

use burn::tensor::FloatDType;
use half::{bf16, f16};
use mla_ops::BlockFormat;
use safetensors::Dtype;

use super::codes::{BlockWeight, Format, find_nan, find_scale_beyond, read_scales};
use super::{Checkpoint, Entry};
use crate::config::Quantization;
use crate::parallel::Part;
use crate::{WeightReport, WrongCut, WrongDType, WrongQuantization, WrongShape};

/// Dtypes that a weight of plain numbers may have in the files.
const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

/// Numbers of a row that share a scale in DeepSeek-V4's FP4 experts.
pub(super) const FP4_BLOCK: usize = 32;
/// The same in NVFP4.
const NVFP4_BLOCK: usize = 16;

/// A weight in the files.
pub(super) struct Stored<'a> {
    pub(super) name: &'a str,
    pub(super) entry: &'a Entry,
    /// The scales, where it is quantised.
    pub(super) scale: Option<Scale<'a>>,
    /// Whether nothing of it is in the report.
    pub(super) is_sound: bool,
}

/// The scales of a quantised weight.
pub(super) struct Scale<'a> {
    pub(super) name: &'a str,
    pub(super) entry: &'a Entry,
    /// What all of them are multiplied by, in NVFP4.
    pub(super) of_tensor: Option<(&'a str, &'a Entry)>,
    /// What is for activations in 4 bits, of which there are none here.
    pub(super) unread: Option<&'a str>,
    pub(super) format: Format,
    pub(super) block: [usize; 2],
}

impl<'a> Stored<'a> {
    /// A tensor without scales.
    pub(super) fn plain(entry: &'a Entry) -> Self {
        Self { name: "", entry, scale: None, is_sound: true }
    }

    /// Looks up the weight `wanted` of shape `shape`, and its scales; what is wrong goes to the report. `None` where it is
    /// missing.
    pub(super) fn find(
        checkpoint: &'a Checkpoint,
        wanted: &str,
        shape: &[usize],
        quantization: Option<Quantization>,
        report: &mut WeightReport,
    ) -> Option<Self> {
        let (name, entry) = checkpoint.find(wanted, report)?;
        let mut stored = Self { name, entry, scale: None, is_sound: false };
        let Some((format, block)) = block_format(name, entry, quantization) else {
            stored.is_sound = match is_codes(entry.dtype) {
                true => {
                    let actual = format!("is {:?}", entry.dtype);
                    let expected = "a `quantization_config` in config.json that says so, or plain numbers".to_string();
                    report.wrong_quantization.push(WrongQuantization { name: name.into(), actual, expected });
                    false
                }
                false => {
                    report.check_dtype(name, entry.dtype, &FLOATS)
                        && report.check_shape(name, &entry.shape, shape.to_vec())
                }
            };
            return Some(stored);
        };
        let is_nvfp4 = entry.dtype == Dtype::U8;
        let scale_names = if is_nvfp4 { vec![format!("{name}_scale")] } else { scale_names(name) };
        let dtypes: &[Dtype] = if is_nvfp4 { &[Dtype::F8_E4M3] } else { &[Dtype::F32, Dtype::F8_E8M0] };
        let scale = scale_names.iter().find_map(|scale| checkpoint.tensors.get_key_value(scale));
        let [rows, columns] = *shape else {
            let actual = format!("has codes in {} axes", shape.len());
            let expected = "plain numbers, or one tensor `[out, in]` per projection".to_string();
            report.wrong_quantization.push(WrongQuantization { name: name.into(), actual, expected });
            return Some(stored);
        };
        if !columns.is_multiple_of(format.per_byte()) {
            let (actual, expected) =
                ("has two numbers in a byte".into(), format!("plain numbers for rows of {columns}"));
            report.wrong_quantization.push(WrongQuantization { name: name.into(), actual, expected });
            return Some(stored);
        }
        let shape_is_right = report.check_shape(name, &entry.shape, vec![rows, columns / format.per_byte()]);
        let scale_shape = vec![rows.div_ceil(block[0]), columns.div_ceil(block[1])];
        let Some((scale_name, scale)) = scale else {
            let expected = format!("a tensor {} {scale_shape:?} of {}", scale_names.join(" or "), listed(dtypes));
            report.wrong_quantization.push(WrongQuantization {
                name: name.into(),
                actual: "has no scales".into(),
                expected,
            });
            return Some(stored);
        };
        let scale_is_right = report.check_dtype(scale_name, scale.dtype, dtypes)
            && report.check_shape(scale_name, &scale.shape, scale_shape);
        let of_tensor = is_nvfp4.then(|| checkpoint.find(&format!("{name}_scale_2"), report)).flatten();
        let of_tensor_is_right = of_tensor.map_or(!is_nvfp4, |(name, entry)| {
            report.check_dtype(name, entry.dtype, &[Dtype::F32])
                && (entry.shape == [1] || report.check_shape(name, &entry.shape, Vec::new()))
        });
        let of_activations = format!("{}.input_scale", name.strip_suffix(".weight").unwrap_or(name));
        let unread =
            checkpoint.tensors.get_key_value(&of_activations).filter(|_| is_nvfp4).map(|(name, _)| name.as_str());
        stored.scale = Some(Scale { name: scale_name, entry: scale, of_tensor, unread, format, block });
        stored.is_sound = shape_is_right && scale_is_right && of_tensor_is_right;
        Some(stored)
    }

    /// Whether its codes and scales are finite numbers, as are their products in `dtype`; plain numbers may be anything.
    ///
    /// # Errors
    /// The first code or scale that is none, or makes one.
    pub(super) fn check(
        &self,
        checkpoint: &Checkpoint,
        columns: usize,
        dtype: FloatDType,
    ) -> Result<(), WrongQuantization> {
        let Some(scale) = &self.scale else { return Ok(()) };
        let bytes = checkpoint.bytes(self.entry);
        let wrong = |name: &str, what: String, at: usize, columns: usize, expected: &str| WrongQuantization {
            name: name.to_string(),
            actual: format!("holds {what} at [{}, {}]", at / columns, at % columns),
            expected: expected.to_string(),
        };
        if let Some(at) = find_nan(bytes, scale.format) {
            let what = format!("the NaN code {:#04x}", bytes[at]);
            return Err(wrong(self.name, what, at, columns, "codes of finite numbers"));
        }
        let of_tensor = scale.of_tensor(checkpoint);
        if !(of_tensor > 0.0 && of_tensor.is_finite()) {
            let name = scale.of_tensor.map_or(scale.name, |(name, _)| name).to_string();
            let expected = "a number above 0".to_string();
            return Err(WrongQuantization { name, actual: format!("is {of_tensor:e}"), expected });
        }
        let most = largest(dtype) / scale.format.max() / of_tensor;
        if let Some((at, value)) = find_scale_beyond(checkpoint.bytes(scale.entry), scale.entry.dtype, most) {
            let across = columns.div_ceil(scale.block[1]);
            // Blocks of zeros have 0 in NVFP4.
            let least = if scale.of_tensor.is_some() { "from 0 on" } else { "above 0" };
            let expected = format!("numbers {least} and at most {most:e}, for weights that {dtype:?} holds");
            return Err(wrong(scale.name, format!("{value:e}"), at, across, &expected));
        }
        Ok(())
    }

    /// Its codes and scales; `None` for plain numbers.
    pub(super) fn blocks<'c>(&self, checkpoint: &'c Checkpoint, columns: usize) -> Option<BlockWeight<'c>> {
        let scale = self.scale.as_ref()?;
        let (bytes, scales) = (checkpoint.bytes(self.entry).into(), scale.numbers(checkpoint));
        Some(BlockWeight { format: scale.format, bytes, scales, block: scale.block, columns })
    }

    /// What is wrong with a part of it that divides a block, if one does.
    pub(super) fn cuts_blocks(&self, shape: &[usize], part: &Part) -> Option<WrongCut> {
        let block = *self.scale.as_ref()?.block.get(part.axis)?;
        let whole = |border: usize| border.is_multiple_of(block) || border == shape[part.axis];
        if part.shape(shape) == shape || (whole(part.range.start) && whole(part.range.end)) {
            return None;
        }
        let axis = if part.axis == 0 { "rows" } else { "columns" };
        let actual = format!("is cut at its {axis} {} and {}", part.range.start, part.range.end);
        Some(WrongCut { name: self.name.into(), actual, expected: format!("whole blocks of {block}") })
    }

    /// The format in which it can stay on a device, if it can: kernels read blocks of 128 by 128 and powers of two as FP4's scales.
    pub(super) fn block_format(&self) -> Option<BlockFormat> {
        let scale = self.scale.as_ref().filter(|_| self.is_sound)?;
        match scale.format {
            Format::E4m3 => (scale.block == [128, 128]).then_some(BlockFormat::Fp8),
            Format::E2m1 => (scale.entry.dtype == Dtype::F8_E8M0).then_some(BlockFormat::Fp4),
        }
    }

    /// Its bytes in the files.
    pub(super) fn len(&self) -> u64 {
        let of_tensor = |scale: &Scale<'_>| scale.of_tensor.map_or(0, |(_, entry)| entry.len());
        self.entry.len() + self.scale.as_ref().map_or(0, |scale| scale.entry.len() + of_tensor(scale))
    }

    /// The names of its tensors.
    pub(super) fn names(&self) -> impl Iterator<Item = &'a str> {
        let scale = self.scale.as_ref();
        let of_tensor = scale.and_then(|scale| scale.of_tensor).map(|(name, _)| name);
        let unread = scale.and_then(|scale| scale.unread);
        std::iter::once(self.name).chain(scale.map(|scale| scale.name)).chain(of_tensor).chain(unread)
    }

    /// Its dtypes in the files.
    pub(super) fn dtypes(&self) -> String {
        match &self.scale {
            None => format!("{:?}", self.entry.dtype),
            Some(scale) if scale.of_tensor.is_some() => format!("F4_E2M1 x {:?} x F32", scale.entry.dtype),
            Some(scale) if scale.format == Format::E2m1 => format!("F4_E2M1 x {:?}", scale.entry.dtype),
            Some(scale) => format!("{:?} x {:?}", self.entry.dtype, scale.entry.dtype),
        }
    }
}

impl Scale<'_> {
    /// All of them.
    pub(super) fn numbers(&self, checkpoint: &Checkpoint) -> Vec<f32> {
        let mut scales = read_scales(checkpoint.bytes(self.entry), self.entry.dtype);
        let of_tensor = self.of_tensor(checkpoint);
        scales.iter_mut().for_each(|scale| *scale *= of_tensor);
        scales
    }

    /// What all of them are multiplied by.
    fn of_tensor(&self, checkpoint: &Checkpoint) -> f32 {
        let Some((_, entry)) = self.of_tensor else { return 1.0 };
        read_scales(checkpoint.bytes(entry), entry.dtype).first().copied().unwrap_or(1.0)
    }
}

/// The largest number of a dtype.
fn largest(dtype: FloatDType) -> f32 {
    match dtype {
        FloatDType::F16 => f16::MAX.to_f32(),
        FloatDType::BF16 => bf16::MAX.to_f32(),
        _ => f32::MAX,
    }
}

/// The names that the scales of a weight may have: in the files of V3 and V3.2, and in those of V4.
pub(super) fn scale_names(weight: &str) -> Vec<String> {
    let v4 = weight.strip_suffix(".weight").map(|module| format!("{module}.scale"));
    std::iter::once(format!("{weight}_scale_inv")).chain(v4).collect()
}

/// Whether a weight belongs to a routed expert.
pub(super) fn is_routed_expert(name: &str) -> bool {
    name.contains(".experts.")
}

pub(super) fn is_codes(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F8_E4M3 | Dtype::I8 | Dtype::U8)
}

/// The format and the block of a quantised weight; `None` for plain numbers and what cannot be read.
fn block_format(name: &str, entry: &Entry, quantization: Option<Quantization>) -> Option<(Format, [usize; 2])> {
    let quantization = quantization?;
    match entry.dtype {
        Dtype::F8_E4M3 => Some((Format::E4m3, quantization.block)),
        // Safetensors has no dtype for two numbers in a byte that the publishers use.
        Dtype::U8 => Some((Format::E2m1, [1, NVFP4_BLOCK])),
        Dtype::I8 if quantization.fp4_experts && is_routed_expert(name) => Some((Format::E2m1, [1, FP4_BLOCK])),
        _ => None,
    }
}

fn listed(dtypes: &[Dtype]) -> String {
    dtypes.iter().map(|dtype| format!("{dtype:?}")).collect::<Vec<_>>().join(" or ")
}

impl Checkpoint {
    /// The tensor `name`, or `None` after recording that it is missing.
    pub(super) fn find(&self, name: &str, report: &mut WeightReport) -> Option<(&str, &Entry)> {
        let found = self.tensors.get_key_value(name);
        if found.is_none() {
            report.missing.push(name.to_string());
        }
        found.map(|(name, entry)| (name.as_str(), entry))
    }
}

impl WeightReport {
    /// Whether a tensor has one of the dtypes that it may have; otherwise it is recorded.
    pub(super) fn check_dtype(&mut self, name: &str, actual: Dtype, dtypes: &[Dtype]) -> bool {
        let right = dtypes.contains(&actual);
        if !right {
            let expected = listed(dtypes);
            self.wrong_dtype.push(WrongDType { name: name.into(), actual: format!("{actual:?}"), expected });
        }
        right
    }

    /// Whether a tensor has the shape that it should have; otherwise it is recorded.
    pub(super) fn check_shape(&mut self, name: &str, actual: &[usize], expected: Vec<usize>) -> bool {
        let right = actual == expected;
        if !right {
            self.wrong_shape.push(WrongShape { name: name.into(), actual: actual.to_vec(), expected });
        }
        right
    }
}
