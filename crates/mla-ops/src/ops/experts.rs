//! [`route_experts`], [`experts_mlp`], and this with what follows it: mixture of experts.

use burn::backend::Dispatch;
use burn::tensor::{DType, DispatchTensor, Int, Tensor};

use super::linear::{linear, linear_pair, pair_has_kernel, swiglu};
use super::norm_rope::check_norm;
use crate::MlaError;
use crate::backend::{BackendRouting, ExpertsSpec, MlaBackend, RouteSpec};
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
    let (indices, weights) = args.routing(options).chosen();
    Ok((Tensor::from_dispatch(indices), Tensor::from_dispatch(weights)))
}

impl RouteExpertsArgs {
    /// What a backend takes.
    fn routing(self, options: &RouteExpertsOptions) -> BackendRouting<Dispatch> {
        let (logits, options) = (self.logits.into_dispatch(), *options);
        match self.choice {
            ExpertChoice::Given(given) => {
                let (given, weights) = Dispatch::weigh_experts(logits, given.into_dispatch(), options);
                BackendRouting::Chosen(given, weights)
            }
            ExpertChoice::Scores(top_k) => {
                // Where there is no bias, any tensor does.
                BackendRouting::Scored(logits.clone(), logits, RouteSpec { biased: false, top_k, options })
            }
            ExpertChoice::BiasedScores(top_k, bias) => {
                BackendRouting::Scored(logits, bias.into_dispatch(), RouteSpec { biased: true, top_k, options })
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

/// Arguments of [`experts_mlp`], [`experts_mlp_add_rms_norm`] and [`experts_mlp_add_rms_norm_linear_pair`].
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

#[cfg(feature = "_gpu")]
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
}

impl Routing {
    /// What a backend takes.
    fn into_backend(self) -> BackendRouting<Dispatch> {
        match self {
            Self::Chosen { indices, weights } => {
                BackendRouting::Chosen(indices.into_dispatch(), weights.into_dispatch())
            }
            Self::Scored { route, options } => route.routing(&options),
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
    args.check_normed("experts_mlp_add_rms_norm", limit, &residual, (&norm_weight, eps))?;
    if args.x.shape().num_elements() == 0 {
        return Ok((residual.clone(), residual));
    }
    Ok(args.sum(limit, Some((residual, norm_weight, eps))))
}

/// What [`experts_mlp_add_rms_norm`] returns, the sum and its norm, both `[N, hidden]`, and the products `[N, out]` of the norm
/// with each of two `weights [out, hidden]`, as [`linear_pair`] computes them; all of the dtype of `x`. The bits are those of
/// both operations. For a single token with shared experts on a GPU with matrix instructions, sum, norm and products are one
/// launch: the end of a layer and the beginning of the next one.
///
/// # Errors
/// As [`experts_mlp_add_rms_norm`]; weights of other shapes, dtypes or devices: nothing is launched.
#[allow(clippy::type_complexity, reason = "four tensors")]
pub fn experts_mlp_add_rms_norm_linear_pair(
    args: ExpertsMlpArgs,
    limit: Option<f32>,
    residual: Tensor<2>,
    norm_weight: Tensor<1>,
    eps: f32,
    weights: [Tensor<2>; 2],
) -> Result<(Tensor<2>, Tensor<2>, [Tensor<2>; 2]), MlaError> {
    let check = args.check_normed("experts_mlp_add_rms_norm_linear_pair", limit, &residual, (&norm_weight, eps))?;
    let [tokens, hidden] = args.x.dims();
    for (name, weight) in ["weights[0]", "weights[1]"].into_iter().zip(&weights) {
        check.float_as(name, weight, args.x.dtype(), "that of `x`")?;
        check.dims(name, weight.dims(), [None, Some(hidden)], || format!("[out, hidden] with hidden = {hidden}"))?;
        check.elements(name, weight)?;
    }
    let [first, second] = weights;
    let of_token = tokens == 1 && pair_has_kernel(&args.x, [&first, &second]);
    if let Some(shared) = args.shared.clone().filter(|_| of_token) {
        let norm = Some((residual, norm_weight, eps));
        let [sum, normed, first, second] = args.sum_of_token(shared, limit, norm, Some([first, second]));
        return Ok((sum, normed, [first, second]));
    }
    let (sum, normed) = experts_mlp_add_rms_norm(args, limit, residual, norm_weight, eps)?;
    let (first, second) = linear_pair(normed.clone(), first, second);
    Ok((sum, normed, [first, second]))
}

/// A residual stream, and weight and epsilon of the norm of what it becomes.
type AddNorm = (Tensor<2>, Tensor<1>, f32);

/// Stream and weight, or `any` tensors.
fn into_backend(norm: Option<AddNorm>, any: &DispatchTensor) -> (DispatchTensor, DispatchTensor) {
    match norm {
        Some((residual, weight, _)) => (residual.into_dispatch(), weight.into_dispatch()),
        None => (any.clone(), any.clone()),
    }
}

impl ExpertsMlpArgs {
    /// The experts' sum, twice; with a residual stream and a norm, the sum of both and its norm.
    fn sum(mut self, limit: Option<f32>, norm: Option<AddNorm>) -> (Tensor<2>, Tensor<2>) {
        if let Some(shared) = self.shared.take_if(|_| self.x.dims()[0] == 1) {
            let [sum, normed, ..] = self.sum_of_token(shared, limit, norm, None);
            return (sum, normed);
        }
        let Self { x, routing, gate_up, down, shared } = self;
        let norm_eps = norm.as_ref().map(|(_, _, eps)| *eps);
        let spec = ExpertsSpec { shared: shared.is_some(), limit, norm_eps, pair: false };
        // Where something is missing, any tensor does.
        let any = x.clone().into_dispatch();
        let (residual, norm_weight) = into_backend(norm, &any);
        let product = |it: SharedExperts| linear(swiglu(x.clone(), it.gate_up, limit), it.down).into_dispatch();
        let shared = shared.map_or(any, product);
        let ((indices, weights), x) = (routing.into_backend().chosen(), x.into_dispatch());
        let [gate_up, down] = [gate_up, down].map(Tensor::into_dispatch);
        let (sum, normed) =
            Dispatch::experts_mlp(x, indices, weights, gate_up, down, shared, residual, norm_weight, spec);
        (Tensor::from_dispatch(sum), Tensor::from_dispatch(normed))
    }

    /// What [`Self::sum`] returns of a single token with these shared experts, and the products of the norm with two matrices,
    /// if there are any.
    fn sum_of_token(
        self,
        shared: SharedExperts,
        limit: Option<f32>,
        norm: Option<AddNorm>,
        pair: Option<[Tensor<2>; 2]>,
    ) -> [Tensor<2>; 4] {
        let norm_eps = norm.as_ref().map(|(_, _, eps)| *eps);
        let spec = ExpertsSpec { shared: true, limit, norm_eps, pair: pair.is_some() };
        let (x, routing) = (self.x.into_dispatch(), self.routing.into_backend());
        let [gate_up, down] = [self.gate_up, self.down].map(Tensor::into_dispatch);
        let [shared_gate_up, shared_down] = [shared.gate_up, shared.down].map(Tensor::into_dispatch);
        // Where something is missing, any tensor does.
        let (residual, norm_weight) = into_backend(norm, &x);
        let [first, second] = pair.map_or_else(|| [x.clone(), x.clone()], |pair| pair.map(Tensor::into_dispatch));
        #[rustfmt::skip]
        let (sum, normed, first, second) = Dispatch::experts_mlp_of_token(
            x, routing, gate_up, down, shared_gate_up, shared_down, residual, norm_weight, first, second, spec,
        );
        [sum, normed, first, second].map(Tensor::from_dispatch)
    }

    /// The arguments of a residual sum and its norm, too.
    fn check_normed(
        &self,
        op: &'static str,
        limit: Option<f32>,
        residual: &Tensor<2>,
        (norm_weight, eps): (&Tensor<1>, f32),
    ) -> Result<Check, MlaError> {
        let check = self.check(op, limit)?;
        let [tokens, hidden] = self.x.dims();
        check.float_as("residual", residual, self.x.dtype(), "that of `x`")?;
        let words = || format!("[N, hidden] = [{tokens}, {hidden}]");
        check.dims("residual", residual.dims(), [Some(tokens), Some(hidden)], words)?;
        check_norm(&check, "norm_weight", norm_weight, hidden, eps)?;
        Ok(check)
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
        #[cfg(feature = "_gpu")]
        crate::op_limits::experts(&check, self)?;
        Ok(check)
    }
}
