//! [`WeightBlocks`]: codes of 8 and 4 bits, and a scale for each block of them, as published files have them.

#[cfg(feature = "flex")]
use burn::backend::{Flex, tensor::IntTensor};
use burn::module::{Module, Param};
use burn::tensor::{DType, Int, Tensor};
#[cfg(feature = "_gpu")]
use {
    burn_cubecl::tensor::CubeTensor,
    mla_kernels::linear::{BlockLayout, PackedArg, WeightArg},
};

use super::module::param;
#[cfg(feature = "flex")]
use super::module::param_of_call;
use crate::MlaError;
use crate::check::{Check, FLOATS};
#[cfg(feature = "flex")]
use crate::reference::tensor;

/// A format of codes in blocks.
///
/// Sources: OCP 8-bit floating point specification 1.0, table 1 (E4M3); OCP microscaling specification 1.0, sections 5.3 (E2M1) and
/// 5.4 (E8M0).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockFormat {
    /// E4M3, and an f32 scale for every 128 columns of some rows.
    Fp8,
    /// E2M1, and an E8M0 scale for every 32 columns of a row.
    Fp4,
}

impl BlockFormat {
    /// Columns of a block.
    pub fn block_columns(self) -> usize {
        match self {
            Self::Fp8 => 128,
            Self::Fp4 => 32,
        }
    }

    /// Codes in a byte.
    pub fn codes_per_byte(self) -> usize {
        match self {
            Self::Fp8 => 1,
            Self::Fp4 => 2,
        }
    }

    /// Scales in a word.
    fn scales_per_word(self) -> usize {
        match self {
            Self::Fp8 => 1,
            Self::Fp4 => 4,
        }
    }
}

/// The parts of a weight of a [`BlockFormat`], for [`Weight::from_blocks`](crate::Weight::from_blocks) and
/// [`StackedWeight::from_blocks`](crate::StackedWeight::from_blocks).
#[derive(Debug, Clone)]
pub struct WeightBlocks {
    /// Which format.
    pub format: BlockFormat,
    /// i32 words: the codes of all rows one after the other, matrix after matrix, the first of a word in its low bits; what is
    /// missing of the last word is anything. None is a NaN.
    pub codes: Tensor<1, Int>,
    /// i32 words: of each matrix rows of blocks, `[ceil(out / block_rows), ceil(in / columns of a block)]`. FP8: the bits of an f32
    /// each. FP4: E8M0 codes, four in a word, of all matrices without gaps.
    pub scales: Tensor<1, Int>,
    /// Rows of a block: a power of two, 1 in FP4. Every matrix begins with a block.
    pub block_rows: usize,
    /// Of the elements that it stands for, to which products of code and scale are rounded: f32, f16 or bf16.
    pub dtype: DType,
}

/// Codes and scales of matrices whose sizes are right.
#[derive(Module, Debug)]
pub(crate) struct Blocks {
    pub(crate) codes: Param<Tensor<1, Int>>,
    pub(crate) scales: Param<Tensor<1, Int>>,
    #[module(skip)]
    pub(crate) packing: Packing,
}

/// What codes and scales are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packing {
    pub(crate) format: BlockFormat,
    /// Matrices, rows of each, columns.
    pub(crate) dims: [usize; 3],
    /// The number of the first of these matrices among all that the words have; on a GPU 0.
    pub(crate) first: usize,
    pub(crate) block_rows: usize,
    pub(crate) dtype: DType,
}

impl Packing {
    /// Rows and columns, and how many matrices where they are stacked.
    pub(crate) fn dims<const D: usize>(&self) -> [usize; D] {
        std::array::from_fn(|axis| self.dims[3 - D + axis])
    }

    /// Elements that it stands for.
    pub(crate) fn len(&self) -> usize {
        self.dims.iter().product()
    }

    /// Blocks of a row.
    pub(crate) fn across(&self) -> usize {
        self.dims[2].div_ceil(self.format.block_columns())
    }

    /// Blocks of a matrix.
    pub(crate) fn per_matrix(&self) -> usize {
        self.dims[1].div_ceil(self.block_rows) * self.across()
    }

    /// As kernels take it.
    #[cfg(feature = "_gpu")]
    pub(crate) fn arg(&self, codes: CubeTensor, scales: CubeTensor) -> WeightArg {
        debug_assert_eq!(self.first, 0, "on a GPU stacks are whole");
        let (rows_log2, across, matrix) = (self.block_rows.ilog2(), self.across(), self.per_matrix());
        let layout = BlockLayout { rows_log2, across, matrix };
        let packed = PackedArg { codes: codes.into_buffer_arg(), scales: scales.into_buffer_arg(), layout };
        match self.format {
            BlockFormat::Fp8 => WeightArg::Fp8(packed),
            BlockFormat::Fp4 => WeightArg::Fp4(packed),
        }
    }
}

impl Blocks {
    /// The parts of so many matrices of so many rows and columns.
    pub(crate) fn new(blocks: WeightBlocks, dims: [usize; 3]) -> Result<Self, MlaError> {
        let WeightBlocks { format, codes, scales, block_rows, dtype } = blocks;
        let check = Check::new("from_blocks", "codes", &codes)?;
        check.int("codes", &codes)?;
        check.int("scales", &scales)?;
        check.value("dtype", FLOATS.contains(&dtype), format!("{dtype:?}"), || "F32, F16 or BF16".into())?;
        let (per_byte, most_rows) = (format.codes_per_byte(), if format == BlockFormat::Fp4 { 1 } else { 1 << 16 });
        let holds = block_rows.is_power_of_two() && block_rows <= most_rows;
        check.value("block_rows", holds, block_rows, || format!("a power of two, at most {most_rows}"))?;
        let words = || format!("whole bytes in a row: a multiple of {per_byte}");
        check.value("dims", dims[2].is_multiple_of(per_byte), format!("{} columns", dims[2]), words)?;
        let len = dims.iter().try_fold(1usize, |len, &dim| len.checked_mul(dim));
        check.value("dims", len.is_some(), format!("{dims:?}"), || "as many elements as memory has".into())?;
        let packing = Packing { format, dims, first: 0, block_rows, dtype };
        let code_words = packing.len().div_ceil(4 * per_byte);
        check.dims("codes", codes.dims(), [Some(code_words)], || format!("[{code_words}] words for {dims:?}"))?;
        let scale_words = (dims[0] * packing.per_matrix()).div_ceil(format.scales_per_word());
        check.dims("scales", scales.dims(), [Some(scale_words)], || {
            format!("[{scale_words}] words for {dims:?} in blocks of {block_rows} rows")
        })?;
        Ok(Self { codes: param(codes), scales: param(scales), packing })
    }

    /// Codes and scales that a backend has in its hands.
    #[cfg(feature = "flex")]
    pub(crate) fn of_call(words: [IntTensor<Flex>; 2], packing: Packing) -> Self {
        let [codes, scales] = words.map(|words| param_of_call(tensor(words)));
        Self { codes, scales, packing }
    }

    /// Bytes of codes and scales.
    pub(crate) fn bytes(&self) -> u64 {
        let words: usize = [&self.codes, &self.scales].into_iter().map(|words| words.shape().num_elements()).sum();
        4 * words as u64
    }

    /// One of the matrices.
    #[cfg(feature = "flex")]
    pub(crate) fn get(&self, index: usize) -> Self {
        let Packing { dims: [_, rows, columns], first, .. } = self.packing;
        Self { packing: Packing { dims: [1, rows, columns], first: first + index, ..self.packing }, ..self.clone() }
    }
}
