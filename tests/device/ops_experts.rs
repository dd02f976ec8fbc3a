//! `route_experts`, `experts_mlp` and `linear` against plain loops.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use mla_ops::Determinism::{BatchInvariant, Fast};
use mla_ops::{
    Addend, ExpertChoice, ExpertGroups, ExpertScoring, ExpertsMlpArgs, ExpertsMlpOptions, ExpertsSum, Residual,
    RouteExpertsArgs, RouteExpertsOptions, Routing, SharedExperts, Weight, experts_mlp, linear, linear_by_head,
    linear_pair, matmul, residual_norm, route_experts, swiglu,
};
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype};
use crate::ops_fixture::{bits, floats, int_values, ints, random, restrided, rng, tolerance, values};
use crate::refusals::Kind::{DType as WrongType, Shape, Value};
use crate::refusals::{assert_refused, zeros};

const PLAIN: RouteExpertsOptions =
    RouteExpertsOptions { scoring: ExpertScoring::Softmax, groups: None, normalise: false, scale: 1.0 };

/// The first `count` places of the values in descending order; of equal ones the first first.
fn best(values: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
    order.truncate(count);
    order
}

/// Scores of a token's logits.
fn scores(logits: &[f64], scoring: ExpertScoring) -> Vec<f64> {
    let total: f64 = logits.iter().map(|x| x.exp()).sum();
    let score = |x: f64| match scoring {
        ExpertScoring::Softmax => x.exp() / total,
        ExpertScoring::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        ExpertScoring::SqrtSoftplus => (x.max(0.0) + (-x.abs()).exp().ln_1p()).sqrt(),
    };
    logits.iter().map(|&x| score(x)).collect()
}

/// What the choice goes by, the experts outside the best groups hidden.
fn ranked(scores: &[f64], bias: Option<&[f64]>, groups: Option<ExpertGroups>) -> Vec<f64> {
    let biased = |(e, score): (usize, &f64)| score + bias.map_or(0.0, |bias| bias[e]);
    let mut ranked: Vec<f64> = scores.iter().enumerate().map(biased).collect();
    if let Some(ExpertGroups { count, kept, best: of }) = groups {
        let size = ranked.len() / count;
        let group_scores: Vec<f64> =
            ranked.chunks(size).map(|group| best(group, of).iter().map(|&i| group[i]).sum()).collect();
        for &group in &best(&group_scores, count)[kept..] {
            ranked[group * size..][..size].fill(f64::NEG_INFINITY);
        }
    }
    ranked
}

#[derive(Debug, Clone, Copy)]
enum How {
    Scores,
    Biased,
    Given,
}

/// The routers of DeepSeek-V2-Lite, V2, V3 and V4, and odd sizes.
#[rstest]
#[case::v2_lite([9, 64, 6], How::Scores, PLAIN)]
#[case::v2([9, 160, 6], How::Scores, RouteExpertsOptions { groups: Some(ExpertGroups { count: 8, kept: 3, best: 1 }), scale: 16.0, ..PLAIN })]
#[case::v3([9, 256, 8], How::Biased, RouteExpertsOptions { scoring: ExpertScoring::Sigmoid, groups: Some(ExpertGroups { count: 8, kept: 4, best: 2 }), normalise: true, scale: 2.5 })]
#[case::v4([9, 256, 6], How::Biased, RouteExpertsOptions { scoring: ExpertScoring::SqrtSoftplus, normalise: true, scale: 1.5, ..PLAIN })]
#[case::v4_table([9, 256, 6], How::Given, RouteExpertsOptions { scoring: ExpertScoring::SqrtSoftplus, normalise: true, scale: 1.5, ..PLAIN })]
#[case::one_expert([3, 1, 1], How::Scores, PLAIN)]
#[case::all([70, 7, 7], How::Biased, PLAIN)]
fn ops_route_experts(#[case] sizes: [usize; 3], #[case] how: How, #[case] options: RouteExpertsOptions) {
    let ([tokens, experts, top_k], mut rng) = (sizes, rng(47));
    let logits: Vec<f64> = random(&mut rng, tokens * experts, DType::F32).iter().map(|x| 4.0 * x).collect();
    let bias = random(&mut rng, experts, DType::F32);
    // Among those that are given, some that there are not.
    let given: Vec<i32> = (0..tokens * top_k).map(|i| (i * 37 % (experts + 2)) as i32 - 1).collect();
    for_each_device(|device| {
        let choice = match how {
            How::Scores => ExpertChoice::Scores(top_k),
            How::Biased => ExpertChoice::BiasedScores(top_k, floats(&bias, [experts], DType::F32, device)),
            How::Given => ExpertChoice::Given(ints(&given, [tokens, top_k], device)),
        };
        let args = RouteExpertsArgs { logits: floats(&logits, [tokens, experts], DType::F32, device), choice };
        let (indices, weights) = route_experts(args, &options).expect("legal").materialise();
        let (indices, weights) = (int_values(indices), values(weights));
        for (token, logits) in logits.chunks(experts).enumerate() {
            let scores = scores(logits, options.scoring);
            let places = token * top_k..(token + 1) * top_k;
            let chosen: Vec<i32> = match how {
                How::Given => given[places.clone()].to_vec(),
                _ => {
                    let bias = matches!(how, How::Biased).then_some(bias.as_slice());
                    best(&ranked(&scores, bias, options.groups), top_k).iter().map(|&e| e as i32).collect()
                }
            };
            assert_eq!(indices[places.clone()], chosen, "token {token} on {device:?}");
            let score = |e: &i32| usize::try_from(*e).ok().and_then(|e| scores.get(e)).copied().unwrap_or(0.0);
            let sum = if options.normalise { chosen.iter().map(score).sum::<f64>() + 1e-20 } else { 1.0 };
            for (actual, expert) in weights[places].iter().zip(&chosen) {
                let expected = score(expert) / sum * f64::from(options.scale);
                let off = (f64::from(*actual) - expected).abs();
                assert!(off <= 1e-5 * expected.abs() + 1e-9, "token {token}: {actual}, expected {expected}");
            }
        }
    });
}

