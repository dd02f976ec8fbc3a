//! Weights that stay in blocks: what they stand for is what the loader dequantises, and they take the memory of the files.

use burn::tensor::{Device, FloatDType, Tensor};
use mla_ops::{BlockFormat, StackedWeight, Weight, WeightFormat};
use rstest::rstest;
use safetensors::Dtype;

use super::tests::{Tensors, single};
use super::*;
use crate::config::Quantization;
use crate::parallel::{Cut, Parallel};

const FP8: Quantization = Quantization { block: [128, 128], fp4_experts: false };
const FP4: Quantization = Quantization { block: [128, 128], fp4_experts: true };

/// Codes without NaN, and their scales in f32.
fn fp8(name: &'static str, scale: &'static str, [rows, columns]: [usize; 2]) -> Tensors {
    let codes = (0..rows * columns).map(|at| (at * 37 % 127) as u8 | (at as u8 & 0x80)).collect();
    let blocks = [rows.div_ceil(128), columns.div_ceil(128)];
    let scales = (0..blocks[0] * blocks[1]).flat_map(|at| (0.01 + at as f32 * 0.003 + name.len() as f32).to_le_bytes());
    vec![(name, Dtype::F8_E4M3, vec![rows, columns], codes), (scale, Dtype::F32, blocks.to_vec(), scales.collect())]
}

fn fp4(name: &'static str, scale: &'static str, [rows, columns]: [usize; 2]) -> Tensors {
    let codes = (0..rows * columns / 2).map(|at| (at * 41 + name.len()) as u8).collect();
    let blocks = vec![rows, columns.div_ceil(32)];
    let scales = (0..blocks[0] * blocks[1]).map(|at| 120 + (at % 9) as u8).collect();
    vec![(name, Dtype::I8, vec![rows, columns / 2], codes), (scale, Dtype::F8_E8M0, blocks, scales)]
}

fn rank(rank: usize) -> Parallel {
    Parallel::pretended(rank, 2)
}

