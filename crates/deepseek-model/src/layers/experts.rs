use burn::module::Module;
use burn::tensor::Tensor;
use mla_ops::{Determinism, ExpertsMlpArgs, ExpertsMlpOptions, ExpertsSum, Routing, StackedWeight, experts_mlp};

use super::Mlp;
use crate::Result;

/// The routed experts, stacked.
#[derive(Module, Debug)]
pub(crate) struct Experts {
    /// `[E, 2 · I, hidden]`, gate rows first.
    pub(crate) gate_up_proj: StackedWeight,
    /// `[E, hidden, I]`.
    pub(crate) down_proj: StackedWeight,
    /// DeepSeek-V4: bound of the activations.
    pub(crate) swiglu_limit: Option<f32>,
}

impl Experts {
    /// x `[N, hidden]` -> the sum of each token's experts and the shared ones, `[N, hidden]`.
    pub(crate) fn forward(
        &self,
        x: Tensor<2>,
        routing: Routing,
        shared: &Mlp,
        determinism: Determinism,
    ) -> Result<ExpertsSum> {
        let (gate_up, down) = (self.gate_up_proj.clone(), self.down_proj.clone());
        let args = ExpertsMlpArgs { x, routing, gate_up, down, shared: Some(shared.weights()) };
        Ok(experts_mlp(args, &ExpertsMlpOptions { limit: self.swiglu_limit, determinism })?)
    }
}
