//! `mhc_pre`, `mhc_post` and `mhc_head` against plain loops.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use mla_ops::{Addend, Determinism, MhcOptions, MhcPreArgs, Mixer, Mixing, Streams, mhc_head, mhc_post, mhc_pre};
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype};
use crate::ops_experts::{Inputs as Experts, sum};
use crate::ops_fixture::{assert_close, bits, floats, random, restrided, rng, rounded, values};
use crate::refusals::Kind::{DType as WrongType, Shape, Value};
use crate::refusals::{assert_refused, zeros};

const OPTIONS: MhcOptions = MhcOptions { norm_eps: 1e-6, eps: 1e-2, sinkhorn_iters: 4, determinism: Determinism::Fast };

struct Inputs {
    /// N, n, d.
    sizes: [usize; 3],
    dtype: DType,
    streams: Vec<f64>,
    weight: Vec<f64>,
    scale: Vec<f64>,
    base: Vec<f64>,
    norm_weight: Vec<f64>,
    output: Vec<f64>,
}

/// What the operations give, of all tokens one after the other.
#[derive(Default)]
struct Expected {
    /// Of the streams, for the head and before the norm.
    sums: Vec<f64>,
    input: Vec<f64>,
    post: Vec<f64>,
    comb: Vec<f64>,
    mixed: Vec<f64>,
}

impl Inputs {
    fn new(sizes: [usize; 3], dtype: DType) -> Self {
        let ([tokens, n, width], mut rng) = (sizes, rng(57));
        let mut numbers = |len, factor: f64, dtype| -> Vec<f64> {
            random(&mut rng, len, dtype).into_iter().map(|value| f64::from((value * factor) as f32)).collect()
        };
        Self {
            sizes,
            dtype,
            streams: numbers(tokens * n * width, 1.0, dtype),
            // For products of about 2.
            weight: numbers((2 + n) * n * n * width, 4.0 / ((n * width) as f64).sqrt(), DType::F32),
            scale: vec![0.7f32, 1.3, 2.1].into_iter().map(f64::from).collect(),
            base: numbers((2 + n) * n, 1.0, DType::F32),
            norm_weight: numbers(width, 1.0, DType::F32),
            output: numbers(tokens * width, 1.0, dtype),
        }
    }

    fn args(&self, device: &Device) -> MhcPreArgs {
        let [_, n, width] = self.sizes;
        let f32s = |values: &[f64]| floats(values, [values.len()], DType::F32, device);
        let weight = floats(&self.weight, [(2 + n) * n, n * width], DType::F32, device).into();
        MhcPreArgs {
            streams: self.streams(device).into(),
            mixer: Mixer { weight, scale: f32s(&self.scale), base: f32s(&self.base) },
            norm_weight: f32s(&self.norm_weight),
        }
    }

    fn streams(&self, device: &Device) -> Tensor<3> {
        floats(&self.streams, self.sizes, self.dtype, device)
    }

    /// Its first rows alone.
    fn head(&self, device: &Device) -> Mixer {
        let [_, n, width] = self.sizes;
        Mixer {
            weight: floats(&self.weight[..n * n * width], [n, n * width], DType::F32, device).into(),
            scale: floats(&self.scale[..1], [1], DType::F32, device),
            base: floats(&self.base[..n], [n], DType::F32, device),
        }
    }

    fn output(&self, device: &Device) -> Tensor<2> {
        let [tokens, _, width] = self.sizes;
        floats(&self.output, [tokens, width], self.dtype, device)
    }

