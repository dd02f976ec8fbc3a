//! [`route_experts`], [`experts_mlp`] and [`experts_mlp_add_rms_norm`]: mixture of experts.

use burn::backend::Dispatch;
use burn::tensor::{DType, DispatchTensor, Int, Tensor};

use super::linear::{linear, swiglu};
use super::norm_rope::check_norm;
use crate::MlaError;
use crate::backend::{ExpertsSpec, MlaBackend, RouteSpec};
use crate::check::Check;

const ROUTE: &str = "route_experts";
/// Experts at most.
const MAX_EXPERTS: usize = 1024;

/// Arguments of [`route_experts`].
#[derive(Debug, Clone)]
pub struct RouteExpertsArgs {
    /// f32 `[N, E]`: the router's logits.
    pub logits: Tensor<2>,
    /// Which experts a token gets.
    pub choice: ExpertChoice,
}

/// Which experts a token gets.
#[derive(Debug, Clone)]
pub enum ExpertChoice {
    /// The `k` best scores.
    Scores(usize),
    /// The `k` best sums of score and bias f32 `[E]`, which counts for the choice only.
    BiasedScores(usize, Tensor<1>),
    /// These, i32 `[N, k]`; one that there is not has no weight.
    Given(Tensor<2, Int>),
}

/// Options of [`route_experts`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouteExpertsOptions {
    /// How a logit becomes a score.
    pub scoring: ExpertScoring,
    /// Choice among the experts of the best groups only.
    pub groups: Option<ExpertGroups>,
    /// Whether the weights of a token are divided by their sum.
    pub normalise: bool,
    /// Factor of the weights.
    pub scale: f32,
}

/// How a logit becomes a score.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

/// Chooses the experts of each token, and their weights; in f32, on the device.
///
/// Returns the experts i32 `[N, k]`, the best first, and their weights f32 `[N, k]`. Of two that are as good, the lower number
/// is the better one; what is not a number is the worst.
///
/// # Errors
/// Wrong shapes, dtypes or devices; groups that do not divide the experts or keep fewer than `k`; more than 1024 experts.
pub fn route_experts(
    args: RouteExpertsArgs,
    options: &RouteExpertsOptions,
) -> Result<(Tensor<2, Int>, Tensor<2>), MlaError> {
    args.check(&Check::new(ROUTE, "logits", &args.logits)?, options)?;
    let (indices, weights) = args.route(options);
    Ok((Tensor::from_dispatch(indices), Tensor::from_dispatch(weights)))
}

/// Logits, a bias, and how the best scores are chosen.
type Scores = (DispatchTensor, DispatchTensor, RouteSpec);

/// What a backend takes.
enum Source {
    Scores(Scores),
    /// Logits and experts.
    Given(DispatchTensor, DispatchTensor),
}

impl RouteExpertsArgs {
    /// Experts and weights.
    fn route(self, options: &RouteExpertsOptions) -> (DispatchTensor, DispatchTensor) {
        match self.source(options) {
            Source::Scores((logits, bias, route)) => <Dispatch as MlaBackend>::choose_experts(logits, bias, route),
            Source::Given(logits, given) => <Dispatch as MlaBackend>::weigh_experts(logits, given, *options),
        }
    }

    fn source(self, options: &RouteExpertsOptions) -> Source {
        let (logits, options) = (self.logits.into_dispatch(), *options);
        match self.choice {
            ExpertChoice::Given(given) => Source::Given(logits, given.into_dispatch()),
            ExpertChoice::Scores(top_k) => {
                // Where there is no bias, any tensor does.
                Source::Scores((logits.clone(), logits, RouteSpec { biased: false, top_k, options }))
            }
            ExpertChoice::BiasedScores(top_k, bias) => {
                Source::Scores((logits, bias.into_dispatch(), RouteSpec { biased: true, top_k, options }))
            }
        }
    }

