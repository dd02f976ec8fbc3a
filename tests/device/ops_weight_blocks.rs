//! Weights in blocks of codes: what they stand for, and that operations compute what they do with the same weights dequantised.
//!
//! Portable kernels read both with the same order of sums: bit for bit. The CPU's products of dense matrices are another
//! library's, and so are sums with matrix instructions: as close as the dtype is.

use burn::tensor::{DType, Device, Tensor, TensorData};
use half::{bf16, f16};
use mla_ops::Determinism::{BatchInvariant, Fast};
use mla_ops::measure::{ForcedScratch, linear_choice};
use mla_ops::{
    BlockFormat, Determinism, ExpertsMlpArgs, ExpertsMlpOptions, LinearProblem, MlaError, Path, Routing, SharedExperts,
    StackedWeight, Weight, WeightBlocks, WeightFormat, experts_mlp, explain_path, linear, linear_by_head, linear_each,
    linear_each_normed, rms_norm, swiglu,
};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype, is_hopper, is_wgpu};
use crate::ops_fixture::{bits, floats, ints, random, rng, tolerance, values};

/// Codes and scales of matrices, on the host.
pub struct Blocks {
    format: BlockFormat,
    dims: [usize; 3],
    block_rows: usize,
    /// A byte each.
    codes: Vec<u8>,
    /// f32, or exponents.
    scales: Vec<f32>,
}

impl Blocks {
    pub fn random(rng: &mut ChaCha8Rng, format: BlockFormat, dims: [usize; 3], block_rows: usize) -> Self {
        let [count, rows, columns] = dims;
        let across = columns.div_ceil(format.block_columns());
        let scales = (0..count * rows.div_ceil(block_rows) * across).map(|_| match format {
            BlockFormat::Fp8 => rng.random_range(0.001f32..0.01),
            BlockFormat::Fp4 => 2f32.powi(rng.random_range(-6..-2)),
        });
        let scales = scales.collect();
        let code = |_| match format {
            // The NaN codes are left out.
            BlockFormat::Fp8 => Some(rng.random::<u8>()).filter(|code| code & 0x7f != 0x7f).unwrap_or(0x81),
            BlockFormat::Fp4 => rng.random_range(0..16),
        };
        let codes = (0..count * rows * columns).map(code).collect();
        Self { format, dims, block_rows, codes, scales }
    }

    /// What they stand for, rounded to the dtype.
    pub fn numbers(&self, dtype: DType) -> Vec<f32> {
        let [_, rows, columns] = self.dims;
        let (across, below) = (columns.div_ceil(self.format.block_columns()), rows.div_ceil(self.block_rows));
        let number = |(at, &code): (usize, &u8)| {
            let (row, column) = (at / columns, at % columns);
            let block = (row / rows * below + row % rows / self.block_rows) * across;
            let product = value(self.format, code) * self.scales[block + column / self.format.block_columns()];
            match dtype {
                DType::F16 => f16::from_f32(product).to_f32(),
                DType::BF16 => bf16::from_f32(product).to_f32(),
                _ => product,
            }
        };
        self.codes.iter().enumerate().map(number).collect()
    }

    fn there(&self, dtype: DType, device: &Device) -> WeightBlocks {
        let words = |bytes: Vec<u8>| {
            let words: Vec<i32> = bytes
                .chunks(4)
                .map(|chunk| chunk.iter().rev().fold(0u32, |word, &byte| word << 8 | u32::from(byte)) as i32)
                .collect();
            let len = words.len();
            Tensor::<1, burn::tensor::Int>::from_data(TensorData::new(words, [len]), (device, DType::I32))
        };
        let (codes, scales) = match self.format {
            BlockFormat::Fp8 => {
                let scales = self.scales.iter().flat_map(|scale| scale.to_bits().to_le_bytes()).collect();
                (self.codes.clone(), scales)
            }
            BlockFormat::Fp4 => {
                let pairs = self.codes.chunks(2).map(|pair| pair[0] | pair[1] << 4).collect();
                (pairs, self.scales.iter().map(|scale| (scale.to_bits() >> 23) as u8).collect())
            }
        };
        let (format, block_rows) = (self.format, self.block_rows);
        WeightBlocks { format, codes: words(codes), scales: words(scales), block_rows, dtype }
    }

