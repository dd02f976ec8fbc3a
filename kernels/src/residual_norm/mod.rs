//! Residual sum, and its norm: what stands between two parts of a layer.
//!
//! A cube has a row. Its units write the sums of a vector of channels each at a time, and read them again for the norm: by then
//! they are in the cache.

mod select;

use cubecl::prelude::*;

use self::select::Shape;
pub(crate) use self::select::UNITS;
use crate::common::launch::address_type;
use crate::experts_mlp::combine::{ExpertOutputs, Place, TokenExperts};

/// Partial sums that a unit adds up, and units that do: `UNITS` is its square.
const SIDE: usize = 16;

/// Arguments of [`launch`]; E is `elem`.
pub struct AddRmsNormArgs {
    /// E `[rows, width]`.
    pub x: BufferArg,
    /// What is added to it.
    pub y: Summand,
    /// f32 `[width]`.
    pub weight: BufferArg,
    /// E `[rows, width]`, written: `x + y`.
    pub sum: BufferArg,
    /// E `[rows, width]`, written: the norm of the sum as it was written.
    pub normed: BufferArg,
    /// Rows.
    pub rows: usize,
    /// Channels.
    pub width: usize,
    /// Added to the mean square.
    pub eps: f32,
    /// f32, f16 or bf16.
    pub elem: ElemType,
}

/// What is added: `y` of the operation.
pub enum Summand {
    /// E `[rows, width]`.
    Rows(BufferArg),
    /// The sum over the experts of each row, rounded to E.
    Experts(ExpertOutputs),
}

/// Writes `sum` and `normed`. Without elements nothing is launched.
pub fn launch(client: &Client, args: AddRmsNormArgs) {
    let AddRmsNormArgs { rows, width, eps, elem, .. } = args;
    if rows * width == 0 {
        return;
    }
    let Shape { cube, vector, vectors } = select::choose(client.properties(), width, elem);
    let count = cubecl::calculate_cube_count_elemwise(client, rows, CubeDim::new_single());
    match args.y {
        Summand::Rows(y) => add_rms_norm_kernel::launch(
            client,
            count,
            cube,
            address_type(client, &[&args.x]),
            vector,
            args.x,
            y,
            args.weight,
            args.sum,
            args.normed,
            rows,
            vectors,
            eps,
            elem,
        ),
        Summand::Experts(outputs) => {
            let (shared, place) = outputs.shared.bind(client);
            add_experts_rms_norm_kernel::launch(
                client,
                count,
                cube,
                address_type(client, &[&outputs.rows]),
                vector,
                args.x,
                outputs.rows,
                outputs.indices,
                outputs.weights,
                shared,
                args.weight,
                args.sum,
                args.normed,
                rows,
                vectors,
                outputs.experts,
                eps,
                outputs.top_k,
                place,
                elem,
            );
        }
    }
}

/// A cube per row, of `vectors` vectors.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn add_rms_norm_kernel<E: Float, N: Size>(
    x: &[Vector<E, N>],
    y: &[Vector<E, N>],
    weight: &[f32],
    sum: &mut [Vector<E, N>],
    normed: &mut [Vector<E, N>],
    rows: usize,
    vectors: usize,
    eps: f32,
    #[define(E)] _elem: ElemType,
) {
    let row = CUBE_POS;
    let mut squares = 0.0f32;
    if row < rows {
        let mut column = UNIT_POS as usize;
        while column < vectors {
            let at = row * vectors + column;
            squares = write_sum(x[at], y[at], sum, at, squares);
            column += UNITS;
        }
    }
    write_norm(squares, sum, weight, normed, rows, vectors, eps);
}

/// The same, of `x` and the sums over the experts of the rows.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn add_experts_rms_norm_kernel<E: Float, N: Size>(
    x: &[Vector<E, N>],
    outputs: &[Vector<E, N>],
    indices: &[i32],
    expert_weights: &[f32],
    shared: &[Vector<E, N>],
    weight: &[f32],
    sum: &mut [Vector<E, N>],
    normed: &mut [Vector<E, N>],
    rows: usize,
    vectors: usize,
    experts: usize,
    eps: f32,
    #[comptime] top_k: usize,
    #[comptime] place: Place,
    #[define(E)] _elem: ElemType,
) {
    let row = CUBE_POS;
    let mut squares = 0.0f32;
    if row < rows {
        let token = TokenExperts::read(indices, expert_weights, row, experts, top_k);
        let mut column = UNIT_POS as usize;
        while column < vectors {
            let at = row * vectors + column;
            let y = token.sum(outputs, shared, column, vectors, rows * vectors, place);
            squares = write_sum(x[at], y, sum, at, squares);
            column += UNITS;
        }
    }
    write_norm(squares, sum, weight, normed, rows, vectors, eps);
}

