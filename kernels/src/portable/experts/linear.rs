//! Projections of a few tokens, by one matrix or by that of their expert or head: each weight is read once for a tile of tokens.
//!
//! With few tokens a projection is as fast as its weights come from the memory. This kernel is for all devices and dtypes; with
//! matrix instructions, `sm80/linear.rs` does the same for f16 and bf16.

use cubecl::prelude::*;

use super::sort::{TILE, max_tiles};
use crate::portable::launch::{address_type, io_vector_size, is_row};
#[cfg(feature = "cuda")]
use crate::sm80::linear as sm80;

/// Units of a cube. They share a row of the weights, or each plane's worth of them has its own.
const UNITS: usize = 128;
/// Outputs up to which a row has all units of a cube: with more cubes there is enough to do for a GPU (a router's logits).
const FEW_OUTPUTS: usize = 512;
/// Tokens of a tile here.
const TOKENS: usize = 4;

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
    /// All of so many rows meet the one matrix.
    Dense {
        /// Rows.
        rows: usize,
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
        /// i32 `[pairs]`, as [`super::sort`] writes it.
        order: BufferArg,
        /// i32, as [`super::sort`] writes it for tiles of [`tile_tokens`].
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
        /// i32 `[pairs]`: the expert of each pair. Pairs of one that there is not are left out.
        experts_of: BufferArg,
        /// Pairs.
        pairs: usize,
        /// Experts.
        experts: usize,
        /// Where the rows of pairs are.
        rows: PairRows,
    },
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

/// What becomes of the products; by default nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct LinearForm {
    /// The output is `silu(gate) * up` of two products.
    pub gated: bool,
    /// `up` is clamped both ways and the gate from above.
    pub limited: bool,
}

/// How a kernel finds its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Rows {
    /// Rows are their own numbers.
    Dense,
    /// A row for each token and head.
    Heads,
    /// See [`PairRows::Gather`].
    Gather,
    /// See [`PairRows::Scatter`].
    Scatter,
    /// The one row is that of each pair of [`Work::Token`].
    TokenGather,
    /// Pairs of [`Work::Token`] have their own rows.
    TokenScatter,
}

/// What both kernels are launched with.
pub(crate) struct Grid {
    pub order: BufferArg,
    /// Of a single token its experts.
    pub tiles: BufferArg,
    pub rows: Rows,
    /// Pairs or heads of a token, or 1.
    pub per_token: usize,
    /// Tokens where tiles are not listed; of a single token how many experts there are.
    pub tokens: usize,
    /// Tiles at most.
    pub max_tiles: usize,
}

impl Grid {
    /// The grid of tiles of `tile` tokens.
    fn new(client: &Client, work: Work, tile: usize) -> Self {
        let unlisted = |rows, per_token, tokens, max_tiles| Self {
            order: dummy(client),
            tiles: dummy(client),
            rows,
            per_token,
            tokens,
            max_tiles,
        };
        match work {
            Work::Dense { rows } => unlisted(Rows::Dense, 1, rows, rows.div_ceil(tile)),
            Work::Heads { rows, heads, .. } => unlisted(Rows::Heads, heads, rows, rows.div_ceil(tile) * heads),
            Work::Experts { order, tiles, pairs, experts, rows } => {
                let (rows, per_token) = match rows {
                    PairRows::Gather { top_k } => (Rows::Gather, top_k),
                    PairRows::Scatter => (Rows::Scatter, 1),
                };
                Self { order, tiles, rows, per_token, tokens: 0, max_tiles: max_tiles(pairs, experts, tile) }
            }
            Work::Token { experts_of, pairs, experts, rows } => {
                let rows = match rows {
                    PairRows::Gather { .. } => Rows::TokenGather,
                    PairRows::Scatter => Rows::TokenScatter,
                };
                Self { tiles: experts_of, ..unlisted(rows, 1, experts, pairs) }
            }
        }
    }
}

/// Tokens of a tile on this device. `rows` are those of a matrix: all of them, or an expert's on average.
pub fn tile_tokens(client: &Client, inputs: usize, rows: usize, elem: ElemType) -> usize {
    #[cfg(feature = "cuda")]
    if sm80::supported(client, inputs, elem) {
        return sm80::tile_tokens(rows);
    }
    let _ = (client, inputs, rows, elem);
    TOKENS
}

