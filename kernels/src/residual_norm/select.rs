//! How a row is divided among the units of its cube.

use cubecl::prelude::*;

use crate::common::launch::io_vector_size;

/// Units of a cube. Every runtime has this many. The order of a row's sum of squares depends on it, here and wherever else it is
/// computed.
pub(crate) const UNITS: usize = 256;

/// The work of a cube.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub cube: CubeDim,
    /// Channels that a unit loads at once.
    pub vector: usize,
    /// Vectors of a row.
    pub vectors: usize,
}

/// For rows of so many channels.
pub(super) fn choose(device: &DeviceProperties, width: usize, elem: ElemType) -> Shape {
    let vector = io_vector_size(device, &[width], elem.size());
    Shape { cube: CubeDim::new_1d(UNITS as u32), vector, vectors: width / vector }
}