    fn expected(&self, options: &MhcOptions) -> Expected {
        let ([tokens, n, width], mut all) = (self.sizes, Expected::default());
        for token in 0..tokens {
            let x = &self.streams[token * n * width..][..n * width];
            let numbers = self.numbers(x, options);
            let sum = |d: usize| (0..n).map(|k| numbers[k] * x[k * width + d]).sum::<f64>();
            let sums: Vec<f64> = (0..width).map(|d| rounded(sum(d), self.dtype)).collect();
            let factor = unit(&sums, options);
            all.input.extend(sums.iter().zip(&self.norm_weight).map(|(sum, weight)| sum * factor * weight));
            all.sums.extend(sums);
            all.post.extend(&numbers[n..2 * n]);
            all.comb.extend(&numbers[2 * n..]);
            for j in 0..n {
                for d in 0..width {
                    let kept: f64 = (0..n).map(|k| numbers[(2 + k) * n + j] * x[k * width + d]).sum();
                    all.mixed.push(kept + numbers[n + j] * self.output[token * width + d]);
                }
            }
        }
        all
    }

    /// pre, post and comb of a token.
    fn numbers(&self, x: &[f64], options: &MhcOptions) -> Vec<f64> {
        let [_, n, _] = self.sizes;
        let (factor, eps) = (unit(x, options), f64::from(options.eps));
        let product = |row: usize| -> f64 { self.weight[row * x.len()..].iter().zip(x).map(|(w, x)| w * x).sum() };
        let mut z: Vec<f64> =
            (0..(2 + n) * n).map(|row| product(row) * factor * self.scale[(row / n).min(2)] + self.base[row]).collect();
        for (at, z) in z[..2 * n].iter_mut().enumerate() {
            let sigmoid = 1.0 / (1.0 + (-*z).exp());
            *z = if at < n { sigmoid + eps } else { 2.0 * sigmoid };
        }
        let comb = &mut z[2 * n..];
        for row in comb.chunks_mut(n) {
            let total: f64 = row.iter().map(|z| z.exp()).sum();
            row.iter_mut().for_each(|z| *z = z.exp() / total + eps);
        }
        for iteration in 0..options.sinkhorn_iters {
            for row in comb.chunks_mut(n).filter(|_| iteration > 0) {
                let total: f64 = row.iter().sum();
                row.iter_mut().for_each(|value| *value /= total + eps);
            }
            for column in 0..n {
                let total: f64 = comb[column..].iter().step_by(n).sum();
                comb[column..].iter_mut().step_by(n).for_each(|value| *value /= total + eps);
            }
        }
        z
    }

    fn check(&self, options: &MhcOptions, device: &Device) {
        let what = format!("{:?} {options:?} {:?} on {device:?}", self.sizes, self.dtype);
        let ([tokens, n, width], expected) = (self.sizes, self.expected(options));
        let args = self.args(device);
        let (input, mixing) = mhc_pre(args.clone(), options).expect("legal");
        assert_eq!((input.dims(), input.dtype()), ([tokens, width], self.dtype), "{what}");
        assert_eq!((mixing.post.dims(), mixing.comb.dims()), ([tokens, n], [tokens, n, n]), "{what}");
        let head = mhc_head(args.streams.clone(), self.head(device), options).expect("legal");
        assert_eq!((head.dims(), head.dtype()), ([tokens, width], self.dtype), "{what}");
        assert_eq!(bits(&mixing.streams), bits(&self.streams(device)), "{what}");
        let mixed = mhc_post(self.output(device), mixing.clone()).expect("legal").tensor();
        assert_eq!((mixed.dims(), mixed.dtype()), (self.sizes, self.dtype), "{what}");
        assert_close(&format!("input, {what}"), self.dtype, &values(input), &expected.input);
        assert_close(&format!("head, {what}"), self.dtype, &values(head), &expected.sums);
        assert_close(&format!("post, {what}"), DType::F32, &values(mixing.post), &expected.post);
        assert_close(&format!("comb, {what}"), DType::F32, &values(mixing.comb), &expected.comb);
        assert_close(&format!("mixed, {what}"), self.dtype, &values(mixed), &expected.mixed);
    }
}

/// What the norm multiplies with.
fn unit(x: &[f64], options: &MhcOptions) -> f64 {
    let mean = x.iter().map(|value| value * value).sum::<f64>() / x.len() as f64;
    (mean + f64::from(options.norm_eps)).sqrt().recip()
}

