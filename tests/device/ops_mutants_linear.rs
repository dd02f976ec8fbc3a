//! Small products of many rows that together reach all paths of the kernels for them, for `tools/mutate.sh`: Hopper's, and that with
//! the matrix instructions of a warp. With one multiprocessor the tiles are those that cases name; elsewhere others may be chosen.

use burn::tensor::DType::{BF16, F16};
use burn::tensor::{DType, Device, Tensor};
use mla_ops::Determinism::{BatchInvariant, Fast};
use mla_ops::measure::linear_choice;
use mla_ops::{
    BlockFormat, Determinism, LinearProblem, Path, StackedWeight, Weight, WeightFormat, linear, linear_by_head,
};
use rand::RngExt;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use rstest::rstest;

use crate::devices::{for_each_device, has_tiles, is_hopper};
use crate::ops_fixture::{floats, rng, rounded, values};
use crate::ops_many_rows::{assert_experts, assert_experts_of, assert_swiglu};
use crate::ops_weight_blocks::assert_many_rows_in_blocks;

/// Each size of tile; two cubes share its tokens or its weights. Fewer blocks of channels than stages, and so many that each is filled
/// three times, of several tiles; rows, channels and outputs that end within a tile.
#[rstest]
#[case([250, 72, 136], BF16, "256 x 1, shared Tokens")]
#[case([400, 328, 136], BF16, "256 x 1, shared Tokens")]
#[case([180, 72, 136], BF16, "192 x 1, shared Tokens")]
#[case([180, 456, 264], BF16, "192 x 1, shared Tokens")]
#[case([300, 72, 136], F16, "160 x 1, shared Weights")]
#[case([300, 520, 136], F16, "160 x 1, shared Weights")]
#[case([160, 72, 72], BF16, "128 x 1, shared Weights")]
#[case([200, 392, 264], BF16, "128 x 1, shared Weights")]
#[case([40, 72, 264], F16, "64 x 1, shared Tokens")]
#[case([40, 776, 264], F16, "64 x 1, shared Tokens")]
#[case([10, 72, 136], F16, "32 x 1, shared Tokens")]
#[case([20, 1032, 264], F16, "32 x 1, shared Tokens")]
fn ops_mutants_linear(#[case] sizes: [usize; 3], #[case] dtype: DType, #[case] tiles: &str) {
    on_hopper(|device| {
        assert_tiles(LinearProblem::dense(sizes, dtype), tiles, device);
        assert_linear(sizes, dtype, Fast, device);
    });
}

/// Sums in the order of all kernels. A part without blocks.
#[rstest]
#[case([20, 416, 72])]
#[case([20, 1056, 264])]
fn ops_mutants_linear_in_parts(#[case] sizes: [usize; 3]) {
    on_hopper(|device| assert_linear(sizes, BF16, BatchInvariant, device));
}

/// Channels that are split among the cubes of four multiprocessors: in two, in eight parts, and codes. Second tiles that end with each
/// of a unit's numbers.
#[rstest]
fn ops_mutants_linear_split(#[values(34, 35, 42, 43, 50, 51, 58, 59)] rows: usize) {
    on_hopper(|device| {
        assert_linear([rows, 2056, 72], BF16, Fast, device);
        assert_linear([rows, 4128, 72], BF16, BatchInvariant, device);
        assert_many_rows_in_blocks([rows, 2080, 72], (BlockFormat::Fp8, 128), BF16, false, device);
    });
}

#[test]
fn ops_mutants_linear_split_longer() {
    on_hopper(|device| {
        assert_linear([40, 2056, 80], BF16, Fast, device);
        assert_linear([40, 4104, 72], BF16, Fast, device);
        assert_linear([40, 4128, 80], BF16, BatchInvariant, device);
        assert_many_rows_in_blocks([40, 3328, 80], (BlockFormat::Fp8, 128), BF16, false, device);
        assert_many_rows_in_blocks([40, 8224, 72], (BlockFormat::Fp8, 128), BF16, false, device);
    });
}

/// Rows of whole units of memory: nothing is written behind them.
#[rstest]
#[case([16, 72, 80])]
#[case([16, 1032, 144])]
fn ops_mutants_linear_gated(#[case] sizes: [usize; 3]) {
    on_hopper(|device| assert_swiglu(sizes, Some(0.4), device));
}

