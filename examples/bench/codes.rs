//! Weights in blocks of codes, as checkpoints have them.

use burn::tensor::{DType, Device, Int, Tensor};
use burn_mla::ops::{BlockFormat, WeightBlocks};
use clap::ValueEnum;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use crate::data;

/// Words that are drawn, a prime number: rows repeat them, each from another one on.
const DRAWN: usize = 1_000_003;

/// The format of the codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BlocksArg {
    Fp8,
    Fp4,
}

impl BlocksArg {
    /// `count` matrices of so many rows and columns, about as large as normal numbers with deviation 0.02.
    pub fn draw(self, [count, rows, columns]: [usize; 3], dtype: DType, device: &Device) -> WeightBlocks {
        let mut rng = data::rng(columns as u64);
        let numbers = count * rows * columns;
        match self {
            Self::Fp8 => WeightBlocks {
                format: BlockFormat::Fp8,
                codes: words(numbers.div_ceil(4), device, || fp8_word(&mut rng)),
                scales: words(count * rows.div_ceil(128) * columns.div_ceil(128), device, || {
                    rng.random_range(1e-4f32..2e-4).to_bits()
                }),
                block_rows: 128,
                dtype,
            },
            Self::Fp4 => WeightBlocks {
                format: BlockFormat::Fp4,
                codes: words(numbers.div_ceil(8), device, || rng.random()),
                // Powers of two, 2^-8 and 2^-7.
                scales: words((count * rows * columns.div_ceil(32)).div_ceil(4), device, || {
                    u32::from_le_bytes([119, 120, 120, 119])
                }),
                block_rows: 1,
                dtype,
            },
        }
    }
}

/// Four codes, none of them a NaN.
fn fp8_word(rng: &mut ChaCha8Rng) -> u32 {
    let codes: [u8; 4] = rng.random();
    u32::from_le_bytes(codes.map(|code| if code & 0x7f == 0x7f { code - 1 } else { code }))
}

fn words(len: usize, device: &Device, word: impl FnMut() -> u32) -> Tensor<1, Int> {
    let drawn: Vec<i32> = std::iter::repeat_with(word).map(u32::cast_signed).take(len.min(DRAWN)).collect();
    let count = drawn.len();
    data::ints::<1>(drawn, [count], device).repeat(&[len.div_ceil(count)]).slice(0..len)
}
