//! Mixture of experts (DeepSeekMoE; DeepSeek-V3 §2.1.2).

use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData, activation};
use mla_ops::{map_independent, matmul};

use super::Mlp;
use crate::config::{DeepseekV3Config, Scoring};
use crate::weights::WeightLoader;
use crate::{ModelError, Result};

/// Routed experts and the shared expert that every token passes.
#[derive(Debug, Clone)]
pub(crate) struct Moe {
    gate: Router,
    experts: Experts,
    shared_experts: Mlp,
}

impl Moe {
    /// Loads `{name}.gate`, `{name}.experts.E` and `{name}.shared_experts`.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, config: &DeepseekV3Config) -> Self {
        let shared_width = config.moe_intermediate_size * config.n_shared_experts;
        Self {
            gate: Router::load(loader, &format!("{name}.gate"), config),
            experts: Experts::load(loader, &format!("{name}.experts"), config),
            shared_experts: Mlp::load(loader, &format!("{name}.shared_experts"), config.hidden_size, shared_width),
        }
    }

    /// `[N, hidden]` -> `[N, hidden]`.
    pub(crate) fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        let (indices, weights) = self.gate.forward(x.clone());
        let routed = self.experts.forward(x.clone(), indices, weights)?;
        Ok(routed + self.shared_experts.forward(x))
    }
}

/// Chooses the experts of each token, and their weights; in f32.
#[derive(Debug, Clone)]
struct Router {
    /// f32 `[hidden, E]`.
    weight: Tensor<2>,
    /// f32 `[1, E]`: added for the choice only (DeepSeek-V3: `e_score_correction_bias`).
    bias: Option<Tensor<2>>,
    scoring: Scoring,
    /// Groups and how many of them are kept; `None` where the choice is over all experts.
    groups: Option<(usize, usize)>,
    top_k: usize,
    normalise: bool,
    scaling_factor: f64,
}

impl Router {
    fn load(loader: &mut WeightLoader, name: &str, config: &DeepseekV3Config) -> Self {
        let experts = config.n_routed_experts;
        let sigmoid = config.scoring == Scoring::Sigmoid;
        let weight = loader.tensor_f32(&format!("{name}.weight"), [experts, config.hidden_size]);
        let bias =
            sigmoid.then(|| loader.tensor_f32(&format!("{name}.e_score_correction_bias"), [experts]).unsqueeze());
        let limited = config.group_limited && config.topk_group < config.n_group;
        Self {
            weight: weight.transpose(),
            bias,
            scoring: config.scoring,
            groups: limited.then_some((config.n_group, config.topk_group)),
            top_k: config.num_experts_per_tok,
            // DeepSeek-V2 never renormalises, whatever its config says.
            normalise: sigmoid && config.norm_topk_prob,
            scaling_factor: config.routed_scaling_factor,
        }
    }

    /// Expert numbers `[N, k]` and weights f32 `[N, k]`.
    fn forward(&self, x: Tensor<2>) -> (Tensor<2, Int>, Tensor<2>) {
        let logits = matmul(x.cast(FloatDType::F32), self.weight.clone());
        let scores = match self.scoring {
            Scoring::Sigmoid => activation::sigmoid(logits),
            Scoring::Softmax => activation::softmax(logits, 1),
        };
        let mut choice = match &self.bias {
            Some(bias) => scores.clone() + bias.clone(),
            None => scores.clone(),
        };
        if let Some((n_group, topk_group)) = self.groups {
            choice = self.keep_best_groups(choice, n_group, topk_group);
        }
        let (_, indices) = choice.topk_with_indices(self.top_k, 1);
        let mut weights = scores.gather(1, indices.clone());
        if self.normalise {
            weights = weights.clone() / (weights.sum_dim(1) + 1e-20);
        }
        (indices, weights * self.scaling_factor)
    }

    /// Hides the experts outside the best groups. A group scores the sum of its two best experts with sigmoid scores
    /// (DeepSeek-V3), its best one with softmax scores (DeepSeek-V2).
    fn keep_best_groups(&self, choice: Tensor<2>, n_group: usize, topk_group: usize) -> Tensor<2> {
        let [tokens, experts] = choice.dims();
        let grouped = choice.reshape([tokens, n_group, experts / n_group]);
        let group_scores = match self.scoring {
            Scoring::Sigmoid => grouped.clone().topk(2, 2).sum_dim(2),
            Scoring::Softmax => grouped.clone().max_dim(2),
        };
        let (_, best) = group_scores.reshape([tokens, n_group]).topk_with_indices(topk_group, 1);
        let groups = Tensor::<1, Int>::arange(0..n_group as i64, (&best.device(), best.dtype()));
        let shape = [tokens, topk_group, n_group];
        let is_best = best
            .unsqueeze_dim::<3>(2)
            .expand(shape)
            .equal(groups.reshape([1, 1, n_group]).expand(shape))
            .any_dim(1)
            .reshape([tokens, n_group, 1]);
        let hidden = is_best.bool_not().expand([tokens, n_group, experts / n_group]);
        grouped.mask_fill(hidden, f32::NEG_INFINITY).reshape([tokens, experts])
    }
}

