//! Projections of a few tokens, by one matrix or by that of their expert or head: each weight is read once for a tile of tokens.
//!
//! With few tokens a projection is as fast as its weights come from the memory. This kernel is for all devices and dtypes; with
//! matrix instructions, `mma.rs` does the same for f16 and bf16.

#[cfg(feature = "cuda")]
mod choice;
mod grid;
#[cfg(feature = "cuda")]
mod latents;
#[cfg(feature = "cuda")]
pub(crate) mod mma;
pub mod normed;
#[cfg(feature = "cuda")]
mod source;

use cubecl::prelude::*;

use self::grid::{Grid, Part, Rows, Tile};
use crate::common::launch::{address_type, io_vector_size, share};
use crate::merge_splits::{self, MergeSplitsArgs};
use crate::residual_norm::{self, AddRmsNormArgs, Summand};
use crate::route_experts::{self, RouteArgs};

/// Units of a cube. They share a row of the weights, or each plane's worth of them has its own.
pub(crate) const UNITS: usize = 128;
/// Outputs up to which a row has all units of a cube: with more cubes there is enough to do for a GPU (a router's logits).
pub(crate) const FEW_OUTPUTS: usize = 512;
/// Tokens of a tile here.
const TOKENS: usize = 4;
/// Vectors of a row that a unit loads before it looks at the first.
pub(crate) const AHEAD: usize = 4;
/// Channels that every kernel takes at once.
const JOINED: usize = 32;

/// Arguments of [`launch`]; X is `x_elem`, E is `elem`.
pub struct LinearArgs {
    /// X `[.., inputs]`: rows that [`Work`] numbers.
    pub x: BufferArg,
    /// E `[experts, outputs, inputs]`; with [`LinearForm::gated`] `[experts, 2 * outputs, inputs]`, gate rows first.
    pub weight: BufferArg,
    /// E `[.., outputs]`, written: rows that [`Work`] numbers.
    pub out: BufferArg,
    /// Which rows meet which matrix.
    pub work: Work,
    /// Channels of a row of x.
    pub inputs: usize,
    /// Channels of a row of the output.
    pub outputs: usize,
    /// Bound of the activations, if [`LinearForm::limited`].
    pub limit: f32,
    /// Gated, limited.
    pub form: LinearForm,
    /// E, or where E is f32, f16 or bf16.
    pub x_elem: ElemType,
    /// f32, f16 or bf16.
    pub elem: ElemType,
}

/// Which rows meet which matrix.
pub enum Work {
    /// All of so many rows meet the one matrix, or two.
    Dense {
        /// Rows.
        rows: usize,
        /// Another matrix that they meet.
        second: Option<SecondMatrix>,
    },
    /// Each head of a token meets its own matrix: x `[rows, heads, inputs + carried]`, out `[rows, heads, outputs + carried]`.
    Heads {
        /// Tokens.
        rows: usize,
        /// Heads.
        heads: usize,
        /// Channels of a row of x that are copied behind its products.
        carried: usize,
        /// Elements from one matrix to the next.
        matrix_stride: usize,
    },
    /// Tiles of pairs of token and expert.
    Experts {
        /// i32 `[pairs]`, as [`crate::experts_mlp::sort`] writes it.
        order: BufferArg,
        /// i32, as [`crate::experts_mlp::sort`] writes it for tiles of [`tile_tokens`].
        tiles: BufferArg,
        /// Pairs.
        pairs: usize,
        /// Experts.
        experts: usize,
        /// Where the rows of pairs are.
        rows: PairRows,
    },
    /// The pairs of one token, each a tile of its own. Nothing is sorted: the order of the experts is that of the pairs.
    Token {
        /// The expert of each pair. Pairs of one that there is not are left out.
        experts_of: ExpertsOf,
        /// Pairs.
        pairs: usize,
        /// Experts.
        experts: usize,
        /// Where the rows of pairs are.
        rows: PairRows,
        /// A shared expert, whose row is behind those of the pairs.
        shared: Option<SharedMatrix>,
    },
}

/// Where the expert of each pair of a token is from.
pub enum ExpertsOf {
    /// i32 `[pairs]`.
    Listed(BufferArg),
    /// The choice of [`crate::route_experts`], which is written as well: in the launch of the projection where that can make it.
    Routed(Box<RouteArgs>),
}

