//! A single row of x and weights in blocks of codes, which has a kernel of its own where there are matrix instructions: against plain
//! f64 loops over what the codes stand for.

use burn::tensor::{DType, Device, Tensor};
use mla_ops::Determinism::Fast;
use mla_ops::{
    BlockFormat, ExpertsMlpArgs, ExpertsMlpOptions, LinearProblem, Path, Routing, SharedExperts, StackedWeight,
    WeightFormat, experts_mlp, explain_path, linear, linear_by_head, linear_each, swiglu,
};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rstest::rstest;

use crate::devices::for_each_dtype;
use crate::ops_fixture::{bits, floats, ints, random, rng, rounded, tolerance, values};
use crate::ops_weight_blocks::{Blocks, block_rows};

/// Whether sums take the scales of FP8, so that weights are not rounded to the dtype: where matrix instructions multiply codes.
fn multiplies_codes(sizes: [usize; 3], dtype: DType, format: BlockFormat, device: &Device) -> bool {
    let problem = LinearProblem::dense(sizes, dtype).with_weight_format(WeightFormat::Blocks(format));
    explain_path(&problem, device).path == Path::PortableMma
}

/// The product with a row of numbers, and the sum of its terms' sizes.
fn dot(x: &[f64], numbers: &[f32]) -> (f64, f64) {
    let products = || x.iter().zip(numbers).map(|(a, &b)| a * f64::from(b));
    (products().sum::<f64>(), products().map(f64::abs).sum::<f64>())
}

/// How far a product may be off: weights are rounded to the dtype unless their codes are multiplied.
fn assert_products(out: &[f32], x: &[f64], numbers: &[f32], dtype: DType, codes: bool, what: &str) {
    let rounding = if codes { 1e-6 } else { tolerance(dtype) };
    for (place, (&out, numbers)) in out.iter().zip(numbers.chunks(x.len())).enumerate() {
        let (expected, size) = dot(x, numbers);
        let off = (f64::from(out) - expected).abs();
        // Below the normal numbers of the dtype.
        let least = if dtype == DType::F16 { 2f64.powi(-24) } else { f64::from(f32::MIN_POSITIVE) };
        let allowed = 2.0 * tolerance(dtype) * expected.abs() + rounding * size + least;
        assert!(off <= allowed, "{what}, {dtype:?}, output {place}: {out}, not {expected}; allowed {allowed:e}");
    }
}

/// Numbers whose sizes go over as many powers of two, as x has them in the dtype.
fn spread(rng: &mut ChaCha8Rng, len: usize, powers: std::ops::Range<i32>, dtype: DType) -> Vec<f64> {
    let values = random(rng, len, dtype);
    values.into_iter().map(|value| rounded(value * 2f64.powi(rng.random_range(powers.clone())), dtype)).collect()
}

/// Fewer chunks than planes, one turn, several, and a last one that is not whole; outputs that end within a tile.
const SIZES: [[usize; 2]; 5] = [[16, 128], [40, 256], [24, 1152], [16, 4224], [130, 2048]];

#[rstest]
fn ops_one_row_in_blocks(#[values(BlockFormat::Fp8, BlockFormat::Fp4)] format: BlockFormat) {
    for_each_dtype(|device, dtype| {
        for [outputs, inputs] in SIZES {
            let mut rng = rng(80);
            let blocks = Blocks::random(&mut rng, format, [1, outputs, inputs], block_rows(format, 16));
            let (weight, numbers) = (blocks.weight(dtype, device), blocks.numbers(DType::F32));
            let codes = multiplies_codes([1, inputs, outputs], dtype, format, device);
            // Around 1, of very different sizes, all of them small.
            for powers in [0..1, -30..8, -14..-12] {
                let x = spread(&mut rng, inputs, powers.clone(), dtype);
                let there: Tensor<2> = floats(&x, [1, inputs], dtype, device);
                let out = values(linear(there, &weight, Fast).expect("legal"));
                let what = format!("{inputs} x {outputs}, 2^{powers:?} on {device:?}");
                assert_products(&out, &x, &numbers, dtype, codes, &what);
            }
        }
    });
}

/// Rows that are all zeros, that have nothing but the smallest and the largest numbers of the dtype, or one that is infinite or NaN.
#[rstest]
fn ops_one_row_in_blocks_of_unusual_numbers(#[values(BlockFormat::Fp8, BlockFormat::Fp4)] format: BlockFormat) {
    for_each_dtype(|device, dtype| {
        let (outputs, inputs) = (24, 384);
        let mut rng = rng(81);
        let blocks = Blocks::random(&mut rng, format, [1, outputs, inputs], block_rows(format, 128));
        let (weight, numbers) = (blocks.weight(dtype, device), blocks.numbers(DType::F32));
        let codes = multiplies_codes([1, inputs, outputs], dtype, format, device);
        let (least, most) = if dtype == DType::F16 { (2f64.powi(-14), 2f64.powi(6)) } else { (1e-36, 1e30) };
        let run = |x: &[f64]| values(linear(floats(x, [1, inputs], dtype, device), &weight, Fast).expect("legal"));
        let zeros = run(&vec![0.0; inputs]);
        assert!(zeros.iter().all(|&out| out == 0.0), "{dtype:?} on {device:?}: {zeros:?}");
        for size in [least, most] {
            let x: Vec<f64> =
                random(&mut rng, inputs, dtype).iter().map(|value| rounded(value * size, dtype)).collect();
            assert_products(&run(&x), &x, &numbers, dtype, codes, &format!("{size:e} on {device:?}"));
        }
        for unusual in [f64::INFINITY, f64::NAN] {
            let mut x = random(&mut rng, inputs, dtype);
            x[200] = unusual;
            let out = run(&x);
            assert!(out.iter().all(|out| !out.is_finite()), "{dtype:?} on {device:?}: {out:?}");
        }
    });
}