/// Rows, heads, inputs, outputs, carried channels.
#[rstest]
#[case([100, 2, 72, 136, 0])]
#[case([100, 3, 200, 264, 8])]
fn ops_mutants_linear_by_head(#[case] sizes: [usize; 5]) {
    on_hopper(|device| assert_by_head(sizes, BF16, device));
}

/// A third tile that ends in each round of stores, with whole units of memory.
#[rstest]
fn ops_mutants_linear_by_head_rows(#[values(264, 280, 296, 312, 328, 344, 360, 376)] rows: usize) {
    on_hopper(|device| assert_by_head([rows, 2, 8, 56, 8], BF16, device));
}

/// Rows of experts, which end in each round of stores. On average they are as many as take tiles of 256 tokens, the first 15 of 192.
const EACH_WIDTH: [usize; 24] =
    [8, 24, 40, 56, 72, 88, 104, 120, 0, 136, 152, 168, 184, 200, 300, 216, 232, 248, 256, 256, 256, 256, 256, 256];

/// Rows of each expert, and those of none. Trimmed tiles of each width that end in each round of stores; small ones.
#[rstest]
#[case(&[200], 0, [72, 72], BF16)]
#[case(&[140], 0, [72, 72], BF16)]
#[case(&EACH_WIDTH, 3, [72, 72], BF16)]
#[case(&EACH_WIDTH[..15], 3, [72, 72], BF16)]
#[case(&[9, 0, 40, 1], 2, [264, 200], F16)]
#[case(&[31, 0, 1], 0, [72, 72], F16)]
fn ops_mutants_linear_experts(
    #[case] pairs: &[usize],
    #[case] without: usize,
    #[case] sizes: [usize; 2],
    #[case] dtype: DType,
) {
    on_hopper(|device| experts(pairs, without, 1, sizes, dtype, WeightFormat::Dense, device));
}

/// As many tiles as fill whole units of memory, and nearly all without rows: none is read behind the last one. Experts, and pairs.
#[rstest]
#[case([124, 128], [8, 8], F16, WeightFormat::Dense)]
#[case([76, 13312], [8, 8], BF16, WeightFormat::Dense)]
#[case([72, 10752], [8, 8], BF16, WeightFormat::Dense)]
#[case([100, 896], [32, 32], BF16, WeightFormat::Blocks(BlockFormat::Fp4))]
fn ops_mutants_linear_last_tile(
    #[case] counts: [usize; 2],
    #[case] sizes: [usize; 2],
    #[case] dtype: DType,
    #[case] format: WeightFormat,
) {
    let mut pairs = vec![0; counts[0]];
    pairs[counts[0] / 2] = 5;
    on_hopper(|device| experts(&pairs, counts[1] - 5, 1, sizes, dtype, format, device));
}

/// Rows, channels and outputs; rows of a block. Of one block of channels, and of twice to three times as many as there are stages.
#[rstest]
#[case([40, 64, 264], 128, BlockFormat::Fp8, BF16)]
#[case([40, 1408, 288], 16, BlockFormat::Fp8, BF16)]
#[case([40, 64, 264], 1, BlockFormat::Fp4, F16)]
#[case([40, 1792, 288], 1, BlockFormat::Fp4, F16)]
fn ops_mutants_linear_in_blocks(
    #[case] sizes: [usize; 3],
    #[case] height: usize,
    #[case] format: BlockFormat,
    #[case] dtype: DType,
    #[values(false, true)] gated: bool,
) {
    on_hopper(|device| assert_many_rows_in_blocks(sizes, (format, height), dtype, gated, device));
}

/// Last tiles of 128 that end in each round of stores.
const EACH_ROUND: [usize; 13] = [10, 20, 128, 128, 127, 40, 60, 128, 70, 90, 128, 100, 120];