/// One stream and several, the most; widths that nothing divides, and several rounds of a cube.
#[rstest]
fn ops_hyper_connection(
    #[values([4, 3, 5], [1, 4, 64], [2, 4, 4104], [70, 2, 6], [5, 1, 8], [2, 8, 3], [300, 4, 32])] sizes: [usize; 3],
) {
    for_each_dtype(|device, dtype| Inputs::new(sizes, dtype).check(&OPTIONS, device));
}

#[rstest]
fn ops_hyper_connection_options(#[values(0.0, 0.3)] eps: f32, #[values(1, 2, 20)] sinkhorn_iters: usize) {
    let options = MhcOptions { eps, sinkhorn_iters, norm_eps: 0.1, ..OPTIONS };
    for_each_device(|device| Inputs::new([3, 4, 10], DType::F32).check(&options, device));
}

/// Streams after a block that are not in memory: what the next block reads of them has the bits that it has of streams in memory, and the
/// values that plain loops give. From one token to tiles of them, some of which are not full, and more than one launch has.
#[rstest]
fn ops_hyper_connection_streams_after_a_block(
    #[values([1, 4, 64], [1, 4, 4096], [3, 3, 5], [5, 1, 33], [8, 4, 40], [13, 2, 100], [9, 8, 72], [64, 4, 36], [65, 4, 36])]
    sizes: [usize; 3],
    #[values(Determinism::Fast, Determinism::BatchInvariant)] determinism: Determinism,
) {
    let options = MhcOptions { determinism, ..OPTIONS };
    for_each_dtype(|device, dtype| {
        let inputs = Inputs::new(sizes, dtype);
        let what = format!("{sizes:?} {determinism:?} {dtype:?} on {device:?}");
        let args = inputs.args(device);
        let (_, mixing) = mhc_pre(args.clone(), &options).expect("legal");
        let streams = mhc_post(inputs.output(device), mixing).expect("legal");
        let in_memory = streams.clone().tensor();
        let read = |streams| mhc_pre(MhcPreArgs { streams, ..args.clone() }, &options).expect("legal");
        let [(input, mixing), (expected_input, expected)] = [streams.clone(), in_memory.clone().into()].map(read);
        assert_eq!(bits(&mixing.streams), bits(&in_memory), "streams, {what}");
        assert_eq!(bits(&input), bits(&expected_input), "input, {what}");
        assert_eq!(bits(&mixing.post), bits(&expected.post), "post, {what}");
        assert_eq!(bits(&mixing.comb), bits(&expected.comb), "comb, {what}");
        let head = |streams: Streams| mhc_head(streams, inputs.head(device), &options).expect("legal");
        assert_eq!(bits(&head(streams)), bits(&head(in_memory.clone().into())), "head, {what}");
        let after = Inputs { streams: values(in_memory).into_iter().map(f64::from).collect(), ..inputs };
        after.check(&options, device);
    });
}

/// Experts that are summed up where they go into the streams: the bits of a sum in memory. One token, whose launches have its shared
/// experts or not, several, more than one launch has, none.
#[rstest]
fn ops_hyper_connection_of_experts(
    #[values([0, 5, 2, 64, 32], [1, 8, 3, 64, 32], [1, 5, 3, 4104, 32], [1, 3, 2, 33, 7], [5, 6, 2, 2056, 8], [41, 3, 2, 64, 32], [4, 5, 5, 33, 7], [70, 3, 2, 64, 32])]
    sizes: [usize; 5],
) {
    let [tokens, .., hidden, _] = sizes;
    for_each_dtype(|device, dtype| {
        let (experts, inputs) = (Experts::new(sizes, dtype), Inputs::new([tokens, 4, hidden], dtype));
        let args = inputs.args(device);
        let (_, mixing) = mhc_pre(args.clone(), &OPTIONS).expect("legal");
        let all = |output: Addend| {
            let mut streams = mhc_post(output, mixing.clone()).expect("legal");
            let read = MhcPreArgs { streams: streams.clone(), ..args.clone() };
            let (input, next) = mhc_pre(read, &OPTIONS).expect("legal");
            let head = mhc_head(streams.clone(), inputs.head(device), &OPTIONS).expect("legal");
            let tensors = [bits(&input), bits(&head), bits(&next.post), bits(&next.comb)];
            (bits(&streams.tensor()), bits(&next.streams), tensors)
        };
        let experts = || sum(experts.args(device));
        let [expected, actual] = [experts().materialise().into(), experts().into()].map(all);
        assert!(actual == expected, "{sizes:?} {dtype:?} on {device:?}");
    });
}

