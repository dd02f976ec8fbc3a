//! Products of a few tokens for all devices and dtypes: a unit has some channels of a row of the weights, for a tile of tokens.

use cubecl::ir::AddressType;
use cubecl::prelude::*;

use super::activation::gated;
use super::behind::{Behind, BehindArgs};
use super::grid::{Grid, Part, Rows, Sizes, Tile};
use super::select::plain_units;
use super::weight::{WeightRow, WeightRows};
use super::{FEW_OUTPUTS, LinearForm, Products, UNITS};
use crate::common::launch::io_vector_size;

/// Tokens of a tile.
pub(super) const TOKENS: usize = 4;
/// Vectors of a row that a unit loads before it looks at the first.
pub(super) const AHEAD: usize = 4;

/// Writes the output of at least one tile.
pub(super) fn launch(
    client: &Client,
    products: Products,
    grid: Grid,
    linear: LinearForm,
    address: AddressType,
    [x_elem, elem]: [ElemType; 2],
    behind: BehindArgs,
) {
    let vector =
        io_vector_size(client.properties(), &[products.inputs, products.carried, products.matrix_stride], elem.size());
    let form = Form::new(client.properties(), &grid, linear, [products.inputs, products.outputs], elem);
    let cubes = grid.cubes(products.outputs, form.outputs());
    let sizes = grid.sizes(&products, vector);
    linear_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, cubes, CubeDim::new_single()),
        form.cube_dim(),
        address,
        vector,
        products.x,
        products.weight.rows(client),
        grid.second.rows(client),
        grid.order,
        grid.tiles,
        products.out,
        grid.second_out,
        sizes,
        products.limit,
        behind,
        form,
        x_elem,
        elem,
    );
}

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    rows: Rows,
    linear: LinearForm,
    /// Units of a cube.
    units: usize,
    /// Those that share a row of the weights.
    columns: usize,
    /// Whether there is a second matrix.
    second: bool,
}

impl Form {
    fn new(device: &DeviceProperties, grid: &Grid, linear: LinearForm, widths: [usize; 2], elem: ElemType) -> Self {
        Self::of(device, (grid.rows, grid.second_width > 0), linear, widths, elem)
    }

    /// For rows of so many inputs and outputs, with or without a second matrix.
    fn of(
        device: &DeviceProperties,
        (rows, second): (Rows, bool),
        linear: LinearForm,
        widths: [usize; 2],
        elem: ElemType,
    ) -> Self {
        let units = plain_units(device, widths, elem);
        let columns = if widths[1] <= FEW_OUTPUTS { units } else { 32 };
        Self { rows, linear, units, columns, second }
    }

    /// Outputs of a cube.
    fn outputs(&self) -> usize {
        self.units / self.columns
    }

    fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(self.columns as u32, self.outputs() as u32)
    }
}

