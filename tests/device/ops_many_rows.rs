//! Products of many rows on tensor cores, dense and grouped by expert, against plain loops: each size of tile, inputs that end
//! within a block of channels, outputs that end within a cube's, rows that end within a tile, channels in parts.

use burn::tensor::{DType, Device, Tensor};
use mla_ops::Determinism::Fast;
use mla_ops::measure::linear_choice;
use mla_ops::{
    ExpertsMlpArgs, ExpertsMlpOptions, LinearProblem, Path, Routing, StackedWeight, Weight, WeightFormat, experts_mlp,
    explain_path, linear, swiglu,
};
use rand::seq::SliceRandom;
use rstest::rstest;

use crate::devices::{for_each_device, has_tiles, is_hopper, is_simulated, skip};
use crate::ops_fixture::{floats, ints, random, rng, rounded, tolerance, values};
use crate::ops_weight_blocks::{Blocks, block_rows};

/// Runs a test on Hopper alone: the other devices have no kernel for many dense rows, or Burn's product in its place.
fn on_hopper(test: impl Fn(&Device)) {
    for_each_device(|device| {
        if is_hopper(device) {
            test(device);
        }
    });
}

/// The kernel for many rows is the one that runs: Hopper's, or elsewhere that with the matrix instructions of a warp.
fn assert_path(problem: LinearProblem, device: &Device) {
    let choice = explain_path(&problem, device);
    let path = if is_hopper(device) { Path::Sm90 } else { Path::PortableMma };
    assert_eq!(choice.path, path, "{choice}");
}

fn dot(a: &[f64], b: &[f64]) -> (f64, f64) {
    let products = || a.iter().zip(b).map(|(a, b)| a * b);
    (products().sum(), products().map(f64::abs).sum())
}

/// Rows, inputs, outputs.
#[rstest]
#[case([65, 64, 128])]
#[case([66, 8, 8])]
#[case([130, 72, 264])]
#[case([190, 200, 136])]
#[case([380, 136, 72])]
#[case([512, 64, 264])]
#[case([9, 4104, 136])]
#[case([33, 4160, 24])]
// Tiles of 64, 160, 192 and 128, of which pairs of cubes share the weights.
#[case([98, 136, 136])]
#[case([257, 136, 136])]
#[case([340, 136, 136])]
#[case([398, 136, 72])]
fn ops_many_rows_linear(#[case] sizes: [usize; 3], #[values(DType::BF16, DType::F16)] dtype: DType) {
    let [rows, inputs, outputs] = sizes;
    on_hopper(|device| {
        assert_path(LinearProblem::dense(sizes, dtype), device);
        let mut rng = rng(71);
        let (x, w) = (random(&mut rng, rows * inputs, dtype), random(&mut rng, outputs * inputs, dtype));
        let weight = Weight::from(floats::<2>(&w, [outputs, inputs], dtype, device));
        let out = values(linear(floats(&x, [rows, inputs], dtype, device), &weight, Fast).expect("legal"));
        for (row, x) in x.chunks(inputs).enumerate() {
            for (o, w) in w.chunks(inputs).enumerate() {
                let (expected, size) = dot(x, w);
                let off = (f64::from(out[row * outputs + o]) - expected).abs();
                assert!(
                    off <= tolerance(dtype) * expected.abs() + 1e-6 * size,
                    "row {row}, output {o}: off by {off:e}"
                );
            }
        }
    });
}