/// Writes `out`. Without rows, inputs or outputs nothing is launched.
pub fn launch(client: &Client, args: LinearArgs) {
    let (inputs, outputs, x_elem, elem) = (args.inputs, args.outputs, args.x_elem, args.elem);
    // Rows of x, and of those that meet one matrix.
    let (count, each) = match &args.work {
        Work::Dense { rows } => (*rows, *rows),
        Work::Heads { rows, heads, .. } => (rows * heads, *rows),
        Work::Experts { pairs, experts, .. } => (*pairs, pairs.div_ceil(*experts)),
        Work::Token { pairs, .. } => (*pairs, 1),
    };
    if count * inputs * outputs == 0 {
        return;
    }
    let (carried, matrix_stride) = match &args.work {
        Work::Heads { carried, matrix_stride, .. } => (*carried, *matrix_stride),
        _ => (0, if args.form.gated { 2 * outputs * inputs } else { outputs * inputs }),
    };
    let (x, weight, out, limit) = (args.x, args.weight, args.out, args.limit);
    let products = Products { x, weight, out, inputs, outputs, carried, matrix_stride, limit };
    let address = address_type(client, &[&products.x, &products.weight, &products.out]);
    #[cfg(feature = "cuda")]
    if sm80::supported(client, inputs, elem) && sm80::fits(&products) {
        let tile = tile_tokens(client, inputs, each, elem);
        let grid = Grid::new(client, args.work, tile);
        return sm80::launch(client, products, grid, (args.form, tile), address, elem);
    }
    let _ = each;
    let grid = Grid::new(client, args.work, TOKENS);
    let vector = io_vector_size(client.properties(), &[inputs, products.carried, products.matrix_stride], elem.size());
    let form = Form::new(grid.rows, args.form, outputs);
    let cubes = outputs.div_ceil(form.outputs()) * grid.max_tiles;
    linear_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, cubes, CubeDim::new_single()),
        form.cube_dim(),
        address,
        vector,
        products.x,
        products.weight,
        grid.order,
        grid.tiles,
        products.out,
        products.inputs / vector,
        products.outputs,
        products.carried / vector,
        products.matrix_stride / vector,
        grid.per_token,
        grid.tokens,
        grid.max_tiles,
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
}

impl Form {
    fn new(rows: Rows, linear: LinearForm, outputs: usize) -> Self {
        Self { rows, linear, columns: if outputs <= FEW_OUTPUTS { UNITS } else { 32 } }
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
    order: &[i32],
    tiles: &[i32],
    out: &mut [E],
    vectors: usize,
    outputs: usize,
    carried: usize,
    matrix_stride: usize,
    per_token: usize,
    tokens: usize,
    max_tiles: usize,
    limit: f32,
    #[comptime] form: Form,
    #[define(X)] _x_elem: ElemType,
    #[define(E)] _elem: ElemType,
) {
    let lanes = N::value().comptime();
    let groups = outputs.div_ceil(form.outputs());
    let number = CUBE_POS / groups;
    let group = CUBE_POS % groups;
    let output = group * form.outputs() + UNIT_POS_Y as usize;
    let tile = Tile::read(tiles, number, max_tiles, tokens, per_token, TOKENS, form.rows);
    let row_vectors = tile.row(vectors, carried);
    let mut sums = Array::<f32>::new(TOKENS);
    let mut gates = Array::<f32>::new(TOKENS);
    #[unroll]
    for t in 0..TOKENS {
        sums[t] = 0.0f32;
        gates[t] = 0.0f32;
    }
    if tile.count > 0 && output < outputs {
        // Of a gated output the gate comes first.
        let row = tile.expert * matrix_stride + output * vectors;
        let up = row + comptime!(if form.linear.gated { 1usize } else { 0usize }) * outputs * vectors;
        let mut column = UNIT_POS_X as usize;
        while column < vectors {
            let weights = Vector::<f32, N>::cast_from(weight[up + column]);
            let mut gate_weights = weights;
            if comptime!(form.linear.gated) {
                gate_weights = Vector::<f32, N>::cast_from(weight[row + column]);
            }
            #[unroll]
            for t in 0..TOKENS {
                let from = tile.input(order, t);
                let values = Vector::<f32, N>::cast_from(x[from * row_vectors + column]);
                #[unroll]
                for lane in 0..lanes {
                    sums[t] += values.extract(lane) * weights.extract(lane);
                    if comptime!(form.linear.gated) {
                        gates[t] += values.extract(lane) * gate_weights.extract(lane);
                    }
                }
            }
            column += comptime!(form.columns);
        }
    }
    let mut shared = Shared::<[f32]>::new_slice(UNITS);
    #[unroll]
    for t in 0..TOKENS {
        let up = sum_of_row(&mut shared, sums[t], form.columns);
        let mut value = up;
        if comptime!(form.linear.gated) {
            value = gated(sum_of_row(&mut shared, gates[t], form.columns), up, limit, form.linear.limited);
        }
        if UNIT_POS_X == 0 && t < tile.count && output < outputs {
            out[tile.output(order, t) * tile.row(outputs, carried * lanes) + output] = E::cast_from(value);
        }
    }
    if comptime!(form.rows == Rows::Heads) {
        let is_first = group == 0;
        if is_first {
            tile.carry::<X, E, N>(x, out, vectors, outputs, carried, UNITS);
        }
    }
}

/// Rows that meet the same matrix.
#[derive(CubeType)]
pub(crate) struct Tile {
    pub expert: usize,
    /// In the order of the experts.
    pub first: usize,
    pub count: usize,
    /// Pairs or heads of a token.
    per_token: usize,
    #[cube(comptime)]
    rows: Rows,
}

#[cube]
impl Tile {
    /// Without rows past the last tile.
    pub(crate) fn read(
        tiles: &[i32],
        number: usize,
        max_tiles: usize,
        tokens: usize,
        per_token: usize,
        #[comptime] size: usize,
        #[comptime] rows: Rows,
    ) -> Tile {
        let mut expert = 0usize.runtime();
        let mut first = number * size;
        let mut count = 0usize.runtime();
        if comptime!(rows == Rows::Dense) {
            if first < tokens {
                count = min(size, tokens - first);
            }
        } else if comptime!(rows == Rows::Heads) {
            if number < max_tiles {
                let tiles_per_head = tokens.div_ceil(size);
                expert = number / tiles_per_head;
                first = number % tiles_per_head * size;
                count = min(size, tokens - first);
            }
        } else if comptime!(matches!(rows, Rows::TokenGather | Rows::TokenScatter)) {
            first = number;
            if number < max_tiles {
                let chosen = tiles[number];
                if is_row(chosen, tokens) {
                    expert = usize::cast_from(chosen);
                    count = 1usize.runtime();
                }
            }
        } else if number < max_tiles {
            expert = usize::cast_from(tiles[number * TILE]);
            first = usize::cast_from(tiles[number * TILE + 1]);
            count = usize::cast_from(tiles[number * TILE + 2]);
        }
        Tile { expert, first, count, per_token, rows }
    }

