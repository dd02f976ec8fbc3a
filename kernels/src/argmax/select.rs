//! How many units go over a row. Constants here were measured; the README says where.

use cubecl::prelude::*;

use crate::common::launch::io_vector_size;

/// Units of a cube. Every runtime has this many.
const UNITS: usize = 256;
/// Units of a cube for rows that have enough for each, where the device has them: a single row has one multiprocessor.
const MANY_UNITS: usize = 1024;
/// Vectors that a unit loads before it looks at the first.
pub(super) const AHEAD: usize = 8;

/// The work of a cube.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub units: usize,
    /// Numbers that a unit loads at once.
    pub vector: usize,
}

/// For rows of so many numbers.
pub(super) fn choose(device: &DeviceProperties, width: usize, elem: ElemType) -> Shape {
    let vector = io_vector_size(device, &[width], elem.size());
    let has_many = device.hardware.max_units_per_cube as usize >= MANY_UNITS;
    let units = if has_many && width / vector >= MANY_UNITS * AHEAD { MANY_UNITS } else { UNITS };
    Shape { units, vector }
}