/// A router: rows in bf16 and weights in f32, whose products are as exact as those of f32. Rows, inputs, outputs; weights of very
/// different sizes.
#[rstest]
#[case([17000, 64, 32])]
#[case([1100, 200, 160])]
#[case([130, 4104, 72])]
fn ops_many_rows_of_a_router(#[case] sizes: [usize; 3]) {
    let [rows, inputs, outputs] = sizes;
    on_hopper(|device| {
        assert_path(LinearProblem::dense(sizes, DType::BF16).with_weight_dtype(DType::F32), device);
        let mut rng = rng(75);
        let x = random(&mut rng, rows * inputs, DType::BF16);
        let scales = [1.0, 1e-3, 30.0];
        let w: Vec<f64> = random(&mut rng, outputs * inputs, DType::F32)
            .into_iter()
            .zip(scales.into_iter().cycle())
            .map(|(w, scale)| f64::from((w * scale) as f32))
            .collect();
        let weight = Weight::from(floats::<2>(&w, [outputs, inputs], DType::F32, device));
        let out = linear(floats(&x, [rows, inputs], DType::BF16, device), &weight, Fast).expect("legal");
        assert_eq!((out.dims(), out.dtype()), ([rows, outputs], DType::F32));
        let out = values(out);
        for row in (0..rows).step_by(37).chain([rows - 1]) {
            for (o, w) in w.chunks(inputs).enumerate() {
                let (expected, size) = dot(&x[row * inputs..][..inputs], w);
                let off = (f64::from(out[row * outputs + o]) - expected).abs();
                assert!(off <= 1e-6 * size, "row {row}, output {o}: off by {off:e} of {size:e}");
            }
        }
    });
}

/// Rows, inputs, outputs.
#[rstest]
fn ops_many_rows_swiglu(
    #[values([66, 8, 8], [130, 72, 136], [380, 64, 72], [512, 136, 24])] sizes: [usize; 3],
    #[values(None, Some(0.4))] limit: Option<f32>,
) {
    on_hopper(|device| assert_swiglu(sizes, limit, device));
}

/// The gated product of random rows in bf16, against plain loops.
pub fn assert_swiglu(sizes: [usize; 3], limit: Option<f32>, device: &Device) {
    let ([rows, inputs, outputs], dtype) = (sizes, DType::BF16);
    assert_path(LinearProblem::gated(sizes, dtype), device);
    let mut rng = rng(72);
    let (x, w) = (random(&mut rng, rows * inputs, dtype), random(&mut rng, 2 * outputs * inputs, dtype));
    let weight = Weight::from(floats::<2>(&w, [2 * outputs, inputs], dtype, device));
    let out = values(swiglu(floats(&x, [rows, inputs], dtype, device), &weight, limit, Fast).expect("legal"));
    let bound = limit.map_or(f64::INFINITY, f64::from);
    for (row, x) in x.chunks(inputs).enumerate() {
        for o in 0..outputs {
            let [(gate, gate_size), (up, up_size)] = [o, outputs + o].map(|o| dot(x, &w[o * inputs..][..inputs]));
            let (gate, up) = (gate.min(bound), up.clamp(-bound, bound));
            let expected = gate / (1.0 + (-gate).exp()) * up;
            let off = (f64::from(out[row * outputs + o]) - expected).abs();
            let sums = gate_size * (up.abs() + 1e-3) + up_size * (gate.abs() + 1e-3);
            let allowed = 2.0 * tolerance(dtype) * expected.abs() + 1e-6 * sums;
            assert!(off <= allowed, "row {row}, output {o}: off by {off:e}, allowed {allowed:e}");
        }
    }
}

/// Tokens, experts, top k, hidden channels, channels of an expert. One expert has most of the tokens, one none, and some pairs
/// have an expert that there is not. The last three are many rows for every GPU that has a kernel for them. Hidden channels are no
/// multiple of 32: the small-batch kernel with matrix instructions does not take these.
#[rstest]
#[case([70, 3, 2, 64, 72])]
#[case([40, 5, 3, 136, 64])]
#[case([300, 4, 2, 72, 40])]
#[case([110, 3, 2, 136, 72])]
#[case([400, 3, 2, 40, 64])]
fn ops_many_rows_experts(#[case] sizes: [usize; 5], #[values(DType::BF16, DType::F16)] dtype: DType) {
    let [tokens, experts, top_k, ..] = sizes;
    for_each_device(|device| {
        let many = is_hopper(device) || has_tiles(device) && tokens * top_k > 64 * experts;
        if !many {
            skip(device, "no kernel for many rows of these experts");
            return;
        }
        let indices: Vec<i32> = (0..tokens * top_k)
            .map(|p| match p % top_k {
                0 => 0,
                place => ((p / 3 + place) % (experts + 1)) as i32,
            })
            .map(|e| if e == 1 { -1 } else { e })
            .collect();
        assert_experts(device, &indices, sizes, dtype, WeightFormat::Dense);
    });
}