fn bits<const D: usize>(tensor: Tensor<D>) -> Vec<u32> {
    tensor.cast(FloatDType::F32).into_data().try_to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

/// What a loader that leaves blocks as they are gives, and one that dequantises.
fn both<T>(
    tensors: Tensors,
    quantization: Quantization,
    parallel: &Parallel,
    load: impl Fn(&mut WeightLoader<'_>) -> T,
) -> [T; 2] {
    let (_dir, checkpoint) = single(tensors);
    [WeightStorage::Stored, WeightStorage::Dense].map(|storage| {
        let loader = WeightLoader::new(&checkpoint, &Device::flex(), FloatDType::BF16, None);
        let loader = loader.with_quantization(Some(quantization)).with_parallel(parallel.clone());
        let mut loader = loader.with_storage(storage);
        let loaded = load(&mut loader);
        let summary = loader.finish().unwrap();
        assert_eq!(summary.tensors % 2, 0, "with the scales of each");
        loaded
    })
}

fn assert_weights([blocks, dense]: [Weight; 2], format: BlockFormat) {
    assert_eq!((blocks.format(), dense.format()), (WeightFormat::Blocks(format), WeightFormat::Dense));
    assert_eq!((blocks.dims(), blocks.dtype()), (dense.dims(), dense.dtype()));
    assert_eq!(bits(blocks.dense()), bits(dense.dense()));
}

fn assert_stacks([blocks, dense]: [StackedWeight; 2], format: BlockFormat) {
    assert_eq!((blocks.format(), dense.format()), (WeightFormat::Blocks(format), WeightFormat::Dense));
    assert_eq!((blocks.dims(), blocks.dtype()), (dense.dims(), dense.dtype()));
    assert_eq!(bits(blocks.dense()), bits(dense.dense()));
}

#[rstest]
#[case([256, 384])]
#[case([130, 132])]
#[case([3, 5])]
fn a_matrix_stays_in_blocks(#[case] shape: [usize; 2]) {
    let tensors = fp8("a.weight", "a.weight_scale_inv", shape);
    let stored: usize = tensors.iter().map(|(.., bytes)| bytes.len()).sum();
    let weights = both(tensors, FP8, &Parallel::single(), |loader| loader.weight("a.weight", shape, Cut::Whole));
    // Codes end with a whole word.
    assert!(weights[0].bytes() as usize <= stored + 3, "{} of {stored} bytes", weights[0].bytes());
    assert_weights(weights, BlockFormat::Fp8);
}

/// Ranks have whole blocks of rows, or of columns.
#[rstest]
fn a_rank_has_its_blocks(#[values(Cut::Rows, Cut::Columns, Cut::Heads(2))] cut: Cut, #[values(0, 1)] number: usize) {
    let weights = both(fp8("a.weight", "a.scale", [256, 512]), FP8, &rank(number), |loader| {
        loader.weight("a.weight", [256, 512], cut)
    });
    assert_weights(weights, BlockFormat::Fp8);
}

/// Below one another, where the second one does not begin with a block of the first.
#[rstest]
fn joined_matrices_stay_in_blocks(#[values(128, 48, 33)] rows: usize) {
    let tensors = [fp8("gate.weight", "gate.scale", [rows, 130]), fp8("u.weight", "u.scale", [rows, 130])].concat();
    let names = ["gate.weight", "u.weight"].map(str::to_string);
    let load = |loader: &mut WeightLoader<'_>| loader.joined(&names, [2 * rows, 130], Cut::Whole);
    assert_weights(both(tensors, FP8, &Parallel::single(), load), BlockFormat::Fp8);
}

const EXPERTS: [[&str; 2]; 4] = [
    ["l.experts.0.w1.weight", "l.experts.0.w1.scale"],
    ["l.experts.0.w3.weight", "l.experts.0.w3.scale"],
    ["l.experts.1.w1.weight", "l.experts.1.w1.scale"],
    ["l.experts.1.w3.weight", "l.experts.1.w3.scale"],
];

/// Tensors of the experts in a format, and what blocks they have.
fn experts(format: BlockFormat, shape: [usize; 2]) -> (Tensors, Quantization) {
    let (make, quantization): (fn(_, _, _) -> Tensors, _) = match format {
        BlockFormat::Fp8 => (fp8, FP8),
        BlockFormat::Fp4 => (fp4, FP4),
    };
    let tensors: Vec<Tensors> = EXPERTS.into_iter().map(|[name, scale]| make(name, scale, shape)).collect();
    (tensors.concat(), quantization)
}

/// Two tensors each, of whole words or not; also those of a rank.
#[rstest]
fn experts_stay_in_blocks(
    #[values([48, 96], [3, 34])] shape: [usize; 2],
    #[values(BlockFormat::Fp8, BlockFormat::Fp4)] format: BlockFormat,
    #[values(false, true)] of_rank: bool,
) {
    let (tensors, quantization) = experts(format, shape);
    let names = EXPERTS.map(|[name, _]| name.to_string());
    let parallel = if of_rank { rank(1) } else { Parallel::single() };
    let [rows, columns] = shape;
    let load = |loader: &mut WeightLoader<'_>| loader.experts(&names, [2, 2 * rows, columns], Cut::Experts);
    assert_stacks(both(tensors, quantization, &parallel, load), format);
}

/// Hidden channels of each: rows of the matrices, or columns.
#[rstest]
fn a_rank_has_blocks_of_each_expert(
    #[values(BlockFormat::Fp8, BlockFormat::Fp4)] format: BlockFormat,
    #[values(Cut::Rows, Cut::Columns)] cut: Cut,
    #[values(0, 1)] number: usize,
) {
    let (tensors, quantization) = experts(format, [256, 512]);
    let names = EXPERTS.map(|[name, _]| name.to_string());
    let load = |loader: &mut WeightLoader<'_>| loader.experts(&names, [2, 512, 512], cut);
    let of_rank = both(tensors.clone(), quantization, &rank(number), load);
    let [_, whole] = both(tensors, quantization, &Parallel::single(), load);
    let (axis, half) = if cut == Cut::Rows { (1, 128) } else { (2, 256) };
    let part = whole.dense().reshape([4, 256, 512]).narrow(axis, number * half, half);
    assert_eq!(bits(of_rank[1].dense()), bits(part));
    assert_stacks(of_rank, format);
}

#[rstest]
fn matrices_of_heads_stay_in_blocks(#[values(128, 64, 5)] rows: usize) {
    let load = |loader: &mut WeightLoader<'_>| loader.by_head("a.weight", [2, rows, 132]);
    let tensors = fp8("a.weight", "a.scale", [2 * rows, 132]);
    assert_stacks(both(tensors, FP8, &Parallel::single(), load), BlockFormat::Fp8);
}

/// Other blocks than those that kernels read are dequantised, and so are FP4's scales in f32.
#[test]
fn other_blocks_are_dequantised() {
    let other = Quantization { block: [64, 128], fp4_experts: false };
    let mut tensors = fp8("a.weight", "a.scale", [128, 256]);
    tensors[1] = super::tests::f32s("a.scale", &[2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let weights = both(tensors, other, &Parallel::single(), |loader| loader.weight("a.weight", [128, 256], Cut::Whole));
    assert_eq!(weights.map(|weight| weight.format()), [WeightFormat::Dense; 2]);
}

/// Drawn where the configuration names blocks: as large as dense ones, and of a rank the part of all.
#[test]
fn random_weights_are_in_blocks() {
    let published = Published {
        layers: "model.layers.",
        projections: &["down_proj"],
        fp4_experts: false,
        power_of_two_scales: false,
        scale_suffix: "_scale_inv",
        scale_dtype: Dtype::F32,
        renaming: None,
    };
    let name = "model.layers.0.mlp.down_proj.weight";
    let draw = |parallel| {
        let loader = WeightLoader::random(7.into(), &Device::flex(), FloatDType::F32, 0, None);
        let loader = loader.with_quantization(Some(FP8)).with_published(published);
        loader.with_parallel(parallel).weight(name, [256, 512], Cut::Columns)
    };
    let whole = draw(Parallel::single());
    assert_eq!(whole.format(), WeightFormat::Blocks(BlockFormat::Fp8));
    let parts = [0, 1].map(|number| draw(rank(number)).dense());
    assert_eq!(bits(Tensor::cat(parts.to_vec(), 1)), bits(whole.dense()));
    let values: Vec<f32> = whole.dense().into_data().try_to_vec().unwrap();
    let square = values.iter().map(|value| f64::from(value * value)).sum::<f64>() / values.len() as f64;
    let mean = values.iter().map(|&value| f64::from(value)).sum::<f64>() / values.len() as f64;
    assert!((square * 512.0 - 1.0).abs() < 0.02 && mean.abs() < 1e-3, "{square} {mean}");
}
