//! [`RouterLogits`]: in memory, or a product that is not computed yet.

use burn::tensor::{DType, Tensor};

use super::backend::BackendLogits;
use crate::check::Check;
use crate::ops::linear::{check_weight, linear};
use crate::ops::products::LinearProblem;
use crate::ops::residual_norm::Rows;
use crate::{Determinism, MlaError, Weight};

/// A router's logits f32 `[N, E]`: in memory, or its product with a single token, which may be computed in the launch that chooses the
/// token's experts.
#[derive(Debug, Clone)]
pub struct RouterLogits(Form);

#[derive(Debug, Clone)]
enum Form {
    InMemory(Tensor<2>),
    /// Checked: of a single row, which a small-batch kernel multiplies.
    Product {
        x: Tensor<2>,
        weight: Box<Weight>,
        determinism: Determinism,
    },
}

impl From<Tensor<2>> for RouterLogits {
    fn from(logits: Tensor<2>) -> Self {
        Self(Form::InMemory(logits))
    }
}

impl RouterLogits {
    /// The [`linear()`](crate::linear()) product of `x [N, hidden]` with a router's weight f32 `[E, hidden]`. Of a single token that is
    /// in memory on a GPU nothing is launched before the experts are chosen. The bits are the same.
    ///
    /// # Errors
    /// As [`linear()`](crate::linear()); a weight of another dtype than f32.
    pub fn product<'a, 'r: 'a>(
        x: impl Into<Rows<'a, 'r>>,
        weight: &Weight,
        determinism: Determinism,
    ) -> Result<Self, MlaError> {
        let x = x.into();
        let check = x.check("route_experts")?;
        weight.check(&check, "weight", DType::F32, "always")?;
        check_weight(&check, ("weight", weight), &x, true)?;
        if let Rows::InMemory(rows) = &x {
            let (problem, device) = (LinearProblem::of_rows(rows, weight, determinism), check.device());
            let few = problem.has_small_batch_kernel(device) && !problem.has_many_rows_kernel(device);
            if few && rows.dims()[0] == 1 {
                return Ok(Self(Form::Product { x: rows.clone(), weight: Box::new(weight.clone()), determinism }));
            }
        }
        Ok(linear(x, weight, determinism)?.into())
    }

    /// `[N, E]`.
    pub fn dims(&self) -> [usize; 2] {
        match &self.0 {
            Form::InMemory(logits) => logits.dims(),
            Form::Product { x, weight, .. } => [x.dims()[0], weight.dims()[0]],
        }
    }

    /// Of an operation of which they are the first argument.
    pub(super) fn check_first(&self, op: &'static str) -> Result<Check, MlaError> {
        let (Form::InMemory(first) | Form::Product { x: first, .. }) = &self.0;
        let check = Check::new(op, "logits", first)?;
        self.check(&check)?;
        Ok(check)
    }

    /// Their dtype and device.
    pub(super) fn check(&self, check: &Check) -> Result<(), MlaError> {
        match &self.0 {
            Form::InMemory(logits) => check.float_as("logits", logits, DType::F32, "always"),
            Form::Product { x, .. } => check.float("logits", x),
        }
    }

    /// What a backend takes.
    pub(super) fn into_backend(self) -> BackendLogits<burn::backend::Dispatch> {
        match self.0 {
            Form::InMemory(logits) => BackendLogits::InMemory(logits.into_dispatch()),
            Form::Product { x, weight, determinism } => {
                BackendLogits::Product(x.into_dispatch(), weight.into_backend(), determinism)
            }
        }
    }
}
