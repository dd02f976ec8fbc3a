//! Mixture of experts of all models: scores, a choice by them or by a table, routed and shared experts.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use mla_ops::{
    Determinism, ExpertChoice, ExpertGroups, ExpertScoring, ExpertsSum, RouteExpertsArgs, RouteExpertsOptions,
    RouterLogits, Routing, Rows, Weight, route_experts,
};

use super::{Experts, Mlp, initialised, param};
use crate::config::sizes::{MOST, impossible_size, is_positive, product, sum, too_many_experts};
use crate::config::{Contradiction, Quantization};
use crate::models::{Observer, deepseek_v3};
use crate::parallel::{Cut, ExpertCut};
use crate::weights::{RandomInit, WeightLoader};
use crate::{ModelError, Result};

/// The sizes of a [`Moe`], by their names in `config.json`. [`DeepseekV3Config::moe`](crate::DeepseekV3Config::moe) and
/// [`DeepseekV4Config::moe`](crate::DeepseekV4Config::moe) have that of a model.
#[derive(Config, Debug, PartialEq)]
pub struct MoeConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Hidden width of one expert.
    pub moe_intermediate_size: usize,
    /// Routed experts.
    pub n_routed_experts: usize,
    /// Routed experts that a token goes to.
    pub num_experts_per_tok: usize,
    /// Shared experts, fused into one of width `n_shared_experts * moe_intermediate_size`.
    #[config(default = 1)]
    pub n_shared_experts: usize,
    /// How router logits become scores; all but `Softmax` with a bias that counts for the choice only (`e_score_correction_bias`).
    #[config(default = "ExpertScoring::Sigmoid")]
    pub scoring: ExpertScoring,
    /// Groups that the routed experts form.
    #[config(default = 1)]
    pub n_group: usize,
    /// Groups that a token may choose from: scored by their two best experts, with `Softmax` by the best one.
    #[config(default = 1)]
    pub topk_group: usize,
    /// Whether the chosen experts' weights are divided by their sum.
    #[config(default = true)]
    pub norm_topk_prob: bool,
    /// Factor on the routed experts' weights.
    #[config(default = 1.0)]
    pub routed_scaling_factor: f64,
    /// Bound of the gate (from above) and of the other factor (both ways) in every expert.
    pub swiglu_limit: Option<f64>,
    /// Whether experts are in FP8, or FP4, as DeepSeek publishes its models.
    pub quantization: Option<Quantization>,
}

impl MoeConfig {
    /// A layer with random weights; otherwise as [`MlaConfig::init`](super::MlaConfig::init).
    ///
    /// # Errors
    /// As there.
    pub fn init(&self, init: impl Into<RandomInit>, device: &Device, dtype: FloatDType) -> Result<Moe> {
        let load = |loader: &mut WeightLoader| deepseek_v3::load_moe(loader, "model.layers.0.mlp", self);
        initialised(self.wrong(), init, (device, dtype), (self.quantization, deepseek_v3::PUBLISHED), load)
    }

    /// A layer that chooses experts by token ids, with a random table for so many of them (hash routing, the first layers of
    /// DeepSeek-V4): the scores only weigh them, and have no bias. Otherwise as [`Self::init`].
    ///
    /// # Errors
    /// As there; a `vocab_size` of 0, or too large.
    pub fn init_hash(
        &self,
        vocab_size: usize,
        init: impl Into<RandomInit>,
        device: &Device,
        dtype: FloatDType,
    ) -> Result<Moe> {
        let load = |loader: &mut WeightLoader| {
            let (name, shape) = ("model.layers.0.mlp", [vocab_size, self.num_experts_per_tok]);
            let table = loader.index_table(&format!("{name}.gate.tid2eid"), shape, self.n_routed_experts);
            deepseek_v3::load_moe_with(loader, name, self, (None, Some(table)))
        };
        let numbers = || product(&[vocab_size, self.num_experts_per_tok]);
        let wrong = self.wrong().or_else(|| impossible_size(&[("vocab_size", vocab_size, MOST)], numbers));
        initialised(wrong, init, (device, dtype), (self.quantization, deepseek_v3::PUBLISHED), load)
    }

    fn wrong(&self) -> Option<Contradiction> {
        let (experts, hidden, width) = (self.n_routed_experts, self.hidden_size, self.moe_intermediate_size);
        let bounds = [
            ("hidden_size", hidden, MOST),
            ("moe_intermediate_size", width, MOST),
            ("n_routed_experts", experts, MOST),
            ("num_experts_per_tok", self.num_experts_per_tok, MOST),
            ("n_shared_experts", self.n_shared_experts, MOST),
            ("n_group", self.n_group, MOST),
            ("topk_group", self.topk_group, MOST),
        ];
        let mlp = |count| product(&[3, count, hidden, width]);
        let numbers = || sum([product(&[experts, hidden + 1]), mlp(experts), mlp(self.n_shared_experts)]);
        impossible_size(&bounds, numbers)
            .or_else(|| too_many_experts(1, experts))
            .or_else(|| self.contradicting_numbers())
            .or_else(|| self.contradicting_groups())
    }

