//! [`experts_mlp`](super::experts_mlp) by kernels: both products of each pair of token and expert, and their weighted sum.

use burn::backend::{cubecl::dtype_to_elem_type, ops::IntTensorOps};
use burn::tensor::{DType, Scalar};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cubecl::client::Client;
use cubecl::ir::ElemType;
use mla_kernels::experts_mlp::combine::{self, CombineArgs, ExpertOutputs, SharedRows};
use mla_kernels::experts_mlp::sort::{self, SortArgs, TILE, max_tiles};
use mla_kernels::linear::{
    self, ExpertsOf, LinearArgs, LinearForm, LinearSizes, PairRows, SharedMatrix, Work, takes_many_rows, tile_tokens,
};
use mla_kernels::residual_norm::Summand;

use super::args::ExpertsMlpOptions;
use super::backend::{BackendEpilogue, BackendExpertsOut, BackendShared, ExpertsMlpBackend};
use crate::Determinism;
use crate::ops::hyper_connection::cube::Projection;
use crate::ops::linear::LinearBackend;
use crate::ops::linear::cube::{joins, pair_args};
use crate::ops::products::measure::scratch_bytes;
use crate::ops::residual_norm::{BackendNormed, BackendProducts, BackendReader, cube as residual_norm};
use crate::ops::route_experts::BackendRouting;
use crate::ops::route_experts::cube::route_args;
use crate::ops::swiglu::SwigluBackend;
use crate::tensors::{contiguous, dims, empty};
use crate::weight::{BackendWeight, dequantized};

/// Pairs of token and expert, for each expert on average, from which on experts in blocks become a scratch of numbers: fewer read
/// the codes.
const MANY_PAIRS: usize = 16;

impl ExpertsMlpBackend for CubeBackend {
    fn experts_mlp(
        x: CubeTensor,
        routing: BackendRouting<Self>,
        gate_up: BackendWeight<Self>,
        down: BackendWeight<Self>,
        shared: BackendShared<Self>,
        epilogue: BackendEpilogue<Self>,
        options: ExpertsMlpOptions,
    ) -> BackendExpertsOut<Self> {
        let experts = Experts { gate_up, down, options };
        let outputs = match shared {
            BackendShared::None => experts.outputs(x, routing, SharedRows::None),
            BackendShared::Rows(rows) => {
                experts.outputs(x, routing, SharedRows::Apart(contiguous(rows).into_buffer_arg()))
            }
            BackendShared::Weights(gate_up, down) => experts.outputs_of_token(x, routing, [gate_up, down]),
        };
        match epilogue {
            BackendEpilogue::None => BackendExpertsOut::Sum(outputs.combine()),
            BackendEpilogue::ResidualNorm { residual, weight, reader, eps } => {
                BackendExpertsOut::Normed(outputs.residual_norm(residual, (weight, eps), reader))
            }
            BackendEpilogue::Streams { mixing, weight } => {
                let (streams, parts) =
                    Projection::mixed(Summand::Experts(outputs.into_args()), mixing, weight).launch();
                BackendExpertsOut::Streams(streams, parts)
            }
            BackendEpilogue::Read { mixing, weight, norm_weight, mixer } => {
                let projection = Projection::mixed(Summand::Experts(outputs.into_args()), mixing, weight);
                BackendExpertsOut::Read(projection.read(norm_weight, mixer))
            }
        }
    }
}

/// Stacked weights of experts.
struct Experts {
    gate_up: BackendWeight<CubeBackend>,
    down: BackendWeight<CubeBackend>,
    options: ExpertsMlpOptions,
}

/// What the experts of each token computed, before the weighted sum.
struct Outputs {
    /// `[pairs, hidden]`, and behind them what is shared, where it is.
    rows: CubeTensor,
    /// Contiguous.
    indices: CubeTensor,
    /// Contiguous.
    weights: CubeTensor,
    shared: SharedRows,
    experts: usize,
}

impl Experts {
    /// How many there are, and their hidden channels.
    fn sizes(&self) -> [usize; 2] {
        let [count, _, width] = self.down.dims();
        [count, width]
    }

    /// The sizes of both products of so many pairs of token and expert.
    fn product_sizes(&self, pairs: usize, elem: ElemType) -> [LinearSizes; 2] {
        let [experts, hidden, width] = self.down.dims();
        let invariant = self.options.determinism.is_batch_invariant();
        let up = (hidden, width, self.gated(), &self.gate_up);
        let down = (width, hidden, LinearForm::default(), &self.down);
        [up, down].map(|(inputs, outputs, form, weight)| {
            LinearSizes::experts([pairs, experts, inputs, outputs], form, elem, weight.format().into(), invariant)
        })
    }

    fn gated(&self) -> LinearForm {
        LinearForm { gated: true, limited: self.options.limit.is_some() }
    }

