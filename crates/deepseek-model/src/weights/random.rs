//! Tensors for a model without a checkpoint: random, but of sizes that keep activations finite.

use std::ops::Range;
use std::sync::Mutex;

use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor, s};
use mla_ops::BlockFormat;

/// How the weights of a model without a checkpoint are drawn. The same seed gives the same weights; `From<u64>` takes a seed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RandomInit {
    pub(super) seed: u64,
    /// Of the numbers of matrices, if that is not by their width.
    std: Option<f32>,
}

/// Matrices have a variance of `1 / in`, so that a product is as large as what goes into it, however few layers a model has.
impl From<u64> for RandomInit {
    fn from(seed: u64) -> Self {
        Self { seed, std: None }
    }
}

impl RandomInit {
    /// Matrices are normally distributed around 0 with this standard deviation, as DeepSeek initialises its models with 0.006
    /// (arXiv 2412.19437, section 4.2), and others with 0.02.
    pub fn normal(seed: u64, std: f32) -> Self {
        Self { seed, std: Some(std) }
    }

    /// The scale of all blocks of a matrix with so many columns: with it, codes as [`Drawing::codes`] draws them have the standard
    /// deviation of a dense matrix; in FP4 the power of two below it.
    pub(super) fn block_scale(self, format: BlockFormat, columns: usize) -> f32 {
        let std = self.std.unwrap_or_else(|| (columns as f32).sqrt().recip());
        match format {
            BlockFormat::Fp8 => std / FP8_STD,
            BlockFormat::Fp4 => f32::from_bits((std / FP4_STD).to_bits() & 0xff80_0000),
        }
    }

    /// Of a matrix that would be uniformly distributed within this bound.
    fn distribution(self, bound: f32) -> Distribution {
        let uniform = Distribution::Uniform(f64::from(-bound), f64::from(bound));
        self.std.map_or(uniform, |std| Distribution::Normal(0.0, f64::from(std)))
    }
}

/// What a tensor of a model without a checkpoint holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Initial {
    /// The same number everywhere.
    Constant(f32),
    /// Numbers between `-bound` and `bound`.
    Uniform {
        /// The largest of them.
        bound: f32,
    },
}

impl Initial {
    /// Matrices have a variance of `1 / in`, so that a product is as large as what goes into it; norms and scales are 1, and
    /// what is added is 0.
    pub(super) fn of(name: &str, shape: &[usize]) -> Self {
        match shape {
            [_] | [] if name.ends_with("norm.weight") || name.ends_with("_scale") => Self::Constant(1.0),
            [_] | [] => Self::Constant(0.0),
            [.., columns] => Self::Uniform { bound: (3.0 / *columns as f32).sqrt() },
        }
    }
}

/// The seed of a tensor: that of the model and the name, so that a layer is the same whichever others there are.
pub(super) fn seed_of(seed: u64, name: &str) -> u64 {
    // FNV-1a.
    name.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// Random numbers per call.
const CHUNK: usize = 1 << 28;

/// A device has one generator for all threads.
static GENERATOR: Mutex<()> = Mutex::new(());

/// A tensor of matrices or vectors `each` below one another, initialised at random on the device.
pub(super) fn tensor<const D: usize>(
    init: RandomInit,
    name: &str,
    each: &[usize],
    shape: [usize; D],
    device: &Device,
    dtype: FloatDType,
) -> Tensor<D> {
    let options = (device, DType::from(dtype));
    match Initial::of(name, each) {
        Initial::Constant(value) => Tensor::full(shape, value, options),
        Initial::Uniform { bound } => {
            let _generator = GENERATOR.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            device.seed(seed_of(init.seed, name));
            let distribution = init.distribution(bound);
            flat(shape.iter().product(), |len| Tensor::random([len], distribution, options)).reshape(shape)
        }
    }
}

/// So many numbers one after the other: GPUs pad the rows of matrices, and do not generate billions of numbers per call.
fn flat(len: usize, random: impl Fn(usize) -> Tensor<1>) -> Tensor<1> {
    if len <= CHUNK {
        return random(len);
    }
    let first = random(CHUNK);
    let mut all = Tensor::empty([len], (&first.device(), first.dtype())).slice_assign(s![..CHUNK], first);
    for start in (CHUNK..len).step_by(CHUNK) {
        let end = len.min(start + CHUNK);
        all = all.slice_assign(s![start..end], random(end - start));
    }
    all
}

/// The root of the mean square of E4M3 numbers from 0.5 up to 2, each as often, and of all E2M1 numbers.
const FP8_STD: f32 = 1.158_77;
const FP4_STD: f32 = 2.926_17;

/// Tensors in blocks, below one another, and which part of them is wanted.
pub(super) struct Drawing<'d> {
    pub(super) device: &'d Device,
    pub(super) format: BlockFormat,
    /// How many, their rows and columns.
    pub(super) whole: [usize; 3],
    /// Which of them, and which rows and columns.
    pub(super) own: [Range<usize>; 3],
}