/// Writes a vector of the sum. Returns `squares` and those of its channels.
#[cube]
fn write_sum<E: Float, N: Size>(
    x: Vector<E, N>,
    y: Vector<E, N>,
    sum: &mut [Vector<E, N>],
    at: usize,
    squares: f32,
) -> f32 {
    let total = add(x, y);
    sum[at] = total;
    add_squares(total, squares)
}

/// The sum in f32, rounded.
#[cube]
pub(crate) fn add<E: Float, N: Size>(x: Vector<E, N>, y: Vector<E, N>) -> Vector<E, N> {
    Vector::cast_from(Vector::<f32, N>::cast_from(x) + Vector::<f32, N>::cast_from(y))
}

/// `squares` and those of these channels.
#[cube]
pub(crate) fn add_squares<E: Float, N: Size>(channels: Vector<E, N>, squares: f32) -> f32 {
    let values = Vector::<f32, N>::cast_from(channels);
    let mut squares = squares;
    #[unroll]
    for lane in 0..N::value().comptime() {
        squares += values.extract(lane) * values.extract(lane);
    }
    squares
}

/// Writes the norm of the cube's row. Called by all units, with the squares of what they wrote.
#[cube]
fn write_norm<E: Float, N: Size>(
    squares: f32,
    sum: &mut [Vector<E, N>],
    weight: &[f32],
    normed: &mut [Vector<E, N>],
    rows: usize,
    vectors: usize,
    eps: f32,
) {
    let row = CUBE_POS;
    let scale = scale_of(squares, vectors * N::value().comptime(), eps);
    if row < rows {
        let mut column = UNIT_POS as usize;
        while column < vectors {
            let at = row * vectors + column;
            normed[at] = norm(sum[at], weight, column, scale);
            column += UNITS;
        }
    }
}

/// The norm of vector number `column` of a row.
#[cube]
pub(crate) fn norm<E: Float, N: Size>(
    channels: Vector<E, N>,
    weight: &[f32],
    column: usize,
    scale: f32,
) -> Vector<E, N> {
    let lanes = N::value().comptime();
    let mut values = Vector::<f32, N>::cast_from(channels);
    #[unroll]
    for lane in 0..lanes {
        values.insert(lane, values.extract(lane) * scale * weight[column * lanes + lane]);
    }
    Vector::cast_from(values)
}

/// What the norm multiplies the `width` channels of a row with, whose squares the units of the cube have. Called by all of them.
#[cube]
pub(crate) fn scale_of(squares: f32, width: usize, eps: f32) -> f32 {
    1.0 / (sum_of_cube(squares) / f32::cast_from(width) + eps).sqrt()
}

/// The sum over the units of a cube, in an order that does not depend on anything. Called by all of them.
#[cube]
fn sum_of_cube(own: f32) -> f32 {
    let mut parts = Shared::<[f32]>::new_slice(UNITS);
    let mut sums = Shared::<[f32]>::new_slice(SIDE);
    let unit = UNIT_POS as usize;
    parts[unit] = own;
    sync_cube();
    if unit < SIDE {
        let mut part = 0.0f32;
        #[unroll]
        for i in 0..SIDE {
            part += parts[i * SIDE + unit];
        }
        sums[unit] = part;
    }
    sync_cube();
    let mut total = 0.0f32;
    #[unroll]
    for i in 0..SIDE {
        total += sums[i];
    }
    total
}

/// Rows of DeepSeek-V3.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, FLOATS, form};
    let device = Arch::Sm90a.properties();
    let shape_of = |kind| (ElemType::Float(kind), select::choose(&device, 7168, ElemType::Float(kind)));
    let rows = FLOATS.map(|kind| {
        let (elem, Shape { cube, vector, .. }) = shape_of(kind);
        let form = form!(add_rms_norm_kernel, cube, [AddressType::U32, vector, _, _, _, _, _, 1, 1, 1.0, elem]);
        Entry::of(kind, "add_rms_norm", form)
    });
    let experts = |name, place| {
        FLOATS.map(|kind| {
            let (elem, Shape { cube, vector, .. }) = shape_of(kind);
            #[rustfmt::skip]
            let form = form!(add_experts_rms_norm_kernel, cube,
                [AddressType::U32, vector, _, _, _, _, _, _, _, _, 1, 1, 1, 1.0, 6, place, elem]);
            Entry::of(kind, name, form)
        })
    };
    let experts = [experts("add_rms_norm.experts", Place::Apart), experts("add_rms_norm.experts.token", Place::Behind)];
    rows.into_iter().chain(experts.into_iter().flatten()).collect()
}
