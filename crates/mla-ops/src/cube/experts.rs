//! Mixture of experts and projections of a few rows, by kernels.

use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use mla_kernels::portable::experts::combine::{self, CombineArgs};
use mla_kernels::portable::experts::linear::{self, LinearArgs, LinearForm, PairRows, Work, tile_tokens};
use mla_kernels::portable::experts::route::{self, Choice, Groups, RouteArgs, RouteForm, Scoring};
use mla_kernels::portable::experts::sort::{self, SortArgs, TILE, max_tiles};

use super::tensors::{contiguous, dims, empty, matrix_stride};
use crate::backend::{ExpertsSpec, LinearSpec};
use crate::{ExpertScoring, RouteExpertsOptions};

/// x `[N, in]`, weight `[out, in]`, or twice as many rows if it is gated: `[N, out]`.
pub(super) fn linear(x: CubeTensor, weight: CubeTensor, spec: &LinearSpec) -> CubeTensor {
    let [x, weight] = [x, weight].map(contiguous);
    let ([rows, inputs], [weight_rows, _]) = (dims(&x), dims(&weight));
    let outputs = if spec.gated { weight_rows / 2 } else { weight_rows };
    let [x_elem, elem] = [x.dtype, weight.dtype].map(dtype_to_elem_type);
    let (out, client) = (empty(&x, [rows, outputs], weight.dtype), x.client.clone());
    let args = LinearArgs {
        x: x.into_buffer_arg(),
        weight: weight.into_buffer_arg(),
        out: out.clone().into_buffer_arg(),
        work: Work::Dense { rows },
        inputs,
        outputs,
        limit: spec.limit.unwrap_or_default(),
        form: LinearForm { gated: spec.gated, limited: spec.limit.is_some() },
        x_elem,
        elem,
    };
    linear::launch(&client, args);
    out
}

/// x `[N, H, d]`, weight `[H, out, in]`: `[N, H, out + d - in]`.
pub(super) fn linear_by_head(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
    let x = contiguous(x);
    let ([rows, heads, width], [_, outputs, inputs]) = (dims(&x), dims(&weight));
    let carried = width - inputs;
    // Half of a projection's matrices may lie between the other halves.
    let (weight, matrix_stride) = match matrix_stride(&weight) {
        Some(stride) => (weight, stride),
        None => (contiguous(weight), outputs * inputs),
    };
    let elem = dtype_to_elem_type(x.dtype);
    let (out, client) = (empty(&x, [rows, heads, outputs + carried], x.dtype), x.client.clone());
    let args = LinearArgs {
        x: x.into_buffer_arg(),
        weight: weight.into_buffer_arg(),
        out: out.clone().into_buffer_arg(),
        work: Work::Heads { rows, heads, carried, matrix_stride },
        inputs,
        outputs,
        limit: 0.0,
        form: LinearForm::default(),
        x_elem: elem,
        elem,
    };
    linear::launch(&client, args);
    out
}

/// Logits `[N, E]`; a bias `[E]` or the given experts `[N, k]` where the choice has them, otherwise anything.
pub(super) fn route(
    logits: CubeTensor,
    bias: CubeTensor,
    given: CubeTensor,
    choice: Choice,
    top_k: usize,
    options: &RouteExpertsOptions,
) -> (CubeTensor, CubeTensor) {
    let [logits, bias, given] = [logits, bias, given].map(contiguous);
    let [tokens, experts] = dims(&logits);
    let (indices, weights) = (empty(&logits, [tokens, top_k], DType::I32), empty(&logits, [tokens, top_k], DType::F32));
    let client = logits.client.clone();
    let args = RouteArgs {
        logits: logits.into_buffer_arg(),
        bias: bias.into_buffer_arg(),
        given: given.into_buffer_arg(),
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
            choice,
            groups: options.groups.map(|g| Groups { count: g.count, kept: g.kept, best: g.best }),
            normalise: options.normalise,
        },
    };
    route::launch(&client, args);
    (indices, weights)
}