/// A row of each head, with channels that are carried; two matrices in one launch; a gated output.
#[rstest]
fn ops_one_row_in_blocks_of_heads_pairs_and_gates(
    #[values(BlockFormat::Fp8, BlockFormat::Fp4)] format: BlockFormat,
    #[values(0, 8)] carried: usize,
) {
    for_each_dtype(|device, dtype| {
        let mut rng = rng(82);
        let (heads, outputs, inputs) = (3, 40, 256);
        let blocks = Blocks::random(&mut rng, format, [heads, outputs, inputs], block_rows(format, 16));
        let (weight, numbers) = (blocks.stacked(dtype, device), blocks.numbers(DType::F32));
        let codes = multiplies_codes([1, inputs, outputs], dtype, format, device);
        let width = inputs + carried;
        let x = random(&mut rng, heads * width, dtype);
        let out = linear_by_head(floats(&x, [1, heads, width], dtype, device), &weight, Fast).expect("legal");
        let (out, row) = (values(out), outputs + carried);
        for head in 0..heads {
            let (x, out) = (&x[head * width..][..width], &out[head * row..][..row]);
            let numbers = &numbers[head * outputs * inputs..][..outputs * inputs];
            assert_products(
                &out[..outputs],
                &x[..inputs],
                numbers,
                dtype,
                codes,
                &format!("head {head} on {device:?}"),
            );
            assert!(out[outputs..].iter().zip(&x[inputs..]).all(|(&out, &x)| f64::from(out) == x), "carried");
        }

        let x: Tensor<2> = floats(&random(&mut rng, inputs, dtype), [1, inputs], dtype, device);
        let mut matrix = |format, rows, height| {
            Blocks::random(&mut rng, format, [1, rows, inputs], block_rows(format, height)).weight(dtype, device)
        };
        let (first, second) = (matrix(format, 144, 128), matrix(BlockFormat::Fp8, 40, 16));
        let [a, b] = linear_each(x.clone(), [&first, &second], Fast).expect("legal");
        for (pair, weight) in [(a, &first), (b, &second)] {
            let alone = linear(x.clone(), weight, Fast).expect("legal");
            assert!(bits(&pair) == bits(&alone), "{dtype:?} on {device:?}: a pair differs");
        }

        let gate_up = matrix(format, 2 * 24, 8);
        let products = values(linear(x.clone(), &gate_up, Fast).expect("legal"));
        let out = values(swiglu(x, &gate_up, Some(0.3), Fast).expect("legal"));
        for (place, &out) in out.iter().enumerate() {
            let (gate, up) = (f64::from(products[place]).min(0.3), f64::from(products[24 + place]).clamp(-0.3, 0.3));
            let expected = gate / (1.0 + (-gate).exp()) * up;
            let off = (f64::from(out) - expected).abs();
            assert!(off <= 8.0 * tolerance(dtype) * (1e-2 + expected.abs()), "{dtype:?}: {out}, not {expected}");
        }
    });
}

