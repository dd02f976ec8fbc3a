//! Mixture of experts (DeepSeekMoE; DeepSeek-V3 §2.1.2).

use burn::tensor::{Int, Tensor};
use mla_ops::{
    ExpertChoice, ExpertGroups, ExpertScoring, ExpertsSum, Normed, RouteExpertsArgs, RouteExpertsOptions, Routing,
    Weight, linear, route_experts,
};

use super::config::{DeepseekV3Config, Scoring};
use super::step::Step;
use crate::Result;
use crate::layers::{Experts, Mlp};
use crate::models::architecture::Observer;
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
            experts: load_experts(loader, &format!("{name}.experts"), config),
            shared_experts: Mlp::load(loader, &format!("{name}.shared_experts"), config.hidden_size, shared_width),
        }
    }

    /// The normed residual stream h `[N, hidden]` -> the sum of each token's experts and the shared ones, `[N, hidden]`, of which
    /// ranks have a summand each. Rows that are padding get no routed expert.
    pub(crate) fn forward(
        &self,
        h: &mut Normed<'_>,
        step: &Step,
        observe: &mut Option<Observer<'_>>,
    ) -> Result<ExpertsSum> {
        let logits = linear(&mut *h, &self.gate.weight, step.determinism)?;
        let routing = Observer::experts(observe, self.gate.route(logits, step.padded_slots.clone())?);
        self.experts.forward(h.tensor(), routing, &self.shared_experts, step.determinism)
    }
}

/// Chooses the experts of each token, and their weights; in f32.
#[derive(Debug, Clone)]
struct Router {
    /// f32 `[E, hidden]`.
    weight: Weight,
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
            weight: loader.weight_f32(&format!("{name}.weight"), [experts, config.hidden_size], Cut::Whole),
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
                local: loader.parallel().local_experts(experts),
            },
        }
    }

    /// Logits f32 `[N, E]`: the experts of each token; of those without a slot, where that may be, none.
    fn route(&self, logits: Tensor<2>, slots: Option<Tensor<1, Int>>) -> Result<Routing> {
        let choice = match &self.bias {
            Some(bias) => ExpertChoice::BiasedScores(self.top_k, bias.clone()),
            None => ExpertChoice::Scores(self.top_k),
        };
        Ok(route_experts(RouteExpertsArgs { logits, choice, slots }, &self.options)?)
    }
}

/// A tensor per expert and projection.
fn load_experts(loader: &mut WeightLoader, name: &str, config: &DeepseekV3Config) -> Experts {
    let (experts, hidden, width) = (config.n_routed_experts, config.hidden_size, config.moe_intermediate_size);
    let weight = |expert: usize, part: &str| format!("{name}.{expert}.{part}.weight");
    let gate_up: Vec<_> = (0..experts).flat_map(|e| [weight(e, "gate_proj"), weight(e, "up_proj")]).collect();
    let down: Vec<_> = (0..experts).map(|e| weight(e, "down_proj")).collect();
    Experts {
        gate_up_proj: loader.experts(&gate_up, [experts, 2 * width, hidden]),
        down_proj: loader.experts(&down, [experts, hidden, width]),
        swiglu_limit: None,
    }
}
