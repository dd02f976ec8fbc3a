//! Projections of a few tokens with matrix instructions, for f16 and bf16: the weights come from the memory once, straight into
//! registers.
//!
//! A cube has 16 rows of the weights and a tile of tokens; its planes share the input channels, and add up in shared memory. A
//! product sums over the channels in any order as long as both factors have the same: so a unit takes 16 bytes in a row, which
//! serve two steps of 16 channels. Of a gated output the cube has 8 rows of the gate and 8 of `up`, placed so that a unit gets
//! both. The row of a single token a cube may write for itself before that (`source.rs`), and the expert of a single
//! token's pair it may choose (`choice.rs`).
//!
//! The order of a sum depends on the sizes of the matrix alone: a token's output does not change with the other tokens.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::features::MmaConfig;
use cubecl::ir::{AddressType, FloatKind};
use cubecl::prelude::*;

use crate::common::launch::multiprocessors;
use crate::linear::activation::gated;
use crate::linear::choice::{PairExperts, PairExpertsArgs};
use crate::linear::grid::{Grid, Part, Rows, Tile};
use crate::linear::latents::{Beside, BesideArgs};
use crate::linear::source::{self, RowSource, RowSourceArgs};
use crate::linear::{Before, LatentRows, LinearForm, Products};
use crate::merge_splits::MergeSplitsArgs;
use crate::residual_norm::{AddRmsNormArgs, UNITS as NORM_UNITS};

/// Units of a plane. The matrix instructions are defined for this number.
const LANES: usize = 32;
/// Planes of a cube, which share the channels.
const PLANES: usize = 8;

/// The matrix instruction: 16 rows, 8 tokens, 16 channels.
const M: usize = 16;
const N: usize = 8;
const K: usize = 16;

/// Elements of a vector: 16 bytes.
const VECTOR: usize = 8;
/// Channels that four units load at once.
const CHUNK: usize = 4 * VECTOR;
/// Chunks whose loads a plane starts before it computes.
const AHEAD: usize = 4;
/// Channels from which all loads of a plane are worth starting at once.
const DEEP: usize = AHEAD * CHUNK * PLANES;
/// Groups of 8 tokens in a tile at most.
const MAX_STEPS: usize = 8;
/// Channels of a row that a cube writes for itself at most: they are in shared memory.
const MAX_OWN_ROW: usize = 1 << 14;

const _: () =
    assert!(LANES * PLANES == NORM_UNITS, "a cube computes the norm of a row in the same order as another launch");

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    rows: Rows,
    linear: LinearForm,
    /// Groups of 8 tokens.
    steps: usize,
    /// Whether a multiprocessor has one cube or two: a plane starts all its loads at once, since no other one fills the time.
    few_cubes: bool,
    /// Whether there is a second matrix.
    second: bool,
    /// Vectors of the row that a cube writes for itself; 0 if rows are in memory.
    own_row: usize,
    /// Whether a pair's cube chooses its expert.
    routed: bool,
}

impl Form {
    fn tokens(&self) -> usize {
        self.steps * N
    }

    /// Outputs of a cube.
    fn outputs(&self) -> usize {
        if self.linear.gated { M / 2 } else { M }
    }

    /// Chunks whose loads a plane starts before it computes: fewer where the tokens take the registers.
    fn ahead(&self) -> usize {
        match self.steps {
            _ if self.own_row > 0 => {
                let turns = (self.own_row * VECTOR).div_ceil(CHUNK * PLANES);
                // All, or about as many each time; fewer, since the loop takes registers, too.
                if turns <= 2 * AHEAD { turns } else { turns.div_ceil(turns.div_ceil(AHEAD + AHEAD / 2)) }
            }
            1 if self.few_cubes => 2 * AHEAD,
            1 | 2 => AHEAD,
            _ => AHEAD / 2,
        }
    }
}

/// Whether the device has what the kernel needs, and the channels come out even.
pub(crate) fn supported(client: &Client, inputs: usize, elem: ElemType) -> bool {
    let (features, float) = (client.features(), ElemType::Float(FloatKind::F32));
    let config = MmaConfig { a_type: elem, b_type: elem, cd_type: float, m: M as u32, n: N as u32, k: K as u32 };
    let hardware = &client.properties().hardware;
    features.matmul.mma.contains(&config)
        && features.memory_reinterpret
        && (hardware.plane_size_min, hardware.plane_size_max) == (LANES as u32, LANES as u32)
        && inputs.is_multiple_of(CHUNK)
}

