//! `norm_rope` against plain loops.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use mla_ops::{NormRopeArgs, NormRopeOptions, norm_rope, residual_norm, rms_norm};
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype};
use crate::ops_fixture::{assert_close, floats, random, restrided, rng, values};
use crate::refusals::Kind::{DType as WrongType, Shape, Value};
use crate::refusals::{assert_refused, zeros};

/// N, H, d and the pairs that RoPE is applied to.
type Sizes = [usize; 4];

struct Inputs {
    sizes: Sizes,
    dtype: DType,
    x: Vec<f64>,
    weight: Vec<f64>,
    /// Of each token and pair.
    cos: Vec<f64>,
    sin: Vec<f64>,
}

impl Inputs {
    fn new(sizes: Sizes, dtype: DType) -> Self {
        let ([tokens, heads, width, pairs], mut rng) = (sizes, rng(31));
        let angles = random(&mut rng, tokens * pairs, DType::F32);
        let table = |f: fn(f64) -> f64| angles.iter().map(|angle| f64::from(f(9.0 * angle) as f32)).collect();
        Self {
            sizes,
            dtype,
            x: random(&mut rng, tokens * heads * width, dtype),
            weight: random(&mut rng, width, DType::F32),
            cos: table(f64::cos),
            sin: table(f64::sin),
        }
    }

    fn args(&self, weighted: bool, norm_whole_head: bool, device: &Device) -> NormRopeArgs {
        let [tokens, heads, width, pairs] = self.sizes;
        let normed = if norm_whole_head { width } else { width - 2 * pairs };
        let table = |values: &[f64]| floats(values, [tokens, pairs], DType::F32, device);
        NormRopeArgs {
            x: floats(&self.x, [tokens, heads, width], self.dtype, device),
            weight: weighted.then(|| floats(&self.weight[..normed], [normed], DType::F32, device)),
            cos: table(&self.cos),
            sin: table(&self.sin),
        }
    }

    fn expected(&self, weighted: bool, options: &NormRopeOptions) -> Vec<f64> {
        let [_, heads, width, pairs] = self.sizes;
        let mut x = self.x.clone();
        for (row, head) in x.chunks_exact_mut(width).enumerate() {
            if let Some(eps) = options.norm_eps {
                let normed = if options.norm_whole_head { width } else { width - 2 * pairs };
                let mean = head[..normed].iter().map(|value| value * value).sum::<f64>() / normed as f64;
                for (channel, value) in head[..normed].iter_mut().enumerate() {
                    *value /= (mean + f64::from(eps)).sqrt();
                    *value *= if weighted { self.weight[channel] } else { 1.0 };
                }
            }
            for pair in 0..pairs {
                let (at, angle) = (width - 2 * pairs + 2 * pair, row / heads * pairs + pair);
                let (u, v, cos) = (head[at], head[at + 1], self.cos[angle]);
                let sin = if options.inverse { -self.sin[angle] } else { self.sin[angle] };
                (head[at], head[at + 1]) = (u * cos - v * sin, v * cos + u * sin);
            }
        }
        x
    }
}

/// DeepSeek-V4's heads and keys, widths that nothing divides, RoPE of whole heads or none.
#[rstest]
fn ops_norm_rope(
    #[values([3, 8, 512, 32], [5, 1, 64, 16], [1, 3, 7, 2], [70, 2, 6, 3], [2, 5, 130, 1], [4, 2, 9, 0], [2, 1, 1, 0])]
    sizes: Sizes,
    #[values((None, false), (Some(1e-6), false), (Some(0.3), true))] (norm_eps, weighted): (Option<f32>, bool),
    #[values(false, true)] norm_whole_head: bool,
    #[values(false, true)] inverse: bool,
) {
    let options = NormRopeOptions { norm_eps, norm_whole_head, inverse };
    for_each_dtype(|device, dtype| {
        let inputs = Inputs::new(sizes, dtype);
        let out = norm_rope(inputs.args(weighted, norm_whole_head, device), &options).expect("legal");
        let [tokens, heads, width, _] = sizes;
        assert_eq!((out.dims(), out.dtype()), ([tokens, heads, width], dtype));
        let what = format!("{sizes:?} {options:?} {dtype:?} on {device:?}");
        assert_close(&what, dtype, &values(out), &inputs.expected(weighted, &options));
    });
}

/// Pieces of work on several threads, or many cubes.
#[test]
fn ops_norm_rope_of_many_tokens() {
    let options = NormRopeOptions { norm_eps: Some(1e-6), norm_whole_head: true, inverse: false };
    for_each_device(|device| {
        let inputs = Inputs::new([2311, 3, 96, 8], DType::F32);
        let out = norm_rope(inputs.args(true, true, device), &options).expect("legal");
        assert_close("many tokens", DType::F32, &values(out), &inputs.expected(true, &options));
    });
}

#[test]
fn ops_norm_rope_of_views_and_of_nothing() {
    let options = NormRopeOptions { norm_eps: Some(1e-6), norm_whole_head: true, inverse: true };
    for_each_device(|device| {
        let inputs = Inputs::new([4, 3, 10, 2], DType::F32);
        let args = inputs.args(true, true, device);
        let views = NormRopeArgs {
            x: restrided(args.x, 0, 2),
            cos: restrided(args.cos, 0, 1),
            sin: restrided(args.sin, 0, 1),
            ..args
        };
        let out = norm_rope(views, &options).expect("legal");
        assert_close("views", DType::F32, &values(out), &inputs.expected(true, &options));
        for shape in [[0, 3, 10], [4, 0, 10]] {
            let tables = || zeros([shape[0], 2], device);
            let args = NormRopeArgs { x: zeros(shape, device), weight: None, cos: tables(), sin: tables() };
            assert_eq!(norm_rope(args, &options).expect("legal").dims(), shape);
        }
    });
}