/// Of equal scores the first counts more, and what is no number less than all others.
#[test]
fn ops_route_experts_ties() {
    let mut logits: Vec<f64> = (0..64).map(|expert| f64::from(1 - expert % 2)).collect();
    logits.extend((0..64).map(|expert| if [5, 9].contains(&expert) { f64::NAN } else { 0.0 }));
    let expected = [
        (0..64).step_by(2).chain((1..16).step_by(2)).collect::<Vec<i32>>(),
        (0..42).filter(|expert| ![5, 9].contains(expert)).collect(),
    ];
    let options = RouteExpertsOptions { scoring: ExpertScoring::Sigmoid, ..PLAIN };
    for_each_device(|device| {
        let logits = floats(&logits, [2, 64], DType::F32, device);
        let (indices, _) = route_experts(RouteExpertsArgs { logits, choice: ExpertChoice::Scores(40) }, &options)
            .expect("legal")
            .materialise();
        assert_eq!(int_values(indices), expected.concat(), "on {device:?}");
    });
}

/// N, experts, k, hidden, I.
type Sizes = [usize; 5];

struct Inputs {
    sizes: Sizes,
    dtype: DType,
    x: Vec<f64>,
    indices: Vec<i32>,
    weights: Vec<f64>,
    gate_up: Vec<f64>,
    down: Vec<f64>,
    /// Gate and up, and down, of shared experts with so many hidden channels, if there are any.
    shared: Option<(usize, [Vec<f64>; 2])>,
}

impl Inputs {
    fn new(sizes: Sizes, dtype: DType) -> Self {
        let ([tokens, experts, top_k, hidden, width], mut rng) = (sizes, rng(53));
        let scaled = |values: Vec<f64>| values.into_iter().map(|x| x / 4.0).collect();
        Self {
            sizes,
            dtype,
            x: random(&mut rng, tokens * hidden, dtype),
            // Expert 1 is never chosen; some numbers are those of no expert.
            indices: (0..tokens * top_k)
                .map(|p| (p * p * 7 + p) as i32 % (experts as i32 + 2) - 1)
                .map(|e| if e == 1 { 0 } else { e })
                .collect(),
            weights: random(&mut rng, tokens * top_k, DType::F32),
            gate_up: scaled(random(&mut rng, experts * 2 * width * hidden, dtype)),
            down: scaled(random(&mut rng, experts * hidden * width, dtype)),
            // Beside an odd number of experts, one or two.
            shared: (experts % 2 == 1).then(|| {
                let width = width * (1 + experts / 2 % 2);
                let weights = [2 * width * hidden, hidden * width];
                (width, weights.map(|len| scaled(random(&mut rng, len, dtype))))
            }),
        }
    }

    /// Experts i32 `[N, k]` and weights f32 `[N, k]`.
    fn chosen(&self, device: &Device) -> (Tensor<2, Int>, Tensor<2>) {
        let [tokens, _, top_k, ..] = self.sizes;
        let weights = floats(&self.weights, [tokens, top_k], DType::F32, device);
        (ints(&self.indices, [tokens, top_k], device), weights)
    }

    /// Those of the first tokens.
    fn routing(&self, device: &Device, tokens: usize) -> Routing {
        match (self.chosen(device), tokens) {
            // Burn narrows no tensor without elements.
            ((indices, weights), 0) => Routing::given(indices, weights),
            ((indices, weights), _) => Routing::given(indices.narrow(0, 0, tokens), weights.narrow(0, 0, tokens)),
        }
    }

    fn args(&self, device: &Device) -> ExpertsMlpArgs {
        let [tokens, experts, _, hidden, width] = self.sizes;
        ExpertsMlpArgs {
            x: floats(&self.x, [tokens, hidden], self.dtype, device),
            routing: self.routing(device, tokens),
            gate_up: floats::<3>(&self.gate_up, [experts, 2 * width, hidden], self.dtype, device).into(),
            down: floats::<3>(&self.down, [experts, hidden, width], self.dtype, device).into(),
            shared: self.shared.as_ref().map(|(width, [gate_up, down])| SharedExperts {
                gate_up: floats::<2>(gate_up, [2 * width, hidden], self.dtype, device).into(),
                down: floats::<2>(down, [hidden, *width], self.dtype, device).into(),
            }),
        }
    }