/// Whether rows and matrices lie so that 16 bytes can be loaded at once.
pub(crate) fn fits(carried: usize, matrix_stride: usize) -> bool {
    carried.is_multiple_of(VECTOR) && matrix_stride.is_multiple_of(VECTOR)
}

/// Whether cubes should do this themselves.
pub(crate) fn takes(client: &Client, products: &Products, grid: &Grid, before: &Before) -> bool {
    match before {
        Before::Nothing => true,
        Before::Merge(merge) => merges(client, products, grid, merge),
        Before::Norm(norm) => norms(client, products, grid, norm),
    }
}

/// Whether cubes should compute the norm that they multiply: that of a single token.
fn norms(client: &Client, products: &Products, grid: &Grid, norm: &AddRmsNormArgs) -> bool {
    let one_token = grid.rows == Rows::Dense && (grid.tokens, norm.rows) == (1, 1) && norm.width == products.inputs;
    one_token && norm.width <= MAX_OWN_ROW && source::pays_norm(client, norm, grid.cubes(products.outputs, M))
}

/// Whether cubes should merge the splits of the row that they multiply: those of a token's head, if a unit's weights fit into
/// registers meanwhile.
fn merges(client: &Client, products: &Products, grid: &Grid, merge: &MergeSplitsArgs) -> bool {
    let one_token = grid.rows == Rows::Heads && (grid.tokens, merge.batch, merge.rows) == (1, 1, grid.per_token);
    let whole_row = products.carried == 0 && merge.width == products.inputs;
    one_token
        && whole_row
        && products.inputs <= 2 * DEEP
        && source::pays(client, merge, grid.cubes(products.outputs, M))
}

/// Whether the launch can turn the channels that it carries, and put latents into a cache.
pub(crate) fn takes_latents(carried: usize, latents: &LatentRows) -> bool {
    carried == 2 * latents.pairs && latents.cache_width.is_multiple_of(VECTOR)
}

/// Tokens of a tile for matrices that meet so many rows.
pub(super) fn tile_tokens(rows: usize) -> usize {
    rows.div_ceil(N).next_power_of_two().min(MAX_STEPS) * N
}

/// Writes the output of at least one tile.
pub(crate) fn launch(
    client: &Client,
    products: Products,
    mut grid: Grid,
    (before, latents): (Before, Option<LatentRows>),
    (linear, tokens): (LinearForm, usize),
    address: AddressType,
    elem: ElemType,
) {
    let (steps, second) = (tokens / N, grid.second_width > 0);
    let (source, x) = RowSourceArgs::new(client, before, products.x);
    let own_row = if matches!(source, RowSourceArgs::Memory) { 0 } else { products.inputs / VECTOR };
    let routed = grid.route.is_some();
    let mut form = Form { rows: grid.rows, linear, steps, few_cubes: own_row > 0, second, own_row, routed };
    let cubes = grid.cubes(products.outputs, form.outputs());
    form.few_cubes |= form.steps == 1 && products.inputs >= DEEP && cubes <= 2 * multiprocessors(client);
    let second_width = grid.second_width(VECTOR);
    let pairs = PairExpertsArgs::new(client, grid.route);
    let (mut beside, mut cubes_beside) = (BesideArgs::Nothing, 0);
    if let Some(latents) = latents {
        let width = products.inputs + products.carried;
        ([grid.second, grid.order, grid.second_out], beside, cubes_beside) =
            latents.bind([grid.tokens, width, VECTOR, LANES * PLANES]);
    }
    linear_mma_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, cubes + cubes_beside, CubeDim::new_single()),
        CubeDim::new_2d(LANES as u32, PLANES as u32),
        address,
        VECTOR,
        x,
        products.weight,
        grid.second,
        grid.order,
        grid.tiles,
        products.out,
        grid.second_out,
        products.inputs / VECTOR,
        products.outputs,
        products.carried / VECTOR,
        products.matrix_stride / VECTOR,
        grid.per_token,
        grid.tokens,
        grid.max_tiles,
        second_width,
        products.limit,
        source,
        beside,
        pairs,
        form,
        elem,
    );
}