/// A cube has some rows of the weights for a tile. The units of a row go over it together.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn linear_kernel<X: Float, E: Float, N: Size>(
    x: &[Vector<X, N>],
    weight: WeightRows<E, N>,
    second: WeightRows<E, N>,
    order: &[i32],
    tiles: &[i32],
    out: &mut [E],
    second_out: &mut [E],
    sizes: Sizes,
    limit: f32,
    behind: &mut Behind,
    #[comptime] form: Form,
    #[define(X)] _x_elem: ElemType,
    #[define(E)] _elem: ElemType,
) {
    let part = Part::new(&sizes, form.outputs(), form.second, form.rows);
    let groups = part.outputs.div_ceil(form.outputs());
    let number = part.cube / groups;
    let group = part.cube % groups;
    let output = group * form.outputs() + UNIT_POS_Y as usize;
    let mut tile = Tile::read(tiles, number, sizes.max_tiles, &sizes, TOKENS, form.rows);
    if comptime!(form.second && form.rows != Rows::Dense) {
        part.place(&mut tile, sizes.max_tiles);
    }
    let mut sums = Array::<f32>::new(TOKENS);
    let mut gates = Array::<f32>::new(TOKENS);
    #[unroll]
    for t in 0..TOKENS {
        sums[t] = 0.0f32;
        gates[t] = 0.0f32;
    }
    if tile.count > 0 && output < part.outputs {
        let matrix = tile.expert * sizes.matrix_stride;
        // Of a gated output the gate comes first.
        let halves = comptime!(if form.linear.gated { 1usize } else { 0usize });
        let gate = WeightRow::new(tile.expert, matrix, output, part.vectors, 0usize.runtime());
        let row = output + halves * part.outputs;
        let up = WeightRow::new(tile.expert, matrix, row, part.vectors, 0usize.runtime());
        let x_vectors = tile.row(sizes.vectors, sizes.carried);
        if comptime!(form.second) {
            if part.is_second {
                multiply(x, &second, order, &tile, &part, &gate, &up, x_vectors, &mut sums, &mut gates, form);
            } else {
                multiply(x, &weight, order, &tile, &part, &gate, &up, x_vectors, &mut sums, &mut gates, form);
            }
        } else {
            multiply(x, &weight, order, &tile, &part, &gate, &up, x_vectors, &mut sums, &mut gates, form);
        }
    }
    let lanes = N::value().comptime();
    let width = tile.row(sizes.outputs, sizes.carried * lanes);
    let mut parts = Shared::<[f32]>::new_slice(comptime!(TOKENS * form.units));
    sum_rows(&mut parts, &mut sums, TOKENS, form.units, form.columns);
    if comptime!(form.linear.gated) {
        sum_rows(&mut parts, &mut gates, TOKENS, form.units, form.columns);
    }
    #[unroll]
    for t in 0..TOKENS {
        let mut value = sums[t];
        if comptime!(form.linear.gated) {
            value = gated(gates[t], value, limit, form.linear.limited);
        }
        if UNIT_POS_X == 0 && t < tile.count && output < part.outputs {
            let row = tile.output(order, t);
            let result = E::cast_from(value);
            if comptime!(form.second && form.rows == Rows::Dense) {
                if part.is_second {
                    second_out[row * part.outputs + output] = result;
                } else {
                    out[row * sizes.outputs + output] = result;
                }
            } else {
                out[row * width + output] = result;
            }
        }
    }
    if comptime!(form.rows == Rows::Heads) {
        let is_first = group == 0;
        if is_first {
            tile.carry::<X, E, N>(x, out, sizes.vectors, sizes.outputs, sizes.carried, form.units);
        }
    }
    behind.run::<E>(&*out, groups, form.units);
}

/// Adds up the products of a unit's columns of these rows of the weights.
#[cube]
#[allow(clippy::too_many_arguments)]
fn multiply<X: Float, E: Float, N: Size>(
    x: &[Vector<X, N>],
    weight: &WeightRows<E, N>,
    order: &[i32],
    tile: &Tile,
    part: &Part,
    gate: &WeightRow,
    up: &WeightRow,
    row_vectors: usize,
    sums: &mut Array<f32>,
    gates: &mut Array<f32>,
    #[comptime] form: Form,
) {
    if comptime!(form.units > UNITS) {
        // One token is what many units are for: with fewer loads more of them are under way.
        if tile.count == 1 {
            multiply_tokens(x, weight, order, tile, part, gate, up, row_vectors, sums, gates, form, 1usize);
        } else {
            multiply_tokens(x, weight, order, tile, part, gate, up, row_vectors, sums, gates, form, TOKENS);
        }
    } else {
        multiply_tokens(x, weight, order, tile, part, gate, up, row_vectors, sums, gates, form, TOKENS);
    }
}