/// The same of experts, in tiles of so many tokens; of FP8 more blocks than there are stages. Tiles of 192 and 256 are trimmed to each width. An
/// odd number of pairs of cubes has an expert's outputs, so that each has rows beside those of others; a row's last
/// scale is for whole blocks. Last tiles end in each round of stores.
#[rstest]
#[case(&[9, 0, 40, 1], [608, 352], BlockFormat::Fp4, BF16, 32)]
#[case(&[31, 0, 1], [64, 64], BlockFormat::Fp4, BF16, 32)]
#[case(&[31, 0, 1], [128, 128], BlockFormat::Fp4, BF16, 32)]
#[case(&[31, 0, 40, 1], [640, 640], BlockFormat::Fp8, BF16, 32)]
#[case(&[50, 33, 64, 64, 20, 9], [896, 384], BlockFormat::Fp8, BF16, 64)]
#[case(&[10, 30, 40, 60, 70, 90, 96, 96, 96], [768, 384], BlockFormat::Fp8, BF16, 96)]
#[case(&EACH_ROUND, [640, 384], BlockFormat::Fp8, BF16, 128)]
#[case(&EACH_WIDTH[4..15], [256, 384], BlockFormat::Fp8, BF16, 192)]
#[case(&EACH_WIDTH, [256, 384], BlockFormat::Fp8, BF16, 256)]
#[case(&EACH_WIDTH, [192, 384], BlockFormat::Fp4, BF16, 256)]
#[case(&[200], [640, 576], BlockFormat::Fp4, BF16, 256)]
#[case(&[50, 33, 64, 64, 20, 9], [1152, 384], BlockFormat::Fp4, BF16, 64)]
#[case(&[10, 30, 40, 60, 70, 90, 96, 96, 96], [768, 384], BlockFormat::Fp4, BF16, 96)]
#[case(&EACH_ROUND, [768, 384], BlockFormat::Fp4, BF16, 128)]
#[case(&[9, 0, 40, 1], [640, 384], BlockFormat::Fp8, F16, 32)]
#[case(&[50, 33, 64, 64, 20, 9], [640, 384], BlockFormat::Fp4, F16, 64)]
fn ops_mutants_linear_experts_in_blocks(
    #[case] pairs: &[usize],
    #[case] sizes: [usize; 2],
    #[case] format: BlockFormat,
    #[case] dtype: DType,
    #[case] tile: usize,
) {
    on_hopper(|device| {
        let format = WeightFormat::Blocks(format);
        let tokens = pairs.iter().sum::<usize>() + 2;
        for problem in LinearProblem::experts([tokens, 1, pairs.len(), sizes[0], sizes[1]], dtype) {
            let choice = linear_choice(&problem.with_weight_format(format), device).to_string();
            assert!(choice.starts_with(&format!("sm90 {tile} ")), "{choice}");
        }
        experts(pairs, 2, 1, sizes, dtype, format, device);
    });
}

/// Experts of a few tokens: one piece and several, the last of which is not full; FP8 of more blocks than a warp has units, rows so long
/// that a cube has fewer warps; an expert with several tiles, one without; fewer items than cubes, and many for a warp.
#[rstest]
#[case(&[3, 0, 9, 1], 2, [512, 512], BF16, BlockFormat::Fp4)]
#[case(&[2], 0, [1536, 1024], F16, BlockFormat::Fp4)]
#[case(&[17, 0, 2, 3, 0, 0, 1, 0], 1, [512, 1536], BF16, BlockFormat::Fp4)]
#[case(&[2, 0, 11, 1], 1, [128, 256], BF16, BlockFormat::Fp8)]
#[case(&[4], 0, [1152, 384], F16, BlockFormat::Fp8)]
#[case(&[2, 1], 0, [4224, 128], BF16, BlockFormat::Fp8)]
#[case(&[2], 0, [7168, 128], BF16, BlockFormat::Fp8)]
fn ops_mutants_streamed(
    #[case] pairs: &[usize],
    #[case] without: usize,
    #[case] sizes: [usize; 2],
    #[case] dtype: DType,
    #[case] format: BlockFormat,
) {
    on_hopper(|device| streamed(pairs, without, sizes, dtype, format, false, device));
}

/// Rows of which one number decides by what power of two the others are multiplied: it is found in each place.
#[rstest]
#[case(&[7; 8], [512, 512], BlockFormat::Fp4)]
#[case(&[7; 3], [512, 1536], BlockFormat::Fp4)]
#[case(&[4; 14], [128, 256], BlockFormat::Fp8)]
#[case(&[4, 3], [4224, 128], BlockFormat::Fp8)]
#[case(&[4, 3], [7168, 128], BlockFormat::Fp8)]
fn ops_mutants_streamed_outliers(#[case] pairs: &[usize], #[case] sizes: [usize; 2], #[case] format: BlockFormat) {
    on_hopper(|device| streamed(pairs, 0, sizes, BF16, format, true, device));
}

