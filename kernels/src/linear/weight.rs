//! Weights in the formats that they are stored in, and how kernels read them. A format is a variant of [`WeightFormat`], which the rows
//! of the tables take or do not take (`select.rs`), of [`WeightArg`] and of [`WeightRows`], what a [`WeightRow`] needs of it, and a tile
//! load for `sm90`. Blocks of codes are read in `packed`.

#[cfg(feature = "cuda")]
use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

#[cfg(feature = "offline")]
use super::packed::BlockLayout;
use super::packed::{Fp4Rows, Fp4RowsLaunch, Fp8Rows, Fp8RowsLaunch, PackedArg, decodes_pairs};
pub(crate) use super::weight_row::WeightRow;
use crate::common::launch::dummy;
#[cfg(feature = "cuda")]
use crate::common::launch::share;

/// Matrices `[outputs, inputs]`, one or a stack, in the format that they are stored in.
pub enum WeightArg {
    /// A number for each element; rows without gaps.
    Dense(BufferArg),
    /// E4M3 codes, four in a word, and an f32 scale for each block.
    Fp8(PackedArg),
    /// E2M1 codes, eight in a word, and an E8M0 scale for every 32 of a row, four in a word.
    Fp4(PackedArg),
}

/// In which format weights are stored: what the choice of a kernel depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// A number for each element.
    Dense,
    /// FP8 E4M3 with a scale for every 128 columns of some rows.
    Fp8,
    /// FP4 E2M1 with a power of two for every 32 columns of a row.
    Fp4,
}

impl WeightFormat {
    /// Whether there is a number for each element.
    pub fn is_dense(self) -> bool {
        match self {
            Self::Dense => true,
            Self::Fp8 | Self::Fp4 => false,
        }
    }
}

impl WeightArg {
    /// The format.
    pub fn format(&self) -> WeightFormat {
        match self {
            Self::Dense(_) => WeightFormat::Dense,
            Self::Fp8(_) => WeightFormat::Fp8,
            Self::Fp4(_) => WeightFormat::Fp4,
        }
    }

    /// Elements that it stands for, or a few more.
    pub(crate) fn elements(&self) -> usize {
        match self {
            Self::Dense(elements) => elements.len(),
            Self::Fp8(packed) => 4 * packed.codes.len(),
            Self::Fp4(packed) => 8 * packed.codes.len(),
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
            Self::Fp8(packed) => Self::Fp8(packed.share()),
            Self::Fp4(packed) => Self::Fp4(packed.share()),
        }
    }

    /// The numbers of a dense one, for kernels whose table takes no other.
    #[cfg(feature = "cuda")]
    pub(crate) fn into_dense(self) -> BufferArg {
        match self {
            Self::Dense(elements) => elements,
            Self::Fp8(_) | Self::Fp4(_) => unreachable!("the table takes dense weights only"),
        }
    }

    /// The largest of its buffers.
    pub(crate) fn largest(&self) -> &BufferArg {
        match self {
            Self::Dense(elements) => elements,
            Self::Fp8(packed) | Self::Fp4(packed) => &packed.codes,
        }
    }

    /// For a kernel that reads rows.
    pub(crate) fn rows<E: Float, V: Size>(self, client: &Client) -> WeightRowsArgs<E, V> {
        self.decoded(decodes_pairs(client))
    }

    fn decoded<E: Float, V: Size>(self, pairs: bool) -> WeightRowsArgs<E, V> {
        match self {
            Self::Dense(elements) => WeightRowsArgs::Dense(DenseRowsLaunch::new(elements)),
            Self::Fp8(packed) => {
                let PackedArg { codes, scales, layout } = packed;
                let launch = Fp8RowsLaunch::new(codes, scales, layout.rows_log2, layout.across, layout.matrix, pairs);
                WeightRowsArgs::Fp8(launch)
            }
            Self::Fp4(packed) => {
                let PackedArg { codes, scales, layout } = packed;
                WeightRowsArgs::Fp4(Fp4RowsLaunch::new(codes, scales, layout.across, layout.matrix, pairs))
            }
        }
    }
}

/// Rows of weights in a kernel. Launches make `WeightRowsArgs`.
#[derive(CubeType, CubeLaunch)]
#[allow(dead_code, reason = "kernels alone have values of it")]
pub(crate) enum WeightRows<E: Float, V: Size> {
    Dense(DenseRows<E, V>),
    Fp8(Fp8Rows),
    Fp4(Fp4Rows),
}