/// The same for the first tokens of the tile.
#[cube]
#[allow(clippy::too_many_arguments)]
fn multiply_tokens<X: Float, E: Float, N: Size>(
    x: &[Vector<X, N>],
    weight: &WeightRows<E, N>,
    order: &[i32],
    tile: &Tile,
    part: &Part,
    gate: &WeightRow,
    up: &WeightRow,
    row_vectors: usize,
    sums: &mut Array<f32>,
    gates: &mut Array<f32>,
    #[comptime] form: Form,
    #[comptime] tokens: usize,
) {
    let lanes = N::value().comptime();
    let mut column = UNIT_POS_X as usize;
    while column < part.vectors {
        // All loads before the first use: they take far longer than the rest.
        let mut weights = Sequence::<Vector<E, N>>::new();
        let mut gate_weights = Sequence::<Vector<E, N>>::new();
        let mut values = Sequence::<Vector<X, N>>::new();
        #[unroll]
        for i in 0..AHEAD {
            let at = min(column + comptime!(i * form.columns), part.vectors - 1);
            weights.push(weight.load(up, at));
            if comptime!(form.linear.gated) {
                gate_weights.push(weight.load(gate, at));
            }
            #[unroll]
            for t in 0..tokens {
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
                for t in 0..tokens {
                    let values = Vector::<f32, N>::cast_from(values[comptime!(i * tokens + t)]);
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

/// Makes of `count` numbers of each unit their sums over the units of its row, in an order that does not depend on anything. Called
/// by all units of a cube.
#[cube]
pub(crate) fn sum_rows(
    shared: &mut Shared<[f32]>,
    numbers: &mut Array<f32>,
    #[comptime] count: usize,
    #[comptime] units: usize,
    #[comptime] columns: usize,
) {
    let unit = UNIT_POS as usize;
    #[unroll]
    for i in 0..count {
        shared[comptime!(i * units) + unit] = numbers[i];
    }
    sync_cube();
    let mut distance = comptime!(columns / 2).runtime();
    while distance > 0 {
        if (UNIT_POS_X as usize) < distance {
            #[unroll]
            for i in 0..count {
                let at = comptime!(i * units) + unit;
                let other = shared[at + distance];
                shared[at] += other;
            }
        }
        sync_cube();
        distance /= 2;
    }
    #[unroll]
    for i in 0..count {
        numbers[i] = shared[comptime!(i * units) + unit - UNIT_POS_X as usize];
    }
    sync_cube();
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use super::grid::offline_sizes;
    use super::weight;
    use crate::offline::{Arch, Entry, FLOATS, FloatKind, form};
    use crate::route_experts::{V3, V4_TABLE};
    let device = Arch::Sm90a.properties();
    let behind = |name| match name {
        "linear.router.choice" => super::behind::offline(V3),
        "linear.router.table" => super::behind::offline(V4_TABLE),
        _ => BehindArgs::Nothing,
    };
    let forms = FLOATS.into_iter().flat_map(|kind| {
        let elem = ElemType::Float(kind);
        let entry_of = |name, (rows, elem): (Rows, ElemType), [gated, limited, second]: [bool; 3], widths| {
            let format = weight::format_of(name);
            let vector = 16 / elem.size();
            let form = Form::of(&device, (rows, second), LinearForm { gated, limited }, widths, elem);
            let cube = form.cube_dim();
            let bits = AddressType::U32;
            let form = form!(
                linear_kernel,
                cube,
                [
                    bits,
                    vector,
                    _,
                    weight::offline_packed(format),
                    weight::offline_packed(format),
                    _,
                    _,
                    _,
                    _,
                    offline_sizes(),
                    1.0,
                    behind(name),
                    form,
                    ElemType::Float(kind),
                    elem
                ]
            );
            Entry::of(kind, name, form)
        };
        let entry = |name, rows, flags, outputs| entry_of(name, (rows, elem), flags, [2048, outputs]);
        let f32 = ElemType::Float(FloatKind::F32);
        [
            entry("linear", Rows::Dense, [false; 3], 2048),
            entry("linear.pair", Rows::Dense, [false, false, true], 2048),
            entry("linear.router", Rows::Dense, [false; 3], 64),
            entry_of("linear.router.choice", (Rows::Dense, f32), [false; 3], [7168, 256]),
            entry_of("linear.router.table", (Rows::Dense, f32), [false; 3], [4096, 256]),
            entry_of("linear.mixer", (Rows::Dense, f32), [false; 3], [16384, 24]),
            entry("linear.heads", Rows::Heads, [false; 3], 512),
            entry("linear.experts_up", Rows::Gather, [true, true, false], 1408),
            entry("linear.experts_down", Rows::Scatter, [false; 3], 2048),
            entry("linear.token_up", Rows::TokenGather, [true, false, true], 1408),
            entry("linear.token_down", Rows::TokenScatter, [false, false, true], 2048),
            entry("linear.fp8", Rows::Dense, [false; 3], 2048),
            entry("linear.heads.fp8", Rows::Heads, [false; 3], 512),
            entry("linear.experts_up.fp8", Rows::Gather, [true, true, false], 1408),
            entry("linear.token_up.fp4", Rows::TokenGather, [true, false, true], 1408),
            entry("linear.experts_up.fp4", Rows::Gather, [true, true, false], 1408),
            entry("linear.experts_down.fp4", Rows::Scatter, [false; 3], 2048),
        ]
    });
    forms.collect()
}