    fn contradicting_numbers(&self) -> Option<Contradiction> {
        let limit = ("swiglu_limit", self.swiglu_limit.unwrap_or(1.0));
        let mut positive = [("routed_scaling_factor", self.routed_scaling_factor), limit].into_iter();
        let (field, value) = positive.find(|&(_, value)| !is_positive(value))?;
        Some((field, value.to_string(), "a finite number above 0, in f32".into()))
    }

    pub(crate) fn contradicting_groups(&self) -> Option<Contradiction> {
        let found = |field, actual: usize, expected: String| Some((field, actual.to_string(), expected));
        let (experts, per_token, groups) = (self.n_routed_experts, self.num_experts_per_tok, self.n_group);
        if groups == 1 {
            let expected = format!("at most `n_routed_experts` = {experts}");
            return if per_token > experts { found("num_experts_per_tok", per_token, expected) } else { None };
        }
        if !experts.is_multiple_of(groups) {
            return found("n_group", groups, format!("a divisor of `n_routed_experts` = {experts}"));
        }
        if self.topk_group > groups {
            return found("topk_group", self.topk_group, format!("at most `n_group` = {groups}"));
        }
        let per_group = experts / groups;
        if per_group < self.best_of_group() {
            let expected = format!("at most {} (a group is scored by its two best experts)", experts / 2);
            return found("n_group", groups, expected);
        }
        let available = self.topk_group * per_group;
        if per_token > available {
            let expected =
                format!("at most {available} (`topk_group` = {} groups of {per_group} experts)", self.topk_group);
            return found("num_experts_per_tok", per_token, expected);
        }
        None
    }

    /// Experts by which a group is scored.
    fn best_of_group(&self) -> usize {
        if self.has_bias() { 2 } else { 1 }
    }

    /// Whether the choice has a bias.
    pub(crate) fn has_bias(&self) -> bool {
        self.scoring != ExpertScoring::Softmax
    }

    /// How so many ranks divide the routed experts.
    pub(crate) fn expert_cut(&self, ranks: usize) -> ExpertCut {
        ExpertCut::of(self.moe_intermediate_size, self.quantization, ranks)
    }

    pub(crate) fn swiglu_limit(&self) -> Option<f32> {
        self.swiglu_limit.map(|limit| limit as f32)
    }
}

/// Mixture of experts (DeepSeekMoE, arXiv 2401.06066; DeepSeek-V3, arXiv 2412.19437, section 2.1.2; DeepSeek-V4 with other scores and
/// clamped activations): routed experts that a token chooses, and shared ones that every token passes.
///
/// ```
/// use burn::tensor::{Device, Distribution, FloatDType, Tensor};
/// use deepseek_model::layers::MoeConfig;
/// use mla_ops::Determinism;
/// use mla_ops::batch::index_tensor;
///
/// let device = Device::flex();
/// // Width of the stream and of an expert, experts, and how many a token goes to.
/// let config = MoeConfig::new(64, 32, 8, 2).with_n_group(4).with_topk_group(2).with_routed_scaling_factor(2.5);
/// let moe = config.init(7, &device, FloatDType::F32)?;
/// let x = Tensor::<2>::random([5, 64], Distribution::Default, &device);
/// let sum = moe.forward(x, Determinism::Fast)?; // may be added in the launch of the norm behind it, see `Residual`
/// assert_eq!(sum.materialise().dims(), [5, 64]);
/// // DeepSeek-V4's first layers choose by token ids.
/// let moe = MoeConfig::new(64, 32, 8, 2).init_hash(100, 7, &device, FloatDType::F32)?;
/// let (x, ids) = (Tensor::<2>::random([3, 64], Distribution::Default, &device), index_tensor(vec![5, 99, 5], &device));
/// assert_eq!(moe.forward_ids(x, &ids, Determinism::Fast)?.materialise().dims(), [3, 64]);
/// # Ok::<(), deepseek_model::ModelError>(())
/// ```
///
/// Its record has the experts stacked: `experts.gate_up_proj` `[E, 2 · I, hidden]`, gate rows first, and `experts.down_proj`
/// `[E, hidden, I]`.
#[derive(Module, Debug)]
pub struct Moe {
    pub(crate) gate: Router,
    pub(crate) experts: Experts,
    pub(crate) shared_experts: Mlp,
}