    /// Of each token the weighted sum, and how large the outputs of its experts are.
    fn expected(&self, limit: Option<f32>) -> Vec<(Vec<f64>, f64)> {
        let [_, experts, top_k, hidden, width] = self.sizes;
        let limit = limit.map_or(f64::INFINITY, f64::from);
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let token = |(token, x): (usize, &[f64])| {
            let (mut sum, mut size) = (vec![0.0; hidden], 0.0f64);
            let mut add = |gate_up: &[f64], down: &[f64], width: usize, weight: f64| {
                let product = |row: usize| dot(x, &gate_up[row * hidden..][..hidden]);
                let h: Vec<f64> = (0..width)
                    .map(|i| {
                        let gate = product(i).min(limit);
                        gate / (1.0 + (-gate).exp()) * product(width + i).clamp(-limit, limit)
                    })
                    .collect();
                for (channel, sum) in sum.iter_mut().enumerate() {
                    let y = weight * dot(&h, &down[channel * width..][..width]);
                    *sum += y;
                    size = size.max(y.abs());
                }
            };
            for pair in token * top_k..(token + 1) * top_k {
                let Some(expert) = usize::try_from(self.indices[pair]).ok().filter(|&e| e < experts) else { continue };
                let (gate_up, down) = (expert * 2 * width * hidden, expert * hidden * width);
                add(&self.gate_up[gate_up..], &self.down[down..], width, self.weights[pair]);
            }
            if let Some((width, [gate_up, down])) = &self.shared {
                add(gate_up, down, *width, 1.0);
            }
            (sum, size)
        };
        self.x.chunks(hidden).enumerate().map(token).collect()
    }
}

/// Options with a limit.
fn limited(limit: Option<f32>) -> ExpertsMlpOptions {
    ExpertsMlpOptions { limit, ..Default::default() }
}

/// The sum of experts without a limit.
fn sum(args: ExpertsMlpArgs) -> ExpertsSum {
    experts_mlp(args, &limited(None)).expect("legal")
}

/// The residual stream behind a summand, and its norm.
fn add_and_norm(stream: Tensor<2>, summand: impl Into<Addend>, weight: &Tensor<1>) -> (Tensor<2>, Tensor<2>) {
    let mut residual = Residual::new(stream);
    residual.add(summand).expect("legal");
    let normed = residual.norm(weight, 1e-6).expect("legal").tensor();
    (residual.tensor(), normed)
}

/// The same, and two projections of the norm.
fn add_and_project(
    stream: Tensor<2>,
    summand: impl Into<Addend>,
    weight: &Tensor<1>,
    [first, second]: &[Weight; 2],
) -> [Tensor<2>; 4] {
    let mut residual = Residual::new(stream);
    residual.add(summand).expect("legal");
    let mut h = residual.norm(weight, 1e-6).expect("legal");
    let (first, second) = linear_pair(&mut h, first, second, Fast).expect("legal");
    let normed = h.tensor();
    [residual.tensor(), normed, first, second]
}

/// One token, a few, more than a tile of one expert; channels that matrix instructions take, and odd ones.
#[rstest]
fn ops_experts_mlp(
    #[values([1, 8, 3, 64, 32], [1, 5, 3, 64, 32], [1, 7, 2, 96, 64], [1, 3, 2, 33, 7], [5, 6, 2, 96, 64], [41, 3, 2, 64, 32], [4, 5, 5, 33, 7], [1, 2, 1, 1, 1], [150, 4, 1, 32, 32])]
    sizes: Sizes,
    #[values(None, Some(0.4))] limit: Option<f32>,
) {
    for_each_dtype(|device, dtype| {
        let inputs = Inputs::new(sizes, dtype);
        let out = experts_mlp(inputs.args(device), &limited(limit)).expect("legal").materialise();
        let [tokens, _, top_k, hidden, _] = sizes;
        assert_eq!((out.dims(), out.dtype()), ([tokens, hidden], dtype));
        let out = values(out);
        for (token, (expected, size)) in inputs.expected(limit).into_iter().enumerate() {
            // Rounded: activations, each expert's output, the sum.
            let allowed = tolerance(dtype) * (top_k as f64 + 2.0) * size.max(0.1);
            for (actual, expected) in out[token * hidden..].iter().zip(expected) {
                let off = (f64::from(*actual) - expected).abs();
                assert!(off <= allowed, "{sizes:?} {dtype:?} on {device:?}, token {token}: {actual}, not {expected}");
            }
        }
    });
}

/// The residual sum and its norm have the bits that they have in a launch of their own. Several vectors for a unit, shared
/// experts that the token's launches take and others, none.
#[rstest]
fn ops_experts_mlp_residual_norm(
    #[values([0, 5, 2, 64, 32], [1, 8, 3, 64, 32], [1, 5, 3, 4104, 32], [1, 3, 2, 33, 7], [5, 6, 2, 2056, 8], [41, 3, 2, 64, 32], [4, 5, 5, 33, 7])]
    sizes: Sizes,
) {
    for_each_dtype(|device, dtype| {
        let (inputs, [tokens, .., hidden, _]) = (Inputs::new(sizes, dtype), sizes);
        let residual = random(&mut rng(54), tokens * hidden, dtype);
        let residual = floats(&residual, [tokens, hidden], dtype, device);
        let weight = floats(&random(&mut rng(55), hidden, DType::F32), [hidden], DType::F32, device);
        let part = sum(inputs.args(device)).materialise();
        let expected = residual_norm(residual.clone(), part, weight.clone(), 1e-6).expect("legal");
        let view = if tokens > 0 { restrided(residual, 0, 1) } else { residual };
        let actual = add_and_norm(view, sum(inputs.args(device)), &weight);
        for (actual, expected) in [(actual.0, expected.0), (actual.1, expected.1)] {
            assert_eq!((actual.dims(), actual.dtype()), ([tokens, hidden], dtype));
            assert!(bits(&actual) == bits(&expected), "{sizes:?} {dtype:?} on {device:?}");
        }
    });
}

