//! Residual sum, its norm, and a projection of that to a few outputs: what stands between the attention and the experts of a
//! token, whose router has one output for each expert.
//!
//! A cube has two outputs of a row. It loads their weights first, and then computes sum and norm of the whole row itself: that
//! takes less time than another launch. The order of all sums is that of [`add_rms_norm`](crate::residual_norm) and
//! [`linear`](crate::linear).

mod select;

use cubecl::prelude::*;

pub use self::select::{NormLinearSizes, supported};
use self::select::{OUTPUTS, Shape};
use crate::common::launch::address_type;
use crate::linear::UNITS as COLUMNS;
use crate::linear::plain::{AHEAD, sum_rows};
use crate::linear::weight::{WeightArg, WeightRow, WeightRows};
use crate::residual_norm::{UNITS, add, add_squares, scale_of};

/// Arguments of [`launch`]; E is `elem`.
pub struct NormLinearArgs {
    /// E `[rows, width]`.
    pub x: BufferArg,
    /// E `[rows, width]`.
    pub y: BufferArg,
    /// f32 `[width]`.
    pub norm_weight: BufferArg,
    /// f32 `[outputs, width]`.
    pub weight: WeightArg,
    /// E `[rows, width]`, written: `x + y`.
    pub sum: BufferArg,
    /// E `[rows, width]`, written: the norm of the sum as it was written.
    pub normed: BufferArg,
    /// f32 `[rows, outputs]`, written: the products of `normed`.
    pub out: BufferArg,
    /// Rows, at least 1.
    pub rows: usize,
    /// Channels, at least 1.
    pub width: usize,
    /// Outputs, at least 1.
    pub outputs: usize,
    /// Added to the mean square.
    pub eps: f32,
    /// f32, f16 or bf16.
    pub elem: ElemType,
}

/// Writes `sum`, `normed` and `out`.
pub fn launch(client: &Client, args: NormLinearArgs) {
    let NormLinearArgs { rows, width, outputs, elem, .. } = args;
    let Shape { cube, vector, weight_vector } = select::choose(client.properties(), width, elem);
    let cubes = rows * outputs.div_ceil(OUTPUTS);
    norm_linear_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, cubes, CubeDim::new_single()),
        cube,
        address_type(client, &[&args.x, args.weight.largest()]),
        vector,
        weight_vector,
        args.x,
        args.y,
        args.norm_weight,
        args.weight.rows(client),
        args.sum,
        args.normed,
        args.out,
        rows,
        outputs,
        args.eps,
        width,
        elem,
    );
}

