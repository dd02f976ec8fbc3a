//! How the channels of a stream are divided among units, and which of them have the matrix.

use cubecl::prelude::*;

use crate::common::launch::io_vector_size;
use crate::common::plane;
use crate::residual_norm::UNITS;

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

/// Units of the plane that has the matrix of so many streams, a number in each unit. 0 where one unit has all of it.
pub(super) fn plane_of_matrix(device: &DeviceProperties, streams: usize) -> usize {
    let (plane, numbers) = (plane::units(device), streams * streams);
    if streams.is_power_of_two() && numbers <= plane && plane < UNITS { plane } else { 0 }
}