/// What a layer has to know of the tokens, besides their rows.
pub(crate) struct MoeTokens<'t> {
    /// i32 `[N]`: their ids, where a table chooses the experts.
    pub(crate) ids: Option<&'t Tensor<1, Int>>,
    /// i32 `[N]`, where some may be padding: below 0 for those, which get no routed expert.
    pub(crate) padded_slots: Option<&'t Tensor<1, Int>>,
}

impl Moe {
    /// x `[N, hidden]`, the norm of a residual stream, of the weights' dtype -> the sum of each token's experts and the shared ones,
    /// `[N, hidden]`, which is not in memory yet: `.materialise()` makes a tensor that can be added.
    ///
    /// # Errors
    /// Another width, dtype or device than that of the weights, more than 1,024 experts; a layer of [`MoeConfig::init_hash`].
    pub fn forward<'a, 'r: 'a>(&self, x: impl Into<Rows<'a, 'r>>, determinism: Determinism) -> Result<ExpertsSum> {
        self.forward_tokens(x, MoeTokens { ids: None, padded_slots: None }, determinism, &mut None)
    }

    /// [`Self::forward`] with the token ids, i32 `[N]`, by which a layer of [`MoeConfig::init_hash`] chooses its experts. A token
    /// that its table does not have gets shared experts alone. Other layers do not look at them.
    ///
    /// # Errors
    /// As there; another number of ids than rows, or another dtype or device.
    pub fn forward_ids<'a, 'r: 'a>(
        &self,
        x: impl Into<Rows<'a, 'r>>,
        ids: &Tensor<1, Int>,
        determinism: Determinism,
    ) -> Result<ExpertsSum> {
        self.forward_tokens(x, MoeTokens { ids: Some(ids), padded_slots: None }, determinism, &mut None)
    }

    /// [`Self::forward`], of which ranks have a summand each.
    pub(crate) fn forward_tokens<'a, 'r: 'a>(
        &self,
        x: impl Into<Rows<'a, 'r>>,
        tokens: MoeTokens<'_>,
        determinism: Determinism,
        observe: &mut Option<Observer<'_>>,
    ) -> Result<ExpertsSum> {
        let mut x = x.into();
        let logits = RouterLogits::product(x.reborrow(), &self.gate.weight, determinism)?;
        let routing = Observer::experts(observe, self.gate.route(logits, tokens)?);
        self.experts.forward(x.tensor(), routing, &self.shared_experts, determinism)
    }
}

/// Chooses the experts of each token, and their weights; in f32.
#[derive(Module, Debug)]
pub(crate) struct Router {
    /// f32 `[E, hidden]`.
    weight: Weight,
    /// f32 `[E]`: added for the choice only.
    bias: Option<Param<Tensor<1>>>,
    /// The experts of each token id, i32 `[vocab, k]`, in place of a choice: the scores only weigh them.
    table: Option<Param<Tensor<2, Int>>>,
    top_k: usize,
    #[module(skip)]
    options: RouteExpertsOptions,
}

impl Router {
    /// Loads `{name}.weight`; bias and table have names of their own in each model.
    pub(crate) fn load(
        loader: &mut WeightLoader,
        name: &str,
        config: &MoeConfig,
        cut: ExpertCut,
        (bias, table): (Option<Tensor<1>>, Option<Tensor<2, Int>>),
    ) -> Self {
        let experts = config.n_routed_experts;
        let (count, kept, best) = (config.n_group, config.topk_group, config.best_of_group());
        Self {
            weight: loader.weight_f32(&format!("{name}.weight"), [experts, config.hidden_size], Cut::Whole),
            bias: bias.map(param),
            table: table.map(param),
            top_k: config.num_experts_per_tok,
            options: RouteExpertsOptions {
                scoring: config.scoring,
                groups: (kept < count).then_some(ExpertGroups { count, kept, best }),
                normalise: config.norm_topk_prob,
                scale: config.routed_scaling_factor as f32,
                local: loader.parallel().local_experts(experts, cut),
            },
        }
    }

    /// Logits f32 `[N, E]`: the experts of each token.
    fn route(&self, logits: RouterLogits, tokens: MoeTokens<'_>) -> Result<Routing> {
        let choice = match (&self.table, &self.bias) {
            (Some(table), _) => {
                let no_ids =
                    || ModelError::request("x", "rows of tokens alone", "token ids, too: a table chooses experts");
                ExpertChoice::Table { experts: table.val(), rows: tokens.ids.ok_or_else(no_ids)?.clone() }
            }
            (None, Some(bias)) => ExpertChoice::BiasedScores(self.top_k, bias.val()),
            (None, None) => ExpertChoice::Scores(self.top_k),
        };
        let slots = tokens.padded_slots.cloned();
        Ok(route_experts(RouteExpertsArgs { logits, choice, slots }, &self.options)?)
    }
}