/// Rows that are gathered in two slices, of which the last has one vector.
#[test]
fn ops_many_rows_experts_of_long_rows() {
    on_hopper(|device| {
        let indices: Vec<i32> = (0..14).map(|pair| if pair == 5 { -1 } else { pair % 3 }).collect();
        assert_experts(device, &indices, [7, 3, 2, 2056, 8], DType::BF16, WeightFormat::Dense);
    });
}

/// Hopper's largest tiles, which are trimmed to the tokens of an expert: each width, tiles of even sizes and a smaller last one, an
/// expert whose tiles are several groups.
#[rstest]
#[case(&[129, 160, 161, 192, 193, 224, 225, 257, 31])]
#[case(&[600, 320, 0, 481, 1])]
#[case(&[2400, 513])]
fn ops_many_rows_experts_trimmed(#[case] pairs: &[usize]) {
    on_hopper(|device| {
        let of_expert = |(expert, &count): (usize, &usize)| vec![expert as i32; count];
        let mut indices: Vec<i32> = pairs.iter().enumerate().flat_map(of_expert).collect();
        indices.shuffle(&mut rng(79));
        let sizes = [indices.len(), pairs.len(), 1, 40, 72];
        let problem = &LinearProblem::experts([sizes[0], 1, sizes[1], 40, 72], DType::BF16)[0];
        let choice = linear_choice(problem, device);
        assert!(choice.to_string().contains("256"), "{choice}");
        assert_experts(device, &indices, sizes, DType::BF16, WeightFormat::Dense);
    });
}

/// [`assert_experts_of`] so many tokens that kernels for many rows take them.
pub fn assert_experts(device: &Device, indices: &[i32], sizes: [usize; 5], dtype: DType, format: WeightFormat) {
    let [tokens, experts, top_k, hidden, width] = sizes;
    for problem in LinearProblem::experts([tokens, top_k, experts, hidden, width], dtype) {
        assert_path(problem.with_weight_format(format), device);
    }
    assert_experts_of(device, indices, sizes, dtype, format, false);
}

/// The experts `[tokens, top_k]` of random tokens, against plain loops. What nobody needs is NaN: experts without tokens, tokens
/// without experts. In rows with `outliers` one number is far larger than the others.
pub fn assert_experts_of(
    device: &Device,
    indices: &[i32],
    sizes: [usize; 5],
    dtype: DType,
    format: WeightFormat,
    outliers: bool,
) {
    let [tokens, experts, top_k, hidden, width] = sizes;
    let mut rng = rng(73);
    let mut x = random(&mut rng, tokens * hidden, dtype);
    for (x, experts) in x.chunks_mut(hidden).zip(indices.chunks(top_k)) {
        if experts.iter().all(|&expert| expert < 0) {
            x.fill(f64::NAN);
        }
    }
    let mut matrices = |[rows, columns]: [usize; 2]| match format {
        WeightFormat::Dense => {
            let mut numbers = random(&mut rng, experts * rows * columns, dtype);
            for (expert, numbers) in numbers.chunks_mut(rows * columns).enumerate() {
                let chosen = indices.contains(&(expert as i32));
                numbers.iter_mut().for_each(|number| *number = if chosen { *number / 4.0 } else { f64::NAN });
            }
            let there = floats::<3>(&numbers, [experts, rows, columns], dtype, device);
            (numbers, StackedWeight::from(there))
        }
        WeightFormat::Blocks(format) => {
            let blocks = Blocks::random(&mut rng, format, [experts, rows, columns], block_rows(format, 16));
            (blocks.numbers(dtype).into_iter().map(f64::from).collect(), blocks.stacked(dtype, device))
        }
    };
    let ((gate_up, gate_up_there), (down, down_there)) = (matrices([2 * width, hidden]), matrices([hidden, width]));
    if outliers {
        for (token, x) in x.chunks_mut(hidden).enumerate() {
            place_outlier(x, token, indices[token * top_k], &gate_up, width, dtype);
        }
    }
    let weights = random(&mut rng, tokens * top_k, DType::F32);
    let routing =
        Routing::given(ints(indices, [tokens, top_k], device), floats(&weights, [tokens, top_k], DType::F32, device));
    let args = ExpertsMlpArgs {
        x: floats(&x, [tokens, hidden], dtype, device),
        routing,
        gate_up: gate_up_there,
        down: down_there,
        shared: None,
    };
    let out = values(experts_mlp(args, &ExpertsMlpOptions::default()).expect("legal").materialise());
    for (token, x) in x.chunks(hidden).enumerate() {
        let (mut expected, mut size) = (vec![0.0; hidden], 0.1f64);
        for pair in token * top_k..(token + 1) * top_k {
            let Some(expert) = usize::try_from(indices[pair]).ok().filter(|&e| e < experts) else { continue };
            let product = |row: usize| dot(x, &gate_up[(expert * 2 * width + row) * hidden..][..hidden]).0;
            let h: Vec<f64> =
                (0..width).map(|i| product(i) / (1.0 + (-product(i)).exp()) * product(width + i)).collect();
            for (channel, sum) in expected.iter_mut().enumerate() {
                let y = weights[pair] * dot(&h, &down[(expert * hidden + channel) * width..][..width]).0;
                *sum += y;
                size = size.max(y.abs());
            }
        }
        let allowed = tolerance(dtype) * (top_k as f64 + 2.0) * size;
        for (actual, expected) in out[token * hidden..].iter().zip(expected) {
            let off = (f64::from(*actual) - expected).abs();
            assert!(off <= allowed, "token {token}: {actual}, not {expected}");
        }
    }
}