    pub fn stacked(&self, dtype: DType, device: &Device) -> StackedWeight {
        StackedWeight::from_blocks(self.there(dtype, device), self.dims).expect("sizes that are right")
    }

    pub fn weight(&self, dtype: DType, device: &Device) -> Weight {
        let [_, rows, columns] = self.dims;
        Weight::from_blocks(self.there(dtype, device), [rows, columns]).expect("sizes that are right")
    }
}

/// The number of a code, by the definition.
fn value(format: BlockFormat, code: u8) -> f32 {
    let (sign, exponent, fraction, bias) = match format {
        BlockFormat::Fp8 => (code >> 7, i32::from(code >> 3 & 15), f32::from(code & 7) / 8.0, 7),
        BlockFormat::Fp4 => (code >> 3, i32::from(code >> 1 & 3), f32::from(code & 1) / 2.0, 1),
    };
    let magnitude = match exponent {
        0 => fraction * 2f32.powi(1 - bias),
        _ => (1.0 + fraction) * 2f32.powi(exponent - bias),
    };
    if sign == 1 { -magnitude } else { magnitude }
}

/// Sizes that are no multiple of a block, and some that are; rows of a block that FP8 may have.
const SIZES: [([usize; 2], usize); 7] = [
    ([128, 256], 128),
    ([5, 34], 128),
    ([130, 132], 128),
    ([48, 512], 16),
    ([3, 2], 1),
    ([257, 130], 1),
    // The last blocks of rows and of channels are not whole, also where tensor cores take them.
    ([200, 416], 64),
];

pub fn block_rows(format: BlockFormat, rows: usize) -> usize {
    if format == BlockFormat::Fp4 { 1 } else { rows }
}

/// Bit for bit where the same kernel reads both.
fn assert_same<const D: usize>(actual: Tensor<D>, expected: Tensor<D>, dtype: DType, what: &str) {
    let device = actual.device();
    assert_eq!((actual.dims(), actual.dtype()), (expected.dims(), expected.dtype()), "{what}");
    if is_wgpu(&device) {
        assert!(bits(&actual) == bits(&expected), "{what}, {dtype:?} on {device:?}: other bits");
        return;
    }
    let (actual, expected) = (values(actual), values(expected));
    let largest = expected.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    for (place, (a, b)) in actual.iter().zip(&expected).enumerate() {
        let off = f64::from((a - b).abs());
        let allowed = 2.0 * tolerance(dtype) * f64::from(largest);
        assert!(off <= allowed, "{what}, {dtype:?} on {device:?}, {place}: {a} is not {b}");
    }
}

/// Every code, with scales of its own, is what the specification says.
#[rstest]
fn ops_blocks_are_their_numbers(#[values(BlockFormat::Fp8, BlockFormat::Fp4)] format: BlockFormat) {
    for_each_dtype(|device, dtype| {
        for ([rows, columns], height) in SIZES {
            let blocks = Blocks::random(&mut rng(70), format, [3, rows, columns], block_rows(format, height));
            let weight = blocks.stacked(dtype, device);
            assert_eq!((weight.format(), weight.dtype()), (WeightFormat::Blocks(format), dtype));
            let expected: Vec<u32> = blocks.numbers(dtype).into_iter().map(f32::to_bits).collect();
            let actual: Vec<u32> = values(weight.dense()).into_iter().map(f32::to_bits).collect();
            assert!(actual == expected, "{rows} x {columns} {dtype:?} on {device:?}");
        }
    });
}

