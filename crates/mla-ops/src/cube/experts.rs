//! Mixture of experts and projections of a few rows, by kernels.

use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cubecl::client::Client;
use cubecl::ir::ElemType;
use mla_kernels::experts_mlp::combine::{self, CombineArgs, ExpertOutputs, SharedRows};
use mla_kernels::experts_mlp::sort::{self, SortArgs, TILE, max_tiles};
use mla_kernels::linear::{
    self, ExpertsOf, LinearArgs, LinearForm, PairRows, SecondMatrix, SharedMatrix, Work, tile_tokens,
};
use mla_kernels::residual_norm::Summand;
use mla_kernels::route_experts::{self as route, Choice, Groups, RouteArgs, RouteForm, Scoring};

use super::{add_norm, add_norm_args};
use crate::backend::{BackendRouting, ExpertsSpec, LinearSpec, RouteSpec};
use crate::tensors::{contiguous, dims, empty, matrix_stride};
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
        work: Work::Dense { rows, second: None },
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

/// x `[N, in]`, both weights `[out, in]`: both products.
pub(super) fn linear_pair(x: CubeTensor, first: CubeTensor, second: CubeTensor) -> (CubeTensor, CubeTensor) {
    if !joins(&first, &second) {
        let spec = LinearSpec { gated: false, limit: None };
        return (self::linear(x.clone(), first, &spec), self::linear(x, second, &spec));
    }
    let client = x.client.clone();
    let (args, outs) = pair_args(contiguous(x), first, second);
    linear::launch(&client, args);
    outs
}

/// Whether one launch has both products.
fn joins(first: &CubeTensor, second: &CubeTensor) -> bool {
    let ([outputs, _], [second_outputs, _]) = (dims(first), dims(second));
    linear::joins(outputs, second_outputs)
}

/// What [`linear_pair`] launches for contiguous x, and what that writes.
fn pair_args(x: CubeTensor, first: CubeTensor, second: CubeTensor) -> (LinearArgs, (CubeTensor, CubeTensor)) {
    let ([rows, inputs], [outputs, _], [second_outputs, _]) = (dims(&x), dims(&first), dims(&second));
    let [first, second] = [first, second].map(contiguous);
    let elem = dtype_to_elem_type(x.dtype);
    let outs = [outputs, second_outputs].map(|outputs| empty(&x, [rows, outputs], x.dtype));
    let second = SecondMatrix {
        weight: second.into_buffer_arg(),
        out: outs[1].clone().into_buffer_arg(),
        outputs: second_outputs,
    };
    let args = LinearArgs {
        x: x.into_buffer_arg(),
        weight: first.into_buffer_arg(),
        out: outs[0].clone().into_buffer_arg(),
        work: Work::Dense { rows, second: Some(second) },
        inputs,
        outputs,
        limit: 0.0,
        form: LinearForm::default(),
        x_elem: elem,
        elem,
    };
    (args, outs.into())
}

/// x `[N, H, d]`, weight `[H, out, in]`: `[N, H, out + d - in]`.
pub(crate) fn linear_by_head(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
    let x = contiguous(x);
    let ([rows, heads, width], [_, outputs, inputs]) = (dims(&x), dims(&weight));
    let out = empty(&x, [rows, heads, outputs + width - inputs], x.dtype);
    linear::launch(&x.client, by_head_args(&x, weight, &out, [rows, heads, width]));
    out
}

/// Contiguous x of `[N, H, d]` elements, weight `[H, out, in]`.
pub(crate) fn by_head_args(
    x: &CubeTensor,
    weight: CubeTensor,
    out: &CubeTensor,
    [rows, heads, width]: [usize; 3],
) -> LinearArgs {
    let [_, outputs, inputs] = dims(&weight);
    // Half of a projection's matrices may lie between the other halves.
    let (weight, matrix_stride) = match matrix_stride(&weight) {
        Some(stride) => (weight, stride),
        None => (contiguous(weight), outputs * inputs),
    };
    let elem = dtype_to_elem_type(x.dtype);
    LinearArgs {
        x: x.clone().into_buffer_arg(),
        weight: weight.into_buffer_arg(),
        out: out.clone().into_buffer_arg(),
        work: Work::Heads { rows, heads, carried: width - inputs, matrix_stride },
        inputs,
        outputs,
        limit: 0.0,
        form: LinearForm::default(),
        x_elem: elem,
        elem,
    }
}

/// Logits `[N, E]` and a bias `[E]`, if there is one, otherwise anything: the best experts and their weights.
pub(super) fn choose(logits: CubeTensor, bias: CubeTensor, spec: &RouteSpec) -> (CubeTensor, CubeTensor) {
    let client = logits.client.clone();
    let (args, chosen) = choose_args(logits, bias, spec);
    route::launch(&client, args);
    chosen
}

/// Logits `[N, E]`, given experts `[N, k]`: these and their weights.
pub(super) fn weigh(logits: CubeTensor, given: CubeTensor, options: &RouteExpertsOptions) -> (CubeTensor, CubeTensor) {
    let ([_, top_k], client, bias) = (dims(&given), logits.client.clone(), logits.clone());
    let (args, chosen) = route_args(logits, bias, given, Choice::Given, top_k, options);
    route::launch(&client, args);
    chosen
}