    /// Experts of a token.
    fn top_k(&self) -> usize {
        match &self.choice {
            ExpertChoice::Scores(top_k) | ExpertChoice::BiasedScores(top_k, _) => *top_k,
            ExpertChoice::Given(given) => given.dims()[1],
        }
    }

    fn check(&self, check: &Check, options: &RouteExpertsOptions) -> Result<(), MlaError> {
        check.float_as("logits", &self.logits, DType::F32, "always")?;
        let [tokens, experts] = self.logits.dims();
        let holds = (1..=MAX_EXPERTS).contains(&experts);
        check.value("logits", holds, format!("{experts} experts"), || format!("1 to {MAX_EXPERTS}"))?;
        let mut most = experts;
        if let Some(ExpertGroups { count, kept, best }) = options.groups {
            let divides = count > 0 && experts % count == 0;
            check.value("groups.count", divides, count, || format!("a divisor of the {experts} experts"))?;
            check.value("groups.kept", (1..=count).contains(&kept), kept, || format!("1 to {count}"))?;
            let size = experts / count;
            check.value("groups.best", (1..=2.min(size)).contains(&best), best, || {
                "1 or 2, and no more than a group has".into()
            })?;
            most = kept * size;
        }
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
        }
        let top_k = self.top_k();
        check.value("choice", (1..=most).contains(&top_k), top_k, || format!("1 to {most} experts for a token"))
    }
}

/// Arguments of [`experts_mlp`] and [`experts_mlp_add_rms_norm`].
#[derive(Debug, Clone)]
pub struct ExpertsMlpArgs {
    /// `[N, hidden]`, f32, f16 or bf16.
    pub x: Tensor<2>,
    /// The experts of each token, and their weights.
    pub routing: Routing,
    /// `[E, 2 I, hidden]` of the dtype of `x`: of each expert the gate rows, then those of `up`.
    pub gate_up: Tensor<3>,
    /// `[E, hidden, I]` of the dtype of `x`.
    pub down: Tensor<3>,
    /// What every token passes beside its own, with weight 1, if there is anything.
    pub shared: Option<SharedExperts>,
}

/// The experts of each token, and their weights.
#[derive(Debug, Clone)]
pub enum Routing {
    /// These.
    Chosen {
        /// i32 `[N, k]`: the experts of each token. A number that is none of an expert is left out.
        indices: Tensor<2, Int>,
        /// f32 `[N, k]`: their weights.
        weights: Tensor<2>,
    },
    /// Those of [`route_experts`], bit for bit. A single token that has shared experts chooses in the launch of its first
    /// projection, where matrix instructions compute that.
    Scored {
        /// Logits f32 `[N, E]`, and which experts a token gets.
        route: RouteExpertsArgs,
        /// How they are chosen.
        options: RouteExpertsOptions,
    },
}

impl Routing {
    /// Experts of a token.
    pub(crate) fn top_k(&self) -> usize {
        match self {
            Self::Chosen { indices, .. } => indices.dims()[1],
            Self::Scored { route, .. } => route.top_k(),
        }
    }

    /// The argument that says so.
    pub(crate) fn argument(&self) -> &'static str {
        match self {
            Self::Chosen { .. } => "indices",
            Self::Scored { .. } => "choice",
        }
    }

    /// Where the best scores are to be chosen, these.
    fn scores(&self) -> Option<Scores> {
        match self {
            Self::Scored { route, options } => match route.clone().source(options) {
                Source::Scores(scores) => Some(scores),
                Source::Given(..) => None,
            },
            Self::Chosen { .. } => None,
        }
    }

    /// Experts and weights.
    fn chosen(self) -> (DispatchTensor, DispatchTensor) {
        match self {
            Self::Chosen { indices, weights } => (indices.into_dispatch(), weights.into_dispatch()),
            Self::Scored { route, options } => route.route(&options),
        }
    }

    /// For so many tokens and experts.
    fn check(&self, check: &Check, [tokens, experts]: [usize; 2]) -> Result<(), MlaError> {
        match self {
            Self::Chosen { indices, weights } => {
                check.int("indices", indices)?;
                check.float_as("weights", weights, DType::F32, "always")?;
                check.dims("indices", indices.dims(), [Some(tokens), None], || format!("[N, k] with N = {tokens}"))?;
                let [_, top_k] = indices.dims();
                let holds = (1..=MAX_EXPERTS).contains(&top_k);
                check.value("indices", holds, top_k, || format!("1 to {MAX_EXPERTS} experts for a token"))?;
                let words = || format!("[N, k] = [{tokens}, {top_k}]");
                check.dims("weights", weights.dims(), [Some(tokens), Some(top_k)], words)
            }
            Self::Scored { route, options } => {
                route.check(check, options)?;
                let words = || format!("[N, E] = [{tokens}, {experts}]");
                check.dims("logits", route.logits.dims(), [Some(tokens), Some(experts)], words)
            }
        }
    }
}