impl Work {
    /// A choice that is to be made, in a launch of its own, unless the projection's kernel `chooses`.
    fn listed(self, client: &Client, chooses: impl Fn(&RouteArgs) -> bool) -> Self {
        match self {
            Work::Token { experts_of: ExpertsOf::Routed(route), pairs, experts, rows, shared } if !chooses(&route) => {
                let experts_of = ExpertsOf::Listed(share(&route.indices));
                route_experts::launch(client, *route);
                Work::Token { experts_of, pairs, experts, rows, shared }
            }
            work => work,
        }
    }
}

/// A matrix of the same inputs, where outputs are not gated.
pub struct SecondMatrix {
    /// E `[outputs, inputs]`.
    pub weight: BufferArg,
    /// E `[rows, outputs]`, written.
    pub out: BufferArg,
    /// Its outputs.
    pub outputs: usize,
}

/// The matrix of an expert that the token has beside its own, with another number of hidden channels than theirs.
pub struct SharedMatrix {
    /// E, laid out like one of the others: `[outputs, inputs]`, or gated `[2 * outputs, inputs]`.
    pub weight: BufferArg,
    /// Its hidden channels: its outputs with [`PairRows::Gather`], its inputs with [`PairRows::Scatter`]. The other number is
    /// that of the other experts.
    pub width: usize,
}

/// Where the rows of pairs are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PairRows {
    /// x has a row for each token, of so many pairs each; the output's rows have the order of the experts.
    Gather {
        /// Pairs of a token.
        top_k: usize,
    },
    /// x has the order of the experts; the output's rows that of the pairs.
    Scatter,
}

/// Latents, and a cache for them: see [`RopeWriteArgs`](crate::rope_write::RopeWriteArgs).
pub struct LatentRows {
    /// E `[tokens, cache_width]`.
    pub latent: BufferArg,
    /// f32 `[cache_width - 2 * pairs]`.
    pub weight: BufferArg,
    /// f32 `[tokens, pairs]`.
    pub cos: BufferArg,
    /// f32 `[tokens, pairs]`.
    pub sin: BufferArg,
    /// i32 `[tokens]`.
    pub slots: BufferArg,
    /// E `[slot_count, cache_width]`, written in place.
    pub cache: BufferArg,
    /// Channels of a row of the cache.
    pub cache_width: usize,
    /// Pairs of neighbours that turn: all carried channels.
    pub pairs: usize,
    /// Rows of the cache.
    pub slot_count: usize,
    /// Added to the mean square in the norm.
    pub eps: f32,
}

/// What becomes of the products; by default nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct LinearForm {
    /// The output is `silu(gate) * up` of two products.
    pub gated: bool,
    /// `up` is clamped both ways and the gate from above.
    pub limited: bool,
}

/// Whether one launch with a second matrix computes the same bits as one for each, by the outputs of both.
pub fn joins(outputs: usize, second_outputs: usize) -> bool {
    (outputs <= FEW_OUTPUTS) == (second_outputs <= FEW_OUTPUTS)
}

/// Whether a shared expert of another width can be in the same launches as a token's own ones, and computes the same bits.
pub fn joins_experts(width: usize, shared_width: usize) -> bool {
    shared_width.is_multiple_of(JOINED) && joins(width, shared_width)
}

/// Tokens of a tile on this device. `rows` are those of a matrix: all of them, or an expert's on average.
pub fn tile_tokens(client: &Client, inputs: usize, rows: usize, elem: ElemType) -> usize {
    #[cfg(feature = "cuda")]
    if mma::supported(client, inputs, elem) {
        return mma::tile_tokens(rows);
    }
    let _ = (client, inputs, rows, elem);
    TOKENS
}

/// Writes `out`. Without rows, inputs or outputs nothing is launched.
pub fn launch(client: &Client, args: LinearArgs) {
    launch_with(client, Before::Nothing, None, args);
}

/// The same for the heads of an attention whose splits are to be merged: `x` is their `out`. Bit for bit [`merge_splits`] and
/// [`launch`]; where a single token has few splits it is one launch, and `x` and the lse of several splits are not written.
pub fn launch_merged(client: &Client, merge: MergeSplitsArgs, args: LinearArgs) {
    launch_with(client, Before::Merge(merge), None, args);
}

/// The same for the norm of a residual sum: `x` is its `normed`. Bit for bit [`residual_norm`] and [`launch`]; for a single row
/// it may be one launch.
pub fn launch_normed(client: &Client, norm: AddRmsNormArgs, args: LinearArgs) {
    launch_with(client, Before::Norm(norm), None, args);
}

/// The same for heads whose carried channels turn, and puts latents into a cache. The launch must be one that [`turns`].
pub fn launch_turned(client: &Client, latents: LatentRows, args: LinearArgs) {
    launch_with(client, Before::Nothing, Some(latents), args);
}

