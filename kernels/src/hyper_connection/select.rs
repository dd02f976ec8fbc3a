//! How the channels of a stream are divided among units.

use cubecl::prelude::*;

use crate::common::launch::io_vector_size;

/// A stream in vectors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    /// Channels that a unit loads at once.
    pub vector: usize,
    /// Vectors of a stream.
    pub vectors: usize,
}

/// For streams of so many channels.
pub(super) fn choose(device: &DeviceProperties, width: usize, elem: ElemType) -> Shape {
    let vector = io_vector_size(device, &[width], elem.size());
    Shape { vector, vectors: width / vector }
}
