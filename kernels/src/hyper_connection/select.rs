//! How the channels of a stream are divided among units and cubes, and which units have the matrix.

use cubecl::ir::FloatKind;
use cubecl::prelude::*;

use crate::common::launch::io_vector_size;
use crate::common::plane;
use crate::residual_norm::UNITS;

/// Channels of each stream that a cube has of a projection: 128 cubes for DeepSeek-V4-Flash's 4096, as many as a Hopper has
/// multiprocessors. They decide the order of its sums, so they are the same on every device and for any number of tokens.
pub(super) const SLICE: usize = 32;
/// Tokens of such a cube, where there are as many: they share what is loaded of the mixer.
pub(super) const TILE: usize = 8;

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

/// Channels of a row of a mixer that a unit loads at once: no more than those of a stream.
pub(super) fn weight_vector(device: &DeviceProperties, width: usize, elem: ElemType) -> usize {
    let own = choose(device, width, ElemType::Float(FloatKind::F32)).vector;
    own.min(choose(device, width, elem).vector)
}

/// Parts of the products of streams of so many channels.
pub fn slices(width: usize) -> usize {
    width.div_ceil(SLICE)
}

/// Tokens of a cube of a projection of so many streams.
pub(super) fn tile(device: &DeviceProperties, tokens: usize, streams: usize) -> usize {
    let shared = TILE * (streams * SLICE + UNITS) * size_of::<f32>();
    if tokens < TILE || shared > device.hardware.max_shared_memory_size { 1 } else { TILE }
}

/// Units of the plane that has the matrix of so many streams, a number in each unit. 0 where one unit has all of it.
pub(super) fn plane_of_matrix(device: &DeviceProperties, streams: usize) -> usize {
    let (plane, numbers) = (plane::units(device), streams * streams);
    if streams.is_power_of_two() && numbers <= plane && plane < UNITS { plane } else { 0 }
}
