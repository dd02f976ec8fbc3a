//! [`Decoded`]: a decode step that is launched where it is read.

use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

use super::backend::{BackendDecode, DecodeSpec, MlaDecodeBackend};
use super::{MlaDecodeArgs, MlaQuery};
use crate::dispatch::tensors;
use crate::ops::mla_plan::{MlaPlan, MlaPlanArgs, PlanSpec};

/// A decode step with checked arguments, from [`mla_decode`](crate::mla_decode()). It is launched where it is read.
#[must_use = "nothing is computed before it is read"]
#[derive(Debug, Clone)]
pub struct Decoded {
    pub(super) args: MlaDecodeArgs,
    pub(super) plan: Planned,
    pub(super) spec: DecodeSpec,
}

/// How the keys are divided.
#[derive(Debug, Clone)]
pub(super) enum Planned {
    /// By the caller's plan.
    Given(MlaPlan),
    /// By a plan of its own, to be made.
    Own(MlaPlanArgs, PlanSpec),
}

impl Decoded {
    /// Launches the step: `out [B, Sq, H, Dv]` in the query's dtype, and `lse` f32 `[B, Sq, H]`, the natural logarithm of the sum
    /// of `exp(score)`.
    pub fn materialise(self) -> (Tensor<4>, Tensor<3>) {
        tensors(<Dispatch as MlaDecodeBackend>::mla_decode(self.into_backend()))
    }

    /// Of `out`: `[B, Sq, H, Dv]`.
    pub fn dims(&self) -> [usize; 4] {
        let [batch, query_len, heads, _] = self.args.q.dims();
        [batch, query_len, heads, self.spec.value_width]
    }

    /// Of `out`.
    pub fn dtype(&self) -> DType {
        self.args.q.dtype()
    }

    /// Where it is computed: a part of the query.
    pub(in crate::ops) fn q(&self) -> &Tensor<4> {
        match &self.args.q {
            MlaQuery::Whole(q) | MlaQuery::Parts { nope: q, .. } => q,
        }
    }

    /// As a backend takes it.
    pub(in crate::ops) fn into_backend(self) -> BackendDecode<Dispatch> {
        let plan = match self.plan {
            Planned::Given(plan) => plan,
            Planned::Own(plan, spec) => plan.launch(spec),
        };
        let q = match self.args.q {
            MlaQuery::Whole(q) => q,
            MlaQuery::Parts { nope, pe } => Tensor::cat(vec![nope, pe], 3),
        };
        BackendDecode {
            q: q.into_dispatch(),
            kv_cache: self.args.kv_cache.into_backend(),
            page_table: self.args.page_table.into_dispatch(),
            seq_lens: self.args.seq_lens.into_dispatch(),
            items: plan.items.into_dispatch(),
            cube_ptr: plan.cube_ptr.into_dispatch(),
            split_ptr: plan.split_ptr.into_dispatch(),
            spec: self.spec,
        }
    }
}