/// Whether [`launch_turned`] takes these.
pub fn turns(client: &Client, latents: &LatentRows, args: &LinearArgs) -> bool {
    #[cfg(feature = "cuda")]
    if let Work::Heads { carried, matrix_stride, .. } = args.work {
        return mma::supported(client, args.inputs, args.elem)
            && mma::fits(carried, matrix_stride)
            && mma::takes_latents(carried, latents);
    }
    let _ = (client, latents, args);
    false
}

/// What writes the rows of x, if they are not there.
#[allow(clippy::large_enum_variant, reason = "there is one at a time")]
pub(crate) enum Before {
    Nothing,
    Merge(MergeSplitsArgs),
    Norm(AddRmsNormArgs),
}

impl Before {
    fn launch(self, client: &Client) {
        match self {
            Self::Nothing => {}
            Self::Merge(merge) => merge_splits::launch(client, merge),
            Self::Norm(norm) => residual_norm::launch(client, norm),
        }
    }

    /// The largest buffer beside x.
    fn largest(&self) -> Option<&BufferArg> {
        match self {
            Self::Nothing => None,
            Self::Merge(merge) => Some(&merge.outs),
            Self::Norm(AddRmsNormArgs { y: Summand::Rows(rows), .. }) => Some(rows),
            Self::Norm(AddRmsNormArgs { y: Summand::Experts(outputs), .. }) => Some(&outputs.rows),
        }
    }
}

/// Behind a launch whose work the products' kernel does itself where that is faster, and with what it does beside them.
fn launch_with(client: &Client, before: Before, latents: Option<LatentRows>, args: LinearArgs) {
    let (inputs, outputs, x_elem, elem) = (args.inputs, args.outputs, args.x_elem, args.elem);
    // Rows of x, and of those that meet one matrix.
    let (count, each) = match &args.work {
        Work::Dense { rows, .. } => (*rows, *rows),
        Work::Heads { rows, heads, .. } => (rows * heads, *rows),
        Work::Experts { pairs, experts, .. } => (*pairs, pairs.div_ceil(*experts)),
        Work::Token { pairs, .. } => (*pairs, 1),
    };
    if count * inputs * outputs == 0 {
        return before.launch(client);
    }
    let (carried, matrix_stride) = match &args.work {
        Work::Heads { carried, matrix_stride, .. } => (*carried, *matrix_stride),
        _ => (0, if args.form.gated { 2 * outputs * inputs } else { outputs * inputs }),
    };
    let (x, weight, out, limit) = (args.x, args.weight, args.out, args.limit);
    let products = Products { x, weight, out, inputs, outputs, carried, matrix_stride, limit };
    let mut buffers = vec![&products.x, &products.weight, &products.out];
    match &args.work {
        Work::Token { shared: Some(shared), .. } => buffers.push(&shared.weight),
        Work::Dense { second: Some(second), .. } => buffers.extend([&second.weight, &second.out]),
        _ => {}
    }
    buffers.extend(before.largest());
    buffers.extend(latents.as_ref().map(|latents| &latents.cache));
    let address = address_type(client, &buffers);
    #[cfg(feature = "cuda")]
    if mma::supported(client, inputs, elem) && mma::fits(carried, matrix_stride) {
        let tile = tile_tokens(client, inputs, each, elem);
        let grid = Grid::new(client, args.work.listed(client, choice::chooses), tile);
        let mut inside = Before::Nothing;
        if mma::takes(client, &products, &grid, &before) {
            inside = before;
        } else {
            before.launch(client);
        }
        return mma::launch(client, products, grid, (inside, latents), (args.form, tile), address, elem);
    }
    before.launch(client);
    let _ = (each, latents);
    let grid = Grid::new(client, args.work.listed(client, |_| false), TOKENS);
    let vector = io_vector_size(client.properties(), &[inputs, products.carried, products.matrix_stride], elem.size());
    let form = Form::new(&grid, args.form, outputs);
    let cubes = grid.cubes(outputs, form.outputs());
    let second_width = grid.second_width(vector);
    linear_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, cubes, CubeDim::new_single()),
        form.cube_dim(),
        address,
        vector,
        products.x,
        products.weight,
        grid.second,
        grid.order,
        grid.tiles,
        products.out,
        grid.second_out,
        products.inputs / vector,
        products.outputs,
        products.carried / vector,
        products.matrix_stride / vector,
        grid.per_token,
        grid.tokens,
        grid.max_tiles,
        second_width,
        products.limit,
        form,
        x_elem,
        elem,
    );
}

