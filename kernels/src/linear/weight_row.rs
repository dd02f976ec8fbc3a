//! Where a row of a matrix is, in whatever format.

use cubecl::prelude::*;

/// Where a row is.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct WeightRow {
    /// The number of the vector that columns are counted from.
    pub(super) first: usize,
    /// The number of the matrix.
    pub(super) matrix: usize,
    /// The number of the row in it.
    pub(super) row: usize,
    /// The number of that vector in the row.
    pub(super) column: usize,
}

#[cube]
impl WeightRow {
    /// Row number `row` of `vectors` each, of matrix number `number`, which starts at vector `matrix`, from vector `column` on.
    pub(crate) fn new(number: usize, matrix: usize, row: usize, vectors: usize, column: usize) -> WeightRow {
        WeightRow { first: matrix + row * vectors + column, matrix: number, row, column }
    }

    /// [`WeightRow::new()`] of a matrix whose vectors are numbered by 32 bits.
    #[cfg(feature = "cuda")]
    pub(crate) fn within(number: usize, matrix: usize, row: u32, vectors: u32, column: u32) -> WeightRow {
        let first = matrix + usize::cast_from(row * vectors + column);
        WeightRow { first, matrix: number, row: usize::cast_from(row), column: usize::cast_from(column) }
    }
}
