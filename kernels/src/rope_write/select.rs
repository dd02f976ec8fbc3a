//! How rows of latents and heads of queries are divided among units and cubes.

use cubecl::prelude::*;

use crate::common::launch::{RowGrid, io_vector_size};
use crate::norm_rope::{Form, Norm};

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Forms {
    pub q: Form,
    pub latent: Form,
}

impl Forms {
    /// For rows of so many vectors, and cubes of so many units.
    pub fn new(q_vectors: usize, latent_vectors: usize, units: usize) -> Self {
        let form = |vectors: usize, norm| Form {
            norm,
            norm_whole_head: false,
            inverse: false,
            columns: RowGrid::columns(vectors),
            units,
        };
        Self { q: form(q_vectors, Norm::None), latent: form(latent_vectors, Norm::Weighted) }
    }
}

/// How the work is divided.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub cube: CubeDim,
    /// Channels that a unit loads at once.
    pub vector: usize,
    pub forms: Forms,
}

/// For heads and rows of the cache of so many channels, with RoPE applied to so many pairs.
pub(super) fn choose(device: &DeviceProperties, widths: [usize; 2], pairs: usize, elem: ElemType) -> Shape {
    let [width, cache_width] = widths;
    let vector = io_vector_size(device, &[width, cache_width, 2 * pairs], elem.size());
    let forms = Forms::new(width / vector, cache_width / vector, RowGrid::UNITS);
    Shape { cube: CubeDim::new_1d(RowGrid::UNITS as u32), vector, forms }
}
