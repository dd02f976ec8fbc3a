//! Which products the kernel takes, and what its code depends on. Constants here were measured; the README says where.

use super::WARP;
use crate::linear::grid::Rows;
use crate::linear::{
    BlockLayout, FP4_COLUMNS, FP8_COLUMNS, LinearForm, PairRows, Products, WeightArg, WeightFormat, Work,
};

/// Tokens of a tile: the columns of the instruction.
pub(super) const TOKENS: usize = 8;
/// Rows of the weights that a warp multiplies at a time: those of the instruction. Of a gated output half of them are of the gate.
pub(super) const WEIGHT_ROWS: usize = 16;
/// Bytes of a row in a copy: the width of the swizzle. A piece has two copies.
pub(super) const COPY_BYTES: usize = 128;
pub(super) const COPIES: usize = 2;
/// Bytes of codes of a piece.
pub(super) const PIECE_BYTES: usize = COPIES * COPY_BYTES * WEIGHT_ROWS;
/// Channels that a product takes: those of a block of FP4.
pub(super) const BLOCK: usize = FP4_COLUMNS;
/// Bytes behind a row of x, so that the rows of eight units which load at once lie in different banks.
const PAD_BYTES: usize = 64;
/// Warps of a cube, and stages of each, in the order in which they are tried: as many warps as there are registers for.
const DIVISIONS: [(usize, usize); 3] = [(16, 2), (8, 3), (8, 2)];
/// Shared memory for rows and stages: what is left beside barriers and powers of two.
const SHARED_BYTES_MAX: usize = 224 << 10;

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::linear) struct Form {
    /// [`Rows::Gather`] or [`Rows::Scatter`].
    pub rows: Rows,
    pub linear: LinearForm,
    pub format: WeightFormat,
    /// Channels of a row.
    pub inputs: usize,
    /// bf16, otherwise f16.
    pub bf16: bool,
}

impl Form {
    /// Codes in a byte.
    pub fn codes(self) -> usize {
        if self.format == WeightFormat::Fp4 { 2 } else { 1 }
    }

    /// Channels of a copy.
    pub fn copy_channels(self) -> usize {
        COPY_BYTES * self.codes()
    }

    /// Blocks of a copy.
    pub fn blocks(self) -> usize {
        self.copy_channels() / BLOCK
    }

    /// Pieces of a row. The last one may stick out: copies have zeros there.
    pub fn pieces(self) -> usize {
        self.inputs.div_ceil(COPIES * self.copy_channels())
    }

    /// Vectors of a row of x in shared memory.
    pub fn vectors(self) -> usize {
        self.pieces() * COPIES * self.copy_channels() / super::VECTOR
    }

    /// Bytes from one row of x to the next in shared memory.
    pub fn row_bytes(self) -> usize {
        self.vectors() * 16 + PAD_BYTES
    }

    /// Bytes of scales of a piece: FP4's come with the codes, a unit keeps those of FP8.
    pub fn scale_bytes(self) -> usize {
        if self.format == WeightFormat::Fp4 { WEIGHT_ROWS * self.scale_row_bytes() } else { 0 }
    }

    /// The same of a row.
    pub fn scale_row_bytes(self) -> usize {
        COPIES * self.copy_channels() / FP4_COLUMNS
    }

    /// Warps of a cube, and stages of each.
    fn division(self) -> Option<(usize, usize)> {
        let bytes = |warps: usize, stages: usize| warps * stages * (PIECE_BYTES + self.scale_bytes());
        let fits =
            |&(warps, stages): &(usize, usize)| bytes(warps, stages) + TOKENS * self.row_bytes() <= SHARED_BYTES_MAX;
        DIVISIONS.into_iter().find(fits)
    }

    pub fn warps(self) -> usize {
        self.division().map_or(0, |(warps, _)| warps)
    }

    pub fn stages(self) -> usize {
        self.division().map_or(0, |(_, stages)| stages)
    }

    pub fn units(self) -> usize {
        self.warps() * WARP
    }

    /// Outputs of a warp.
    pub fn outputs(self) -> usize {
        if self.linear.gated { WEIGHT_ROWS / 2 } else { WEIGHT_ROWS }
    }
}

/// The kernel for these, if it takes them.
pub(super) fn form(products: &Products, work: &Work, linear: LinearForm, bf16: bool) -> Option<Form> {
    let rows = match work {
        Work::Experts { rows: PairRows::Gather { .. }, .. } => Rows::Gather,
        Work::Experts { rows: PairRows::Scatter, .. } => Rows::Scatter,
        _ => return None,
    };
    let &Products { inputs, outputs, matrix_stride, .. } = products;
    let form = Form { rows, linear, format: products.weight.format(), inputs, bf16 };
    let whole = inputs * outputs * if linear.gated { 2 } else { 1 };
    let lies_well = match &products.weight {
        WeightArg::Dense(_) => false,
        // A block has all rows of a warp, or of its gates.
        WeightArg::Fp8(packed) => {
            let BlockLayout { rows_log2, across, .. } = packed.layout;
            inputs.is_multiple_of(FP8_COLUMNS) && across == inputs / FP8_COLUMNS && 1 << rows_log2 >= WEIGHT_ROWS
        }
        // Rows of scales are copied, too.
        WeightArg::Fp4(packed) => {
            let BlockLayout { across, matrix, .. } = packed.layout;
            across * FP4_COLUMNS == inputs && [across, matrix].into_iter().all(|len| len.is_multiple_of(16))
        }
    };
    let takes = lies_well && matrix_stride == whole && outputs.is_multiple_of(WEIGHT_ROWS) && form.division().is_some();
    takes.then_some(form)
}