/// Cube `t * groups + g` has group `g` of the outputs for tile `t`: neighbours share the tokens.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn linear_mma_kernel<E: Float, V: Size>(
    x: &[Vector<E, V>],
    weight: &[Vector<E, V>],
    second: &[Vector<E, V>],
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
    source: &mut RowSource<E, V>,
    beside: Beside,
    pairs: &mut PairExperts,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    let def = MmaDefinition::<E, E, f32>::new(M, N, K);
    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
    // [planes, rows, tokens]
    let mut sums = Shared::<[f32]>::new_slice(comptime!(PLANES * M * form.tokens()));
    let mut part = Part::whole(vectors, outputs);
    if comptime!(form.second) {
        part.split(second_width, max_tiles, form.outputs(), form.rows);
    }
    let groups = part.outputs.div_ceil(form.outputs());
    let number = part.cube / groups;
    let group = part.cube % groups;
    let output = group * form.outputs();
    let listed = if comptime!(form.routed) { 0usize.runtime() } else { max_tiles };
    let mut tile = Tile::read(tiles, number, listed, tokens, per_token, form.tokens(), form.rows);
    if comptime!(form.routed) {
        pairs.assign(&mut tile, &part, number, max_tiles, tokens, comptime!(LANES * PLANES));
    }
    if comptime!(form.second && form.rows != Rows::Dense) {
        part.place(&mut tile, max_tiles);
    }
    if tile.count > 0 {
        // This unit's row of a product, and its channels.
        let row = (UNIT_POS_X / 4) as usize;
        let quad = (UNIT_POS_X % 4) as usize;
        // Past the last row, that one again.
        let own = min(output + row, part.outputs - 1);
        let mut other = min(output + row + M / 2, part.outputs - 1);
        if comptime!(form.linear.gated) {
            other = part.outputs + own;
        }
        let own = tile.expert * matrix_stride + own * part.vectors + quad;
        let other = tile.expert * matrix_stride + other * part.vectors + quad;
        let mut inputs = Sequence::<usize>::new();
        let mut acc = Array::<Vector<f32, NC>>::new(comptime!(2 * form.steps));
        #[unroll]
        for step in 0..form.steps {
            let mut input = quad;
            if comptime!(form.own_row == 0) {
                input += tile.input(order, row + comptime!(step * N)) * tile.row(vectors, carried);
            }
            inputs.push(input);
            acc[comptime!(2 * step)] = Vector::new(0.0f32);
            acc[comptime!(2 * step + 1)] = Vector::new(0.0f32);
        }
        let chunks = part.vectors / 4;
        if comptime!(form.own_row > 0) {
            let mut own_row = Shared::<[Vector<E, V>]>::new_slice(form.own_row);
            // The weights are on their way meanwhile.
            let mut chunk = UNIT_POS_Y as usize;
            let weights = load_of_part::<E, V>(&part, weight, second, own, other, chunk, chunks, form);
            source.write(x, &mut own_row, tile.expert, per_token, vectors);
            sync_cube();
            multiply::<E, V, NC>(&own_row, &weights, &inputs, chunk, chunks, &mut acc, form.ahead(), form);
            if comptime!(form.own_row / 4 > form.ahead() * PLANES) {
                chunk += comptime!(form.ahead() * PLANES);
                while chunk < chunks {
                    let weights = load_of_part::<E, V>(&part, weight, second, own, other, chunk, chunks, form);
                    multiply::<E, V, NC>(&own_row, &weights, &inputs, chunk, chunks, &mut acc, form.ahead(), form);
                    chunk += comptime!(form.ahead() * PLANES);
                }
            }
        } else if comptime!(form.second) {
            if part.is_second {
                multiply_all::<E, V, NC>(x, second, own, other, &inputs, chunks, &mut acc, form);
            } else {
                multiply_all::<E, V, NC>(x, weight, own, other, &inputs, chunks, &mut acc, form);
            }
        } else {
            multiply_all::<E, V, NC>(x, weight, own, other, &inputs, chunks, &mut acc, form);
        }
        // Rows `row` and `row + 8`, tokens `2 * quad` and the next of each step.
        let at = (UNIT_POS_Y as usize * M + row) * form.tokens() + 2 * quad;
        #[unroll]
        for i in 0..comptime!(2 * form.steps) {
            let at = at + comptime!(i % 2 * (M / 2) * form.tokens() + i / 2 * N);
            sums[at] = acc[i].extract(0usize);
            sums[at + 1] = acc[i].extract(1usize);
        }
    }
    sync_cube();
    let mut value = UNIT_POS as usize;
    while value < tile.count * form.outputs() {
        let (token, row) = (value / form.outputs(), value % form.outputs());
        if output + row < part.outputs {
            let first = sum(&sums, row, token, form);
            let mut result = first;
            if comptime!(form.linear.gated) {
                result = gated(first, sum(&sums, row + M / 2, token, form), limit, form.linear.limited);
            }
            let to = tile.output(order, token);
            let result = E::cast_from(result);
            if comptime!(form.second && form.rows == Rows::Dense) {
                if part.is_second {
                    second_out[to * part.outputs + output + row] = result;
                } else {
                    out[to * outputs + output + row] = result;
                }
            } else {
                out[to * tile.row(outputs, carried * VECTOR) + output + row] = result;
            }
        }
        value += comptime!(LANES * PLANES);
    }
    if comptime!(form.rows == Rows::Heads) {
        let is_first = group == 0;
        if is_first {
            beside.carry::<E, V>(&tile, x, out, vectors, outputs, carried, comptime!(LANES * PLANES));
        }
        let own_cubes = groups * max_tiles;
        if CUBE_POS >= own_cubes {
            beside.write::<E, V>(second, order, second_out, tokens, CUBE_POS - own_cubes);
        }
    }
}

