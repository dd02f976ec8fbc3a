//! What a model asks for: names, shapes, and what tensors are loaded as.

use burn::tensor::{DType, FloatDType};
use mla_ops::BlockFormat;

use super::packed::{LoadAs, WeightStorage};
use super::stored::Stored;
use crate::parallel::Cut;

/// Bytes of these tensors on a device, where weights have `dtype`.
pub fn device_bytes(specs: &[WeightSpec], dtype: FloatDType) -> u64 {
    specs.iter().map(|spec| spec.len() * spec.role.dtype(dtype).size() as u64).sum()
}

/// What a tensor is loaded as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightRole {
    /// In the loader's dtype.
    Weight,
    /// In f32 whatever the loader's dtype is.
    F32,
    /// Whole numbers, as i32.
    Table,
}

impl WeightRole {
    /// The dtype on the device, where weights have `dtype`.
    pub fn dtype(self, dtype: FloatDType) -> DType {
        match self {
            Self::Weight => dtype.into(),
            Self::F32 => DType::F32,
            Self::Table => DType::I32,
        }
    }
}

/// A tensor that a model asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightSpec {
    /// Its published name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// What it is loaded as.
    pub role: WeightRole,
    /// How it is divided among ranks.
    pub cut: Cut,
}

impl WeightSpec {
    /// Numbers in it.
    pub fn len(&self) -> u64 {
        self.shape.iter().map(|&size| size as u64).product()
    }

    /// Whether it holds no number.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A tensor that was asked for, and what the files have in its place.
pub(crate) struct Listed<'a> {
    pub(crate) spec: WeightSpec,
    pub(super) stored: Option<Stored<'a>>,
    /// The format in which it may stay on a device.
    pub(super) format: Option<BlockFormat>,
}

impl Listed<'_> {
    /// Its bytes in the files, scales included; 0 where it is missing.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.stored.as_ref().map_or(0, Stored::len)
    }

    /// Its bytes on the device of one of so many ranks.
    pub(crate) fn rank_bytes(&self, load_as: LoadAs, ranks: usize) -> u64 {
        let all = self.device_bytes(load_as);
        match self.spec.cut {
            Cut::Whole => all,
            _ => all.div_ceil(ranks.max(1) as u64),
        }
    }

    /// Its bytes on a device that has all of it.
    pub(crate) fn device_bytes(&self, load_as: LoadAs) -> u64 {
        let format = self.format.filter(|_| load_as.storage == WeightStorage::Stored);
        let (Some(format), [rows, columns]) = (format, self.spec.shape.as_slice()) else {
            return self.spec.len() * self.spec.role.dtype(load_as.dtype).size() as u64;
        };
        Self::block_bytes(format, &[*rows, *columns])
    }

    /// Bytes of a matrix in blocks.
    pub(super) fn block_bytes(format: BlockFormat, &[rows, columns]: &[usize; 2]) -> u64 {
        let codes = rows as u64 * columns as u64 / format.codes_per_byte() as u64;
        let across = columns.div_ceil(format.block_columns()) as u64;
        match format {
            BlockFormat::Fp8 => codes + rows.div_ceil(128) as u64 * across * size_of::<f32>() as u64,
            BlockFormat::Fp4 => codes + rows as u64 * across,
        }
    }

    /// Its dtypes in the files.
    pub(crate) fn stored_as(&self) -> Option<String> {
        self.stored.as_ref().map(Stored::dtypes)
    }
}
