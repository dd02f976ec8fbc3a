//! Mixture of experts of DeepSeek-V4: square-root-softplus scores, a table for the first layers, clamped activations.

use burn::tensor::{Int, Tensor};
use mla_ops::{
    ExpertChoice, ExpertScoring, ExpertsSum, RouteExpertsArgs, RouteExpertsOptions, Routing, Weight, linear,
    route_experts,
};

use super::config::DeepseekV4Config;
use super::schedule::MlpSpec;
use super::step::V4Step;
use crate::Result;
use crate::layers::{Experts, Mlp, MlpNames};
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
    /// Loads `{name}.gate`, `{name}.experts` and `{name}.shared_experts`.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, config: &DeepseekV4Config, spec: MlpSpec) -> Self {
        let sizes = [config.hidden_size, config.moe_intermediate_size];
        let names = MlpNames { gate: "w1", up: "w3", down: "w2" };
        Self {
            gate: Router::load(loader, &format!("{name}.gate"), config, spec),
            experts: load_experts(loader, &format!("{name}.experts"), config),
            shared_experts: Mlp::load_as(loader, &format!("{name}.shared_experts"), names, sizes),
        }
    }

    /// x `[N, hidden]` -> `[N, hidden]`, of which ranks have a summand each. Rows that are padding get no routed expert.
    pub(crate) fn forward(
        &self,
        x: Tensor<2>,
        step: &V4Step,
        observe: &mut Option<Observer<'_>>,
    ) -> Result<ExpertsSum> {
        let routing = self.gate.forward(x.clone(), step)?;
        let routing = Observer::experts(observe, routing);
        self.experts.forward(x, routing, &self.shared_experts, step.determinism)
    }
}

/// Chooses the experts of each token, and their weights; in f32.
#[derive(Debug, Clone)]
struct Router {
    /// f32 `[E, hidden]`.
    weight: Weight,
    choice: Choice,
    options: RouteExpertsOptions,
}

#[derive(Debug, Clone)]
enum Choice {
    /// The experts of each token id, i32 `[vocab, k]`; the scores only weigh them.
    Table(Tensor<2, Int>),
    /// The best scores, with a bias f32 `[E]` that is added for the choice only.
    Scores { bias: Tensor<1>, top_k: usize },
}

impl Router {
    fn load(loader: &mut WeightLoader, name: &str, config: &DeepseekV4Config, spec: MlpSpec) -> Self {
        let (experts, top_k) = (config.n_routed_experts, config.num_experts_per_tok);
        let choice = match spec {
            MlpSpec::HashMoe => {
                let shape = [config.vocab_size, top_k];
                Choice::Table(loader.index_table(&format!("{name}.tid2eid"), shape, experts))
            }
            MlpSpec::Moe => {
                Choice::Scores { bias: loader.tensor_f32(&format!("{name}.bias"), [experts], Cut::Whole), top_k }
            }
        };
        Self {
            weight: loader.weight_f32(&format!("{name}.weight"), [experts, config.hidden_size], Cut::Whole),
            choice,
            options: RouteExpertsOptions {
                scoring: ExpertScoring::SqrtSoftplus,
                groups: None,
                normalise: true,
                scale: config.routed_scaling_factor as f32,
                local: loader.parallel().local_experts(experts),
            },
        }
    }

    /// The experts of each token.
    fn forward(&self, x: Tensor<2>, step: &V4Step) -> Result<Routing> {
        let logits = linear(x, &self.weight, step.determinism)?;
        let choice = match &self.choice {
            Choice::Table(table) => ExpertChoice::Table { experts: table.clone(), rows: step.input_ids.clone() },
            Choice::Scores { bias, top_k } => ExpertChoice::BiasedScores(*top_k, bias.clone()),
        };
        let slots = step.padded_slots.clone();
        Ok(route_experts(RouteExpertsArgs { logits, choice, slots }, &self.options)?)
    }
}

/// Published checkpoints have one tensor per expert, transformers' packed ones two for all.
fn load_experts(loader: &mut WeightLoader, name: &str, config: &DeepseekV4Config) -> Experts {
    let (experts, hidden, width) = (config.n_routed_experts, config.hidden_size, config.moe_intermediate_size);
    let swiglu_limit = Some(config.swiglu_limit as f32);
    let packed = format!("{name}.gate_up_proj");
    if loader.has(&packed) {
        let gate_up_proj = loader.packed_experts(&packed, [experts, 2 * width, hidden]);
        let down_proj = loader.packed_experts(&format!("{name}.down_proj"), [experts, hidden, width]);
        return Experts { gate_up_proj, down_proj, swiglu_limit };
    }
    let weight = |expert: usize, part: &str| format!("{name}.{expert}.{part}.weight");
    let gate_up: Vec<_> = (0..experts).flat_map(|e| [weight(e, "w1"), weight(e, "w3")]).collect();
    let down: Vec<_> = (0..experts).map(|e| weight(e, "w2")).collect();
    let gate_up_proj = loader.experts(&gate_up, [experts, 2 * width, hidden]);
    let down_proj = loader.experts(&down, [experts, hidden, width]);
    Experts { gate_up_proj, down_proj, swiglu_limit }
}
