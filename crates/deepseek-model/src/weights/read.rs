//! From the bytes of mapped files to one tensor on a device.

use std::borrow::Cow;
use std::ops::Range;

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData, s};
use half::{bf16, f16};
use safetensors::Dtype;

use super::Checkpoint;
use super::codes::BlockWeight;
use super::numbers::{Weight, append, window};
use super::stored::Stored;
use crate::WrongQuantization;
use crate::parallel::Part;

/// Matrices of one shape in the files, and which part of each is read.
pub(super) struct Matrices<'s, 'a> {
    pub(super) checkpoint: &'s Checkpoint,
    pub(super) stored: &'s [Stored<'a>],
    pub(super) each: &'s [usize],
    pub(super) part: &'s Part,
}

impl Matrices<'_, '_> {
    pub(super) fn columns(&self) -> usize {
        self.each.last().copied().unwrap_or(1).max(1)
    }

    pub(super) fn is_whole(&self) -> bool {
        self.part.shape(self.each) == self.each
    }

    /// The bytes of plain numbers.
    fn plain(&self, stored: &Stored<'_>) -> Cow<'_, [u8]> {
        let bytes = self.checkpoint.bytes(stored.entry);
        if self.is_whole() {
            return bytes.into();
        }
        let ([rows, columns], size) = (self.part.window(self.each), stored.entry.dtype.bitsize() / 8);
        window(bytes.into(), self.columns() * size, rows, columns.start * size..columns.end * size)
    }

    /// The numbers of one of them where they are codes with scales; `None` for plain ones.
    ///
    /// # Errors
    /// As [`Stored::blocks`]; all of the tensor is looked at.
    pub(super) fn blocks(
        &self,
        stored: &Stored<'_>,
        dtype: FloatDType,
    ) -> Result<Option<BlockWeight<'_>>, WrongQuantization> {
        let weight = stored.blocks(self.checkpoint, self.columns(), dtype)?;
        Ok(weight.map(|weight| match self.is_whole() {
            true => weight,
            false => weight.window(self.part.window(self.each)),
        }))
    }
}

/// A tensor as it fills up, matrix after matrix. Flat, since GPUs pad the rows of matrices, and a padded matrix would be copied in
/// every step that uses it.
pub(super) struct Filling {
    device: Device,
    dtype: FloatDType,
    /// Rows of a matrix, and their columns.
    size: [usize; 2],
    count: usize,
    all: Option<Tensor<1>>,
}

impl Filling {
    /// For these matrices, in `dtype`.
    pub(super) fn new(matrices: &Matrices<'_, '_>, device: &Device, dtype: FloatDType) -> Self {
        let size = matrices.part.window(matrices.each).map(|range| range.len());
        Self { device: device.clone(), dtype, size, count: matrices.stored.len(), all: None }
    }

    /// Takes in matrix number `number`: its blocks, or its plain numbers.
    pub(super) fn take(&mut self, number: usize, matrices: &Matrices<'_, '_>, blocks: Option<BlockWeight<'_>>) {
        let [rows, columns] = self.size;
        match blocks {
            None => {
                let stored = &matrices.stored[number];
                let data = host_data(&matrices.plain(stored), stored.entry.dtype, rows * columns, self.dtype);
                let part = Tensor::from_data(data, (&self.device, DType::from(self.dtype)));
                self.put(number, 0..rows, part);
            }
            Some(weight) => weight.parts().for_each(|at| {
                let part = weight.decode(at.clone(), &self.device, self.dtype);
                self.put(number, at.clone(), part.reshape([at.len() * columns]));
            }),
        }
    }

    fn put(&mut self, number: usize, at: Range<usize>, part: Tensor<1>) {
        let ([rows, columns], count) = (self.size, self.count);
        if at.len() == rows * count {
            self.all = Some(part);
            return;
        }
        let empty = || Tensor::empty([rows * count * columns], (&self.device, DType::from(self.dtype)));
        let whole = self.all.take().unwrap_or_else(empty);
        let first = number * rows;
        // The tensor has no other handle, so that this writes in place.
        self.all = Some(whole.slice_assign(s![(first + at.start) * columns..(first + at.end) * columns], part));
    }

    /// What it has become.
    pub(super) fn finish(self) -> Option<Tensor<1>> {
        self.all
    }
}

/// Plain numbers, converted to `dtype`.
fn host_data(bytes: &[u8], stored: Dtype, len: usize, dtype: FloatDType) -> TensorData {
    fn converted<T: Weight>(bytes: &[u8], stored: Dtype, len: usize) -> TensorData {
        let mut values = Vec::<T>::with_capacity(len);
        append(&mut values, bytes, stored);
        TensorData::new(values, [len])
    }
    match dtype {
        FloatDType::F16 => converted::<f16>(bytes, stored, len),
        FloatDType::BF16 => converted::<bf16>(bytes, stored, len),
        _ => converted::<f32>(bytes, stored, len),
    }
}
