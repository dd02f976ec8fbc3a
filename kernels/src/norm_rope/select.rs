//! How heads are divided among units.

use cubecl::prelude::*;

use super::Norm;
use crate::common::launch::RowGrid;

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    pub norm: Norm,
    pub norm_whole_head: bool,
    pub inverse: bool,
    /// Units of a head.
    pub columns: usize,
    /// Units of a cube.
    pub units: usize,
}

impl Form {
    /// Heads of a cube.
    pub fn heads(&self) -> usize {
        self.units / self.columns
    }

    /// Cubes for so many heads.
    pub fn cubes(&self, heads: usize) -> usize {
        heads.div_ceil(self.heads())
    }
}

/// What becomes of a head, and to how many of its channels RoPE is not applied, and to how many it is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Heads {
    pub norm: Norm,
    pub norm_whole_head: bool,
    pub inverse: bool,
    pub parts: [usize; 2],
    pub elem: ElemType,
}

/// How the work is divided.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub form: Form,
    /// Units of a head, and heads.
    pub cube: CubeDim,
    /// Channels that a unit loads at once.
    pub vector: usize,
}

/// For at least one head.
pub(super) fn choose(device: &DeviceProperties, heads: &Heads) -> Shape {
    let &Heads { norm, norm_whole_head, inverse, parts, elem } = heads;
    let (cube, vector) = RowGrid::cube(device, &parts, elem.size());
    let form = Form { norm, norm_whole_head, inverse, columns: cube.x as usize, units: cube.num_elems() as usize };
    Shape { form, cube, vector }
}