    /// Of any number of tokens; what is shared was computed apart, if there is anything.
    fn outputs(self, x: CubeTensor, routing: BackendRouting<CubeBackend>, shared: SharedRows) -> Outputs {
        let (indices, weights) = routing.materialise();
        let [x, indices, weights] = [x, indices, weights].map(contiguous);
        let ([tokens, hidden], [_, top_k], [experts, width]) = (dims(&x), dims(&indices), self.sizes());
        let (pairs, elem) = (tokens * top_k, dtype_to_elem_type(x.dtype));
        let activations = empty(&x, [pairs, width], x.dtype);
        let rows = empty(&x, [pairs, hidden], x.dtype);
        if self.dequantises(&x.client, pairs, elem) {
            self.products_in_ranges(&x, &indices, [&activations, &rows]);
            return Outputs { rows, indices, weights, shared, experts };
        }
        let work = match tokens {
            1 => pairs_of_token(&indices, ExpertsOf::Listed(indices.clone().into_buffer_arg()), experts, [None, None]),
            _ => sorted(&x.client, &indices, experts, self.product_sizes(pairs, elem)),
        };
        self.products(&x, &activations, &rows, work);
        Outputs { rows, indices, weights, shared, experts }
    }

    /// Of a single token, with the shared experts in the same launches where their sizes allow it; the first one chooses the
    /// token's own.
    fn outputs_of_token(
        self,
        x: CubeTensor,
        routing: BackendRouting<CubeBackend>,
        [gate_up, down]: [BackendWeight<CubeBackend>; 2],
    ) -> Outputs {
        let ([experts, width], [hidden, shared_width]) = (self.sizes(), down.dims());
        // Each format has its own kernels, with their order of sums.
        let alike = self.gate_up.format().is_dense() == gate_up.format().is_dense()
            && self.down.format().is_dense() == down.format().is_dense();
        let in_blocks = !self.down.format().is_dense();
        if !alike || !linear::joins_experts(width, shared_width, in_blocks) {
            let activations = CubeBackend::swiglu(x.clone(), gate_up, self.options.limit, self.options.determinism);
            let shared = <CubeBackend as LinearBackend>::linear(activations, down, self.options.determinism);
            return self.outputs(x, routing, SharedRows::Apart(contiguous(shared).into_buffer_arg()));
        }
        let ((indices, weights), experts_of) = chosen_or_to_choose(routing);
        let ([_, pairs], x) = (dims(&indices), contiguous(x));
        let shared =
            [gate_up, down].map(|weight| Some(SharedMatrix { weight: weight.into_arg(), width: shared_width }));
        // What is shared lies behind the pairs.
        let activations = empty(&x, [pairs * width + shared_width], x.dtype);
        let rows = empty(&x, [pairs + 1, hidden], x.dtype);
        let work = pairs_of_token(&indices, experts_of, experts, shared);
        self.products(&x, &activations, &rows, work);
        Outputs { rows, indices, weights, shared: SharedRows::Behind, experts }
    }

    /// Whether there are enough pairs for a scratch of numbers in the place of blocks, and no kernel that decodes them for as many.
    /// The order of sums is another one then.
    fn dequantises(&self, client: &Client, pairs: usize, elem: ElemType) -> bool {
        let [experts, _] = self.sizes();
        let in_blocks = [&self.gate_up, &self.down].into_iter().any(|weight| !weight.format().is_dense());
        let many = in_blocks && pairs > MANY_PAIRS * experts && !self.options.determinism.is_batch_invariant();
        many && !self.product_sizes(pairs, elem).iter().all(|sizes| takes_many_rows(client, sizes))
    }

    /// Both products with experts that are dequantised some at a time: the scratch has no more than [`scratch_bytes`], or one
    /// expert. Pairs are sorted for each range anew; those of other experts are none there.
    fn products_in_ranges(&self, x: &CubeTensor, indices: &CubeTensor, [activations, rows]: [&CubeTensor; 2]) {
        let ([experts, hidden, width], [pairs, _]) = (self.down.dims(), dims(rows));
        let elem = dtype_to_elem_type(x.dtype);
        let each = (scratch_bytes() / (3 * hidden * width * elem.size()).max(1)).clamp(1, experts);
        for first in (0..experts).step_by(each) {
            let count = each.min(experts - first);
            let [gate_up, down] = [&self.gate_up, &self.down]
                .map(|weight| BackendWeight::Dense(dequantized(weight.clone(), first, count)));
            let range = Self { gate_up, down, options: self.options };
            let own = <CubeBackend as IntTensorOps<CubeBackend>>::int_sub_scalar(
                indices.clone(),
                Scalar::new(first as i64, &DType::I32),
            );
            // Burn pads the rows of what it computes on CUDA.
            let own = contiguous(own);
            let work = sorted(&x.client, &own, count, range.product_sizes(pairs, elem));
            range.products(x, activations, rows, work);
        }
    }