/// The routers of DeepSeek-V2-Lite, V3 and V4, and odd sizes: bit for bit a choice before the experts, also for experts of
/// equal score.
#[rstest]
#[case::v2_lite([64, 6, 64, 32], How::Scores, PLAIN)]
#[case::v2([161, 6, 96, 32], How::Scores, RouteExpertsOptions { groups: Some(ExpertGroups { count: 7, kept: 3, best: 1 }), scale: 16.0, ..PLAIN })]
#[case::v3([256, 8, 64, 32], How::Biased, RouteExpertsOptions { scoring: ExpertScoring::Sigmoid, groups: Some(ExpertGroups { count: 8, kept: 4, best: 2 }), normalise: true, scale: 2.5 })]
#[case::v4([15, 6, 32, 16], How::Biased, RouteExpertsOptions { scoring: ExpertScoring::SqrtSoftplus, normalise: true, scale: 1.5, ..PLAIN })]
#[case::v4_table([15, 6, 32, 16], How::Given, RouteExpertsOptions { scoring: ExpertScoring::SqrtSoftplus, normalise: true, scale: 1.5, ..PLAIN })]
#[case::one_expert([1, 1, 64, 8], How::Scores, PLAIN)]
#[case::more_experts_than_units([301, 2, 32, 8], How::Scores, PLAIN)]
#[case::odd_channels([5, 2, 33, 7], How::Biased, PLAIN)]
fn ops_experts_mlp_of_scores(
    #[case] sizes: [usize; 4],
    #[case] how: How,
    #[case] options: RouteExpertsOptions,
    #[values(1, 3)] tokens: usize,
) {
    let [experts, top_k, hidden, width] = sizes;
    let mut first = rng(56);
    // With steps of a quarter some are equal.
    let mut numbers = |count| random(&mut first, count, DType::F32).iter().map(|x| (16.0 * x).round() / 4.0).collect();
    let (logits, bias): (Vec<f64>, Vec<f64>) = (numbers(tokens * experts), numbers(experts));
    let given: Vec<i32> = (0..tokens * top_k).map(|i| (i * 37 % (experts + 2)) as i32 - 1).collect();
    for_each_dtype(|device, dtype| {
        let mut inputs = Inputs::new([tokens, experts, top_k, hidden, width], dtype);
        // An even number of experts has none beside it there.
        let weights = [2 * width * hidden, hidden * width].map(|len| random(&mut rng(57), len, dtype));
        inputs.shared.get_or_insert((width, weights));
        let choice = match how {
            How::Scores => ExpertChoice::Scores(top_k),
            How::Biased => ExpertChoice::BiasedScores(top_k, floats(&bias, [experts], DType::F32, device)),
            How::Given => ExpertChoice::Given(ints(&given, [tokens, top_k], device)),
        };
        let route = RouteExpertsArgs { logits: floats(&logits, [tokens, experts], DType::F32, device), choice };
        let (indices, weights) = route_experts(route.clone(), &options).expect("legal").materialise();
        let residual = floats(&inputs.x, [tokens, hidden], dtype, device);
        let norm_weight = floats(&random(&mut rng(55), hidden, DType::F32), [hidden], DType::F32, device);
        let projections = [48, 17].map(|rows| {
            let weight = random(&mut rng(58), rows * hidden, dtype);
            Weight::from(floats::<2>(&weight, [rows, hidden], dtype, device))
        });
        let all = |routing| {
            let args = ExpertsMlpArgs { routing, ..inputs.args(device) };
            let (residual_sum, normed) = add_and_norm(residual.clone(), sum(args.clone()), &norm_weight);
            let [pair_sum, pair_norm, first, second] =
                add_and_project(residual.clone(), sum(args.clone()), &norm_weight, &projections);
            [sum(args).materialise(), residual_sum, normed, pair_sum, pair_norm, first, second]
        };
        let expected = all(Routing::given(indices, weights));
        let scored = route_experts(route, &options).expect("legal");
        for (actual, expected) in all(scored).into_iter().zip(expected) {
            assert!(bits(&actual) == bits(&expected), "{sizes:?} {dtype:?} on {device:?}");
        }
    });
}