/// The matrices of a launch.
pub(crate) struct Products {
    pub x: BufferArg,
    pub weight: BufferArg,
    pub out: BufferArg,
    pub inputs: usize,
    pub outputs: usize,
    pub carried: usize,
    pub matrix_stride: usize,
    pub limit: f32,
}

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    rows: Rows,
    linear: LinearForm,
    /// Units that share a row of the weights.
    columns: usize,
    /// Whether there is a second matrix.
    second: bool,
}

impl Form {
    fn new(grid: &Grid, linear: LinearForm, outputs: usize) -> Self {
        let columns = if outputs <= FEW_OUTPUTS { UNITS } else { 32 };
        Self { rows: grid.rows, linear, columns, second: grid.second_width > 0 }
    }

    /// Outputs of a cube.
    fn outputs(&self) -> usize {
        UNITS / self.columns
    }

    fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(self.columns as u32, self.outputs() as u32)
    }
}

/// A cube has some rows of the weights for a tile. The units of a row go over it together.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn linear_kernel<X: Float, E: Float, N: Size>(
    x: &[Vector<X, N>],
    weight: &[Vector<E, N>],
    second: &[Vector<E, N>],
    order: &[i32],
    tiles: &[i32],
    out: &mut [E],
    second_out: &mut [E],
    vectors: usize,
    outputs: usize,
    carried: usize,
    matrix_stride: usize,
    per_token: usize,
    tokens: usize,
    max_tiles: usize,
    second_width: usize,
    limit: f32,
    #[comptime] form: Form,
    #[define(X)] _x_elem: ElemType,
    #[define(E)] _elem: ElemType,
) {
    let lanes = N::value().comptime();
    let mut part = Part::whole(vectors, outputs);
    if comptime!(form.second) {
        part.split(second_width, max_tiles, form.outputs(), form.rows);
    }
    let groups = part.outputs.div_ceil(form.outputs());
    let number = part.cube / groups;
    let group = part.cube % groups;
    let output = group * form.outputs() + UNIT_POS_Y as usize;
    let mut tile = Tile::read(tiles, number, max_tiles, tokens, per_token, TOKENS, form.rows);
    if comptime!(form.second && form.rows != Rows::Dense) {
        part.place(&mut tile, max_tiles);
    }
    let mut sums = Array::<f32>::new(TOKENS);
    let mut gates = Array::<f32>::new(TOKENS);
    #[unroll]
    for t in 0..TOKENS {
        sums[t] = 0.0f32;
        gates[t] = 0.0f32;
    }
    if tile.count > 0 && output < part.outputs {
        // Of a gated output the gate comes first.
        let row = tile.expert * matrix_stride + output * part.vectors;
        let row_vectors = tile.row(vectors, carried);
        if comptime!(form.second) {
            if part.is_second {
                multiply::<X, E, N>(x, second, order, &tile, &part, row, row_vectors, &mut sums, &mut gates, form);
            } else {
                multiply::<X, E, N>(x, weight, order, &tile, &part, row, row_vectors, &mut sums, &mut gates, form);
            }
        } else {
            multiply::<X, E, N>(x, weight, order, &tile, &part, row, row_vectors, &mut sums, &mut gates, form);
        }
    }
    let mut parts = Shared::<[f32]>::new_slice(UNITS);
    #[unroll]
    for t in 0..TOKENS {
        let up = sum_of_row(&mut parts, sums[t], form.columns);
        let mut value = up;
        if comptime!(form.linear.gated) {
            value = gated(sum_of_row(&mut parts, gates[t], form.columns), up, limit, form.linear.limited);
        }
        if UNIT_POS_X == 0 && t < tile.count && output < part.outputs {
            let row = tile.output(order, t);
            let result = E::cast_from(value);
            if comptime!(form.second && form.rows == Rows::Dense) {
                if part.is_second {
                    second_out[row * part.outputs + output] = result;
                } else {
                    out[row * outputs + output] = result;
                }
            } else {
                out[row * tile.row(outputs, carried * lanes) + output] = result;
            }
        }
    }
    if comptime!(form.rows == Rows::Heads) {
        let is_first = group == 0;
        if is_first {
            tile.carry::<X, E, N>(x, out, vectors, outputs, carried, UNITS);
        }
    }
}

