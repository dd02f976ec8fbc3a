//! Residual sum, and its norm: what stands between two parts of a layer.
//!
//! A cube has a row. Its units write the sums of a vector of channels each at a time, and read them again for the norm: by then
//! they are in the cache.

use cubecl::prelude::*;

use super::launch::{address_type, io_vector_size};

/// Units of a cube. Every runtime has this many.
const UNITS: usize = 256;
/// Partial sums that a unit adds up, and units that do: `UNITS` is its square.
const SIDE: usize = 16;

/// Arguments of [`launch`]; E is `elem`.
pub struct AddRmsNormArgs {
    /// E `[rows, width]`.
    pub x: BufferArg,
    /// E `[rows, width]`.
    pub y: BufferArg,
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

/// Writes `sum` and `normed`. Without elements nothing is launched.
pub fn launch(client: &Client, args: AddRmsNormArgs) {
    let AddRmsNormArgs { rows, width, eps, elem, .. } = args;
    if rows * width == 0 {
        return;
    }
    let vector = io_vector_size(client.properties(), &[width], elem.size());
    add_rms_norm_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, rows, CubeDim::new_single()),
        CubeDim::new_1d(UNITS as u32),
        address_type(client, &[&args.x]),
        vector,
        args.x,
        args.y,
        args.weight,
        args.sum,
        args.normed,
        rows,
        width / vector,
        eps,
        elem,
    );
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
    let lanes = N::value().comptime();
    let row = CUBE_POS;
    let mut squares = 0.0f32;
    if row < rows {
        let mut column = UNIT_POS as usize;
        while column < vectors {
            let at = row * vectors + column;
            let total =
                Vector::<E, N>::cast_from(Vector::<f32, N>::cast_from(x[at]) + Vector::<f32, N>::cast_from(y[at]));
            sum[at] = total;
            let values = Vector::<f32, N>::cast_from(total);
            #[unroll]
            for lane in 0..lanes {
                squares += values.extract(lane) * values.extract(lane);
            }
            column += UNITS;
        }
    }
    let mean = sum_of_cube(squares) / f32::cast_from(vectors * lanes);
    let scale = 1.0 / (mean + eps).sqrt();
    if row < rows {
        let mut column = UNIT_POS as usize;
        while column < vectors {
            let at = row * vectors + column;
            let mut values = Vector::<f32, N>::cast_from(sum[at]);
            #[unroll]
            for lane in 0..lanes {
                values.insert(lane, values.extract(lane) * scale * weight[column * lanes + lane]);
            }
            normed[at] = Vector::cast_from(values);
            column += UNITS;
        }
    }
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

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, FLOATS, form};
    let cube = CubeDim::new_1d(UNITS as u32);
    let forms = FLOATS.into_iter().map(|kind| {
        let elem = ElemType::Float(kind);
        let vector = 16 / elem.size();
        let form = form!(add_rms_norm_kernel, cube, [AddressType::U32, vector, _, _, _, _, _, 1, 1, 1.0, elem]);
        Entry::of(kind, "add_rms_norm", form)
    });
    forms.collect()
}