/// Rows for the kernels of few and of many, and for a scratch of numbers.
#[rstest]
fn ops_linear_in_blocks(
    #[values(BlockFormat::Fp8, BlockFormat::Fp4)] format: BlockFormat,
    #[values(1, 4, 9, 64, 65)] rows: usize,
) {
    for_each_dtype(|device, dtype| {
        for ([outputs, inputs], height) in SIZES {
            let mut rng = rng(71);
            let blocks = Blocks::random(&mut rng, format, [1, outputs, inputs], block_rows(format, height));
            let (weight, what) = (blocks.weight(dtype, device), format!("{rows} x {inputs} x {outputs}"));
            let x: Tensor<2> = floats(&random(&mut rng, rows * inputs, dtype), [rows, inputs], dtype, device);
            let dense = Weight::from(weight.dense());
            let expected = linear(x.clone(), &dense, Fast).expect("legal");
            assert_same(linear(x.clone(), &weight, Fast).expect("legal"), expected, dtype, &what);
            let all = linear(x.clone(), &weight, BatchInvariant).expect("legal");
            let first = linear(x.narrow(0, 0, 1), &weight, BatchInvariant).expect("legal");
            assert!(bits(&first) == bits(&all.narrow(0, 0, 1)), "{what}: a row depends on others");
        }
    });
}

/// Many rows on Hopper, whose tensor cores take what codes become in registers: against plain loops over the numbers that they stand
/// for. Every size of tile, rows, channels and outputs that end within one, channels in parts.
#[rstest]
#[case([34, 416, 200])]
#[case([40, 256, 128])]
#[case([130, 96, 264])]
#[case([300, 160, 136])]
#[case([33, 4160, 24])]
fn ops_many_rows_in_blocks(
    #[case] sizes: [usize; 3],
    #[values((BlockFormat::Fp8, 128), (BlockFormat::Fp8, 16), (BlockFormat::Fp4, 1))] kind: (BlockFormat, usize),
    #[values(DType::BF16, DType::F16)] dtype: DType,
    #[values(false, true)] gated: bool,
) {
    for_each_device(|device| {
        if is_hopper(device) {
            assert_many_rows_in_blocks(sizes, kind, dtype, gated, device);
        }
    });
}

/// Against plain loops; `kind`: the format, and the rows of a block.
pub fn assert_many_rows_in_blocks(
    sizes: [usize; 3],
    kind: (BlockFormat, usize),
    dtype: DType,
    gated: bool,
    device: &Device,
) {
    let ([rows, inputs, outputs], (format, height)) = (sizes, kind);
    let problem = if gated { LinearProblem::gated(sizes, dtype) } else { LinearProblem::dense(sizes, dtype) };
    let problem = problem.with_weight_format(WeightFormat::Blocks(format));
    let choice = explain_path(&problem, device);
    assert_eq!(choice.path, Path::Sm90, "{choice}");

    let (mut rng, both) = (rng(74), if gated { 2 * outputs } else { outputs });
    let blocks = Blocks::random(&mut rng, format, [1, both, inputs], height);
    // Sums of small tiles take the scales of FP8 in f32, larger ones multiply rounded numbers.
    let tiles = linear_choice(&problem, device).to_string();
    let is_small = ["sm90 32 ", "sm90 64 ", "sm90 128 "].iter().any(|small| tiles.starts_with(small));
    let scales_sums = format == BlockFormat::Fp8 && is_small;
    let numbers = blocks.numbers(if scales_sums { DType::F32 } else { dtype });
    let x = random(&mut rng, rows * inputs, dtype);
    let weight = blocks.weight(dtype, device);
    let rows_there = floats(&x, [rows, inputs], dtype, device);
    let out = match gated {
        true => swiglu(rows_there, &weight, None, Fast),
        false => linear(rows_there, &weight, Fast),
    };
    let out = values(out.expect("legal"));
    for (row, x) in x.chunks(inputs).enumerate() {
        // The product with a row of the weights, and the sum of its terms' sizes.
        let dot = |of: usize| {
            let products = || x.iter().zip(&numbers[of * inputs..]).map(|(a, &b)| a * f64::from(b));
            (products().sum::<f64>(), products().map(f64::abs).sum::<f64>())
        };
        for o in 0..outputs {
            let ((first, first_size), (up, up_size)) =
                if gated { (dot(o), dot(outputs + o)) } else { (dot(o), (1.0, 0.0)) };
            let (expected, sums) = match gated {
                true => {
                    let sums = first_size * (up.abs() + 1e-3) + up_size * (first.abs() + 1e-3);
                    (first / (1.0 + (-first).exp()) * up, sums)
                }
                false => (first, first_size),
            };
            let off = (f64::from(out[row * outputs + o]) - expected).abs();
            let allowed = 2.0 * tolerance(dtype) * expected.abs() + 1e-6 * sums;
            assert!(off <= allowed, "row {row}, output {o}: off by {off:e}, allowed {allowed:e}");
        }
    }
}