/// Sum, norm and products have the bits of the operations that compute them one after the other. Rows for one turn of loads and
/// for several, matrices for one launch and for two, shared experts that the token's launches take and others, none.
#[rstest]
fn ops_experts_mlp_linear_pair(
    #[values([0, 5, 2, 64, 32], [1, 8, 3, 64, 32], [1, 5, 3, 64, 32], [1, 7, 2, 2080, 32], [1, 3, 2, 4128, 32], [1, 3, 2, 33, 7], [5, 5, 2, 64, 32])]
    sizes: Sizes,
    #[values([48, 17], [8, 600])] outputs: [usize; 2],
) {
    for_each_dtype(|device, dtype| {
        let (inputs, [tokens, .., hidden, _]) = (Inputs::new(sizes, dtype), sizes);
        let mut rng = rng(56);
        let mut matrix = |rows: usize| floats(&random(&mut rng, rows * hidden, dtype), [rows, hidden], dtype, device);
        let (residual, weights) = (matrix(tokens), outputs.map(&mut matrix));
        let norm = floats(&random(&mut rng, hidden, DType::F32), [hidden], DType::F32, device);
        let weights = weights.map(Weight::from);
        let (sum_there, normed) = add_and_norm(residual.clone(), sum(inputs.args(device)), &norm);
        let (first, second) = linear_pair(normed.clone(), &weights[0], &weights[1], Fast).expect("legal");
        let (experts, view) = (sum(inputs.args(device)), if tokens > 0 { restrided(residual, 0, 1) } else { residual });
        let [its_sum, its_norm, its_first, its_second] = add_and_project(view, experts, &norm, &weights);
        for (actual, expected) in [(its_sum, sum_there), (its_norm, normed), (its_first, first), (its_second, second)] {
            assert_eq!((actual.dims(), actual.dtype()), (expected.dims(), dtype));
            assert!(bits(&actual) == bits(&expected), "{sizes:?} {outputs:?} {dtype:?} on {device:?}");
        }
    });
}

/// A token's output has the same bits whatever the other tokens are.
#[rstest]
fn ops_experts_mlp_of_one_token_among_others(#[values(DType::F32, DType::BF16)] dtype: DType) {
    for_each_dtype(|device, present| {
        if present != dtype {
            return;
        }
        let inputs = Inputs::new([64, 7, 2, 64, 32], dtype);
        let args = inputs.args(device);
        let part = |count: usize| {
            let (x, routing) = (args.x.clone().narrow(0, 0, count), inputs.routing(device, count));
            let args = ExpertsMlpArgs { x, routing, ..args.clone() };
            // The CPU's own products choose their loops by the number of rows.
            let determinism = if *device == Device::flex() { BatchInvariant } else { Fast };
            let options = ExpertsMlpOptions { limit: None, determinism };
            values(experts_mlp(args, &options).expect("legal").materialise().narrow(0, 0, 1))
        };
        let alone = part(1);
        assert_eq!(alone, part(7), "among 7 on {device:?}");
        assert_eq!(alone, part(64), "among 64 on {device:?}");
    });
}

#[test]
fn ops_experts_of_views_and_of_nothing() {
    for_each_device(|device| {
        let inputs = Inputs::new([5, 7, 2, 64, 32], DType::F32);
        let args = inputs.args(device);
        let expected = values(sum(args.clone()).materialise());
        let (indices, weights) = inputs.chosen(device);
        let views = ExpertsMlpArgs {
            x: restrided(args.x, 0, 1),
            routing: Routing::given(indices, restrided(weights, 0, 1)),
            gate_up: restrided(args.gate_up.dense(), 0, 2).into(),
            down: restrided(args.down.dense(), 0, 1).into(),
            shared: args.shared.map(|shared| SharedExperts {
                gate_up: restrided(shared.gate_up.dense(), 0, 1).into(),
                down: restrided(shared.down.dense(), 0, 1).into(),
            }),
        };
        assert_eq!(values(sum(views).materialise()), expected);
        let args = inputs.args(device);
        let none: Tensor<2, Int> = Tensor::from_data(TensorData::new(Vec::<i32>::new(), [0, 2]), (device, DType::I32));
        let nothing = ExpertsMlpArgs {
            x: zeros([0, 64], device),
            routing: Routing::given(none, zeros([0, 2], device)),
            shared: None,
            ..args
        };
        assert_eq!(sum(nothing).materialise().dims(), [0, 64]);
    });
}

/// Rows for the kernel of few, and for the product of matrices.
#[rstest]
fn ops_linear(
    #[values(1, 2, 8, 9, 64, 65)] rows: usize,
    #[values([64, 48], [2048, 16], [33, 7], [1, 1], [96, 1])] widths: [usize; 2],
) {
    let [inputs, outputs] = widths;
    for_each_dtype(|device, dtype| {
        let mut rng = rng(59);
        let (x, w) = (random(&mut rng, rows * inputs, dtype), random(&mut rng, outputs * inputs, dtype));
        let weight = Weight::from(floats::<2>(&w, [outputs, inputs], dtype, device));
        let out = linear(floats(&x, [rows, inputs], dtype, device), &weight, Fast).expect("legal");
        assert_eq!((out.dims(), out.dtype()), ([rows, outputs], dtype));
        let out = values(out);
        // The CPU rounds sums of f16 to f16 after every 512 terms.
        let panels = if dtype == DType::F16 && *device == Device::flex() { inputs.div_ceil(512) - 1 } else { 0 };
        for (row, x) in x.chunks(inputs).enumerate() {
            for (o, w) in w.chunks(inputs).enumerate() {
                let (mut expected, mut size, mut peak) = (0.0f64, 0.0, 0.0f64);
                for (a, b) in x.iter().zip(w) {
                    expected += a * b;
                    size += (a * b).abs();
                    peak = peak.max(expected.abs());
                }
                let off = (f64::from(out[row * outputs + o]) - expected).abs();
                let rounded = panels as f64 * 2f64.powi(-11) * peak;
                let allowed = tolerance(dtype) * expected.abs() + 1e-6 * size + rounded;
                assert!(off <= allowed, "{widths:?} {dtype:?} on {device:?}, row {row}: off by {off:e}");
            }
        }
    });
}