/// A token's bits are the same in every batch: also in one that several launches would have, if its tokens did not have to be independent.
#[rstest]
fn ops_hyper_connection_alone_as_in_a_batch(#[values(11, 70)] tokens: usize) {
    let options = MhcOptions { determinism: Determinism::BatchInvariant, ..OPTIONS };
    for_each_dtype(|device, dtype| {
        let inputs = Inputs::new([tokens, 4, 64], dtype);
        let args = inputs.args(device);
        let (input, mixing) = mhc_pre(args.clone(), &options).expect("legal");
        let streams = inputs.streams(device).narrow(0, 7, 1);
        let head = inputs.head(device);
        let [heads, own_head] = [args.streams.clone(), streams.clone().into()]
            .map(|streams| mhc_head(streams, head.clone(), &options).expect("legal"));
        assert_eq!(bits(&own_head), bits(&heads.narrow(0, 7, 1)), "{dtype:?} on {device:?}");
        let (own_input, own_mixing) = mhc_pre(MhcPreArgs { streams: streams.into(), ..args }, &options).expect("legal");
        assert_eq!(bits(&own_input), bits(&input.narrow(0, 7, 1)), "{dtype:?} on {device:?}");
        assert_eq!(bits(&own_mixing.post), bits(&mixing.post.narrow(0, 7, 1)));
        assert_eq!(bits(&own_mixing.comb), bits(&mixing.comb.narrow(0, 7, 1)));
    });
}

#[test]
fn ops_hyper_connection_of_views_and_of_nothing() {
    for_each_device(|device| {
        let inputs = Inputs::new([4, 3, 10], DType::F32);
        let (args, expected) = (inputs.args(device), inputs.expected(&OPTIONS));
        let streams = restrided(inputs.streams(device), 0, 2);
        let (input, mixing) =
            mhc_pre(MhcPreArgs { streams: streams.clone().into(), ..args.clone() }, &OPTIONS).expect("legal");
        assert_close("views", DType::F32, &values(input), &expected.input);
        let views = Mixing { streams, post: restrided(mixing.post, 0, 1), comb: restrided(mixing.comb, 1, 2) };
        let mixed = mhc_post(restrided(inputs.output(device), 0, 1), views).expect("legal");
        let (next, _) = mhc_pre(MhcPreArgs { streams: mixed.clone(), ..args.clone() }, &OPTIONS).expect("legal");
        let mixed = mixed.clone().tensor();
        let (expected_next, _) =
            mhc_pre(MhcPreArgs { streams: mixed.clone().into(), ..args }, &OPTIONS).expect("legal");
        assert_eq!(bits(&next), bits(&expected_next), "views on {device:?}");
        assert_close("views", DType::F32, &values(mixed), &expected.mixed);
        let none: Tensor<3> = zeros([0, 3, 10], device);
        let pre = |streams| mhc_pre(MhcPreArgs { streams, ..inputs.args(device) }, &OPTIONS).expect("legal");
        let (input, mixing) = pre(none.clone().into());
        assert_eq!((input.dims(), mixing.post.dims(), mixing.comb.dims()), ([0, 10], [0, 3], [0, 3, 3]));
        let mut mixed = mhc_post(zeros::<2>([0, 10], device), mixing).expect("legal");
        assert_eq!((mixed.dims(), mixed.tensor().dims(), pre(mixed).0.dims()), ([0, 3, 10], [0, 3, 10], [0, 10]));
        assert_eq!(mhc_head(none, inputs.head(device), &OPTIONS).expect("legal").dims(), [0, 10]);
    });
}