#[rstest]
fn ops_linear_pair_in_blocks(#[values(1, 9, 65)] rows: usize) {
    for_each_dtype(|device, dtype| {
        let mut rng = rng(72);
        let x: Tensor<2> = floats(&random(&mut rng, rows * 160, dtype), [rows, 160], dtype, device);
        let mut weight =
            |format, outputs, height| Blocks::random(&mut rng, format, [1, outputs, 160], height).weight(dtype, device);
        let (fp8, fp4) = (weight(BlockFormat::Fp8, 144, 128), weight(BlockFormat::Fp4, 40, 1));
        let dense = Weight::from(fp8.dense());
        for [first, second] in [[&fp8, &fp4], [&fp8, &dense], [&dense, &fp4]] {
            let [a, b] = linear_each(x.clone(), [first, second], Fast).expect("legal");
            for (pair, weight) in [(a, first), (b, second)] {
                let alone = linear(x.clone(), weight, Fast).expect("legal");
                assert!(bits(&pair) == bits(&alone), "{rows} {dtype:?} on {device:?}");
            }
        }
    });
}

/// The norm of the first product takes its place: the bits are those of operations apart.
fn assert_normed<const N: usize>(
    x: &Tensor<2>,
    weights: [&Weight; N],
    (norm_weight, eps): &(Tensor<1>, f32),
    determinism: Determinism,
) {
    let [outputs, _] = weights[0].dims();
    let norm_weight = norm_weight.clone().narrow(0, 0, outputs);
    let mut apart = linear_each(x.clone(), weights, determinism).expect("legal");
    apart[0] = rms_norm(apart[0].clone(), norm_weight.clone(), *eps).expect("legal");
    let joint = linear_each_normed(x.clone(), weights, (norm_weight, *eps), determinism).expect("legal");
    assert!(joint.iter().map(bits).eq(apart.iter().map(bits)), "{outputs} of {N} for {:?} {determinism:?}", x.dims());
}

