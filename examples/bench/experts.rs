//! `experts_mlp`: routed experts of published sizes, each chosen equally often, or drawn.

use std::collections::BTreeSet;

use burn::tensor::{DType, Tensor};
use burn_mla::ops::measure::linear_choices;
use burn_mla::ops::{
    Determinism, ExpertsMlpArgs, ExpertsMlpOptions, LinearProblem, Routing, StackedWeight, experts_mlp,
};
use rand::seq::SliceRandom;
use serde_json::json;

use crate::cases::{Bench, Size};
use crate::report::{Volume, rounded};
use crate::{data, tables};

/// The experts of a layer.
#[derive(Debug, Clone, Copy)]
struct Experts {
    model: &'static str,
    experts: usize,
    width: usize,
    hidden: usize,
    top_k: usize,
}

const V2_LITE: Experts = Experts { model: "v2-lite", experts: 64, width: 1408, hidden: 2048, top_k: 6 };
const V3: Experts = Experts { model: "v3", experts: 256, width: 2048, hidden: 7168, top_k: 8 };
const V4_FLASH: Experts = Experts { model: "v4-flash", experts: 256, width: 2048, hidden: 4096, top_k: 6 };
const TINY: Experts = Experts { model: "tiny", experts: 8, width: 16, hidden: 32, top_k: 3 };
const TOKENS: [usize; 10] = [1, 8, 16, 64, 256, 1024, 2048, 4096, 8192, 16384];

/// Weights on the device.
struct Weights {
    /// `[E, 2 I, hidden]`.
    gate_up: StackedWeight,
    /// `[E, hidden, I]`.
    down: StackedWeight,
}

impl Experts {
    fn all(size: Size) -> Vec<Self> {
        if size == Size::Smoke { vec![TINY] } else { vec![V2_LITE, V3, V4_FLASH] }
    }

    fn weights(self, bench: &Bench) -> Result<Weights, String> {
        let Experts { experts, width, hidden, .. } = self;
        let stack = |dims| match bench.blocks {
            Some(blocks) => StackedWeight::from_blocks(blocks.draw(dims, bench.dtype, &bench.device), dims)
                .map_err(|error| error.to_string()),
            None => Ok(data::weights(dims, bench.dtype, &bench.device).into()),
        };
        Ok(Weights { gate_up: stack([experts, 2 * width, hidden])?, down: stack([experts, hidden, width])? })
    }
}

/// Whether the tables choose what is the fastest: the same for both products.
pub fn tables(bench: &mut Bench) {
    for layer in Experts::all(bench.size) {
        let Experts { model, experts, width, hidden, top_k } = layer;
        bench.case(&format!("experts {model}: the weights"), |bench| {
            let (weights, dtype) = (layer.weights(bench)?, bench.dtype);
            let problems = |tokens| LinearProblem::experts([tokens, top_k, experts, hidden, width], dtype);
            let most = tables::most_rows(bench.size);
            let borders =
                [0, 1].map(|product| tables::borders(|tokens| problems(tokens)[product], most, &bench.device));
            // A token alone has kernels of its own, among which there is no choice.
            let borders: BTreeSet<usize> = borders.into_iter().flatten().filter(|&tokens| tokens > 1).collect();
            for tokens in borders {
                let name = format!("experts {model} {tokens}");
                bench.case(&name, |bench| {
                    let args = arguments(bench, layer, tokens, &weights).0;
                    let choices = linear_choices(&problems(tokens)[0], &bench.device);
                    let measured = tables::forced(bench, choices, || compute(&args));
                    tables::judge(bench, &name, measured)
                });
            }
            Ok(())
        });
    }
}

/// The section.
pub fn run(bench: &mut Bench) {
    for layer in Experts::all(bench.size) {
        bench.case(&format!("experts {}: the weights", layer.model), |bench| {
            let weights = layer.weights(bench)?;
            for tokens in bench.rows(&TOKENS) {
                bench.case(&format!("experts {} {tokens}", layer.model), |bench| case(bench, layer, tokens, &weights));
            }
            Ok(())
        });
    }
}