#[test]
fn ops_errors_hyper_connection_pre() {
    for_each_device(|device| {
        let args = || Inputs::new([4, 3, 10], DType::F32).args(device);
        let refuses = |kind, argument, change: fn(&mut MhcPreArgs, &Device)| {
            let mut args = args();
            change(&mut args, device);
            assert_refused(mhc_pre(args, &OPTIONS), kind, argument);
        };
        refuses(Value, "streams", |it, device| it.streams = zeros::<3>([4, 9, 10], device).into());
        refuses(Value, "streams", |it, device| it.streams = zeros::<3>([4, 0, 10], device).into());
        refuses(Value, "streams", |it, device| it.streams = zeros::<3>([4, 3, 0], device).into());
        refuses(Shape, "mixer.weight", |it, device| it.mixer.weight = zeros::<2>([15, 29], device).into());
        refuses(Shape, "mixer.weight", |it, device| it.mixer.weight = zeros::<2>([14, 30], device).into());
        refuses(WrongType, "mixer.weight", |it, device| {
            it.mixer.weight = zeros::<2>([15, 30], device).cast(FloatDType::F16).into();
        });
        refuses(Shape, "mixer.scale", |it, device| it.mixer.scale = zeros([15], device));
        refuses(WrongType, "mixer.scale", |it, _| it.mixer.scale = it.mixer.scale.clone().cast(FloatDType::F16));
        refuses(Shape, "mixer.base", |it, device| it.mixer.base = zeros([3], device));
        refuses(Shape, "norm_weight", |it, device| it.norm_weight = zeros([9], device));
        let refuses = |argument, options| assert_refused(mhc_pre(args(), &options), Value, argument);
        refuses("eps", MhcOptions { norm_eps: f32::NAN, ..OPTIONS });
        refuses("eps", MhcOptions { eps: -1.0, ..OPTIONS });
        refuses("sinkhorn_iters", MhcOptions { sinkhorn_iters: 0, ..OPTIONS });
        refuses("sinkhorn_iters", MhcOptions { sinkhorn_iters: usize::MAX, ..OPTIONS });
    });
}

#[test]
fn ops_errors_hyper_connection_post_and_head() {
    for_each_device(|device| {
        let inputs = Inputs::new([4, 3, 10], DType::F32);
        let args = inputs.args(device);
        let head = |mixer| mhc_head(args.streams.clone(), mixer, &OPTIONS);
        head(inputs.head(device)).expect("legal before it is changed");
        assert_refused(head(args.mixer.clone()), Shape, "mixer.weight");
        assert_refused(head(Mixer { scale: zeros([3], device), ..inputs.head(device) }), Shape, "mixer.scale");
        let options = MhcOptions { norm_eps: -1.0, ..OPTIONS };
        assert_refused(mhc_head(args.streams.clone(), inputs.head(device), &options), Value, "norm_eps");
        let (_, mixing) = mhc_pre(args.clone(), &OPTIONS).expect("legal before it is changed");
        let call = |output: Tensor<2>, mixing| mhc_post(output, mixing);
        assert_refused(call(zeros([4, 9], device), mixing.clone()), Shape, "output");
        assert_refused(call(inputs.output(device).cast(FloatDType::F16), mixing.clone()), WrongType, "output");
        let post = zeros([3, 3], device);
        assert_refused(call(inputs.output(device), Mixing { post, ..mixing.clone() }), Shape, "mixing.post");
        let comb = zeros([4, 3, 2], device);
        assert_refused(call(inputs.output(device), Mixing { comb, ..mixing.clone() }), Shape, "mixing.comb");
        let streams = zeros([4, 9, 10], device);
        assert_refused(call(inputs.output(device), Mixing { streams, ..mixing }), Value, "streams");
    });
}