impl Drawing<'_> {
    /// Words of random codes. All of them are drawn, so that the parts of the ranks are those of one tensor.
    pub(super) fn codes(&self, init: RandomInit, name: &str) -> Tensor<1, Int> {
        let _generator = GENERATOR.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        self.device.seed(seed_of(init.seed, name));
        let per_word = 4 * self.format.codes_per_byte();
        let [count, rows, columns] = self.whole;
        let words = columns / per_word;
        let all = random_words(self.device, count * rows * words, self.format);
        let whole = [0..count, 0..rows, 0..columns];
        if self.own == whole {
            return all;
        }
        let [matrices, own_rows, own_columns] = self.own.clone();
        let own_words = own_columns.start / per_word..own_columns.end / per_word;
        let own = all.reshape([count, rows, words]).slice(s![matrices, own_rows, own_words]);
        let len = own.shape().num_elements();
        // A copy, for a view would keep the memory of the whole.
        Tensor::<1, Int>::empty([len], (self.device, DType::I32)).slice_assign(s![..len], own.reshape([len]))
    }

    /// Words that nobody has written.
    pub(super) fn unwritten(&self) -> Tensor<1, Int> {
        let len: usize = self.own.iter().map(|range| range.len()).product();
        Tensor::empty([len / (4 * self.format.codes_per_byte())], (self.device, DType::I32))
    }
}

/// Whether a part of so many columns begins and ends with a block, or with the row.
pub(super) fn whole_blocks(format: BlockFormat, columns: &Range<usize>, all: usize) -> bool {
    let whole = |border: usize| border.is_multiple_of(format.block_columns()) || border == all;
    whole(columns.start) && whole(columns.end)
}

/// The same of rows.
pub(super) fn whole_blocks_of_rows(format: BlockFormat, rows: &Range<usize>, all: usize) -> bool {
    let whole = |border: usize| format == BlockFormat::Fp4 || border.is_multiple_of(128) || border == all;
    whole(rows.start) && whole(rows.end)
}

/// So many words of codes. E4M3: numbers of both signs from 0.5 up to 2. E2M1: all.
fn random_words(device: &Device, len: usize, format: BlockFormat) -> Tensor<1, Int> {
    const WORDS: usize = CHUNK / 8;
    let half = |len| {
        let numbers = Distribution::Uniform(0.0, f64::from(1u32 << 16));
        Tensor::<1>::random([len], numbers, (device, DType::F32)).int().cast(burn::tensor::IntDType::I32)
    };
    let chunk = |len: usize| {
        let words = half(len).bitwise_left_shift_scalar(16).bitwise_or(half(len).bitwise_and_scalar(0xffff));
        match format {
            BlockFormat::Fp8 => words.bitwise_and_scalar(0x8f8f_8f8f_u32 as i32).bitwise_or_scalar(0x3030_3030),
            BlockFormat::Fp4 => words,
        }
    };
    if len <= WORDS {
        return chunk(len);
    }
    let mut all = Tensor::<1, Int>::empty([len], (device, DType::I32));
    for start in (0..len).step_by(WORDS) {
        let end = len.min(start + WORDS);
        all = all.slice_assign(s![start..end], chunk(end - start));
    }
    all
}

/// Choices `[rows, k]` of numbers below `below`, all different in a row where that is possible, all equally often. Those of a row lie
/// apart: ranks have neighbouring experts, and should have some of each row.
pub(super) fn table([rows, k]: [usize; 2], below: usize) -> Vec<i32> {
    let coprime = |step: &usize| gcd(*step, below) == 1;
    // About the golden section of the numbers.
    let step = (below * 382 / 1000..=below).find(coprime).unwrap_or(1);
    (0..rows * k).map(|place| (place % below * step % below) as i32).collect()
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