/// Every other token has one large number. The others are like two rows of their expert's weights, so that one number of what its down
/// projection multiplies is large. Tokens have it in different places.
fn place_outlier(x: &mut [f64], token: usize, expert: i32, gate_up: &[f64], width: usize, dtype: DType) {
    let (hidden, place) = (x.len(), 37 * token);
    match usize::try_from(expert) {
        Ok(_) if token.is_multiple_of(2) => x[place / 2 % hidden] = 64.0,
        Ok(expert) => {
            let row = |row: usize| &gate_up[(expert * 2 * width + row) * hidden..][..hidden];
            let (gate, up) = (row(place / 2 % width), row(width + place / 2 % width));
            x.iter_mut().zip(gate.iter().zip(up)).for_each(|(x, (gate, up))| *x = rounded(gate + up, dtype));
        }
        Err(_) => {}
    }
}

/// The sizes of prompts: the largest tiles, several for a cube. Some rows and outputs are looked at. Not on a simulated GPU.
#[rstest]
#[case([4096, 2048, 3072])]
#[case([1000, 7168, 2112])]
#[case([16384, 512, 4096])]
fn ops_many_rows_of_prompts(#[case] sizes: [usize; 3]) {
    let [rows, inputs, outputs] = sizes;
    on_hopper(|device| {
        if is_simulated(device) {
            return skip(device, "takes too long on a simulated GPU");
        }
        let dtype = DType::BF16;
        assert_path(LinearProblem::dense(sizes, dtype), device);
        let mut rng = rng(74);
        let (x, w) = (random(&mut rng, rows * inputs, dtype), random(&mut rng, outputs * inputs, dtype));
        let there: Tensor<2> = floats(&x, [rows, inputs], dtype, device);
        let weight = Weight::from(floats::<2>(&w, [outputs, inputs], dtype, device));
        let out = values(linear(there, &weight, Fast).expect("legal"));
        for row in (0..rows).step_by(61).chain([rows - 1]) {
            for o in (0..outputs).step_by(7).chain([outputs - 1]) {
                let (expected, size) = dot(&x[row * inputs..][..inputs], &w[o * inputs..][..inputs]);
                let off = (f64::from(out[row * outputs + o]) - expected).abs();
                assert!(
                    off <= tolerance(dtype) * expected.abs() + 1e-6 * size,
                    "row {row}, output {o}: off by {off:e}"
                );
            }
        }
    });
}