/// Multiplies all chunks of channels of this plane.
#[cube]
#[allow(clippy::too_many_arguments)]
fn multiply_all<E: Float, V: Size, NC: Size>(
    x: &[Vector<E, V>],
    weight: &[Vector<E, V>],
    own: usize,
    other: usize,
    inputs: &Sequence<usize>,
    chunks: usize,
    acc: &mut Array<Vector<f32, NC>>,
    #[comptime] form: Form,
) {
    let mut chunk = UNIT_POS_Y as usize;
    if comptime!(form.few_cubes) {
        while chunk < chunks {
            let weights = load_weights::<E, V>(weight, own, other, chunk, chunks, form.ahead(), form);
            multiply::<E, V, NC>(x, &weights, inputs, chunk, chunks, acc, form.ahead(), form);
            chunk += comptime!(form.ahead() * PLANES);
        }
    } else {
        while chunk + comptime!((form.ahead() - 1) * PLANES) < chunks {
            let weights = load_weights::<E, V>(weight, own, other, chunk, chunks, form.ahead(), form);
            multiply::<E, V, NC>(x, &weights, inputs, chunk, chunks, acc, form.ahead(), form);
            chunk += comptime!(form.ahead() * PLANES);
        }
        while chunk < chunks {
            let weights = load_weights::<E, V>(weight, own, other, chunk, chunks, 1usize, form);
            multiply::<E, V, NC>(x, &weights, inputs, chunk, chunks, acc, 1usize, form);
            chunk += PLANES;
        }
    }
}

/// The weights of the matrix of this part, as [`load_weights`] loads them.
#[cube]
#[allow(clippy::too_many_arguments)]
fn load_of_part<E: Float, V: Size>(
    part: &Part,
    weight: &[Vector<E, V>],
    second: &[Vector<E, V>],
    own: usize,
    other: usize,
    chunk: usize,
    chunks: usize,
    #[comptime] form: Form,
) -> Sequence<Vector<E, V>> {
    let count = comptime!(form.ahead());
    let mut held = Array::<Vector<E, V>>::new(comptime!(2 * count));
    if comptime!(form.second) {
        if part.is_second {
            hold(load_weights::<E, V>(second, own, other, chunk, chunks, count, form), &mut held, count);
        } else {
            hold(load_weights::<E, V>(weight, own, other, chunk, chunks, count, form), &mut held, count);
        }
    } else {
        hold(load_weights::<E, V>(weight, own, other, chunk, chunks, count, form), &mut held, count);
    }
    let mut weights = Sequence::<Vector<E, V>>::new();
    #[unroll]
    for i in 0..comptime!(2 * count) {
        weights.push(held[i]);
    }
    weights
}

