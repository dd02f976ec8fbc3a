//! Whether norm and products are one launch, and how it divides the work. Constants here were measured; the README of `linear`
//! says where.

use cubecl::prelude::*;

use crate::common::launch::io_vector_size;
use crate::linear::{FEW_OUTPUTS, UNITS as COLUMNS, has_many_units};
use crate::residual_norm::UNITS;

/// Outputs of a cube.
pub(super) const OUTPUTS: usize = UNITS / COLUMNS;
/// Rows up to which a launch is dearer than the same norm in every cube of a row.
const FEW_ROWS: usize = 8;

/// What the choice depends on.
#[derive(Debug, Clone, Copy)]
pub struct NormLinearSizes {
    /// Rows.
    pub rows: usize,
    /// Channels.
    pub width: usize,
    /// Outputs.
    pub outputs: usize,
    /// Of the rows: f32, f16 or bf16.
    pub elem: ElemType,
}

/// Whether [`launch`](super::launch) takes matrices of these sizes, and is worth it.
pub fn supported(client: &Client, sizes: &NormLinearSizes) -> bool {
    let &NormLinearSizes { rows, width, outputs, elem } = sizes;
    // Beside the row there are sums.
    let shared = width * elem.size() + (2 * UNITS + COLUMNS) * size_of::<f32>();
    let hardware = &client.properties().hardware;
    // The same order of sums as in a launch apart.
    let alike = outputs <= FEW_OUTPUTS && !has_many_units(width, outputs);
    rows <= FEW_ROWS && alike && shared <= hardware.max_shared_memory_size
}

/// The work of a cube: some outputs of a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub cube: CubeDim,
    /// Channels that a unit loads at once, of rows and of weights.
    pub vector: usize,
    pub weight_vector: usize,
}

/// For rows of so many channels.
pub(super) fn choose(device: &DeviceProperties, width: usize, elem: ElemType) -> Shape {
    let [vector, weight_vector] = [elem.size(), size_of::<f32>()].map(|size| io_vector_size(device, &[width], size));
    Shape { cube: CubeDim::new_2d(COLUMNS as u32, OUTPUTS as u32), vector, weight_vector }
}