/// Cube `r * groups + g` has group `g` of the outputs of row `r`.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn norm_linear_kernel<E: Float, V: Size, N: Size>(
    x: &[Vector<E, V>],
    y: &[Vector<E, V>],
    norm_weight: &[f32],
    weight: WeightRows<f32, N>,
    sum: &mut [Vector<E, V>],
    normed: &mut [Vector<E, V>],
    out: &mut [f32],
    rows: usize,
    outputs: usize,
    eps: f32,
    #[comptime] width: usize,
    #[define(E)] _elem: ElemType,
) {
    let lanes = V::value().comptime();
    let weight_lanes = N::value().comptime();
    let vectors = comptime!(width / lanes);
    let weight_vectors = comptime!(width / weight_lanes);
    let groups = outputs.div_ceil(OUTPUTS);
    let (row, group) = (CUBE_POS / groups, CUBE_POS % groups);
    // Cubes past the last row work on it, too, and write nothing.
    let is_row = row < rows;
    let row = min(row, rows - 1);
    let output = group * OUTPUTS + UNIT_POS_Y as usize;
    let (matrix, own) = (0usize.runtime(), min(output, outputs - 1));
    let weight_row = WeightRow::new(matrix, matrix, own, weight_vectors.runtime(), 0usize.runtime());
    let mut column = UNIT_POS_X as usize;
    let weights = load(&weight, &weight_row, column, weight_vectors);

    let mut values = Shared::<[E]>::new_slice(width);
    let mut squares = 0.0f32;
    let mut at = UNIT_POS as usize;
    while at < vectors {
        let total = add(x[row * vectors + at], y[row * vectors + at]);
        squares = add_squares(total, squares);
        #[unroll]
        for lane in 0..lanes {
            values[at * lanes + lane] = total.extract(lane);
        }
        if is_row && group == 0 {
            sum[row * vectors + at] = total;
        }
        at += UNITS;
    }
    let scale = scale_of(squares, width.runtime(), eps);
    let mut at = UNIT_POS as usize;
    while at < vectors {
        let mut norm = Vector::<E, V>::new(E::from_int(0));
        #[unroll]
        for lane in 0..lanes {
            let channel = at * lanes + lane;
            let value = E::cast_from(f32::cast_from(values[channel]) * scale * norm_weight[channel]);
            values[channel] = value;
            norm.insert(lane, value);
        }
        if is_row && group == 0 {
            normed[row * vectors + at] = norm;
        }
        at += UNITS;
    }
    sync_cube();

    let mut product = multiply(&values, &weights, column, weight_vectors, 0.0f32);
    column += comptime!(AHEAD * COLUMNS);
    while column < weight_vectors {
        let next = load(&weight, &weight_row, column, weight_vectors);
        product = multiply(&values, &next, column, weight_vectors, product);
        column += comptime!(AHEAD * COLUMNS);
    }
    let mut parts = Shared::<[f32]>::new_slice(UNITS);
    let mut products = Array::<f32>::new(1usize);
    products[0] = product;
    sum_rows(&mut parts, &mut products, 1usize, UNITS, COLUMNS);
    if UNIT_POS_X == 0 && is_row && output < outputs {
        out[row * outputs + output] = products[0];
    }
}

/// A unit's next vectors of a row of the weights; past its end, the last one again.
#[cube]
fn load<N: Size>(
    weight: &WeightRows<f32, N>,
    row: &WeightRow,
    column: usize,
    #[comptime] vectors: usize,
) -> Sequence<Vector<f32, N>> {
    let mut weights = Sequence::<Vector<f32, N>>::new();
    #[unroll]
    for i in 0..AHEAD {
        weights.push(weight.load(row, min(column + comptime!(i * COLUMNS), comptime!(vectors - 1))));
    }
    weights
}

/// `sum` and the products of these vectors.
#[cube]
fn multiply<E: Float, N: Size>(
    values: &[E],
    weights: &Sequence<Vector<f32, N>>,
    column: usize,
    #[comptime] vectors: usize,
    sum: f32,
) -> f32 {
    let lanes = N::value().comptime();
    let mut sum = sum;
    #[unroll]
    for i in 0..AHEAD {
        let at = column + comptime!(i * COLUMNS);
        if at < vectors {
            #[unroll]
            for lane in 0..lanes {
                sum += f32::cast_from(values[at * lanes + lane]) * weights[i].extract(lane);
            }
        }
    }
    sum
}

/// The routers of DeepSeek-V2-Lite and V3.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::linear::weight;
    use crate::offline::{Arch, Entry, FLOATS, form};
    let device = Arch::Sm90a.properties();
    let entry = |kind, (name, width)| {
        let (elem, bits) = (ElemType::Float(kind), AddressType::U32);
        let Shape { cube, vector, weight_vector } = select::choose(&device, width, elem);
        let form = form!(
            norm_linear_kernel,
            cube,
            [bits, vector, weight_vector, _, _, _, weight::offline(), _, _, _, 1, 1, 1.0, width, elem]
        );
        Entry::of(kind, name, form)
    };
    let widths = [("norm_linear", 2048), ("norm_linear.v3", 7168)];
    FLOATS.into_iter().flat_map(|kind| widths.map(|width| entry(kind, width))).collect()
}
