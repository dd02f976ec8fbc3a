//! Tensors from a loader in other shapes. In place of those that are not there, there are placeholders.

use burn::tensor::Tensor;

use super::{WeightLoader, placeholder};

impl WeightLoader<'_> {
    /// A tensor from this loader in another shape. A placeholder stays one.
    pub fn reshape<const D: usize, const E: usize>(&self, tensor: Tensor<D>, shape: [usize; E]) -> Tensor<E> {
        match self.listing.is_some() || !self.report.is_empty() {
            true => placeholder(shape, &self.device, tensor.dtype()),
            false => tensor.reshape(shape),
        }
    }

    /// Tensors from this loader, the rows of one behind those of another. Placeholders give one.
    pub(crate) fn cat<const D: usize>(&self, tensors: Vec<Tensor<D>>) -> Tensor<D> {
        match self.listing.is_some() || !self.report.is_empty() {
            true => {
                let (mut shape, dtype) = (tensors[0].dims(), tensors[0].dtype());
                shape[0] = tensors.iter().map(|tensor| tensor.dims()[0]).sum();
                placeholder(shape, &self.device, dtype)
            }
            false => Tensor::cat(tensors, 0),
        }
    }

    /// The last rows of a matrix from this loader. A placeholder gives one.
    pub(crate) fn last_rows(&self, matrix: &Tensor<2>, count: usize) -> Tensor<2> {
        let [rows, width] = matrix.dims();
        match self.listing.is_some() || !self.report.is_empty() {
            true => placeholder([count, width], &self.device, matrix.dtype()),
            false => matrix.clone().narrow(0, rows - count, count),
        }
    }

    /// A tensor from this loader, row after row in memory. A placeholder stays one.
    pub(crate) fn contiguous<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        match self.listing.is_some() || !self.report.is_empty() {
            true => tensor,
            false => {
                let (shape, len) = (tensor.dims(), tensor.shape().num_elements());
                tensor.reshape([len]).reshape(shape)
            }
        }
    }
}
