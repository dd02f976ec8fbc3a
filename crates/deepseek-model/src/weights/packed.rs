//! Weights that stay in the blocks of codes in which files have them: from mapped bytes to the words that kernels read.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use mla_ops::{BlockFormat, WeightBlocks};

use super::codes::e8m0_of;
use super::read::{Filling, Matrices};
use super::stored::{Scale, Stored};
use crate::cache::KvCacheFormat;

/// How a model has those of its weights that files have in blocks of codes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WeightStorage {
    /// As the files have them, where kernels read that: E4M3 in blocks of 128 by 128, and E2M1 with E8M0 scales. They take the
    /// memory that they take in the files.
    #[default]
    Stored,
    /// Dequantised: a number of the model's dtype for each code.
    Dense,
}

/// What a model's weights become on a device, and how its caches store their rows. A dtype alone leaves blocks of weights as they are
/// stored, and caches in that dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadAs {
    /// Of activations, caches, and weights that are plain numbers: f32, f16 or bf16. What a block stands for is rounded to it.
    pub dtype: FloatDType,
    /// Of weights in blocks.
    pub storage: WeightStorage,
    /// Of the rows of caches.
    pub kv_cache: KvCacheFormat,
}

impl From<FloatDType> for LoadAs {
    fn from(dtype: FloatDType) -> Self {
        Self { dtype, storage: WeightStorage::Stored, kv_cache: KvCacheFormat::Auto }
    }
}

/// Codes and scales as they fill up, tensor after tensor of one shape.
pub(super) struct BlockFilling {
    format: BlockFormat,
    /// How many there will be, and their rows and columns.
    sizes: [usize; 3],
    codes: Filling<Int>,
    scales: Scales,
}

/// Those of all tensors so far.
enum Scales {
    /// Numbers, of which matrices may need some twice.
    Numbers(Vec<f32>),
    /// A byte each: on the device as in the files.
    Codes(Filling<Int>),
}

impl BlockFilling {
    /// For so many tensors of so many rows and columns.
    pub(super) fn new(device: &Device, format: BlockFormat, sizes: [usize; 3]) -> Self {
        let [count, rows, columns] = sizes;
        let words = |bytes: usize| Filling::new(device, DType::I32, bytes.div_ceil(4));
        let scales = match format {
            BlockFormat::Fp8 => Scales::Numbers(Vec::new()),
            BlockFormat::Fp4 => Scales::Codes(words(count * rows * columns.div_ceil(format.block_columns()))),
        };
        Self { format, sizes, codes: words(count * rows * columns / format.codes_per_byte()), scales }
    }

    /// Takes in the next one.
    pub(super) fn take(&mut self, matrices: &Matrices<'_, '_>, stored: &Stored<'_>, scale: &Scale<'_>) {
        self.codes.read(matrices.codes(stored, scale));
        match &mut self.scales {
            Scales::Numbers(scales) => scales.extend(matrices.scales(scale)),
            Scales::Codes(codes) => codes.read(matrices.scale_codes(scale)),
        }
    }

    /// What they have become, as matrices of so many rows each, and the sizes of these.
    pub(super) fn finish(self, matrix_rows: usize, dtype: FloatDType) -> Option<(WeightBlocks, [usize; 3])> {
        let [count, rows, columns] = self.sizes;
        let codes = self.codes.finish()?;
        let matrices = count * rows / matrix_rows.max(1);
        let block_rows = self.format.block_rows(rows, matrix_rows);
        let scales = match self.scales {
            // Of blocks of one row, which follow one another as rows do.
            Scales::Codes(scales) => scales.finish()?,
            Scales::Numbers(stored) => {
                let across = columns.div_ceil(self.format.block_columns());
                let of_tensor = rows.div_ceil(self.format.stored_rows());
                let rows_of_blocks = (0..matrices)
                    .flat_map(|matrix| (0..matrix_rows).step_by(block_rows).map(move |row| matrix * matrix_rows + row))
                    .map(|first| first / rows * of_tensor + first % rows / self.format.stored_rows());
                let scales = rows_of_blocks.flat_map(|block| &stored[block * across..(block + 1) * across]);
                on_device(scales.map(|scale| scale.to_bits() as i32).collect(), &codes.device())
            }
        };
        let blocks = WeightBlocks { format: self.format, codes, scales, block_rows, dtype: dtype.into() };
        Some((blocks, [matrices, matrix_rows, columns]))
    }
}

/// These words of codes, of tensors of so many rows and columns that make matrices of so many rows, with one scale for all.
pub(super) fn with_scale(
    codes: Tensor<1, Int>,
    scale: f32,
    (format, [count, rows, columns]): (BlockFormat, [usize; 3]),
    matrix_rows: usize,
    dtype: FloatDType,
) -> (WeightBlocks, [usize; 3]) {
    let matrices = count * rows / matrix_rows.max(1);
    let block_rows = format.block_rows(rows, matrix_rows);
    let blocks = matrices * matrix_rows.div_ceil(block_rows) * columns.div_ceil(format.block_columns());
    let (words, word) = match format {
        BlockFormat::Fp8 => (blocks, scale.to_bits()),
        BlockFormat::Fp4 => (blocks.div_ceil(4), u32::from(e8m0_of(scale)) * 0x0101_0101),
    };
    let scales = Tensor::full([words], word as i32, (&codes.device(), DType::I32));
    (WeightBlocks { format, codes, scales, block_rows, dtype: dtype.into() }, [matrices, matrix_rows, columns])
}

/// Rows of blocks.
trait BlockRows {
    /// In the files.
    fn stored_rows(self) -> usize;
    /// On the device, where tensors of so many rows make matrices of so many: every matrix begins with a block, and so does every
    /// tensor. What lies below another tensor has blocks of fewer rows, with the same scales.
    fn block_rows(self, rows: usize, matrix_rows: usize) -> usize;
}

impl BlockRows for BlockFormat {
    fn stored_rows(self) -> usize {
        match self {
            Self::Fp8 => 128,
            Self::Fp4 => 1,
        }
    }

    fn block_rows(self, rows: usize, matrix_rows: usize) -> usize {
        let stored = self.stored_rows();
        match rows == matrix_rows {
            true => stored,
            false => stored.min(1 << rows.trailing_zeros().min(matrix_rows.trailing_zeros()).min(16)),
        }
    }
}

fn on_device(words: Vec<i32>, device: &Device) -> Tensor<1, Int> {
    let len = words.len();
    Tensor::from_data(TensorData::new(words, [len]), (device, DType::I32))
}