/// More weights than a launch has, in blocks and dense, whose outputs are and are not whole vectors: the bits are those of each alone. Rows of
/// 256 channels and more of codes have a kernel of their own where there is one; of 1152 all loads of dense weights start at once.
#[rstest]
fn ops_linear_each_of_both_kinds(
    #[values(1, 2, 8, 9, 33, 65)] rows: usize,
    #[values(160, 256, 1152)] inputs: usize,
    #[values(Fast, BatchInvariant)] determinism: Determinism,
) {
    for_each_dtype(|device, dtype| {
        let mut rng = rng(77);
        let x: Tensor<2> = floats(&random(&mut rng, rows * inputs, dtype), [rows, inputs], dtype, device);
        let mut weight = |format, outputs, height| {
            Blocks::random(&mut rng, format, [1, outputs, inputs], height).weight(dtype, device)
        };
        let (wide, fp4) = (weight(BlockFormat::Fp8, 144, 128), weight(BlockFormat::Fp4, 24, 1));
        let few = weight(BlockFormat::Fp8, 8, 16);
        let [dense, odd, one] = [40, 13, 1].map(|outputs| Weight::from(wide.dense().narrow(0, 0, outputs)));
        let all = [&dense, &wide, &odd, &fp4, &one, &few, &wide];
        let products = linear_each(x.clone(), all, determinism).expect("legal");
        for (number, (product, weight)) in products.into_iter().zip(all).enumerate() {
            let alone = linear(x.clone(), weight, determinism).expect("legal");
            assert_eq!(product.dims(), alone.dims());
            assert!(bits(&product) == bits(&alone), "{rows} x {inputs}, {dtype:?} on {device:?}: {number} differs");
        }
        let norm = (floats(&random(&mut rng, 144, DType::F32), [144], DType::F32, device), 1e-6);
        assert_normed(&x, [&wide, &fp4], &norm, determinism);
        assert_normed(&x, [&wide, &few, &dense, &odd, &one], &norm, determinism);
        assert_normed(&x, [&dense, &odd, &one], &norm, determinism);
        assert_normed(&x, [&odd, &dense], &norm, determinism);
        assert_normed(&x, [&dense, &wide], &norm, determinism);
        let ([], [alone]) =
            (linear_each(x.clone(), [], Fast).expect("legal"), linear_each(x, [&few], Fast).expect("legal"));
        assert_eq!(alone.dims(), [rows, 8]);
    });
}

#[rstest]
fn ops_swiglu_in_blocks(
    #[values(BlockFormat::Fp8, BlockFormat::Fp4)] format: BlockFormat,
    #[values(1, 9, 65)] rows: usize,
    #[values(None, Some(0.3))] limit: Option<f32>,
) {
    for_each_dtype(|device, dtype| {
        let mut rng = rng(73);
        let mut blocks = Blocks::random(&mut rng, format, [1, 96, 288], block_rows(format, 16));
        // Powers of two, so that all dtypes have the numbers: some kernels round them, some do not, and a gate that is clamped amplifies that.
        blocks.scales.iter_mut().for_each(|scale| *scale = scale.log2().round().exp2());
        let weight = blocks.weight(dtype, device);
        let x: Tensor<2> = floats(&random(&mut rng, rows * 288, dtype), [rows, 288], dtype, device);
        let expected = swiglu(x.clone(), &Weight::from(weight.dense()), limit, Fast).expect("legal");
        assert_same(swiglu(x, &weight, limit, Fast).expect("legal"), expected, dtype, &format!("{rows} rows"));
    });
}

#[rstest]
fn ops_linear_by_head_in_blocks(
    #[values(BlockFormat::Fp8, BlockFormat::Fp4)] format: BlockFormat,
    #[values(1, 9, 65)] rows: usize,
    #[values(0, 8)] carried: usize,
) {
    for_each_dtype(|device, dtype| {
        let mut rng = rng(74);
        let (heads, outputs, inputs) = (3, 40, 136);
        let blocks = Blocks::random(&mut rng, format, [heads, outputs, inputs], block_rows(format, 128));
        let weight = blocks.stacked(dtype, device);
        let width = inputs + carried;
        let x = floats(&random(&mut rng, rows * heads * width, dtype), [rows, heads, width], dtype, device);
        let expected = linear_by_head(x.clone(), &StackedWeight::from(weight.dense()), Fast).expect("legal");
        let actual = linear_by_head(x, &weight, Fast).expect("legal");
        assert_same(actual, expected, dtype, &format!("{rows} rows"));
    });
}