/// Keeps weights past the end of a branch.
#[cube]
fn hold<E: Float, V: Size>(weights: Sequence<Vector<E, V>>, held: &mut Array<Vector<E, V>>, #[comptime] count: usize) {
    #[unroll]
    for i in 0..comptime!(2 * count) {
        held[i] = weights[i];
    }
}

/// A unit's weights of some chunks of channels, one from `chunk` on for each turn of the planes; past the last one, zeros.
#[cube]
fn load_weights<E: Float, V: Size>(
    weight: &[Vector<E, V>],
    own: usize,
    other: usize,
    chunk: usize,
    chunks: usize,
    #[comptime] count: usize,
    #[comptime] form: Form,
) -> Sequence<Vector<E, V>> {
    let mut weights = Sequence::<Vector<E, V>>::new();
    #[unroll]
    for i in 0..count {
        let at = chunk + comptime!(i * PLANES);
        weights.push(load::<E, V>(weight, own, at, chunks, form.few_cubes));
        weights.push(load::<E, V>(weight, other, at, chunks, form.few_cubes));
    }
    weights
}

/// Multiplies the chunks of these weights, which are loaded first: they are the longer way.
#[cube]
#[allow(clippy::too_many_arguments)]
fn multiply<E: Float, V: Size, NC: Size>(
    x: &[Vector<E, V>],
    weights: &Sequence<Vector<E, V>>,
    inputs: &Sequence<usize>,
    chunk: usize,
    chunks: usize,
    acc: &mut Array<Vector<f32, NC>>,
    #[comptime] count: usize,
    #[comptime] form: Form,
) {
    let def = MmaDefinition::<E, E, f32>::new(M, N, K);
    let size!(NA) = def.vector_size(MatrixIdent::A);
    #[unroll]
    for i in 0..count {
        let at = chunk + comptime!(i * PLANES);
        let a = weights[comptime!(2 * i)];
        let b = weights[comptime!(2 * i + 1)];
        #[unroll]
        for step in 0..form.steps {
            let tokens = load::<E, V>(x, inputs[step], at, chunks, form.few_cubes);
            let mut part = Array::<Vector<f32, NC>>::new(2usize);
            part[0] = acc[comptime!(2 * step)];
            part[1] = acc[comptime!(2 * step + 1)];
            #[unroll]
            for half in 0..2usize {
                let first_pair = comptime!(2 * half);
                let mut rows = Array::<Vector<E, NA>>::new(4usize);
                rows[0] = pair::<E, V, NA>(a, first_pair);
                rows[1] = pair::<E, V, NA>(b, first_pair);
                rows[2] = pair::<E, V, NA>(a, comptime!(first_pair + 1));
                rows[3] = pair::<E, V, NA>(b, comptime!(first_pair + 1));
                let mut columns = Array::<Vector<E, NA>>::new(2usize);
                columns[0] = pair::<E, V, NA>(tokens, first_pair);
                columns[1] = pair::<E, V, NA>(tokens, comptime!(first_pair + 1));
                def.execute_inplace(&rows, &columns, &mut part);
            }
            acc[comptime!(2 * step)] = part[0];
            acc[comptime!(2 * step + 1)] = part[1];
        }
    }
}

/// What a unit has of chunk number `at` of a row; zeros, where there is none and that is `checked`.
#[cube]
fn load<E: Float, V: Size>(
    rows: &[Vector<E, V>],
    row: usize,
    at: usize,
    chunks: usize,
    #[comptime] checked: bool,
) -> Vector<E, V> {
    if comptime!(checked) {
        let mut values = Vector::<E, V>::new(E::from_int(0));
        if at < chunks {
            values = rows[row + at * 4];
        }
        values
    } else {
        rows[row + at * 4]
    }
}

