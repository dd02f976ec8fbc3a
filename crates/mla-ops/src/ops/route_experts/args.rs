//! Arguments of [`route_experts`](super::route_experts), and their checks.

use burn::tensor::{DType, Int, Tensor};
use serde::{Deserialize, Serialize};

use super::logits::RouterLogits;
use crate::MlaError;
use crate::check::Check;

/// Experts at most, and experts of a token at most.
pub(crate) const MAX_EXPERTS: usize = 1024;

/// Arguments of [`route_experts`](crate::route_experts()).
#[derive(Debug, Clone)]
pub struct RouteExpertsArgs {
    /// f32 `[N, E]`, a tensor `.into()` them or [`RouterLogits::product`].
    pub logits: RouterLogits,
    /// Which experts a token gets.
    pub choice: ExpertChoice,
    /// i32 `[N]`, where some tokens may be padding: those whose slot in a cache is below 0. They get no expert: all are -1.
    pub slots: Option<Tensor<1, Int>>,
}

/// Which experts a token gets.
#[derive(Debug, Clone)]
pub enum ExpertChoice {
    /// The `k` best scores.
    Scores(usize),
    /// The `k` best sums of score and bias f32 `[E]`, which counts for the choice only.
    BiasedScores(usize, Tensor<1>),
    /// These, i32 `[N, k]`; one that does not exist has weight 0.
    Given(Tensor<2, Int>),
    /// Those of a row of a table for each token (DeepSeek-V4's hash layers).
    Table {
        /// i32 `[T, k]`; an expert that does not exist has weight 0.
        experts: Tensor<2, Int>,
        /// i32 `[N]`: the row of each token; one that does not exist has no experts, each of them -1 with weight 0.
        rows: Tensor<1, Int>,
    },
}

/// Options of [`route_experts`](crate::route_experts()).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouteExpertsOptions {
    /// How a logit becomes a score.
    pub scoring: ExpertScoring,
    /// Choice among the experts of the best groups only.
    pub groups: Option<ExpertGroups>,
    /// Whether the weights of a token are divided by their sum.
    pub normalise: bool,
    /// Factor of the weights, a finite number.
    pub scale: f32,
    /// The experts whose weights this device has, where others have the rest: the [`Routing`](crate::Routing) numbers these from 0,
    /// and all others -1. Choice and weights are those among all experts. `None`: it has all.
    pub local: Option<LocalExperts>,
}

impl RouteExpertsOptions {
    /// The weights are the scores, all groups are open, and the device has all experts.
    pub fn new(scoring: ExpertScoring) -> Self {
        Self { scoring, groups: None, normalise: false, scale: 1.0, local: None }
    }
}

/// Experts with consecutive numbers, which one device has of all (expert parallelism; GShard, arXiv 2006.16668).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalExperts {
    /// The number of the first one.
    pub first: usize,
    /// How many there are.
    pub count: usize,
}

/// How a logit becomes a score.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExpertScoring {
    /// The softmax over all experts (DeepSeek-V2).
    Softmax,
    /// `1 / (1 + exp(-x))` (DeepSeek-V3).
    Sigmoid,
    /// `sqrt(ln(1 + exp(x)))` (DeepSeek-V4).
    SqrtSoftplus,
}

/// Groups of experts with consecutive numbers, all of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Groups.
    pub count: usize,
    /// Groups that are kept.
    pub kept: usize,
    /// A group scores the sum of so many of its best experts, 1 (DeepSeek-V2) or 2 (DeepSeek-V3).
    pub best: usize,
}

impl RouteExpertsArgs {
    /// Experts of a token.
    pub(super) fn top_k(&self) -> usize {
        match &self.choice {
            ExpertChoice::Scores(top_k) | ExpertChoice::BiasedScores(top_k, _) => *top_k,
            ExpertChoice::Given(experts) | ExpertChoice::Table { experts, .. } => experts.dims()[1],
        }
    }

    pub(super) fn check(&self, options: &RouteExpertsOptions) -> Result<(), MlaError> {
        let check = self.logits.check_first("route_experts")?;
        let [tokens, experts] = self.logits.dims();
        let holds = (1..=MAX_EXPERTS).contains(&experts);
        check.value("logits", holds, format!("{experts} experts"), || format!("1 to {MAX_EXPERTS}"))?;
        check.value("scale", options.scale.is_finite(), options.scale, || "a finite number".into())?;
        if let Some(local) = options.local {
            local.check(&check, experts)?;
        }
        if let Some(slots) = &self.slots {
            check.int("slots", slots)?;
            check.dims("slots", slots.dims(), [Some(tokens)], || format!("[N] = [{tokens}]"))?;
        }
        let mut most = match options.groups {
            Some(groups) => groups.check(&check, experts)?,
            None => experts,
        };
        match &self.choice {
            ExpertChoice::Scores(_) => {}
            ExpertChoice::BiasedScores(_, bias) => {
                check.float_as("choice", bias, DType::F32, "always")?;
                check.dims("choice", bias.dims(), [Some(experts)], || format!("[E] = [{experts}]"))?;
            }
            ExpertChoice::Given(given) => {
                check.int("choice", given)?;
                check.dims("choice", given.dims(), [Some(tokens), None], || format!("[N, k] with N = {tokens}"))?;
                most = MAX_EXPERTS;
            }
            ExpertChoice::Table { experts, rows } => {
                check.int("choice.experts", experts)?;
                check.int("choice.rows", rows)?;
                check.elements("choice.experts", experts)?;
                check.dims("choice.rows", rows.dims(), [Some(tokens)], || format!("[N] = [{tokens}]"))?;
                let [table_rows, _] = experts.dims();
                check.value("choice.experts", table_rows > 0, "no rows", || "at least one".into())?;
                most = MAX_EXPERTS;
            }
        }
        let top_k = self.top_k();
        check.value("choice", (1..=most).contains(&top_k), top_k, || format!("1 to {most} experts for a token"))
    }
}

impl LocalExperts {
    fn check(self, check: &Check, experts: usize) -> Result<(), MlaError> {
        let Self { first, count } = self;
        let holds = count > 0 && first.checked_add(count).is_some_and(|end| end <= experts);
        check.value("local", holds, format!("{count} experts from number {first} on"), || {
            format!("at least one, all of them among the {experts}")
        })
    }
}

impl ExpertGroups {
    /// How many experts are left to choose from.
    fn check(self, check: &Check, experts: usize) -> Result<usize, MlaError> {
        let Self { count, kept, best } = self;
        let divides = count > 0 && experts.is_multiple_of(count);
        check.value("groups.count", divides, count, || format!("a divisor of the {experts} experts"))?;
        check.value("groups.kept", (1..=count).contains(&kept), kept, || format!("1 to {count}"))?;
        let size = experts / count;
        check.value("groups.best", (1..=2.min(size)).contains(&best), best, || {
            "1 or 2, and no more than a group has".into()
        })?;
        Ok(kept * size)
    }
}