/// A token, a few, and so many that experts become numbers first: all of them at once, or one after the other.
#[rstest]
#[case(1, false)]
#[case(5, false)]
#[case(90, false)]
#[case(90, true)]
fn ops_experts_in_blocks(
    #[case] tokens: usize,
    #[case] one_by_one: bool,
    #[values([BlockFormat::Fp8, BlockFormat::Fp8], [BlockFormat::Fp4, BlockFormat::Fp8])] formats: [BlockFormat; 2],
    #[values(false, true)] shared_in_blocks: bool,
    #[values([160, 48], [256, 128])] sizes: [usize; 2],
) {
    let (experts, top_k, [hidden, width]) = (5, 2, sizes);
    let _scratch = one_by_one.then(|| ForcedScratch::new(1));
    for_each_dtype(|device, dtype| {
        let mut rng = rng(75);
        let [routed, shared] = formats;
        let stack = |rng: &mut ChaCha8Rng, dims, height| {
            Blocks::random(rng, routed, dims, block_rows(routed, height)).stacked(dtype, device)
        };
        let gate_up = stack(&mut rng, [experts, 2 * width, hidden], 16);
        let down = stack(&mut rng, [experts, hidden, width], 128);
        let mut matrix = |rows, columns| {
            let blocks = Blocks::random(&mut rng, shared, [1, rows, columns], block_rows(shared, 16));
            let weight = blocks.weight(dtype, device);
            if shared_in_blocks { weight } else { weight.dense().into() }
        };
        let shared = SharedExperts { gate_up: matrix(2 * width, hidden), down: matrix(hidden, width) };
        let chosen: Vec<i32> = (0..tokens * top_k).map(|pair| (pair * pair * 3 + pair) as i32 % 6).collect();
        let weights = random(&mut rng, tokens * top_k, DType::F32);
        let x: Tensor<2> = floats(&random(&mut rng, tokens * hidden, dtype), [tokens, hidden], dtype, device);
        let run = |gate_up: &StackedWeight, down: &StackedWeight, shared: SharedExperts| {
            let routing = Routing::given(
                ints(&chosen, [tokens, top_k], device),
                floats(&weights, [tokens, top_k], DType::F32, device),
            );
            let (x, gate_up, down) = (x.clone(), gate_up.clone(), down.clone());
            let args = ExpertsMlpArgs { x, routing, gate_up, down, shared: Some(shared) };
            experts_mlp(args, &ExpertsMlpOptions::default()).expect("legal").materialise()
        };
        let dense = SharedExperts { gate_up: shared.gate_up.dense().into(), down: shared.down.dense().into() };
        let expected = run(&gate_up.dense().into(), &down.dense().into(), dense);
        assert_same(run(&gate_up, &down, shared), expected, dtype, &format!("{tokens} tokens, {formats:?}"));
    });
}

/// What does not fit together is refused by name.
#[test]
fn ops_blocks_of_wrong_sizes_are_refused() {
    for_each_device(|device| {
        let blocks = Blocks::random(&mut rng(76), BlockFormat::Fp8, [1, 64, 256], 32);
        let refused = |change: &dyn Fn(&mut WeightBlocks), dims: [usize; 2], argument: &str| {
            let mut there = blocks.there(DType::F32, device);
            change(&mut there);
            let error = Weight::from_blocks(there, dims).expect_err("refused");
            assert!(error.to_string().contains(&format!("`{argument}`")), "{error}");
        };
        refused(&|_| {}, [64, 260], "codes");
        refused(&|it| it.block_rows = 64, [64, 256], "scales");
        refused(&|it| it.block_rows = 24, [64, 256], "block_rows");
        refused(&|it| it.format = BlockFormat::Fp4, [64, 256], "block_rows");
        refused(&|it| it.dtype = DType::I32, [64, 256], "dtype");
        let weight = blocks.weight(DType::F32, device);
        let x: Tensor<2> = Tensor::zeros([1, 255], (device, DType::F32));
        assert!(matches!(linear(x, &weight, Fast), Err(MlaError::Shape { argument: "weight", .. })));
    });
}
