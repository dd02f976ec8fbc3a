//! Mixture of experts (DeepSeekMoE; DeepSeek-V3 §2.1.2).

use burn::tensor::{Bool, Tensor};
use mla_ops::{
    ExpertChoice, ExpertGroups, ExpertScoring, ExpertsMlpArgs, RouteExpertsArgs, RouteExpertsOptions, Routing,
    experts_mlp_add_rms_norm, experts_mlp_add_rms_norm_linear_pair, route_experts,
};

use super::{AttentionInput, Mlp, MultiHeadLatentAttention, RmsNorm};
use crate::Result;
use crate::models::deepseek_v3::{DeepseekV3Config, Scoring};
use crate::parallel::Cut;
use crate::weights::WeightLoader;

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

    /// The residual stream x `[N, hidden]` and what the attention adds to it, with the norm of that sum and the norm behind the
    /// experts: the sum with the experts, and its norm, with the products that the attention behind it begins with, if there
    /// is one. Rows that are `padding`, `[N, 1]`, get no routed expert.
    pub(crate) fn forward_sum(
        &self,
        (x, attention): (Tensor<2>, Tensor<2>),
        [norm, next_norm]: [&RmsNorm; 2],
        next: Option<&MultiHeadLatentAttention>,
        padding: Option<&Tensor<2, Bool>>,
    ) -> Result<(Tensor<2>, AttentionInput)> {
        let (x, h, logits) = norm.forward_sum_and_project(x, attention, self.gate.weight.clone())?;
        let args = self.experts.args(h, self.gate.routing(logits, padding)?, &self.shared_experts);
        let (limit, weight, eps) = (self.experts.swiglu_limit, next_norm.weight.clone(), next_norm.eps);
        let Some(next) = next else {
            let (x, h) = experts_mlp_add_rms_norm(args, limit, x, weight, eps)?;
            return Ok((x, h.into()));
        };
        let projections = next.first_projections();
        let (sum, x, projected) = experts_mlp_add_rms_norm_linear_pair(args, limit, x, weight, eps, projections)?;
        Ok((sum, AttentionInput { x, projected: Some(projected) }))
    }
}

/// Chooses the experts of each token, and their weights; in f32.
#[derive(Debug, Clone)]
struct Router {
    /// f32 `[E, hidden]`.
    weight: Tensor<2>,
    /// f32 `[E]`: added for the choice only (DeepSeek-V3: `e_score_correction_bias`).
    bias: Option<Tensor<1>>,
    top_k: usize,
    options: RouteExpertsOptions,
}

impl Router {
    fn load(loader: &mut WeightLoader, name: &str, config: &DeepseekV3Config) -> Self {
        let experts = config.n_routed_experts;
        let sigmoid = config.scoring == Scoring::Sigmoid;
        let limited = config.group_limited && config.topk_group < config.n_group;
        Self {
            weight: loader.tensor_f32(&format!("{name}.weight"), [experts, config.hidden_size], Cut::Whole),
            bias: sigmoid.then(|| loader.tensor_f32(&format!("{name}.e_score_correction_bias"), [experts], Cut::Whole)),
            top_k: config.num_experts_per_tok,
            options: RouteExpertsOptions {
                scoring: if sigmoid { ExpertScoring::Sigmoid } else { ExpertScoring::Softmax },
                groups: limited.then_some(ExpertGroups {
                    count: config.n_group,
                    kept: config.topk_group,
                    best: if sigmoid { 2 } else { 1 },
                }),
                // DeepSeek-V2 never renormalises, whatever its config says.
                normalise: sigmoid && config.norm_topk_prob,
                scale: config.routed_scaling_factor as f32,
            },
        }
    }

    /// Logits f32 `[N, E]`: the experts of each token, of `padding` none.
    fn routing(&self, logits: Tensor<2>, padding: Option<&Tensor<2, Bool>>) -> Result<Routing> {
        let choice = match &self.bias {
            Some(bias) => ExpertChoice::BiasedScores(self.top_k, bias.clone()),
            None => ExpertChoice::Scores(self.top_k),
        };
        let (route, options) = (RouteExpertsArgs { logits, choice }, self.options);
        let Some(padding) = padding else { return Ok(Routing::Scored { route, options }) };
        let (indices, weights) = route_experts(route, &options)?;
        let padding = padding.clone().expand(indices.dims());
        Ok(Routing::Chosen { indices: indices.mask_fill(padding, -1), weights })
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
    pub(super) swiglu_limit: Option<f32>,
}

impl Experts {
    fn load(loader: &mut WeightLoader, name: &str, config: &DeepseekV3Config) -> Self {
        let (experts, hidden, width) = (config.n_routed_experts, config.hidden_size, config.moe_intermediate_size);
        let weight = |expert: usize, part: &str| format!("{name}.{expert}.{part}.weight");
        let gate_up: Vec<_> = (0..experts).flat_map(|e| [weight(e, "gate_proj"), weight(e, "up_proj")]).collect();
        let down: Vec<_> = (0..experts).map(|e| weight(e, "down_proj")).collect();
        let gate_up: Tensor<3> = loader.stacked(&gate_up, [2 * experts, width, hidden], Cut::Experts);
        let local = loader.parallel().local(experts);
        Self {
            gate_up_proj: loader.reshape(gate_up, [local, 2 * width, hidden]),
            down_proj: loader.stacked(&down, [experts, hidden, width], Cut::Experts),
            swiglu_limit: None,
        }
    }

    /// x `[N, hidden]`: what the sum of each token's experts and the shared one takes.
    pub(super) fn args(&self, x: Tensor<2>, routing: Routing, shared: &Mlp) -> ExpertsMlpArgs {
        let (gate_up, down) = (self.gate_up_proj.clone(), self.down_proj.clone());
        ExpertsMlpArgs { x, routing, gate_up, down, shared: Some(shared.weights()) }
    }
}
