//! [`route_experts`](super::route_experts) by a kernel.

use burn::tensor::DType;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::linear::LinearForm;
use mla_kernels::route_experts::{self as route, Choice, Groups, RouteArgs, RouteForm, Scoring};

use super::args::{ExpertScoring, RouteExpertsOptions};
use super::backend::{BackendChoice, BackendLogits, BackendPadding, RouteExpertsBackend};
use crate::ops::linear::cube::rows_args;
use crate::tensors::{contiguous, dims, empty};

impl RouteExpertsBackend for CubeBackend {
    fn route_experts(
        choice: BackendChoice<Self>,
        padding: BackendPadding<Self>,
        options: RouteExpertsOptions,
    ) -> (CubeTensor, CubeTensor) {
        let (args, chosen) = route_args(choice, padding, &options);
        let client = chosen.0.client.clone();
        route::launch(&client, args);
        chosen
    }
}

/// What the kernel takes, and the experts and weights that it writes.
pub(crate) fn route_args(
    choice: BackendChoice<CubeBackend>,
    padding: BackendPadding<CubeBackend>,
    options: &RouteExpertsOptions,
) -> (RouteArgs, (CubeTensor, CubeTensor)) {
    // The kernel has a slot for each of these tensors, and does not look at those that its form has no use for.
    let (form, logits, others, top_k) = match choice {
        BackendChoice::Scores(logits, top_k) => (Choice::Scores, logits, [None, None, None], top_k),
        BackendChoice::BiasedScores(logits, bias, top_k) => {
            (Choice::BiasedScores, logits, [Some(bias), None, None], top_k)
        }
        BackendChoice::Given(logits, given) => {
            let [_, top_k] = dims(&given);
            (Choice::Given, logits, [None, Some(given), None], top_k)
        }
        BackendChoice::Table(logits, table, rows) => {
            let [_, top_k] = dims(&table);
            (Choice::Table, logits, [None, Some(table), Some(rows)], top_k)
        }
    };
    let (product, logits) = match logits {
        BackendLogits::InMemory(logits) => (None, contiguous(logits)),
        BackendLogits::Product(x, weight, determinism) => {
            let ([experts, _], form) = (weight.dims(), (LinearForm::default(), 0.0));
            let (args, logits) = rows_args(contiguous(x), weight, experts, form, determinism);
            (Some(Box::new(args)), logits)
        }
    };
    let slots = match padding {
        BackendPadding::None => None,
        BackendPadding::Slots(slots) => Some(slots),
    };
    let padded = slots.is_some();
    let or_any = |other: Option<CubeTensor>| other.map_or_else(|| logits.clone(), contiguous);
    let ([bias, given, rows], slots) = (others.map(or_any), or_any(slots));
    let ([tokens, experts], [table_rows, _]) = (dims(&logits), dims(&given));
    let (indices, weights) = (empty(&logits, [tokens, top_k], DType::I32), empty(&logits, [tokens, top_k], DType::F32));
    let args = RouteArgs {
        logits: logits.into_buffer_arg(),
        product,
        bias: bias.into_buffer_arg(),
        given: given.into_buffer_arg(),
        rows: rows.into_buffer_arg(),
        table_rows,
        slots: slots.into_buffer_arg(),
        indices: indices.clone().into_buffer_arg(),
        weights: weights.clone().into_buffer_arg(),
        tokens,
        scale: options.scale,
        form: RouteForm {
            experts,
            top_k,
            scoring: match options.scoring {
                ExpertScoring::Softmax => Scoring::Softmax,
                ExpertScoring::Sigmoid => Scoring::Sigmoid,
                ExpertScoring::SqrtSoftplus => Scoring::SqrtSoftplus,
            },
            choice: form,
            groups: options.groups.map(|g| Groups { count: g.count, kept: g.kept, best: g.best }),
            normalise: options.normalise,
            local: options.local.map(|l| route::LocalExperts { first: l.first, count: l.count }),
            padded,
        },
    };
    (args, (indices, weights))
}