    /// The gated products of x, and those of the activations.
    fn products(self, x: &CubeTensor, activations: &CubeTensor, rows: &CubeTensor, [up, down]: [Work; 2]) {
        let [_, hidden, width] = self.down.dims();
        let (gated, limit) = (self.gated(), (self.options.limit.unwrap_or_default(), self.options.determinism));
        product(x, self.gate_up, activations, ([hidden, width], gated, limit), up);
        product(activations, self.down, rows, ([width, hidden], LinearForm::default(), limit), down);
    }
}

impl Outputs {
    /// The weighted sum `[N, hidden]`.
    fn combine(self) -> CubeTensor {
        let ([_, hidden], [tokens, _]) = (dims(&self.rows), dims(&self.indices));
        let out = empty(&self.rows, [tokens, hidden], self.rows.dtype);
        let elem = dtype_to_elem_type(out.dtype);
        let outputs = self.into_args();
        let args = CombineArgs { outputs, out: out.clone().into_buffer_arg(), tokens, width: hidden, elem };
        combine::launch(&out.client, args);
        out
    }

    /// The weighted sum as a summand of a residual stream, the norm of that, and what reads it: two projections in the same
    /// launch, where shared experts were in those before.
    fn residual_norm(
        self,
        residual: CubeTensor,
        norm: (CubeTensor, f32),
        reader: BackendReader<CubeBackend>,
    ) -> BackendNormed<CubeBackend> {
        let is_behind = matches!(self.shared, SharedRows::Behind);
        let client = self.rows.client.clone();
        let summand = Summand::Experts(self.into_args());
        match reader {
            BackendReader::LinearPair(first, second, determinism) if is_behind && joins(&first, &second) => {
                let (norm, [sum, normed]) = residual_norm::launch_args(residual, summand, norm);
                let (products, [first, second]) = pair_args(normed.clone(), first, second, determinism);
                linear::launch_normed(&client, norm, products);
                BackendNormed { sum, normed, products: BackendProducts::Two(first, second) }
            }
            reader => residual_norm::launch(residual, summand, norm, reader),
        }
    }

    /// As kernels take them.
    fn into_args(self) -> ExpertOutputs {
        let [_, top_k] = dims(&self.indices);
        ExpertOutputs {
            rows: self.rows.into_buffer_arg(),
            indices: self.indices.into_buffer_arg(),
            weights: self.weights.into_buffer_arg(),
            shared: self.shared,
            top_k,
            experts: self.experts,
        }
    }
}

/// Contiguous experts and weights, which the launch that takes the other result may have to write.
fn chosen_or_to_choose(routing: BackendRouting<CubeBackend>) -> ((CubeTensor, CubeTensor), ExpertsOf) {
    match routing {
        BackendRouting::Chosen(choice, padding, options) => {
            let (args, chosen) = route_args(choice, padding, &options);
            (chosen, ExpertsOf::Routed(Box::new(args)))
        }
        BackendRouting::Given(indices, weights) => {
            let [indices, weights] = [indices, weights].map(contiguous);
            let listed = ExpertsOf::Listed(indices.clone().into_buffer_arg());
            ((indices, weights), listed)
        }
    }
}

/// One of the products of the experts, from inputs to outputs, with a bound of the activations.
fn product(
    x: &CubeTensor,
    weight: BackendWeight<CubeBackend>,
    out: &CubeTensor,
    ([inputs, outputs], form, (limit, determinism)): ([usize; 2], LinearForm, (f32, Determinism)),
    work: Work,
) {
    let elem = dtype_to_elem_type(x.dtype);
    let args = LinearArgs {
        x: x.clone().into_buffer_arg(),
        weight: weight.into_arg(),
        out: out.clone().into_buffer_arg(),
        work,
        inputs,
        outputs,
        limit,
        form,
        x_elem: elem,
        elem,
        batch_invariant: determinism.is_batch_invariant(),
    };
    linear::launch(&x.client, args);
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

/// The work of both products, of these sizes: pairs sorted by expert.
fn sorted(client: &Client, indices: &CubeTensor, experts: usize, [up, down]: [LinearSizes; 2]) -> [Work; 2] {
    let [tokens, top_k] = dims(indices);
    let pairs = tokens * top_k;
    let order = empty(indices, [pairs], DType::I32);
    let [up_tile, down_tile] = [up, down].map(|sizes| tile_tokens(client, &sizes));
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
    let up_tiles = tiled(up_tile);
    let down_tiles = if down_tile == up_tile { up_tiles.clone() } else { tiled(down_tile) };
    [(up_tiles, PairRows::Gather { top_k }), (down_tiles, PairRows::Scatter)].map(|(tiles, rows)| {
        let (order, tiles) = (order.clone().into_buffer_arg(), tiles.into_buffer_arg());
        Work::Experts { order, tiles, pairs, experts, rows }
    })
}