/// Two matrices in one launch or two, and rows for the product of matrices: the bits are those of each alone.
#[rstest]
fn ops_linear_pair(
    #[values(1, 2, 9, 64, 65)] rows: usize,
    #[values([64, 48, 16], [2048, 16, 600], [96, 520, 1000], [33, 7, 1])] widths: [usize; 3],
) {
    let [inputs, outputs, second_outputs] = widths;
    for_each_dtype(|device, dtype| {
        let mut rng = rng(62);
        let mut matrix = |rows: usize| floats(&random(&mut rng, rows * inputs, dtype), [rows, inputs], dtype, device);
        let x = matrix(rows);
        let [first, second] = [outputs, second_outputs].map(|rows| Weight::from(matrix(rows)));
        let (a, b) = linear_pair(x.clone(), &first, &second, Fast).expect("legal");
        let [c, d] = [first, second].map(|weight| linear(x.clone(), &weight, Fast).expect("legal"));
        assert_eq!((a.dims(), b.dims()), ([rows, outputs], [rows, second_outputs]));
        assert_eq!(values(a), values(c), "{widths:?} {dtype:?} on {device:?}");
        assert_eq!(values(b), values(d), "{widths:?} {dtype:?} on {device:?}");
    });
}

/// A router: weights in f32 whatever the rows are, and products of these numbers as they are.
#[rstest]
fn ops_linear_with_weights_in_f32(
    #[values(1, 3, 65)] rows: usize,
    #[values([64, 48], [2048, 64], [33, 7])] widths: [usize; 2],
) {
    let [inputs, outputs] = widths;
    for_each_dtype(|device, dtype| {
        let mut rng = rng(60);
        let (x, w) = (random(&mut rng, rows * inputs, dtype), random(&mut rng, outputs * inputs, DType::F32));
        let weight = Weight::from(floats::<2>(&w, [outputs, inputs], DType::F32, device));
        let out = linear(floats(&x, [rows, inputs], dtype, device), &weight, Fast).expect("legal");
        assert_eq!((out.dims(), out.dtype()), ([rows, outputs], DType::F32));
        for (out, x) in values(out).chunks(outputs).zip(x.chunks(inputs)) {
            for (out, w) in out.iter().zip(w.chunks(inputs)) {
                let products = || x.iter().zip(w).map(|(a, b)| a * b);
                let (expected, size): (f64, f64) = (products().sum(), products().map(f64::abs).sum());
                let off = (f64::from(*out) - expected).abs();
                assert!(off <= 1e-6 * size, "{rows} {widths:?} {dtype:?} on {device:?}: off by {off:e}");
            }
        }
    });
}

/// Gated projections, with and without a limit.
#[rstest]
fn ops_swiglu(
    #[values(1, 9, 65)] rows: usize,
    #[values([64, 48], [33, 7], [2, 1])] widths: [usize; 2],
    #[values(None, Some(0.4))] limit: Option<f32>,
) {
    let [inputs, outputs] = widths;
    for_each_dtype(|device, dtype| {
        let mut rng = rng(61);
        let (x, w) = (random(&mut rng, rows * inputs, dtype), random(&mut rng, 2 * outputs * inputs, dtype));
        let (x_there, w_there) =
            (floats(&x, [rows, inputs], dtype, device), floats::<2>(&w, [2 * outputs, inputs], dtype, device));
        let out = swiglu(x_there, &Weight::from(w_there), limit, Fast).expect("legal");
        assert_eq!((out.dims(), out.dtype()), ([rows, outputs], dtype));
        let (out, bound) = (values(out), limit.map_or(f64::INFINITY, f64::from));
        // The CPU rounds the terms of f16 before it adds them.
        let of_sums = if dtype == DType::F16 && *device == Device::flex() { 2f64.powi(-11) } else { 1e-6 };
        for (row, x) in x.chunks(inputs).enumerate() {
            let products = |o: usize| x.iter().zip(&w[o * inputs..]).map(|(a, b)| a * b);
            let (dot, size) = (|o| products(o).sum::<f64>(), |o| products(o).map(f64::abs).sum::<f64>());
            for o in 0..outputs {
                let (gate, up) = (dot(o).min(bound), dot(outputs + o).clamp(-bound, bound));
                let expected = gate / (1.0 + (-gate).exp()) * up;
                let off = (f64::from(out[row * outputs + o]) - expected).abs();
                // Both products may have been rounded, and silu of the one.
                let sums = size(o) * (up.abs() + 1e-3) + size(outputs + o) * (gate.abs() + 1e-3);
                let allowed = 3.0 * tolerance(dtype) * expected.abs() + of_sums * sums;
                assert!(off <= allowed, "{widths:?} {dtype:?} on {device:?}: off by {off:e}, allowed {allowed:e}");
            }
        }
    });
}