/// The same where rows of FP8 become f16 before.
#[rstest]
#[case(&[50, 0, 33], [64, 64])]
#[case(&[60], [2176, 64])]
fn ops_mutants_linear_outliers(#[case] pairs: &[usize], #[case] sizes: [usize; 2]) {
    on_hopper(|device| {
        let (indices, sizes) = indices(pairs, 1, 1, sizes);
        assert_experts_of(device, &indices, sizes, BF16, WeightFormat::Blocks(BlockFormat::Fp8), true);
    });
}

/// So few tokens of experts that their weights are streamed.
fn streamed(
    pairs: &[usize],
    without: usize,
    sizes: [usize; 2],
    dtype: DType,
    format: BlockFormat,
    outliers: bool,
    device: &Device,
) {
    let format = WeightFormat::Blocks(format);
    let (tokens, [hidden, width]) = (pairs.iter().sum::<usize>() + without, sizes);
    for problem in LinearProblem::experts([tokens, 1, pairs.len(), hidden, width], dtype) {
        let choice = linear_choice(&problem.with_weight_format(format), device);
        assert_eq!(choice.to_string(), "portable-mma 8", "so few tokens have another kernel");
    }
    let (indices, sizes) = indices(pairs, without, 1, sizes);
    assert_experts_of(device, &indices, sizes, dtype, format, outliers);
}

/// Rows of each head, in tiles of 128: one and five blocks of channels, the last of which is not full; more tiles than run together.
#[rstest]
#[case([70, 2, 8, 8, 16])]
#[case([70, 2, 136, 136, 8])]
#[case([70, 17, 8, 136, 0])]
fn ops_mutants_tiled_by_head(#[case] sizes: [usize; 5]) {
    on_tiles(|device| assert_by_head(sizes, BF16, device));
}

/// Last tiles that end in each round of stores, with whole units of memory.
#[rstest]
fn ops_mutants_tiled_by_head_rows(#[values(4, 12, 20, 28, 36, 44, 52, 60)] last: usize) {
    on_tiles(|device| {
        assert_by_head([64 + last, 1, 40, 40, 24], BF16, device);
        assert_by_head([256 + last, 1, 40, 40, 24], BF16, device);
        // Tiles of 64, full blocks.
        assert_by_head([128 + last, 1, 64, 32, 0], F16, device);
    });
}

#[rstest]
#[case([132, 2, 32, 8, 24])]
#[case([132, 2, 160, 264, 8])]
#[case([132, 11, 32, 136, 0])]
fn ops_mutants_tiled_by_head_whole(#[case] sizes: [usize; 5]) {
    on_tiles(|device| assert_by_head(sizes, F16, device));
}

/// The same of experts, of which a token has one or two: tiles of 64, and of 128 with full blocks.
#[rstest]
#[case(&[65, 70], 0, 1, [8, 8], BF16)]
#[case(&[4, 12, 20, 28, 36, 44, 52, 60], 260, 2, [40, 40], BF16)]
#[case(&[130, 0, 65, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], 1330, 2, [136, 72], BF16)]
#[case(&[256, 8], 0, 1, [32, 32], F16)]
#[case(&[4, 12, 20, 28, 36, 44, 52, 60, 68, 76, 84, 92, 100, 108, 116, 124], 1024, 2, [64, 96], F16)]
#[case(&[4, 12, 20, 28, 36, 44, 52, 60, 68, 76, 84, 92, 100, 108, 116, 124], 1024, 2, [160, 64], F16)]
#[case(&[129, 255], 0, 2, [160, 160], F16)]
fn ops_mutants_tiled_experts(
    #[case] pairs: &[usize],
    #[case] without: usize,
    #[case] top_k: usize,
    #[case] sizes: [usize; 2],
    #[case] dtype: DType,
) {
    on_tiles(|device| experts(pairs, without, top_k, sizes, dtype, WeightFormat::Dense, device));
}

fn on_hopper(test: impl Fn(&Device)) {
    for_each_device(|device| {
        if is_hopper(device) {
            test(device);
        }
    });
}

fn on_tiles(test: impl Fn(&Device)) {
    for_each_device(|device| {
        if has_tiles(device) {
            test(device);
        }
    });
}