/// What a launch of [`choose`] takes, and what it writes.
fn choose_args(logits: CubeTensor, bias: CubeTensor, spec: &RouteSpec) -> (RouteArgs, (CubeTensor, CubeTensor)) {
    let choice = if spec.biased { Choice::BiasedScores } else { Choice::Scores };
    // Nobody looks at what would be given.
    let given = bias.clone();
    route_args(logits, bias, given, choice, spec.top_k, &spec.options)
}

fn route_args(
    logits: CubeTensor,
    bias: CubeTensor,
    given: CubeTensor,
    choice: Choice,
    top_k: usize,
    options: &RouteExpertsOptions,
) -> (RouteArgs, (CubeTensor, CubeTensor)) {
    let [logits, bias, given] = [logits, bias, given].map(contiguous);
    let [tokens, experts] = dims(&logits);
    let (indices, weights) = (empty(&logits, [tokens, top_k], DType::I32), empty(&logits, [tokens, top_k], DType::F32));
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
    (args, (indices, weights))
}

/// Experts and weights, which may be written by the launch that takes the other result.
fn routing_args(routing: BackendRouting<CubeBackend>) -> ((CubeTensor, CubeTensor), ExpertsOf) {
    match routing {
        BackendRouting::Chosen(indices, weights) => {
            let [indices, weights] = [indices, weights].map(contiguous);
            let listed = indices.clone().into_buffer_arg();
            ((indices, weights), ExpertsOf::Listed(listed))
        }
        BackendRouting::Scored(logits, bias, route) => {
            let (args, chosen) = choose_args(logits, bias, &route);
            (chosen, ExpertsOf::Routed(Box::new(args)))
        }
    }
}

/// The residual stream, and weight and epsilon of the norm of what it becomes.
type AddNorm = (CubeTensor, CubeTensor, f32);

/// See [`MlaBackend::experts_mlp`](crate::backend::MlaBackend).
pub(super) fn mlp(
    x: CubeTensor,
    (indices, weights): (CubeTensor, CubeTensor),
    [gate_up, down]: [CubeTensor; 2],
    shared: CubeTensor,
    norm: Option<AddNorm>,
    spec: &ExpertsSpec,
) -> (CubeTensor, CubeTensor) {
    let [x, indices, weights, gate_up, down, shared] = [x, indices, weights, gate_up, down, shared].map(contiguous);
    let ([tokens, hidden], [_, top_k], [experts, _, width]) = (dims(&x), dims(&indices), dims(&down));
    let (pairs, elem) = (tokens * top_k, dtype_to_elem_type(x.dtype));
    let activations = empty(&x, [pairs, width], x.dtype);
    let outputs = empty(&x, [pairs, hidden], x.dtype);
    let [up_work, down_work] = match tokens {
        1 => pairs_of_token(&indices, ExpertsOf::Listed(indices.clone().into_buffer_arg()), experts, [None, None]),
        _ => sorted(&x.client, &indices, experts, [hidden, width], elem),
    };
    product(&x, gate_up, &activations, [hidden, width], true, up_work, spec);
    product(&activations, down, &outputs, [width, hidden], false, down_work, spec);
    let shared = if spec.shared { SharedRows::Apart(shared.into_buffer_arg()) } else { SharedRows::None };
    combine(outputs, (indices, weights), shared, experts, norm)
}

/// As [`mlp`], with the shared experts in the same launches as those of the token, and the choice of its own in the first one;
/// and the products of the norm with two matrices, if there are any: with the sum and its norm one launch.
pub(super) fn mlp_of_token(
    x: CubeTensor,
    routing: BackendRouting<CubeBackend>,
    experts: [CubeTensor; 2],
    shared: [CubeTensor; 2],
    behind: (Option<AddNorm>, Option<[CubeTensor; 2]>),
    spec: &ExpertsSpec,
) -> (CubeTensor, CubeTensor, CubeTensor, CubeTensor) {
    let ([count, _, width], [_, shared_width]) = (dims(&experts[1]), dims(&shared[1]));
    if !linear::joins_experts(width, shared_width) {
        let ([gate_up, down], (norm, pair)) = (shared, behind);
        let gated = LinearSpec { gated: true, limit: spec.limit };
        let activations = self::linear(x.clone(), gate_up, &gated);
        let shared = self::linear(activations, down, &LinearSpec { gated: false, limit: None });
        return with_pair(mlp(x, routing.chosen(), experts, shared, norm, spec), pair);
    }
    let client = x.client.clone();
    let (routing, experts_of) = routing_args(routing);
    let rows = rows_of_token(x, (&routing.0, experts_of), experts, shared, spec);
    match behind {
        (Some((residual, weight, eps)), Some([first, second])) if joins(&first, &second) => {
            let outputs = Summand::Experts(outputs_of(rows, routing, SharedRows::Behind, count));
            let (norm, (sum, normed)) = add_norm_args(residual, outputs, weight, eps);
            let (products, (first, second)) = pair_args(normed.clone(), first, second);
            linear::launch_normed(&client, norm, products);
            (sum, normed, first, second)
        }
        (norm, pair) => with_pair(combine(rows, routing, SharedRows::Behind, count, norm), pair),
    }
}