/// See [`crate::experts_mlp`].
pub(super) fn mlp(
    x: CubeTensor,
    (indices, weights): (CubeTensor, CubeTensor),
    gate_up: CubeTensor,
    down: CubeTensor,
    shared: CubeTensor,
    spec: &ExpertsSpec,
) -> CubeTensor {
    let [x, indices, weights, gate_up, down, shared] = [x, indices, weights, gate_up, down, shared].map(contiguous);
    let ([tokens, hidden], [_, top_k], [experts, _, width]) = (dims(&x), dims(&indices), dims(&down));
    let (client, dtype) = (x.client.clone(), x.dtype);
    let (pairs, elem) = (tokens * top_k, dtype_to_elem_type(dtype));
    let activations = empty(&x, [pairs, width], dtype);
    let outputs = empty(&x, [pairs, hidden], dtype);
    let out = empty(&x, [tokens, hidden], dtype);

    let product = |x: &CubeTensor, weight: CubeTensor, out: &CubeTensor, up: bool, work: Work| {
        let args = LinearArgs {
            x: x.clone().into_buffer_arg(),
            weight: weight.into_buffer_arg(),
            out: out.clone().into_buffer_arg(),
            work,
            inputs: if up { hidden } else { width },
            outputs: if up { width } else { hidden },
            limit: spec.limit.unwrap_or_default(),
            form: LinearForm { gated: up, limited: up && spec.limit.is_some() },
            x_elem: elem,
            elem,
        };
        linear::launch(&client, args);
    };
    let [up_work, down_work] = match tokens {
        1 => [PairRows::Gather { top_k }, PairRows::Scatter].map(|rows| {
            let experts_of = indices.clone().into_buffer_arg();
            Work::Token { experts_of, pairs, experts, rows }
        }),
        _ => sorted(&client, &indices, experts, [hidden, width], elem),
    };
    product(&x, gate_up, &activations, true, up_work);
    product(&activations, down, &outputs, false, down_work);
    let args = CombineArgs {
        rows: outputs.into_buffer_arg(),
        indices: indices.into_buffer_arg(),
        weights: weights.into_buffer_arg(),
        shared: shared.into_buffer_arg(),
        is_shared: spec.shared,
        out: out.clone().into_buffer_arg(),
        tokens,
        top_k,
        experts,
        width: hidden,
        elem,
    };
    combine::launch(&client, args);
    out
}

/// The work of both products, with so many channels of their inputs: pairs sorted by expert.
fn sorted(
    client: &Client,
    indices: &CubeTensor,
    experts: usize,
    [hidden, width]: [usize; 2],
    elem: ElemType,
) -> [Work; 2] {
    let [tokens, top_k] = dims(indices);
    let pairs = tokens * top_k;
    let order = empty(indices, [pairs], DType::I32);
    let tile = |inputs: usize| tile_tokens(client, inputs, pairs.div_ceil(experts), elem);
    let tiled = |tile: usize| {
        let tiles = empty(indices, [max_tiles(pairs, experts, tile), TILE], DType::I32);
        let args = SortArgs {
            experts_of: indices.clone().into_buffer_arg(),
            order: order.clone().into_buffer_arg(),
            tiles: tiles.clone().into_buffer_arg(),
            pairs,
            experts,
            tile,
        };
        sort::launch(client, args);
        tiles
    };
    // Both products may have tiles of different sizes.
    let up_tiles = tiled(tile(hidden));
    let down_tiles = if tile(width) == tile(hidden) { up_tiles.clone() } else { tiled(tile(width)) };
    [(up_tiles, PairRows::Gather { top_k }), (down_tiles, PairRows::Scatter)].map(|(tiles, rows)| {
        let (order, tiles) = (order.clone().into_buffer_arg(), tiles.into_buffer_arg());
        Work::Experts { order, tiles, pairs, experts, rows }
    })
}
