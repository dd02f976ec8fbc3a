//! Weights in the formats that they are stored in, and how kernels read them. A format is a variant of [`WeightFormat`], which the rows
//! of the tables take or do not take (`select.rs`), of [`WeightArg`] and of [`WeightRows`], what a [`WeightRow`] needs of it, and a tile
//! load for `sm90`.

#[cfg(feature = "cuda")]
use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

use crate::common::launch::dummy;
#[cfg(feature = "cuda")]
use crate::common::launch::share;

/// Matrices `[outputs, inputs]`, one or a stack, in the format that they are stored in.
pub enum WeightArg {
    /// A number for each element; rows without gaps.
    Dense(BufferArg),
}

/// In which format weights are stored: what the choice of a kernel depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// A number for each element.
    Dense,
}

impl WeightArg {
    /// The format.
    pub fn format(&self) -> WeightFormat {
        match self {
            Self::Dense(_) => WeightFormat::Dense,
        }
    }

    /// No matrix.
    pub(crate) fn none(client: &Client) -> Self {
        Self::Dense(dummy(client))
    }

    /// The same once more.
    #[cfg(feature = "cuda")]
    pub(crate) fn share(&self) -> Self {
        match self {
            Self::Dense(elements) => Self::Dense(share(elements)),
        }
    }

    /// The largest of its buffers.
    pub(crate) fn largest(&self) -> &BufferArg {
        match self {
            Self::Dense(elements) => elements,
        }
    }

    /// For a kernel that reads rows.
    pub(crate) fn rows<E: Float, V: Size>(self) -> WeightRowsArgs<E, V> {
        match self {
            Self::Dense(elements) => WeightRowsArgs::Dense(DenseRowsLaunch::new(elements)),
        }
    }
}

/// Rows of weights in a kernel. Launches make `WeightRowsArgs`.
#[derive(CubeType, CubeLaunch)]
#[allow(dead_code, reason = "kernels alone have values of it")]
pub(crate) enum WeightRows<E: Float, V: Size> {
    Dense(DenseRows<E, V>),
}

#[derive(CubeType, CubeLaunch)]
pub(crate) struct DenseRows<E: Float, V: Size> {
    elements: &'static [Vector<E, V>],
}

/// Where a row is.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct WeightRow {
    /// The number of the vector that columns are counted from.
    first: usize,
}

#[cube]
impl WeightRow {
    /// Row number `row` of `vectors` each, of the matrix that starts at vector `matrix`, from vector `column` on.
    pub(crate) fn new(matrix: usize, row: usize, vectors: usize, column: usize) -> WeightRow {
        WeightRow { first: matrix + row * vectors + column }
    }
}

#[cube]
impl<E: Float, V: Size> WeightRows<E, V> {
    /// Vector number `column` of a row, from where the row is counted.
    pub(crate) fn load(&self, row: &WeightRow, column: usize) -> Vector<E, V> {
        #[comptime]
        match self {
            WeightRows::Dense(dense) => dense.elements[row.first + column],
        }
    }

    /// Starts to copy it to place `at` of shared memory.
    #[cfg(feature = "cuda")]
    pub(crate) fn copy(&self, row: &WeightRow, column: usize, to: &mut Shared<[Vector<E, V>]>, at: usize) {
        let (from, len) = (row.first + column, V::value().comptime());
        #[comptime]
        match self {
            WeightRows::Dense(dense) => {
                copy_async(&dense.elements[from..from + 1], &mut to[at..at + 1], comptime!(len as u32));
            }
        }
    }
}

/// A dense matrix, with nothing to launch.
#[cfg(feature = "offline")]
pub(crate) fn offline<E: Float, V: Size>() -> WeightRowsArgs<E, V> {
    WeightArg::Dense(crate::offline::buffer()).rows()
}