/// A sum, its norm, and the products of the norm with two matrices; where there are none, the sum again.
fn with_pair(
    (sum, normed): (CubeTensor, CubeTensor),
    pair: Option<[CubeTensor; 2]>,
) -> (CubeTensor, CubeTensor, CubeTensor, CubeTensor) {
    let (first, second) = match pair {
        Some([first, second]) => linear_pair(normed.clone(), first, second),
        None => (sum.clone(), sum.clone()),
    };
    (sum, normed, first, second)
}

/// What each expert of a token computes, given the contiguous numbers of its own, which the first launch may choose, and what
/// the shared ones do: `[k + 1, hidden]`.
fn rows_of_token(
    x: CubeTensor,
    (indices, experts_of): (&CubeTensor, ExpertsOf),
    [gate_up, down]: [CubeTensor; 2],
    shared: [CubeTensor; 2],
    spec: &ExpertsSpec,
) -> CubeTensor {
    let ([_, pairs], [experts, hidden, width], [_, shared_width]) = (dims(indices), dims(&down), dims(&shared[1]));
    let [x, gate_up, down] = [x, gate_up, down].map(contiguous);
    let shared = shared.map(|weight| {
        let weight = contiguous(weight).into_buffer_arg();
        Some(SharedMatrix { weight, width: shared_width })
    });
    // What is shared lies behind the pairs.
    let activations = empty(&x, [pairs * width + shared_width], x.dtype);
    let outputs = empty(&x, [pairs + 1, hidden], x.dtype);
    let [up_work, down_work] = pairs_of_token(indices, experts_of, experts, shared);
    product(&x, gate_up, &activations, [hidden, width], true, up_work, spec);
    product(&activations, down, &outputs, [width, hidden], false, down_work, spec);
    outputs
}

/// One of the products of the experts.
fn product(
    x: &CubeTensor,
    weight: CubeTensor,
    out: &CubeTensor,
    [inputs, outputs]: [usize; 2],
    up: bool,
    work: Work,
    spec: &ExpertsSpec,
) {
    let elem = dtype_to_elem_type(x.dtype);
    let args = LinearArgs {
        x: x.clone().into_buffer_arg(),
        weight: weight.into_buffer_arg(),
        out: out.clone().into_buffer_arg(),
        work,
        inputs,
        outputs,
        limit: spec.limit.unwrap_or_default(),
        form: LinearForm { gated: up, limited: up && spec.limit.is_some() },
        x_elem: elem,
        elem,
    };
    linear::launch(&x.client, args);
}

/// The weighted sum of the rows of each token's pairs, and what is shared; twice, or as part of a residual sum and its norm.
fn combine(
    rows: CubeTensor,
    routing: (CubeTensor, CubeTensor),
    shared: SharedRows,
    experts: usize,
    norm: Option<AddNorm>,
) -> (CubeTensor, CubeTensor) {
    let ([_, hidden], [tokens, _]) = (dims(&rows), dims(&routing.0));
    let (elem, like) = (dtype_to_elem_type(rows.dtype), rows.clone());
    let outputs = outputs_of(rows, routing, shared, experts);
    if let Some((residual, weight, eps)) = norm {
        return add_norm(residual, Summand::Experts(outputs), weight, eps);
    }
    let (out, client) = (empty(&like, [tokens, hidden], like.dtype), like.client.clone());
    let args = CombineArgs { outputs, out: out.clone().into_buffer_arg(), tokens, width: hidden, elem };
    combine::launch(&client, args);
    (out.clone(), out)
}

/// The rows of each token's pairs, and what is shared, as kernels take them.
fn outputs_of(
    rows: CubeTensor,
    (indices, weights): (CubeTensor, CubeTensor),
    shared: SharedRows,
    experts: usize,
) -> ExpertOutputs {
    let [_, top_k] = dims(&indices);
    ExpertOutputs {
        rows: rows.into_buffer_arg(),
        indices: indices.into_buffer_arg(),
        weights: weights.into_buffer_arg(),
        shared,
        top_k,
        experts,
    }
}

/// The work of both products for a single token, whose pairs have the order of its experts. The first one may choose them.
fn pairs_of_token(
    indices: &CubeTensor,
    experts_of: ExpertsOf,
    experts: usize,
    [up, down]: [Option<SharedMatrix>; 2],
) -> [Work; 2] {
    let [_, pairs] = dims(indices);
    let listed = ExpertsOf::Listed(indices.clone().into_buffer_arg());
    let gather = PairRows::Gather { top_k: pairs };
    [(experts_of, gather, up), (listed, PairRows::Scatter, down)].map(|(experts_of, rows, shared)| Work::Token {
        experts_of,
        pairs,
        experts,
        rows,
        shared,
    })
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
