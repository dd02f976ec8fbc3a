//! Tensors from a loader in other shapes. In place of those that are not there, there are placeholders.

use burn::tensor::Tensor;

use super::{WeightLoader, placeholder};

impl WeightLoader<'_> {
    /// A tensor from this loader in another shape. A placeholder stays one.
    pub fn reshape<const D: usize, const E: usize>(&self, tensor: Tensor<D>, shape: [usize; E]) -> Tensor<E> {
        match self.gives_placeholders() {
            true => placeholder(shape, &self.device, tensor.dtype()),
            false => tensor.reshape(shape),
        }
    }

    /// Tensors from this loader, the rows of one behind those of another. Placeholders give one.
    pub(crate) fn cat<const D: usize>(&self, tensors: Vec<Tensor<D>>) -> Tensor<D> {
        match self.gives_placeholders() {
            true => {
                let (mut shape, dtype) = (tensors[0].dims(), tensors[0].dtype());
                shape[0] = tensors.iter().map(|tensor| tensor.dims()[0]).sum();
                placeholder(shape, &self.device, dtype)
            }
            false => Tensor::cat(tensors, 0),
        }
    }

    /// A tensor from this loader, row after row in memory. A placeholder stays one.
    pub(crate) fn contiguous<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        match self.gives_placeholders() {
            true => tensor,
            false => contiguous(tensor),
        }
    }

    /// Whether tensors are placeholders, or some may be.
    pub(crate) fn gives_placeholders(&self) -> bool {
        self.listing.is_some() || !self.report.is_empty()
    }
}

/// The tensor row after row in memory.
pub(crate) fn contiguous<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    let (shape, len) = (tensor.dims(), tensor.shape().num_elements());
    tensor.reshape([len]).reshape(shape)
}