/// Heads with channels that are carried over; matrices that are the second half of larger ones.
#[rstest]
fn ops_linear_by_head(
    #[values(1, 9, 65)] rows: usize,
    #[values([16, 128, 48, 64], [3, 33, 7, 0], [2, 64, 8, 5])] sizes: [usize; 4],
    #[values(false, true)] halves: bool,
) {
    let [heads, inputs, outputs, carried] = sizes;
    for_each_dtype(|device, dtype| {
        let (width, mut rng) = (inputs + carried, rng(67));
        let x = random(&mut rng, rows * heads * width, dtype);
        let w = random(&mut rng, heads * 2 * outputs * inputs, dtype);
        let both = floats(&w, [heads, 2 * outputs, inputs], dtype, device);
        let half = both.narrow(1, outputs, outputs);
        let weight = if halves { half } else { half.clone().mul_scalar(1.0) };
        let x_there = floats(&x, [rows, heads, width], dtype, device);
        let out = linear_by_head(x_there, &weight.into(), Fast).expect("legal");
        assert_eq!((out.dims(), out.dtype()), ([rows, heads, outputs + carried], dtype));
        for (row, (out, x)) in values(out).chunks(outputs + carried).zip(x.chunks(width)).enumerate() {
            let matrix = &w[(row % heads * 2 + 1) * outputs * inputs..][..outputs * inputs];
            for (out, w) in out.iter().zip(matrix.chunks(inputs)) {
                let products = || x.iter().zip(w).map(|(a, b)| a * b);
                let (expected, size): (f64, f64) = (products().sum(), products().map(f64::abs).sum());
                let off = (f64::from(*out) - expected).abs();
                assert!(off <= tolerance(dtype) * expected.abs() + 1e-6 * size, "{sizes:?} {dtype:?} on {device:?}");
            }
            let rest = out[outputs..].iter().map(|&value| f64::from(value));
            assert!(rest.eq(x[inputs..].iter().copied()), "{sizes:?} {dtype:?} on {device:?}");
        }
    });
}

#[test]
fn ops_errors_experts() {
    for_each_device(|device| {
        let args = || Inputs::new([4, 5, 2, 64, 32], DType::F32).args(device);
        experts_mlp(args(), &limited(None)).expect("legal before it is changed").materialise();
        let refuses = |kind, argument, change: fn(&mut ExpertsMlpArgs, &Device)| {
            let mut args = args();
            change(&mut args, device);
            assert_refused(experts_mlp(args, &limited(None)), kind, argument);
        };
        let (indices, weights) = Inputs::new([4, 5, 2, 64, 32], DType::F32).chosen(device);
        let given = |indices: &Tensor<2, Int>, weights| {
            let args = ExpertsMlpArgs { routing: Routing::given(indices.clone(), weights), ..args() };
            experts_mlp(args, &limited(None))
        };
        assert_refused(given(&indices.clone().narrow(0, 0, 3), weights.clone()), Shape, "indices");
        assert_refused(given(&indices, zeros([4, 3], device)), Shape, "weights");
        assert_refused(given(&indices, weights.cast(FloatDType::F16)), WrongType, "weights");
        refuses(Shape, "down", |it, device| it.down = zeros::<3>([5, 63, 32], device).into());
        refuses(Value, "down", |it, device| it.down = zeros::<3>([5, 64, 0], device).into());
        refuses(Shape, "gate_up", |it, device| it.gate_up = zeros::<3>([5, 63, 64], device).into());
        refuses(Shape, "gate_up", |it, device| it.gate_up = zeros::<3>([4, 64, 64], device).into());
        let refuses_shared = |kind, argument, change: fn(&mut SharedExperts, &Device)| {
            let mut args = args();
            change(args.shared.as_mut().expect("five experts have shared ones"), device);
            assert_refused(experts_mlp(args, &limited(None)), kind, argument);
        };
        refuses_shared(Shape, "shared.down", |it, device| it.down = zeros::<2>([63, 32], device).into());
        refuses_shared(Value, "shared.down", |it, device| it.down = zeros::<2>([64, 0], device).into());
        refuses_shared(Shape, "shared.gate_up", |it, device| it.gate_up = zeros::<2>([63, 64], device).into());
        refuses_shared(WrongType, "shared.gate_up", |it, _| {
            it.gate_up = it.gate_up.dense().cast(FloatDType::F16).into()
        });
        refuses_shared(WrongType, "shared.down", |it, _| it.down = it.down.dense().cast(FloatDType::F16).into());
        refuses(WrongType, "gate_up", |it, _| it.gate_up = it.gate_up.dense().cast(FloatDType::F16).into());
        assert_refused(experts_mlp(args(), &limited(Some(0.0))), Value, "limit");
        assert_refused(experts_mlp(args(), &limited(Some(f32::NAN))), Value, "limit");
        let norm = |args, residual: [usize; 2], width: usize, eps| {
            let mut residual = Residual::new(zeros(residual, device));
            residual.add(experts_mlp(args, &limited(None))?)?;
            residual.norm(&zeros([width], device), eps).map(|mut h| h.tensor())
        };
        norm(args(), [4, 64], 64, 0.0).expect("legal before it is changed");
        let other = ExpertsMlpArgs { x: zeros([3, 64], device), ..args() };
        assert_refused(norm(other, [4, 64], 64, 0.0), Shape, "indices");
        assert_refused(norm(args(), [4, 63], 64, 0.0), Shape, "addend");
        assert_refused(norm(args(), [4, 64], 63, 0.0), Shape, "weight");
        assert_refused(norm(args(), [4, 64], 64, f32::NAN), Value, "eps");
        let half = zeros::<2>([4, 64], device).cast(FloatDType::F16);
        assert_refused(Residual::new(half.clone()).add(sum(args())), WrongType, "addend");
        let pair = |first: Tensor<2>, second: Tensor<2>| {
            let mut residual = Residual::new(zeros([4, 64], device));
            residual.add(sum(args())).expect("legal");
            let mut h = residual.norm(&zeros([64], device), 0.0).expect("legal");
            linear_pair(&mut h, &first.into(), &second.into(), Fast)
        };
        let matrix = |width| zeros::<2>([8, width], device);
        pair(matrix(64), matrix(64)).expect("legal before it is changed");
        assert_refused(pair(matrix(63), matrix(64)), Shape, "first");
        assert_refused(pair(matrix(64), matrix(63)), Shape, "second");
        assert_refused(pair(matrix(64), half), WrongType, "second");

        let scored = |logits: [usize; 2], choice| {
            let route = RouteExpertsArgs { logits: zeros(logits, device), choice };
            experts_mlp(ExpertsMlpArgs { routing: route_experts(route, &PLAIN)?, ..args() }, &limited(None))
        };
        scored([4, 5], ExpertChoice::Scores(2)).expect("legal before it is changed").materialise();
        assert_refused(scored([3, 5], ExpertChoice::Scores(2)), Shape, "logits");
        assert_refused(scored([4, 6], ExpertChoice::Scores(2)), Shape, "logits");
        assert_refused(scored([4, 5], ExpertChoice::Scores(6)), Value, "choice");
        assert_refused(scored([4, 5], ExpertChoice::BiasedScores(2, zeros([4], device))), Shape, "choice");

        let route = |choice, options: RouteExpertsOptions| {
            route_experts(RouteExpertsArgs { logits: zeros([3, 8], device), choice }, &options)
        };
        let grouped =
            |count, kept, best| RouteExpertsOptions { groups: Some(ExpertGroups { count, kept, best }), ..PLAIN };
        route(ExpertChoice::Scores(4), grouped(4, 2, 2)).expect("legal before it is changed").materialise();
        assert_refused(route(ExpertChoice::Scores(0), PLAIN), Value, "choice");
        assert_refused(route(ExpertChoice::Scores(9), PLAIN), Value, "choice");
        assert_refused(route(ExpertChoice::Scores(5), grouped(4, 2, 2)), Value, "choice");
        assert_refused(route(ExpertChoice::Scores(1), grouped(3, 2, 2)), Value, "groups.count");
        assert_refused(route(ExpertChoice::Scores(1), grouped(0, 0, 1)), Value, "groups.count");
        assert_refused(route(ExpertChoice::Scores(1), grouped(4, 5, 2)), Value, "groups.kept");
        assert_refused(route(ExpertChoice::Scores(1), grouped(8, 2, 2)), Value, "groups.best");
        assert_refused(route(ExpertChoice::BiasedScores(2, zeros([7], device)), PLAIN), Shape, "choice");
        let logits: Tensor<2> = zeros([3, 1025], device);
        let many = RouteExpertsArgs { logits, choice: ExpertChoice::Scores(2) };
        assert_refused(route_experts(many, &PLAIN), Value, "logits");
    });
}

