//! [`ExpertsSum`]: a weighted sum of experts that is not in memory yet.

use burn::backend::Dispatch;
use burn::tensor::{DispatchTensor, Tensor};

use super::args::{ExpertsMlpArgs, ExpertsMlpOptions};
use super::backend::{BackendEpilogue, BackendExpertsOut, BackendShared, ExpertsMlpBackend};
use crate::ops::hyper_connection::{BackendMixer, BackendMixing, BackendRead};
use crate::ops::linear::in_memory::linear;
use crate::ops::residual_norm::{BackendNormed, BackendReader};
use crate::ops::swiglu::in_memory::swiglu;

/// The weighted sum of the experts of each token, `[N, hidden]`, which is not computed yet: [`Self::materialise`] makes a tensor that can be added.
#[derive(Debug, Clone)]
#[must_use = "nothing is launched before it is read"]
pub struct ExpertsSum {
    /// Checked.
    args: ExpertsMlpArgs,
    options: ExpertsMlpOptions,
}

impl ExpertsSum {
    pub(super) fn new(args: ExpertsMlpArgs, options: ExpertsMlpOptions) -> Self {
        Self { args, options }
    }

    /// The sum `[N, hidden]`, of the dtype of `x`.
    pub fn materialise(self) -> Tensor<2> {
        if self.args.x.shape().num_elements() == 0 {
            return self.args.x;
        }
        match self.run(BackendEpilogue::None) {
            BackendExpertsOut::Sum(sum) => Tensor::from_dispatch(sum),
            _ => unreachable!("without an epilogue there is a sum"),
        }
    }

    /// A tensor of its shape, dtype and device.
    pub(crate) fn like(&self) -> &Tensor<2> {
        &self.args.x
    }

    /// Whether it is that of a single token that has shared experts, which all are in the same launches.
    pub(crate) fn is_of_token(&self) -> bool {
        self.args.x.dims()[0] == 1 && self.args.shared.is_some()
    }

    /// The sum with a residual stream `[N, hidden]` of its dtype, its norm with a weight and an epsilon, and what reads that. There
    /// are elements.
    pub(crate) fn residual_norm(
        self,
        residual: DispatchTensor,
        (weight, eps): (DispatchTensor, f32),
        reader: BackendReader<Dispatch>,
    ) -> BackendNormed<Dispatch> {
        match self.run(BackendEpilogue::ResidualNorm { residual, weight, reader, eps }) {
            BackendExpertsOut::Normed(normed) => normed,
            _ => unreachable!("the epilogue has a norm"),
        }
    }

    /// The streams `[N, n, hidden]` after a block with the sum as its output, and parts of their products with a weight f32
    /// `[m, n hidden]`. There are elements.
    pub(crate) fn project(
        self,
        mixing: BackendMixing<Dispatch>,
        weight: DispatchTensor,
    ) -> (DispatchTensor, DispatchTensor) {
        match self.run(BackendEpilogue::Streams { mixing, weight }) {
            BackendExpertsOut::Streams(streams, parts) => (streams, parts),
            _ => unreachable!("the epilogue has streams"),
        }
    }

    /// The same streams, and what a block reads of them by such a mixer and a norm with a weight f32 `[hidden]`.
    pub(crate) fn read(
        self,
        mixing: BackendMixing<Dispatch>,
        weight: DispatchTensor,
        norm_weight: DispatchTensor,
        mixer: BackendMixer<Dispatch>,
    ) -> BackendRead<Dispatch> {
        match self.run(BackendEpilogue::Read { mixing, weight, norm_weight, mixer }) {
            BackendExpertsOut::Read(read) => read,
            _ => unreachable!("the epilogue has what a block reads"),
        }
    }

    fn run(self, epilogue: BackendEpilogue<Dispatch>) -> BackendExpertsOut<Dispatch> {
        let is_of_token = self.is_of_token();
        let (ExpertsMlpArgs { x, routing, gate_up, down, shared }, options) = (self.args, self.options);
        let shared = match shared {
            None => BackendShared::None,
            Some(shared) if is_of_token => {
                BackendShared::Weights(shared.gate_up.into_backend(), shared.down.into_backend())
            }
            Some(shared) => {
                let activations = swiglu(x.clone(), &shared.gate_up, options.limit, options.determinism);
                BackendShared::Rows(linear(activations, &shared.down, options.determinism).into_dispatch())
            }
        };
        let [gate_up, down] = [gate_up, down].map(|weight| weight.into_backend());
        Dispatch::experts_mlp(x.into_dispatch(), routing.into_backend(), gate_up, down, shared, epilogue, options)
    }
}