#[derive(CubeType, CubeLaunch)]
pub(crate) struct DenseRows<E: Float, V: Size> {
    elements: &'static [Vector<E, V>],
}

/// A vector of 8 columns as it is stored: its numbers, or codes and what tells their scale; or 16 or 32 codes. What the format lacks is zero,
/// and takes no registers.
#[cfg(feature = "cuda")]
#[derive(CubeType, Clone, Copy)]
pub(super) struct Fetched<E: Float, V: Size> {
    pub(super) values: Vector<E, V>,
    pub(super) codes: Vector<u32, Const<4>>,
    pub(super) scale: f32,
    pub(super) scale_code: u32,
}

/// 16 bytes of codes of a row as they are stored, and what tells their scales. What the format lacks is zero, and takes no registers.
#[cfg(feature = "cuda")]
#[derive(CubeType, Clone, Copy)]
pub(super) struct Codes {
    pub(super) words: Vector<u32, Const<4>>,
    /// Of FP8: the scale of the block that has them all.
    pub(super) scale: f32,
    /// Of FP4: those of four blocks, from that of the nearest multiple of 128 columns on.
    pub(super) scale_codes: u32,
}

#[cfg(feature = "cuda")]
#[cube]
impl<E: Float, V: Size> Fetched<E, V> {
    fn nothing() -> Fetched<E, V> {
        Fetched::<E, V> {
            values: Vector::new(E::from_int(0)),
            codes: Vector::new(0u32),
            scale: 0.0f32.runtime(),
            scale_code: 0u32.runtime(),
        }
    }
}

#[cube]
impl<E: Float, V: Size> WeightRows<E, V> {
    /// Vector number `column` of a row, from where the row is counted.
    pub(crate) fn load(&self, row: &WeightRow, column: usize) -> Vector<E, V> {
        #[comptime]
        match self {
            WeightRows::Dense(dense) => dense.elements[row.first + column],
            WeightRows::Fp8(packed) => packed.load::<E, V>(row, column),
            WeightRows::Fp4(packed) => packed.load::<E, V>(row, column),
        }
    }

    /// The same before it is decoded: several of these are under way at once, where decoding is not between them.
    #[cfg(feature = "cuda")]
    pub(super) fn fetch(&self, row: &WeightRow, column: usize) -> Fetched<E, V> {
        let mut fetched = Fetched::nothing();
        self.fetch_to(&mut fetched, row, column);
        fetched
    }

    /// The same where that is in the row; otherwise zeros.
    #[cfg(feature = "cuda")]
    pub(super) fn fetch_if(&self, is_there: bool, row: &WeightRow, column: usize) -> Fetched<E, V> {
        let mut fetched = Fetched::nothing();
        if is_there {
            self.fetch_to(&mut fetched, row, column);
        }
        fetched
    }

    /// 16 codes, or 32 of FP4, from a multiple of as many columns on, of a matrix in blocks, where those are in the row; otherwise zeros.
    #[cfg(feature = "cuda")]
    pub(super) fn fetch_codes(
        &self,
        is_there: bool,
        row: &WeightRow,
        column: usize,
        #[comptime] count: usize,
    ) -> Fetched<E, V> {
        let mut fetched = Fetched::nothing();
        if is_there {
            #[comptime]
            match self {
                WeightRows::Dense(_) => {}
                WeightRows::Fp8(packed) => {
                    fetched.codes = packed.words_of_16(row, column);
                    fetched.scale = packed.scale::<V>(row, column);
                }
                WeightRows::Fp4(packed) => {
                    if comptime!(count == crate::linear::FP4_COLUMNS) {
                        fetched.codes = packed.words_of_32(row, column);
                    } else {
                        let words = packed.words_of_16(row, column);
                        fetched.codes.insert(0usize, words.extract(0usize));
                        fetched.codes.insert(1usize, words.extract(1usize));
                    }
                    fetched.scale_code = packed.scale_code::<V>(row, column);
                }
            }
        }
        fetched
    }

    /// In which format the matrix is stored.
    #[cfg(feature = "cuda")]
    pub(super) fn format(&self) -> comptime_type!(WeightFormat) {
        #[comptime]
        match self {
            WeightRows::Dense(_) => comptime!(WeightFormat::Dense),
            WeightRows::Fp8(_) => comptime!(WeightFormat::Fp8),
            WeightRows::Fp4(_) => comptime!(WeightFormat::Fp4),
        }
    }