#[test]
fn ops_errors_projections() {
    for_each_device(|device| {
        let half = |shape: [usize; 2]| zeros::<2>(shape, device).cast(FloatDType::F16);
        let project = |weight: Tensor<2>| linear(zeros::<2>([3, 8], device), &weight.into(), Fast);
        project(zeros([4, 8], device)).expect("legal before it is changed");
        assert_refused(project(zeros([4, 7], device)), Shape, "weight");
        assert_refused(project(half([4, 8])), WrongType, "weight");
        // Weights in f32 are for rows of any dtype.
        linear(half([3, 8]), &zeros::<2>([4, 8], device).into(), Fast).expect("legal");
        let pair = |first: Tensor<2>, second: Tensor<2>| {
            linear_pair(zeros::<2>([3, 8], device), &first.into(), &second.into(), Fast)
        };
        assert_refused(pair(zeros([4, 7], device), zeros([4, 8], device)), Shape, "first");
        assert_refused(pair(zeros([4, 8], device), half([4, 8])), WrongType, "second");
        let gated = |gate_up: Tensor<2>, limit| swiglu(zeros::<2>([3, 8], device), &gate_up.into(), limit, Fast);
        gated(zeros([4, 8], device), Some(1.0)).expect("legal before it is changed");
        assert_refused(gated(zeros([4, 7], device), None), Shape, "gate_up");
        assert_refused(gated(zeros([3, 8], device), None), Value, "gate_up");
        assert_refused(gated(half([4, 8]), None), WrongType, "gate_up");
        assert_refused(gated(zeros([4, 8], device), Some(0.0)), Value, "limit");
        let product = |lhs: [usize; 3], rhs| matmul(zeros::<3>(lhs, device), rhs, Fast);
        product([2, 3, 8], zeros([2, 8, 4], device)).expect("legal before it is changed");
        assert_refused(product([2, 3, 8], zeros([2, 7, 4], device)), Shape, "rhs");
        assert_refused(product([2, 3, 8], zeros([1, 8, 4], device)), Shape, "rhs");
        assert_refused(product([2, 3, 8], zeros::<3>([2, 8, 4], device).cast(FloatDType::F16)), WrongType, "rhs");
        assert_refused(matmul(zeros::<1>([8], device), zeros::<1>([8], device), Fast), Value, "lhs");
    });
}