/// Adds up the products of a unit's columns, from `row` on in the weights.
#[cube]
#[allow(clippy::too_many_arguments)]
fn multiply<X: Float, E: Float, N: Size>(
    x: &[Vector<X, N>],
    weight: &[Vector<E, N>],
    order: &[i32],
    tile: &Tile,
    part: &Part,
    row: usize,
    row_vectors: usize,
    sums: &mut Array<f32>,
    gates: &mut Array<f32>,
    #[comptime] form: Form,
) {
    let lanes = N::value().comptime();
    let up = row + comptime!(if form.linear.gated { 1usize } else { 0usize }) * part.outputs * part.vectors;
    let mut column = UNIT_POS_X as usize;
    while column < part.vectors {
        // All loads before the first use: they take far longer than the rest.
        let mut weights = Sequence::<Vector<E, N>>::new();
        let mut gate_weights = Sequence::<Vector<E, N>>::new();
        let mut values = Sequence::<Vector<X, N>>::new();
        #[unroll]
        for i in 0..AHEAD {
            let at = min(column + comptime!(i * form.columns), part.vectors - 1);
            weights.push(weight[up + at]);
            if comptime!(form.linear.gated) {
                gate_weights.push(weight[row + at]);
            }
            #[unroll]
            for t in 0..TOKENS {
                values.push(x[tile.input(order, t) * row_vectors + at]);
            }
        }
        #[unroll]
        for i in 0..AHEAD {
            if column + comptime!(i * form.columns) < part.vectors {
                let weights = Vector::<f32, N>::cast_from(weights[i]);
                let mut gate = weights;
                if comptime!(form.linear.gated) {
                    gate = Vector::<f32, N>::cast_from(gate_weights[i]);
                }
                #[unroll]
                for t in 0..TOKENS {
                    let values = Vector::<f32, N>::cast_from(values[comptime!(i * TOKENS + t)]);
                    #[unroll]
                    for lane in 0..lanes {
                        sums[t] += values.extract(lane) * weights.extract(lane);
                        if comptime!(form.linear.gated) {
                            gates[t] += values.extract(lane) * gate.extract(lane);
                        }
                    }
                }
            }
        }
        column += comptime!(AHEAD * form.columns);
    }
}

/// `silu(gate) * up`.
#[cube]
pub(crate) fn gated(gate: f32, up: f32, limit: f32, #[comptime] limited: bool) -> f32 {
    let mut gate = gate;
    let mut up = up;
    if comptime!(limited) {
        // Comparisons, unlike minima, let what is not a number through.
        gate = select(gate > limit, limit, gate);
        up = select(up > limit, limit, select(up < -limit, -limit, up));
    }
    gate / (1.0 + (-gate).exp()) * up
}

/// The sum over the units of a row, in an order that does not depend on anything. Called by all units of a cube.
#[cube]
pub(crate) fn sum_of_row(shared: &mut Shared<[f32]>, own: f32, #[comptime] columns: usize) -> f32 {
    let unit = UNIT_POS as usize;
    shared[unit] = own;
    sync_cube();
    let mut distance = comptime!(columns / 2).runtime();
    while distance > 0 {
        if (UNIT_POS_X as usize) < distance {
            let other = shared[unit + distance];
            shared[unit] += other;
        }
        sync_cube();
        distance /= 2;
    }
    let sum = shared[unit - UNIT_POS_X as usize];
    sync_cube();
    sum
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, FLOATS, form};
    let forms = FLOATS.into_iter().flat_map(|kind| {
        let elem = ElemType::Float(kind);
        let vector = 16 / elem.size();
        let entry = |name, rows, [gated, limited, second]: [bool; 3], outputs| {
            let columns = if outputs <= FEW_OUTPUTS { UNITS } else { 32 };
            let form = Form { rows, linear: LinearForm { gated, limited }, columns, second };
            let cube = form.cube_dim();
            let bits = AddressType::U32;
            let form = form!(
                linear_kernel,
                cube,
                [bits, vector, _, _, _, _, _, _, _, 1, 1, 1, 1, 1, 1, 1, 1, 1.0, form, elem, elem]
            );
            Entry::of(kind, name, form)
        };
        [
            entry("linear", Rows::Dense, [false; 3], 2048),
            entry("linear.pair", Rows::Dense, [false, false, true], 2048),
            entry("linear.router", Rows::Dense, [false; 3], 64),
            entry("linear.heads", Rows::Heads, [false; 3], 512),
            entry("linear.experts_up", Rows::Gather, [true, true, false], 1408),
            entry("linear.experts_down", Rows::Scatter, [false; 3], 2048),
            entry("linear.token_up", Rows::TokenGather, [true, false, true], 1408),
            entry("linear.token_down", Rows::TokenScatter, [false, false, true], 2048),
        ]
    });
    [forms.collect(), mma::offline(), normed::offline()].into_iter().flatten().collect()
}