/// The sum over the planes.
#[cube]
fn sum(sums: &[f32], row: usize, token: usize, #[comptime] form: Form) -> f32 {
    let mut total = 0.0f32;
    #[unroll]
    for plane in 0..PLANES {
        total += sums[(comptime!(plane * M) + row) * form.tokens() + token];
    }
    total
}

/// Pair number `index` of the numbers in a vector, as an operand of the instruction.
#[cube]
pub(crate) fn pair<E: Float, V: Size, NA: Size>(vector: Vector<E, V>, #[comptime] index: usize) -> Vector<E, NA> {
    let words = Vector::<u32, Const<4>>::reinterpret(vector);
    Vector::<E, NA>::reinterpret(words.extract(index))
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::linear::{choice, latents};
    use crate::offline::{Arch, Entry, form};
    use crate::route_experts as route;
    let beside = |latents| if latents { latents::offline(LANES * PLANES) } else { BesideArgs::Nothing };
    // Rows of a token's head, of V2-Lite, and of V3.
    let source = |own_row| match own_row * VECTOR {
        0 => RowSourceArgs::Memory,
        512 => source::offline_splits(),
        2048 => source::offline_normed(6),
        _ => source::offline_normed(8),
    };
    let cube = CubeDim::new_2d(LANES as u32, PLANES as u32);
    let forms = [FloatKind::F16, FloatKind::BF16].into_iter().flat_map(|kind| {
        let elem = ElemType::Float(kind);
        let entry = |name: &'static str, rows, gated, limited, steps, few_cubes| {
            let second = matches!(rows, Rows::TokenGather | Rows::TokenScatter) || name.contains("pair");
            let own_row = match name {
                "linear.mma.merged_heads" => 512 / VECTOR,
                "linear.mma.normed_pair" => 2048 / VECTOR,
                "linear.mma.normed_pair.v3" => 7168 / VECTOR,
                _ => 0,
            };
            let route = match name {
                "linear.mma.token_routed_up" => Some(route::V2_LITE),
                "linear.mma.token_routed_up.v3" => Some(route::V3),
                _ => None,
            };
            let pairs = move || route.map_or(PairExpertsArgs::Listed, choice::offline);
            let (linear, routed) = (LinearForm { gated, limited }, route.is_some());
            let form = Form { rows, linear, steps, few_cubes, second, own_row, routed };
            let (bits, latents) = (AddressType::U32, name == "linear.mma.turned_heads");
            let form = form!(
                linear_mma_kernel,
                cube,
                [
                    bits,
                    VECTOR,
                    _,
                    _,
                    _,
                    _,
                    _,
                    _,
                    _,
                    1,
                    1,
                    1,
                    1,
                    1,
                    1,
                    1,
                    1,
                    1.0,
                    source(own_row),
                    beside(latents),
                    pairs(),
                    form,
                    elem
                ]
            );
            Entry::of(kind, name, form).on(|arch| arch != Arch::Sm75)
        };
        [
            entry("linear.mma.8", Rows::Dense, false, false, 1, false),
            entry("linear.mma.few", Rows::Dense, false, false, 1, true),
            entry("linear.mma.few_gated", Rows::Dense, true, false, 1, true),
            entry("linear.mma.pair", Rows::Dense, false, false, 1, true),
            entry("linear.mma.normed_pair", Rows::Dense, false, false, 1, true),
            entry("linear.mma.normed_pair.v3", Rows::Dense, false, false, 1, true),
            entry("linear.mma.64", Rows::Dense, false, false, 8, false),
            entry("linear.mma.heads", Rows::Heads, false, false, 1, false),
            entry("linear.mma.turned_heads", Rows::Heads, false, false, 1, false),
            entry("linear.mma.merged_heads", Rows::Heads, false, false, 1, true),
            entry("linear.mma.experts_up", Rows::Gather, true, true, 1, false),
            entry("linear.mma.experts_down", Rows::Scatter, false, false, 1, false),
            entry("linear.mma.token_up", Rows::TokenGather, true, false, 1, false),
            entry("linear.mma.token_routed_up", Rows::TokenGather, true, false, 1, false),
            entry("linear.mma.token_routed_up.v3", Rows::TokenGather, true, false, 1, false),
            entry("linear.mma.token_down", Rows::TokenScatter, false, false, 1, false),
        ]
    });
    forms.collect()
}