    /// 16 bytes of codes of a matrix in blocks, whose rows have a multiple of 128 columns, where those are in the row; otherwise zeros.
    /// `row` and `column` begin with 16 bytes each, so that where the row is need not be computed again for each column.
    #[cfg(feature = "cuda")]
    pub(super) fn codes_if(&self, is_there: bool, row: &WeightRow, column: usize) -> Codes {
        let mut codes = Codes { words: Vector::new(0u32), scale: 0.0f32.runtime(), scale_codes: 0u32.runtime() };
        if is_there {
            #[comptime]
            match self {
                WeightRows::Dense(_) => {}
                WeightRows::Fp8(packed) => {
                    codes.words = packed.sixteen(row.first / 2 + column / 2);
                    codes.scale = packed.scale::<V>(row, column);
                }
                WeightRows::Fp4(packed) => {
                    codes.words = packed.thirty_two(row.first / 4 + column / 4);
                    codes.scale_codes = packed.scale_codes::<V>(row, column);
                }
            }
        }
        codes
    }

    #[cfg(feature = "cuda")]
    fn fetch_to(&self, fetched: &mut Fetched<E, V>, row: &WeightRow, column: usize) {
        #[comptime]
        match self {
            WeightRows::Dense(dense) => fetched.values = dense.elements[row.first + column],
            WeightRows::Fp8(packed) => {
                let words = packed.words(row, column);
                fetched.codes.insert(0usize, words.extract(0usize));
                fetched.codes.insert(1usize, words.extract(1usize));
                fetched.scale = packed.scale::<V>(row, column);
            }
            WeightRows::Fp4(packed) => {
                fetched.codes.insert(0usize, packed.word(row, column));
                fetched.scale_code = packed.scale_code::<V>(row, column);
            }
        }
    }

    /// What has been fetched of a matrix in this format.
    #[cfg(feature = "cuda")]
    pub(super) fn decode(&self, fetched: &Fetched<E, V>) -> Vector<E, V> {
        #[comptime]
        match self {
            WeightRows::Dense(_) => fetched.values,
            WeightRows::Fp8(packed) => {
                let mut words = Vector::<u32, Const<2>>::new(fetched.codes.extract(0usize));
                words.insert(1usize, fetched.codes.extract(1usize));
                packed.decode::<E, V>(words, fetched.scale)
            }
            WeightRows::Fp4(packed) => packed.decode::<E, V>(fetched.codes.extract(0usize), fetched.scale_code),
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
            // Codes are decoded on the way to registers: the table has no such launch.
            WeightRows::Fp8(_) => {}
            WeightRows::Fp4(_) => {}
        }
    }
}

/// A dense matrix, with nothing to launch.
#[cfg(feature = "offline")]
pub(crate) fn offline<E: Float, V: Size>() -> WeightRowsArgs<E, V> {
    WeightArg::Dense(crate::offline::buffer()).decoded(true)
}

/// The format of the weights of a kernel in the offline list, by its name.
#[cfg(feature = "offline")]
pub(crate) fn format_of(name: &str) -> WeightFormat {
    match name {
        _ if name.ends_with(".fp8") => WeightFormat::Fp8,
        _ if name.ends_with(".fp4") => WeightFormat::Fp4,
        _ => WeightFormat::Dense,
    }
}

/// Codes and scales of rows of so many channels, for a map of them.
#[cfg(feature = "offline")]
pub(crate) fn offline_blocks(format: WeightFormat, inputs: usize) -> WeightArg {
    let (codes, scales) = (crate::offline::buffer(), crate::offline::buffer());
    let (rows_log2, columns) =
        if format == WeightFormat::Fp4 { (0, super::FP4_COLUMNS) } else { (7, super::FP8_COLUMNS) };
    let across = inputs / columns;
    let packed = PackedArg { codes, scales, layout: BlockLayout { rows_log2, across, matrix: 32 * across } };
    if format == WeightFormat::Fp4 { WeightArg::Fp4(packed) } else { WeightArg::Fp8(packed) }
}

/// Codes and scales, with nothing to launch.
#[cfg(feature = "offline")]
pub(crate) fn offline_packed<E: Float, V: Size>(format: WeightFormat) -> WeightRowsArgs<E, V> {
    let packed = || PackedArg {
        codes: crate::offline::buffer(),
        scales: crate::offline::buffer(),
        layout: BlockLayout::default(),
    };
    match format {
        WeightFormat::Dense => offline(),
        WeightFormat::Fp8 => WeightArg::Fp8(packed()).decoded(true),
        WeightFormat::Fp4 => WeightArg::Fp4(packed()).decoded(true),
    }
}