/// Where launches are recorded, the tiles are those that a case is for.
fn assert_tiles(problem: LinearProblem, tiles: &str, device: &Device) {
    if std::env::var("SIM_CUDA_SMS").as_deref() == Ok("1") {
        assert!(linear_choice(&problem, device).to_string().ends_with(tiles), "{tiles}: other tiles are chosen");
    }
}

/// Numbers whose products have exact sums in f32.
fn whole(rng: &mut ChaCha8Rng, n: usize) -> Vec<f64> {
    (0..n).map(|_| f64::from(rng.random_range(-8..=8))).collect()
}

/// A tensor behind which lie NaN.
fn before_nan<const D: usize>(numbers: &[f64], shape: [usize; D], dtype: DType, device: &Device) -> Tensor<D> {
    let mut more = shape;
    more[0] += 1;
    let all = [numbers, &vec![f64::NAN; more.iter().product::<usize>() - numbers.len()]].concat();
    floats(&all, more, dtype, device).narrow(0, 0, shape[0])
}

/// Products of whole numbers, bit for bit.
fn assert_linear(sizes: [usize; 3], dtype: DType, determinism: Determinism, device: &Device) {
    let ([rows, inputs, outputs], mut rng) = (sizes, rng(81));
    let problem = LinearProblem::dense(sizes, dtype).with_determinism(determinism);
    assert_eq!(linear_choice(&problem, device).path, Path::Sm90);
    let (x, w) = (whole(&mut rng, rows * inputs), whole(&mut rng, outputs * inputs));
    let weight = Weight::from(before_nan::<2>(&w, [outputs, inputs], dtype, device));
    let out = linear(before_nan(&x, [rows, inputs], dtype, device), &weight, determinism).expect("legal");
    let expected = x.chunks(inputs).flat_map(|x| w.chunks(inputs).map(move |w| dot(x, w)));
    assert_whole(values(out), expected, dtype);
}

/// The same of heads; carried channels come behind.
fn assert_by_head(sizes: [usize; 5], dtype: DType, device: &Device) {
    let ([rows, heads, inputs, outputs, carried], mut rng) = (sizes, rng(82));
    let width = inputs + carried;
    let (x, w) = (whole(&mut rng, rows * heads * width), whole(&mut rng, heads * outputs * inputs));
    let weight = StackedWeight::from(floats::<3>(&w, [heads, outputs, inputs], dtype, device));
    let out = linear_by_head(floats(&x, [rows, heads, width], dtype, device), &weight, Fast).expect("legal");
    let expected = x.chunks(width).enumerate().flat_map(|(row, x)| {
        let (x, carried) = x.split_at(inputs);
        let matrix = w[row % heads * outputs * inputs..].chunks(inputs).take(outputs);
        matrix.map(move |w| dot(x, w)).chain(carried.iter().copied())
    });
    assert_whole(values(out), expected, dtype);
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn assert_whole(out: Vec<f32>, expected: impl Iterator<Item = f64>, dtype: DType) {
    let expected: Vec<f32> = expected.map(|sum| rounded(sum, dtype) as f32).collect();
    let first = out.iter().zip(&expected).position(|(out, expected)| out != expected);
    assert!(out.len() == expected.len() && first.is_none(), "first differs at {first:?}");
}

/// So many pairs of each expert and of none, in random order.
fn experts(
    pairs: &[usize],
    without: usize,
    top_k: usize,
    sizes: [usize; 2],
    dtype: DType,
    format: WeightFormat,
    device: &Device,
) {
    let (indices, sizes) = indices(pairs, without, top_k, sizes);
    assert_experts(device, &indices, sizes, dtype, format);
}

/// Their experts, and tokens, experts, pairs of a token and widths.
fn indices(pairs: &[usize], without: usize, top_k: usize, [hidden, width]: [usize; 2]) -> (Vec<i32>, [usize; 5]) {
    let of_expert = |(expert, &count): (usize, &usize)| vec![expert as i32; count];
    let mut indices: Vec<i32> = pairs.iter().enumerate().flat_map(of_expert).collect();
    indices.resize(indices.len() + without, -1);
    indices.shuffle(&mut rng(83));
    let sizes = [indices.len() / top_k, pairs.len(), top_k, hidden, width];
    (indices, sizes)
}