#[test]
fn ops_errors_norm_rope() {
    for_each_device(|device| {
        let normed = NormRopeOptions { norm_eps: Some(1e-6), norm_whole_head: true, inverse: false };
        let args = || Inputs::new([4, 3, 10, 2], DType::F32).args(true, true, device);
        norm_rope(args(), &normed).expect("legal before it is changed");
        let refuses = |kind, argument, change: fn(&mut NormRopeArgs, &Device)| {
            let mut args = args();
            change(&mut args, device);
            assert_refused(norm_rope(args, &normed), kind, argument);
        };
        refuses(Shape, "weight", |it, device| it.weight = Some(zeros([9], device)));
        refuses(Shape, "cos", |it, device| it.cos = zeros([3, 2], device));
        refuses(Shape, "sin", |it, device| it.sin = zeros([5, 2], device));
        refuses(Value, "cos", |it, device| it.cos = zeros([4, 6], device));
        refuses(Value, "sin", |it, device| it.sin = zeros([4, 1], device));
        refuses(WrongType, "cos", |it, _| it.cos = it.cos.clone().cast(FloatDType::F16));
        let still = NormRopeOptions { norm_whole_head: false, ..normed.clone() };
        assert_refused(norm_rope(args(), &still), Shape, "weight");
        let half: fn(Tensor<1>) -> Tensor<1> = |weight| weight.cast(FloatDType::F16);
        let args_with_half = NormRopeArgs { weight: args().weight.map(half), ..args() };
        assert_refused(norm_rope(args_with_half, &normed), WrongType, "weight");
        assert_refused(norm_rope(args(), &NormRopeOptions { norm_eps: None, ..normed.clone() }), Value, "weight");
        for eps in [-1.0, f32::NAN, f32::INFINITY] {
            let options = NormRopeOptions { norm_eps: Some(eps), ..normed.clone() };
            assert_refused(norm_rope(args(), &options), Value, "norm_eps");
        }
    });
}

/// Rows of odd and of published widths.
#[rstest]
fn ops_rms_norm(#[values([3, 2048], [1, 7168], [65, 7], [2, 1], [0, 8])] sizes: [usize; 2]) {
    let [tokens, width] = sizes;
    for_each_dtype(|device, dtype| {
        let inputs = Inputs::new([tokens, 1, width, 0], dtype);
        let options = NormRopeOptions { norm_eps: Some(1e-6), norm_whole_head: true, inverse: false };
        let x = floats(&inputs.x, sizes, dtype, device);
        let out = rms_norm(x, floats(&inputs.weight, [width], DType::F32, device), 1e-6).expect("legal");
        assert_eq!((out.dims(), out.dtype()), (sizes, dtype));
        assert_close(
            &format!("{sizes:?} {dtype:?} on {device:?}"),
            dtype,
            &values(out),
            &inputs.expected(true, &options),
        );
    });
}

#[test]
fn ops_errors_rms_norm() {
    for_each_device(|device| {
        let call = |width, eps| rms_norm(zeros([3, 8], device), zeros([width], device), eps);
        call(8, 0.0).expect("legal before it is changed");
        assert_refused(call(7, 0.0), Shape, "weight");
        assert_refused(call(8, f32::NAN), Value, "eps");
        assert_refused(
            rms_norm(zeros([3, 8], device), zeros::<1>([8], device).cast(FloatDType::F16), 0.0),
            WrongType,
            "weight",
        );
    });
}

/// The sum is that of Burn, bit for bit, and the norm that of the sum as it was rounded.
#[rstest]
fn ops_residual_norm(#[values([3, 2048], [1, 7168], [65, 7], [2, 1], [300, 24], [0, 8])] sizes: [usize; 2]) {
    let [tokens, width] = sizes;
    for_each_dtype(|device, dtype| {
        let mut inputs = Inputs::new([tokens, 1, width, 0], dtype);
        let options = NormRopeOptions { norm_eps: Some(1e-6), norm_whole_head: true, inverse: false };
        let what = format!("{sizes:?} {dtype:?} on {device:?}");
        let x = floats(&inputs.x, sizes, dtype, device);
        let y = floats(&random(&mut rng(32), tokens * width, dtype), sizes, dtype, device);
        let expected = values(x.clone() + y.clone());
        let views = [x, y].map(|part| if tokens > 0 { restrided(part, 0, 1) } else { part });
        let [x, y] = views;
        let weight = floats(&inputs.weight, [width], DType::F32, device);
        let (sum, normed) = residual_norm(x, y, weight, 1e-6).expect("legal");
        assert_eq!((sum.dims(), sum.dtype(), normed.dims(), normed.dtype()), (sizes, dtype, sizes, dtype));
        assert_eq!(values(sum), expected, "{what}");
        inputs.x = expected.into_iter().map(f64::from).collect();
        assert_close(&what, dtype, &values(normed), &inputs.expected(true, &options));
    });
}

#[test]
fn ops_errors_residual_norm() {
    for_each_device(|device| {
        let call = |y: [usize; 2], width, eps| {
            residual_norm(zeros([3, 8], device), zeros(y, device), zeros([width], device), eps)
        };
        call([3, 8], 8, 0.0).expect("legal before it is changed");
        assert_refused(call([3, 7], 8, 0.0), Shape, "y");
        assert_refused(call([2, 8], 8, 0.0), Shape, "y");
        assert_refused(call([3, 8], 7, 0.0), Shape, "weight");
        assert_refused(call([3, 8], 8, -1.0), Value, "eps");
        let half = zeros::<2>([3, 8], device).cast(FloatDType::F16);
        assert_refused(residual_norm(zeros([3, 8], device), half, zeros([8], device), 0.0), WrongType, "y");
    });
}