    /// The row of x for a token of the tile; past the last one, that of the last.
    pub(crate) fn input(&self, order: &[i32], token: usize) -> usize {
        let place = self.first + min(token, self.count - 1);
        if comptime!(self.rows == Rows::Gather) {
            usize::cast_from(order[place]) / self.per_token
        } else if comptime!(self.rows == Rows::TokenGather) {
            0usize.runtime()
        } else if comptime!(self.rows == Rows::Heads) {
            place * self.per_token + self.expert
        } else {
            place
        }
    }

    /// The row of the output for a token of the tile.
    pub(crate) fn output(&self, order: &[i32], token: usize) -> usize {
        let place = self.first + token;
        if comptime!(self.rows == Rows::Scatter) {
            usize::cast_from(order[place])
        } else if comptime!(self.rows == Rows::Heads) {
            place * self.per_token + self.expert
        } else {
            place
        }
    }

    /// The length of a row, with what is carried behind it where rows have that.
    pub(crate) fn row(&self, len: usize, carried: usize) -> usize {
        if comptime!(self.rows == Rows::Heads) { len + carried } else { len }
    }

    /// Copies the channels of x past those of the product, `carried` vectors of each token, behind its outputs.
    pub(crate) fn carry<X: Float, E: Float, N: Size>(
        &self,
        x: &[Vector<X, N>],
        out: &mut [E],
        vectors: usize,
        outputs: usize,
        carried: usize,
        #[comptime] units: usize,
    ) {
        let lanes = N::value().comptime();
        let mut vector = UNIT_POS as usize;
        while vector < self.count * carried {
            let (token, column) = (vector / carried, vector % carried);
            let row = (self.first + token) * self.per_token + self.expert;
            let values = x[row * (vectors + carried) + vectors + column];
            #[unroll]
            for lane in 0..lanes {
                out[row * (outputs + carried * lanes) + outputs + column * lanes + lane] =
                    E::cast_from(values.extract(lane));
            }
            vector += units;
        }
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
fn sum_of_row(shared: &mut Shared<[f32]>, own: f32, #[comptime] columns: usize) -> f32 {
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

/// A buffer that nobody looks at.
fn dummy(client: &Client) -> BufferArg {
    // SAFETY: the buffer is made here; one element of any type fits into it.
    unsafe { BufferArg::from_raw_parts(client.empty(16), 1) }
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, FLOATS, form};
    let forms = FLOATS.into_iter().flat_map(|kind| {
        let elem = ElemType::Float(kind);
        let vector = 16 / elem.size();
        let entry = |name, rows, gated, limited, outputs| {
            let form = Form::new(rows, LinearForm { gated, limited }, outputs);
            let cube = form.cube_dim();
            let bits = AddressType::U32;
            let form =
                form!(linear_kernel, cube, [bits, vector, _, _, _, _, _, 1, 1, 1, 1, 1, 1, 1, 1.0, form, elem, elem]);
            Entry::of(kind, name, form)
        };
        [
            entry("linear", Rows::Dense, false, false, 2048),
            entry("linear.router", Rows::Dense, false, false, 64),
            entry("linear.heads", Rows::Heads, false, false, 512),
            entry("linear.experts_up", Rows::Gather, true, true, 1408),
            entry("linear.experts_down", Rows::Scatter, false, false, 2048),
            entry("linear.token_up", Rows::TokenGather, true, false, 1408),
            entry("linear.token_down", Rows::TokenScatter, false, false, 2048),
        ]
    });
    forms.collect()
}
