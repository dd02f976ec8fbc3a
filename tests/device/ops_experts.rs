//! `experts_mlp` against plain loops.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use mla_ops::Determinism::{BatchInvariant, Fast};
use mla_ops::{
    Addend, ExpertChoice, ExpertGroups, ExpertScoring, ExpertsMlpArgs, ExpertsMlpOptions, ExpertsSum, LocalExperts,
    Residual, RouteExpertsArgs, RouteExpertsOptions, Routing, SharedExperts, StackedWeight, Weight, experts_mlp,
    linear_each, residual_norm, route_experts,
};
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype};
use crate::ops_fixture::{bits, floats, ints, random, restrided, rng, tolerance, values};
use crate::ops_route_experts::{How, PLAIN, in_table};
use crate::refusals::zeros;

/// N, experts, k, hidden, I.
type Sizes = [usize; 5];

/// Arguments of `experts_mlp`, on the host.
pub struct Inputs {
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
    pub fn new(sizes: Sizes, dtype: DType) -> Self {
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
    pub fn chosen(&self, device: &Device) -> (Tensor<2, Int>, Tensor<2>) {
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

    pub fn args(&self, device: &Device) -> ExpertsMlpArgs {
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
pub fn limited(limit: Option<f32>) -> ExpertsMlpOptions {
    ExpertsMlpOptions { limit, ..Default::default() }
}

/// The sum of experts without a limit.
pub fn sum(args: ExpertsMlpArgs) -> ExpertsSum {
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
    let [first, second] = linear_each(&mut h, [first, second], Fast).expect("legal");
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
#[case::v3([256, 8, 64, 32], How::Biased, RouteExpertsOptions { scoring: ExpertScoring::Sigmoid, groups: Some(ExpertGroups { count: 8, kept: 4, best: 2 }), normalise: true, scale: 2.5, local: None })]
#[case::v4([15, 6, 32, 16], How::Biased, RouteExpertsOptions { scoring: ExpertScoring::SqrtSoftplus, normalise: true, scale: 1.5, ..PLAIN })]
#[case::v4_table([15, 6, 32, 16], How::Given, RouteExpertsOptions { scoring: ExpertScoring::SqrtSoftplus, normalise: true, scale: 1.5, ..PLAIN })]
#[case::v4_rows([15, 6, 32, 16], How::Table, RouteExpertsOptions { scoring: ExpertScoring::SqrtSoftplus, normalise: true, scale: 1.5, ..PLAIN })]
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
            How::Table => in_table(&given, top_k, device),
        };
        let route = RouteExpertsArgs {
            logits: floats(&logits, [tokens, experts], DType::F32, device).into(),
            choice,
            slots: None,
        };
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

/// Devices that have some of the experts each: their sums add up to that of all, and a choice where it is used has the bits of one
/// before.
#[rstest]
fn ops_experts_mlp_of_local_experts(
    #[values(1, 3)] tokens: usize,
    #[values(How::Scores, How::Biased, How::Given, How::Table)] how: How,
) {
    let ([experts, top_k, hidden, width], mut rng) = ([9, 4, 64, 32], rng(59));
    let logits = random(&mut rng, tokens * experts, DType::F32);
    let bias = random(&mut rng, experts, DType::F32);
    let given: Vec<i32> = (0..tokens * top_k).map(|i| (i * 37 % (experts + 2)) as i32 - 1).collect();
    for_each_dtype(|device, dtype| {
        let inputs = Inputs::new([tokens, experts, top_k, hidden, width], dtype);
        let routing = |local| {
            let choice = match how {
                How::Scores => ExpertChoice::Scores(top_k),
                How::Biased => ExpertChoice::BiasedScores(top_k, floats(&bias, [experts], DType::F32, device)),
                How::Given => ExpertChoice::Given(ints(&given, [tokens, top_k], device)),
                How::Table => in_table(&given, top_k, device),
            };
            let route = RouteExpertsArgs {
                logits: floats(&logits, [tokens, experts], DType::F32, device).into(),
                choice,
                slots: None,
            };
            route_experts(route, &RouteExpertsOptions { local, ..PLAIN }).expect("legal")
        };
        let ExpertsMlpArgs { gate_up, down, .. } = inputs.args(device);
        let part =
            |weight: &StackedWeight, LocalExperts { first, count }| weight.dense().narrow(0, first, count).into();
        let mut added = vec![0.0f32; tokens * hidden];
        for (number, local) in
            [(0, 5), (5, 4)].map(|(first, count)| LocalExperts { first, count }).into_iter().enumerate()
        {
            let args = |routing| {
                let args = inputs.args(device);
                let (gate_up, down) = (part(&gate_up, local), part(&down, local));
                // One of them has the shared experts.
                ExpertsMlpArgs { routing, gate_up, down, shared: args.shared.filter(|_| number == 0), ..args }
            };
            let (indices, weights) = routing(Some(local)).materialise();
            let own = sum(args(routing(Some(local)))).materialise();
            let before = sum(args(Routing::given(indices, weights))).materialise();
            assert!(bits(&own) == bits(&before), "{how:?} {dtype:?} on {device:?}");
            added.iter_mut().zip(values(own)).for_each(|(sum, own)| *sum += own);
        }
        let all = values(sum(ExpertsMlpArgs { routing: routing(None), ..inputs.args(device) }).materialise());
        let most = all.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        for (added, all) in added.iter().zip(all) {
            assert!(
                (added - all).abs() <= tolerance(dtype) as f32 * most,
                "{added}, expected {all}; {dtype:?} on {device:?}"
            );
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
        let [first, second] = linear_each(normed.clone(), [&weights[0], &weights[1]], Fast).expect("legal");
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