/// Experts that every token passes, side by side as one of S hidden channels.
#[derive(Debug, Clone)]
pub struct SharedExperts {
    /// `[2 S, hidden]` of the dtype of `x`: the gate rows, then those of `up`.
    pub gate_up: Tensor<2>,
    /// `[hidden, S]` of the dtype of `x`.
    pub down: Tensor<2>,
}

/// The weighted sum of the experts of each token, `down(silu(gate(x)) ⊙ up(x))`, and of the shared ones: `[N, hidden]` of the
/// dtype of `x`.
///
/// A `limit` clamps `up` both ways and the gate from above (DeepSeek-V4). On a GPU nothing comes back to the host on the way:
/// the pairs of several tokens are sorted by expert on the device, and a single token's shared experts are in the launches of
/// its own. Products and the weighted sum are f32; activations and the output of each expert are rounded to the dtype.
///
/// # Errors
/// Wrong shapes, dtypes or devices, or a limit that is not positive: nothing is launched.
pub fn experts_mlp(args: ExpertsMlpArgs, limit: Option<f32>) -> Result<Tensor<2>, MlaError> {
    args.check("experts_mlp", limit)?;
    if args.x.shape().num_elements() == 0 {
        return Ok(args.x);
    }
    Ok(args.sum(limit, None).0)
}

/// The sum of `residual [N, hidden]`, of the dtype of `x`, and [`experts_mlp`], and its [`rms_norm`](crate::rms_norm) with a
/// weight f32 `[hidden]`: both `[N, hidden]` of that dtype. The bits are those of [`add_rms_norm`](crate::add_rms_norm) after
/// [`experts_mlp`], with one launch less.
///
/// # Errors
/// As both.
pub fn experts_mlp_add_rms_norm(
    args: ExpertsMlpArgs,
    limit: Option<f32>,
    residual: Tensor<2>,
    norm_weight: Tensor<1>,
    eps: f32,
) -> Result<(Tensor<2>, Tensor<2>), MlaError> {
    let check = args.check("experts_mlp_add_rms_norm", limit)?;
    let [tokens, hidden] = args.x.dims();
    check.float_as("residual", &residual, args.x.dtype(), "that of `x`")?;
    let words = || format!("[N, hidden] = [{tokens}, {hidden}]");
    check.dims("residual", residual.dims(), [Some(tokens), Some(hidden)], words)?;
    check_norm(&check, "norm_weight", &norm_weight, hidden, eps)?;
    if tokens * hidden == 0 {
        return Ok((residual.clone(), residual));
    }
    Ok(args.sum(limit, Some((residual, norm_weight, eps))))
}

