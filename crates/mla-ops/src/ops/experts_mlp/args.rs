//! Arguments of [`experts_mlp`](super::experts_mlp), and their checks.

use burn::tensor::Tensor;

use crate::check::Check;
use crate::ops::route_experts::{MAX_EXPERTS, Routing};
use crate::ops::swiglu::check_limit;
use crate::{Determinism, MlaError, StackedWeight, Weight};

/// Arguments of [`experts_mlp`](crate::experts_mlp()).
#[derive(Debug, Clone)]
pub struct ExpertsMlpArgs {
    /// `[N, hidden]`, f32, f16 or bf16.
    pub x: Tensor<2>,
    /// The experts of each token, and their weights.
    pub routing: Routing,
    /// `[E, 2 I, hidden]` of the dtype of `x`: of each expert the gate rows, then those of `up`.
    pub gate_up: StackedWeight,
    /// `[E, hidden, I]` of the dtype of `x`.
    pub down: StackedWeight,
    /// What every token passes beside its own, with weight 1, if there is anything.
    pub shared: Option<SharedExperts>,
}

/// Experts that every token passes, side by side as one of S hidden channels.
#[derive(Debug, Clone)]
pub struct SharedExperts {
    /// `[2 S, hidden]` of the dtype of `x`: the gate rows, then those of `up`.
    pub gate_up: Weight,
    /// `[hidden, S]` of the dtype of `x`.
    pub down: Weight,
}

/// Options of [`experts_mlp`](crate::experts_mlp()).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ExpertsMlpOptions {
    /// Clamps `up` both ways and the gate from above (DeepSeek-V4), above 0.
    pub limit: Option<f32>,
    /// Whether the bits of a token may depend on the others.
    pub determinism: Determinism,
}

impl ExpertsMlpArgs {
    /// No shared experts. A dense weight may be a tensor.
    pub fn new(
        x: Tensor<2>,
        routing: Routing,
        gate_up: impl Into<StackedWeight>,
        down: impl Into<StackedWeight>,
    ) -> Self {
        Self { x, routing, gate_up: gate_up.into(), down: down.into(), shared: None }
    }

    pub(super) fn check(&self, options: &ExpertsMlpOptions) -> Result<(), MlaError> {
        let check = Check::new("experts_mlp", "x", &self.x)?;
        check.float("x", &self.x)?;
        let (dtype, [tokens, hidden], [experts, _, width]) = (self.x.dtype(), self.x.dims(), self.down.dims());
        self.gate_up.check(&check, "gate_up", dtype, "that of `x`")?;
        self.down.check(&check, "down", dtype, "that of `x`")?;
        self.routing.check(&check, [tokens, experts])?;
        let words = || format!("[E, hidden, I] with hidden = {hidden}, none of them 0");
        check.dims("down", self.down.dims(), [None, Some(hidden), None], words)?;
        let holds = (1..=MAX_EXPERTS).contains(&experts) && width > 0;
        check.value("down", holds, format!("{:?}", self.down.dims()), || {
            format!("1 to {MAX_EXPERTS} experts with a channel")
        })?;
        let words = || format!("[E, 2 I, hidden] = [{experts}, {}, {hidden}]", 2 * width);
        check.dims("gate_up", self.gate_up.dims(), [Some(experts), Some(2 * width), Some(hidden)], words)?;
        if let Some(shared) = &self.shared {
            shared.check(&check, &self.x)?;
        }
        check_limit(&check, options.limit)?;
        #[cfg(feature = "_gpu")]
        self.check_device(&check)?;
        Ok(())
    }

    /// What pairs of token and expert compute has to fit on the device.
    #[cfg(feature = "_gpu")]
    fn check_device(&self, check: &Check) -> Result<(), MlaError> {
        if check.client().is_none() {
            return Ok(());
        }
        check.elements("x", &self.x)?;
        let ([tokens, hidden], [_, _, width]) = (self.x.dims(), self.down.dims());
        let (pairs, argument) = (tokens * self.routing.top_k(), self.routing.argument());
        if i32::try_from(pairs).is_err() {
            let reason = format!("{pairs} pairs of token and expert, and the most is {}", i32::MAX);
            return Err(check.device_limit(argument, reason));
        }
        check.allocation(argument, self.x.dtype(), [pairs, hidden.max(width)])
    }
}

impl SharedExperts {
    fn check(&self, check: &Check, x: &Tensor<2>) -> Result<(), MlaError> {
        let [_, hidden] = x.dims();
        self.gate_up.check(check, "shared.gate_up", x.dtype(), "that of `x`")?;
        self.down.check(check, "shared.down", x.dtype(), "that of `x`")?;
        let words = || format!("[hidden, S] with hidden = {hidden}");
        check.dims("shared.down", self.down.dims(), [Some(hidden), None], words)?;
        let [_, width] = self.down.dims();
        check.value("shared.down", width > 0, width, || "at least one hidden channel".into())?;
        let words = || format!("[2 S, hidden] = [{}, {hidden}]", 2 * width);
        check.dims("shared.gate_up", self.gate_up.dims(), [Some(2 * width), Some(hidden)], words)
    }
}
