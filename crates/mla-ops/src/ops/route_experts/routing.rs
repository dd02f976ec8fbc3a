//! [`Routing`]: experts and weights, in memory or not yet chosen.

use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

use super::args::{ExpertChoice, MAX_EXPERTS, RouteExpertsArgs, RouteExpertsOptions};
use super::backend::{BackendChoice, BackendPadding, BackendRouting};
use crate::MlaError;
use crate::check::Check;

/// The experts of each token, and their weights: in memory, or what [`route_experts`](crate::route_experts()) will choose.
#[derive(Debug, Clone)]
#[must_use = "no expert is chosen before it is read"]
pub struct Routing(Form);

#[derive(Debug, Clone)]
enum Form {
    Given {
        indices: Tensor<2, Int>,
        weights: Tensor<2>,
    },
    /// Checked.
    Chosen {
        args: RouteExpertsArgs,
        options: RouteExpertsOptions,
    },
}

impl Routing {
    /// Experts i32 `[N, k]` and their weights f32 `[N, k]`. A number that is no expert's is left out. The operation that reads
    /// them checks both.
    pub fn given(indices: Tensor<2, Int>, weights: Tensor<2>) -> Self {
        Self(Form::Given { indices, weights })
    }

    /// Of checked arguments.
    pub(super) fn chosen_from(args: RouteExpertsArgs, options: RouteExpertsOptions) -> Self {
        Self(Form::Chosen { args, options })
    }

    /// The experts i32 `[N, k]`, the best first, by their local numbers, and their weights f32 `[N, k]`.
    pub fn materialise(self) -> (Tensor<2, Int>, Tensor<2>) {
        let (indices, weights) = self.into_backend().materialise();
        (Tensor::from_dispatch(indices), Tensor::from_dispatch(weights))
    }

    /// What a backend takes.
    pub(crate) fn into_backend(self) -> BackendRouting<Dispatch> {
        let (args, options) = match self.0 {
            Form::Given { indices, weights } => {
                return BackendRouting::Given(indices.into_dispatch(), weights.into_dispatch());
            }
            Form::Chosen { args, options } => (args, options),
        };
        let logits = args.logits.into_backend();
        let choice = match args.choice {
            ExpertChoice::Scores(top_k) => BackendChoice::Scores(logits, top_k),
            ExpertChoice::BiasedScores(top_k, bias) => BackendChoice::BiasedScores(logits, bias.into_dispatch(), top_k),
            ExpertChoice::Given(given) => BackendChoice::Given(logits, given.into_dispatch()),
            ExpertChoice::Table { experts, rows } => {
                BackendChoice::Table(logits, experts.into_dispatch(), rows.into_dispatch())
            }
        };
        let padding = args.slots.map_or(BackendPadding::None, |slots| BackendPadding::Slots(slots.into_dispatch()));
        BackendRouting::Chosen(choice, padding, options)
    }

    /// Experts of a token.
    #[cfg(feature = "_gpu")]
    pub(crate) fn top_k(&self) -> usize {
        match &self.0 {
            Form::Given { indices, .. } => indices.dims()[1],
            Form::Chosen { args, .. } => args.top_k(),
        }
    }

    /// The argument that decides how many experts a token has.
    #[cfg(feature = "_gpu")]
    pub(crate) fn argument(&self) -> &'static str {
        match &self.0 {
            Form::Given { .. } => "indices",
            Form::Chosen { .. } => "choice",
        }
    }

    /// For so many tokens and experts.
    pub(crate) fn check(&self, check: &Check, [tokens, experts]: [usize; 2]) -> Result<(), MlaError> {
        match &self.0 {
            Form::Given { indices, weights } => {
                check.int("indices", indices)?;
                check.float_as("weights", weights, DType::F32, "always")?;
                check.dims("indices", indices.dims(), [Some(tokens), None], || format!("[N, k] with N = {tokens}"))?;
                let [_, top_k] = indices.dims();
                let holds = (1..=MAX_EXPERTS).contains(&top_k);
                check.value("indices", holds, top_k, || format!("1 to {MAX_EXPERTS} experts for a token"))?;
                let words = || format!("[N, k] = [{tokens}, {top_k}]");
                check.dims("weights", weights.dims(), [Some(tokens), Some(top_k)], words)
            }
            Form::Chosen { args, options: RouteExpertsOptions { local: Some(local), .. } } => {
                args.logits.check(check)?;
                check.value("local", local.count == experts, format!("{} experts", local.count), || {
                    format!("E = {experts}, those of the weights")
                })?;
                check.dims("logits", args.logits.dims(), [Some(tokens), None], || format!("[N, ..] with N = {tokens}"))
            }
            Form::Chosen { args, .. } => {
                args.logits.check(check)?;
                let words = || format!("[N, E] = [{tokens}, {experts}]");
                check.dims("logits", args.logits.dims(), [Some(tokens), Some(experts)], words)
            }
        }
    }
}