impl ExpertsMlpArgs {
    /// The experts' sum, twice; with a residual stream and the weight and epsilon of a norm, the sum of both and its norm.
    fn sum(self, limit: Option<f32>, norm: Option<(Tensor<2>, Tensor<1>, f32)>) -> (Tensor<2>, Tensor<2>) {
        let Self { x, routing, gate_up, down, shared } = self;
        let norm_eps = norm.as_ref().map(|(_, _, eps)| *eps);
        let spec = ExpertsSpec { shared: shared.is_some(), limit, norm_eps };
        // Where something is missing, any tensor does.
        let any = || x.clone().into_dispatch();
        let (residual, norm_weight) = match norm {
            Some((residual, weight, _)) => (residual.into_dispatch(), weight.into_dispatch()),
            None => (any(), any()),
        };
        let [gate_up, down] = [gate_up, down].map(Tensor::into_dispatch);
        #[rustfmt::skip]
        let (sum, normed) = match (shared, routing.scores()) {
            (Some(shared), Some((logits, bias, route))) if x.dims()[0] == 1 => {
                let [shared_gate_up, shared_down] = [shared.gate_up, shared.down].map(Tensor::into_dispatch);
                <Dispatch as MlaBackend>::routed_experts_mlp_of_token(
                    x.into_dispatch(), logits, bias, gate_up, down, shared_gate_up, shared_down, residual, norm_weight, route, spec,
                )
            }
            (Some(shared), None) if x.dims()[0] == 1 => {
                let (indices, weights) = routing.chosen();
                let [shared_gate_up, shared_down] = [shared.gate_up, shared.down].map(Tensor::into_dispatch);
                <Dispatch as MlaBackend>::experts_mlp_of_token(
                    x.into_dispatch(), indices, weights, gate_up, down, shared_gate_up, shared_down, residual, norm_weight, spec,
                )
            }
            (shared, _) => {
                let (indices, weights) = routing.chosen();
                let product = |it: SharedExperts| linear(swiglu(x.clone(), it.gate_up, limit), it.down).into_dispatch();
                let shared = shared.map_or_else(any, product);
                <Dispatch as MlaBackend>::experts_mlp(
                    x.into_dispatch(), indices, weights, gate_up, down, shared, residual, norm_weight, spec,
                )
            }
        };
        (Tensor::from_dispatch(sum), Tensor::from_dispatch(normed))
    }

    fn check(&self, op: &'static str, limit: Option<f32>) -> Result<Check, MlaError> {
        let check = Check::new(op, "x", &self.x)?;
        check.float("x", &self.x)?;
        for (name, weight) in [("gate_up", &self.gate_up), ("down", &self.down)] {
            check.float_as(name, weight, self.x.dtype(), "that of `x`")?;
        }
        let ([tokens, hidden], [experts, _, width]) = (self.x.dims(), self.down.dims());
        self.routing.check(&check, [tokens, experts])?;
        let words = || format!("[E, hidden, I] with hidden = {hidden}, none of them 0");
        check.dims("down", self.down.dims(), [None, Some(hidden), None], words)?;
        let holds = (1..=MAX_EXPERTS).contains(&experts) && width > 0;
        check.value("down", holds, format!("{:?}", self.down.dims()), || {
            format!("1 to {MAX_EXPERTS} experts with a channel")
        })?;
        let words = || format!("[E, 2 I, hidden] = [{experts}, {}, {hidden}]", 2 * width);
        check.dims("gate_up", self.gate_up.dims(), [Some(experts), Some(2 * width), Some(hidden)], words)?;
        if let Some(SharedExperts { gate_up, down }) = &self.shared {
            check.float_as("shared.gate_up", gate_up, self.x.dtype(), "that of `x`")?;
            check.float_as("shared.down", down, self.x.dtype(), "that of `x`")?;
            let words = || format!("[hidden, S] with hidden = {hidden}");
            check.dims("shared.down", down.dims(), [Some(hidden), None], words)?;
            let [_, width] = down.dims();
            check.value("shared.down", width > 0, width, || "at least one hidden channel".into())?;
            let words = || format!("[2 S, hidden] = [{}, {hidden}]", 2 * width);
            check.dims("shared.gate_up", gate_up.dims(), [Some(2 * width), Some(hidden)], words)?;
        }
        if let Some(limit) = limit {
            check.value("limit", limit > 0.0, limit, || "a number above 0".into())?;
        }
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        crate::limits::experts(&check, self)?;
        Ok(check)
    }
}