fn case(bench: &mut Bench, layer: Experts, tokens: usize, weights: &Weights) -> Result<(), String> {
    let Experts { model, experts, width, hidden, top_k } = layer;
    let (args, indices) = arguments(bench, layer, tokens, weights);
    let difference = check(bench, layer, weights, &args.x, &indices[(tokens - 1) * top_k..], compute(&args)?)?;
    let times = bench.timer.measure(|| compute(&args))?;
    let chosen = indices.iter().collect::<BTreeSet<_>>().len();
    let of_weights = (weights.gate_up.bytes() + weights.down.bytes()) as f64 / experts as f64 * chosen as f64;
    let volume = Volume {
        flops: Some((6 * tokens * top_k) as f64 * (width * hidden) as f64),
        bytes: Some(of_weights + (2 * tokens * hidden * bench.dtype.size()) as f64),
    };
    let mut shape = vec![
        ("model", json!(model)),
        ("tokens", json!(tokens)),
        ("experts", json!(experts)),
        ("top_k", json!(top_k)),
        ("chosen", json!(chosen)),
    ];
    shape.extend(bench.blocks.map(|blocks| ("weight", json!(format!("{blocks:?}").to_lowercase()))));
    bench.report.row("experts", &shape, &times, volume, &[("rel_rms", rounded(difference, 8))]);
    Ok(())
}

/// So many tokens, and their experts.
fn arguments(bench: &Bench, layer: Experts, tokens: usize, weights: &Weights) -> (ExpertsMlpArgs, Vec<i32>) {
    let (Experts { hidden, top_k, .. }, device) = (layer, &bench.device);
    let indices = if bench.random_experts { drawn(tokens, layer) } else { balanced(tokens, layer) };
    let routing = Routing::given(
        data::ints(indices.clone(), [tokens, top_k], device),
        Tensor::full([tokens, top_k], 1.0 / top_k as f32, (device, DType::F32)),
    );
    let args = ExpertsMlpArgs {
        x: data::normal([tokens, hidden], bench.dtype, device),
        routing,
        gate_up: weights.gate_up.clone(),
        down: weights.down.clone(),
        shared: None,
    };
    (args, indices)
}

fn compute(args: &ExpertsMlpArgs) -> Result<Tensor<2>, String> {
    let options = ExpertsMlpOptions { limit: None, determinism: Determinism::Fast };
    let sum = experts_mlp(args.clone(), &options).map_err(|error| error.to_string())?;
    Ok(sum.materialise())
}

/// Experts `[tokens, k]`, drawn for each token: some have more tokens than others.
fn drawn(tokens: usize, Experts { experts, top_k, .. }: Experts) -> Vec<i32> {
    let mut rng = data::rng(tokens as u64);
    (0..tokens).flat_map(|_| data::permutation(experts, &mut rng).into_iter().take(top_k)).collect()
}

/// Experts `[tokens, k]`, those of a token all different, in random order: all experts come once before any comes again.
fn balanced(tokens: usize, layer: Experts) -> Vec<i32> {
    let Experts { experts, top_k, .. } = layer;
    let mut rng = data::rng(tokens as u64);
    let mut chosen: Vec<i32> = Vec::with_capacity(tokens * top_k + experts);
    while chosen.len() < tokens * top_k {
        // The token that the last round began.
        let begun = chosen[chosen.len() / top_k * top_k..].to_vec();
        let mut round = data::permutation(experts, &mut rng);
        while round[..(top_k - begun.len()) % top_k].iter().any(|expert| begun.contains(expert)) {
            round.shuffle(&mut rng);
        }
        chosen.extend(round);
    }
    chosen.truncate(tokens * top_k);
    chosen
}

/// The last token against f64.
fn check(
    bench: &Bench,
    layer: Experts,
    weights: &Weights,
    x: &Tensor<2>,
    chosen: &[i32],
    out: Tensor<2>,
) -> Result<f64, String> {
    let Experts { width, hidden, top_k, .. } = layer;
    let last = x.dims()[0] - 1..x.dims()[0];
    let x = data::floats(x.clone().slice(last.clone()))?;
    let mut expected = vec![0.0; hidden];
    let (all_up, all_down) = (weights.gate_up.dense(), weights.down.dense());
    for &expert in chosen {
        let matrix = |stack: &Tensor<3>| data::floats(stack.clone().narrow(0, expert as usize, 1));
        let gate_up: Vec<f64> = matrix(&all_up)?.chunks_exact(hidden).map(|row| data::dot(&x, row)).collect();
        let (gate, up) = gate_up.split_at(width);
        let silu = |gate: f64| gate / (1.0 + (-gate).exp());
        let activations: Vec<f32> = gate.iter().zip(up).map(|(&gate, &up)| (silu(gate) * up) as f32).collect();
        for (sum, row) in expected.iter_mut().zip(matrix(&all_down)?.chunks_exact(width)) {
            *sum += data::dot(&activations, row) / top_k as f64;
        }
    }
    let mut difference = data::Difference::default();
    difference.add_numbers(&data::floats(out.slice(last))?, expected);
    difference.check(bench.dtype)
}
