//! How rows of latents and heads of queries are divided among units and cubes.

use cubecl::prelude::*;

use crate::common::launch::{RowGrid, io_vector_size};
use crate::norm_rope::{Form, Norm};

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Forms {
    pub q: Form,
    pub latent: Form,
    /// Of an indexer's heads, if there are some.
    pub index: Option<Form>,
}

impl Forms {
    /// For rows of so many vectors, of which heads have no norm and latents one without their rotary key, and cubes of so many
    /// units.
    pub fn new(q_vectors: usize, latent_vectors: usize, units: usize) -> Self {
        let form = |vectors: usize, norm| Form {
            norm,
            norm_whole_head: false,
            inverse: false,
            columns: RowGrid::columns(vectors),
            units,
        };
        Self { q: form(q_vectors, Norm::None), latent: form(latent_vectors, Norm::Weighted), index: None }
    }
}

/// Heads and rows of the cache.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    /// Channels of a head, and of a row of the cache.
    pub widths: [usize; 2],
    /// Channels of an indexer's head.
    pub index: Option<usize>,
    /// Pairs that RoPE is applied to.
    pub pairs: usize,
    /// Of whole heads.
    pub q_norm: Norm,
    /// Whether that of a row of the cache has the rotary key in it.
    pub norm_whole_row: bool,
}

/// How the work is divided.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub cube: CubeDim,
    /// Channels that a unit loads at once.
    pub vector: usize,
    pub forms: Forms,
}

/// For cubes of so many units.
pub(super) fn choose(device: &DeviceProperties, rows: &Rows, elem: ElemType, units: usize) -> Shape {
    let &Rows { widths: [width, cache_width], index, pairs, q_norm, norm_whole_row } = rows;
    let vector = io_vector_size(device, &[width, cache_width, index.unwrap_or(width), 2 * pairs], elem.size());
    let Forms { q, latent, .. } = Forms::new(width / vector, cache_width / vector, units);
    let index = index.map(|width| Form { columns: RowGrid::columns(width / vector), ..q });
    let q = Form { norm: q_norm, norm_whole_head: q_norm != Norm::None, ..q };
    let latent = Form { norm_whole_head: norm_whole_row, ..latent };
    Shape { cube: CubeDim::new_1d(units as u32), vector, forms: Forms { q, latent, index } }
}