/// The experts of one token, and a shared one in FP8. On a small device there are many groups of outputs for each multiprocessor, as V4-Flash has on
/// a large one: of FP4 planes share the channels in pairs, and rows are of less than a turn, of one that is not whole, and of several.
#[rstest]
fn ops_one_row_of_experts_in_blocks(
    #[values(BlockFormat::Fp8, BlockFormat::Fp4)] format: BlockFormat,
    #[values([128, 640], [384, 128], [640, 256], [1152, 384])] sizes: [usize; 2],
) {
    let (experts, [hidden, width]) = (4, sizes);
    for_each_dtype(|device, dtype| {
        let mut rng = rng(84);
        let mut blocks = |format, dims| Blocks::random(&mut rng, format, dims, block_rows(format, 16));
        let (gate_up, down) = (blocks(format, [experts, 2 * width, hidden]), blocks(format, [experts, hidden, width]));
        let own = [[1, 2 * width, hidden], [1, hidden, width]].map(|dims| blocks(BlockFormat::Fp8, dims));
        let x = spread(&mut rng, hidden, -6..3, dtype);
        let (chosen, weights) = ([3, 0, 2], [0.5, -1.25, 2.0]);

        let (mut expected, mut largest) = (vec![0.0; hidden], vec![0.0; hidden]);
        let mut add = |weight: f64, gate_up: &[f32], down: &[f32]| {
            let products: Vec<f64> = gate_up.chunks(hidden).map(|row| dot(&x, row).0).collect();
            let (gate, up) = products.split_at(width);
            let inner: Vec<f64> = gate.iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
            for (place, row) in down.chunks(width).enumerate() {
                let (product, size) = dot(&inner, row);
                expected[place] += weight * product;
                largest[place] += weight.abs() * size;
            }
        };
        let (all_up, all_down) = (gate_up.numbers(DType::F32), down.numbers(DType::F32));
        for (&expert, &weight) in chosen.iter().zip(&weights) {
            let of = |numbers: &[f32], rows: usize| numbers[expert as usize * rows..][..rows].to_vec();
            add(weight, &of(&all_up, 2 * width * hidden), &of(&all_down, hidden * width));
        }
        let [own_up, own_down] = [&own[0], &own[1]].map(|blocks| blocks.numbers(DType::F32));
        add(1.0, &own_up, &own_down);

        let routing = Routing::given(ints(&chosen, [1, 3], device), floats(&weights, [1, 3], DType::F32, device));
        let [up, back] = [&own[0], &own[1]].map(|blocks| blocks.weight(dtype, device));
        let args = ExpertsMlpArgs {
            x: floats(&x, [1, hidden], dtype, device),
            routing,
            gate_up: gate_up.stacked(dtype, device),
            down: down.stacked(dtype, device),
            shared: Some(SharedExperts { gate_up: up, down: back }),
        };
        let out = values(experts_mlp(args, &ExpertsMlpOptions::default()).expect("legal").materialise());
        for (place, &out) in out.iter().enumerate() {
            let off = (f64::from(out) - expected[place]).abs();
            let allowed = 4.0 * tolerance(dtype) * largest[place];
            assert!(off <= allowed, "{dtype:?} on {device:?}, {place}: {out}, not {}; {allowed:e}", expected[place]);
        }
    });
}

/// Several rows of an expert in FP4, within a tile: each is what it is with the same weights dequantised, and the same row has the same bits
/// at any place of a tile. With wide rows units take 32 codes at a time; where there are many cubes for a device, each takes several groups
/// of outputs, the last one fewer.
#[rstest]
#[case::narrow(2, [32, 256, 128])]
#[case::narrow(4, [32, 256, 128])]
#[case::narrow(5, [32, 256, 128])]
#[case::narrow(7, [32, 256, 128])]
#[case::wide(3, [3, 1024, 1024])]
#[case::wide(7, [3, 1024, 1024])]
fn ops_few_rows_of_experts_in_blocks(#[case] tokens: usize, #[case] sizes: [usize; 3]) {
    let ([experts, hidden, width], top_k) = (sizes, 2);
    for_each_dtype(|device, dtype| {
        let mut rng = rng(83);
        let mut stack = |dims| Blocks::random(&mut rng, BlockFormat::Fp4, dims, 1).stacked(dtype, device);
        let (gate_up, down) = (stack([experts, 2 * width, hidden]), stack([experts, hidden, width]));
        let row = random(&mut rng, hidden, dtype);
        let other = random(&mut rng, hidden, dtype);
        // All tokens go to expert 0, and each to another one. The last token is the first once more.
        let x: Vec<f64> =
            (0..tokens).flat_map(|token| if token % (tokens - 1) == 0 { &row } else { &other }).copied().collect();
        let chosen: Vec<i32> =
            (0..tokens as i32).flat_map(|token| [0, 1 + token % (tokens as i32 - 1) % (experts as i32 - 1)]).collect();
        let weights: Vec<f64> = vec![0.5; tokens * top_k];
        let run = |gate_up: StackedWeight, down: StackedWeight| {
            let routing = Routing::given(
                ints(&chosen, [tokens, top_k], device),
                floats(&weights, [tokens, top_k], DType::F32, device),
            );
            let x = floats(&x, [tokens, hidden], dtype, device);
            let args = ExpertsMlpArgs { x, routing, gate_up, down, shared: None };
            experts_mlp(args, &ExpertsMlpOptions::default()).expect("legal").materialise()
        };
        let expected = values(run(gate_up.dense().into(), down.dense().into()));
        let out = run(gate_up, down);
        let (first, last) = (out.clone().narrow(0, 0, 1), out.clone().narrow(0, tokens - 1, 1));
        assert!(bits(&first) == bits(&last), "{tokens} {dtype:?} on {device:?}: a row depends on its place");
        let largest = expected.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        for (place, (out, expected)) in values(out).iter().zip(&expected).enumerate() {
            let allowed = 2.0 * tolerance(dtype) * f64::from(largest);
            let off = f64::from((out - expected).abs());
            assert!(off <= allowed, "{tokens} {dtype:?} on {device:?}, {place}: {out}, not {expected}");
        }
    });
}