/// The routed experts, stacked.
#[derive(Debug, Clone)]
pub(super) struct Experts {
    /// `[E, 2 · I, hidden]`, gate rows first.
    pub(super) gate_up_proj: Tensor<3>,
    /// `[E, hidden, I]`.
    pub(super) down_proj: Tensor<3>,
    /// DeepSeek-V4: bound of the activations.
    pub(super) swiglu_limit: Option<f64>,
}

impl Experts {
    fn load(loader: &mut WeightLoader, name: &str, config: &DeepseekV3Config) -> Self {
        let (experts, hidden, width) = (config.n_routed_experts, config.hidden_size, config.moe_intermediate_size);
        let weight = |expert: usize, part: &str| format!("{name}.{expert}.{part}.weight");
        let gate_up: Vec<_> = (0..experts).flat_map(|e| [weight(e, "gate_proj"), weight(e, "up_proj")]).collect();
        let down: Vec<_> = (0..experts).map(|e| weight(e, "down_proj")).collect();
        let gate_up: Tensor<3> = loader.stacked(&gate_up, [2 * experts, width, hidden]);
        Self {
            gate_up_proj: loader.reshape(gate_up, [experts, 2 * width, hidden]),
            down_proj: loader.stacked(&down, [experts, hidden, width]),
            swiglu_limit: None,
        }
    }

    /// x `[N, hidden]`, indices `[N, k]`, weights f32 `[N, k]` -> `[N, hidden]`.
    ///
    /// The choices are read back to the host, which sorts the pairs of token and expert by expert: each expert in use
    /// then is one pair of matmuls over neighbouring rows.
    pub(super) fn forward(&self, x: Tensor<2>, indices: Tensor<2, Int>, weights: Tensor<2>) -> Result<Tensor<2>> {
        let [tokens, top_k] = indices.dims();
        let [_, hidden] = x.dims();
        let (device, dtype) = (x.device(), FloatDType::from(x.dtype()));
        let chosen = indices.try_into_vec_as::<i32>().map_err(ModelError::device)?;
        let mut pairs: Vec<usize> = (0..chosen.len()).collect();
        pairs.sort_by_key(|&pair| chosen[pair]);

        let index = |values: Vec<i32>| {
            let n = values.len();
            Tensor::<1, Int>::from_data(TensorData::new(values, [n]), (&device, DType::I32))
        };
        let sorted = x.select(0, index(pairs.iter().map(|&pair| (pair / top_k) as i32).collect()));
        let mut groups = Vec::new();
        let mut first = 0;
        for group in pairs.chunk_by(|&a, &b| chosen[a] == chosen[b]) {
            groups.push((chosen[group[0]] as usize, first, group.len()));
            first += group.len();
        }
        let work = pairs.len() * 3 * hidden * self.down_proj.dims()[2];
        let outputs = map_independent(&device, work, groups, |(expert, first, len)| {
            self.expert(expert, sorted.clone().narrow(0, first, len))
        });
        let mut place = vec![0; pairs.len()];
        for (row, &pair) in pairs.iter().enumerate() {
            place[pair] = row as i32;
        }
        let outputs = Tensor::cat(outputs, 0).select(0, index(place)).reshape([tokens, top_k, hidden]);
        let weighted = outputs * weights.cast(dtype).unsqueeze_dim::<3>(2);
        Ok(weighted.sum_dim(1).reshape([tokens, hidden]))
    }

    /// One expert: `[n, hidden]` -> `[n, hidden]`.
    fn expert(&self, expert: usize, x: Tensor<2>) -> Tensor<2> {
        let weight = |stacked: &Tensor<3>| stacked.clone().narrow(0, expert, 1).squeeze_dim::<2>(0);
        let gate_up = weight(&self.gate_up_proj);
        let width = gate_up.dims()[0] / 2;
        let gate = matmul(x.clone(), gate_up.clone().narrow(0, 0, width).transpose());
        let up = matmul(x, gate_up.narrow(0, width, width).transpose());
        matmul(gated(gate, up, self.swiglu_limit), weight(&self.down_proj).transpose())
    }
}

/// `silu(gate) ⊙ up`. A limit clamps `up` both ways and the gate only from above, where silu grows.
pub(super) fn gated(gate: Tensor<2>, up: Tensor<2>, limit: Option<f64>) -> Tensor<2> {
    match limit {
        None => activation::silu(gate) * up,
        Some(limit) => activation::silu(gate.clamp_max(limit)) * up.clamp(-limit, limit),
    }
}
