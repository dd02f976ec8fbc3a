//! Attention of each query token over rows that are named one by one, before the division by the sum of the weights.
//!
//! The general form for every device, in plain arithmetic and with rows read straight from memory: where the quotient is wanted,
//! the kernels of `mla_decode` are far faster.
//!
//! A cube has a query token and a few of its heads. It looks at as many entries of the list as it has units: each unit computes
//! the scores of one row, then each adds its channels of all these rows.

mod select;

use cubecl::prelude::*;

use self::select::{HEADS, UNITS, columns, cubes};
use crate::common::launch::{address_type, is_row, or_dummy};

/// A score of no row, and the maximum before the first. Finite: WGSL may assume that no infinity occurs.
const LOWEST: f32 = -1.0e30;

/// Arguments of [`launch`]. N query tokens, H heads, E is `elem`.
pub struct SparsePartsArgs {
    /// E `[N, H, D]`.
    pub q: BufferArg,
    /// E `[rows, D]`: keys, of which the first channels are the value.
    pub rows: BufferArg,
    /// i32 `[N, K]`: rows, or negative for none.
    pub slots: BufferArg,
    /// i32 `[N]`: only so many entries of a list count.
    pub lengths: BufferArg,
    /// f32 `[N, H, Dv]`, written: the sum of `exp(score - max) * value`.
    pub acc: BufferArg,
    /// f32 `[N, H]`, written: the largest score, -inf where there is none.
    pub max: BufferArg,
    /// f32 `[N, H]`, written: the sum of `exp(score - max)`.
    pub row_sum: BufferArg,
    /// N.
    pub tokens: usize,
    /// H.
    pub heads: usize,
    /// How many rows there are.
    pub row_count: usize,
    /// K.
    pub most: usize,
    /// D.
    pub width: usize,
    /// Dv.
    pub value_width: usize,
    /// The factor of the scores.
    pub softmax_scale: f32,
    /// f32, f16 or bf16.
    pub elem: ElemType,
}

/// Computes `acc`, `max` and `row_sum`. Without query tokens or heads nothing is launched.
pub fn launch(client: &Client, args: SparsePartsArgs) {
    let cubes = cubes(args.tokens, args.heads);
    if cubes == 0 {
        return;
    }
    sparse_parts_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, cubes, CubeDim::new_single()),
        CubeDim::new_1d(UNITS as u32),
        address_type(client, &[&args.q, &args.rows, &args.slots, &args.acc]),
        args.q,
        or_dummy(client, args.rows, args.row_count * args.width),
        or_dummy(client, args.slots, args.most),
        args.lengths,
        args.acc,
        args.max,
        args.row_sum,
        args.tokens,
        args.heads,
        args.row_count,
        args.most,
        args.width,
        args.softmax_scale,
        f32::NEG_INFINITY,
        args.value_width,
        args.elem,
    );
}

/// The heads of a cube.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Heads {
    /// The row of the first one in `[N, H]`.
    first: usize,
    /// How many there are, [`HEADS`] at most.
    count: usize,
}

#[cube]
impl Heads {
    /// The row of a head; of one that there is not, that of the last.
    fn row(&self, head: usize) -> usize {
        self.first + min(head, self.count - 1)
    }
}

#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn sparse_parts_kernel<E: Float>(
    q: &[E],
    rows: &[E],
    slots: &[i32],
    lengths: &[i32],
    acc: &mut [f32],
    max_score: &mut [f32],
    row_sum: &mut [f32],
    tokens: usize,
    heads: usize,
    row_count: usize,
    most: usize,
    width: usize,
    softmax_scale: f32,
    neg_inf: f32,
    #[comptime] value_width: usize,
    #[define(E)] _elem: ElemType,
) {
    let columns = comptime!(columns(value_width));
    let unit = UNIT_POS as usize;
    let tiles = heads.div_ceil(HEADS);
    let token = CUBE_POS / tiles;
    if token < tokens {
        let first_head = CUBE_POS % tiles * HEADS;
        let own = Heads { first: token * heads + first_head, count: min(heads - first_head, HEADS.runtime()) };
        let length = min(usize::cast_from(max(lengths[token], 0i32)), most);
        let mut listed = Shared::<[i32]>::new_slice(UNITS);
        let mut weights = Shared::<[f32]>::new_slice(comptime!(HEADS * UNITS));
        let mut highest = filled(HEADS, LOWEST);
        let mut sums = filled(HEADS, 0.0);
        let mut values = filled(comptime!(HEADS * columns), 0.0);

        let mut first = 0usize;
        while first < length {
            let mut slot = i32::new(-1);
            if first + unit < length && is_row(slots[token * most + first + unit], row_count) {
                slot = slots[token * most + first + unit];
            }
            let scores = scores::<E>(q, rows, &own, slot, width, softmax_scale);
            // All units have read the weights before.
            sync_cube();
            listed[unit] = slot;
            #[unroll]
            for head in 0..HEADS {
                weights[comptime!(head * UNITS) + unit] = scores[head];
            }
            sync_cube();
            raise(&weights, &mut highest, &mut sums, &mut values, columns);
            // All units have read the scores.
            sync_cube();
            #[unroll]
            for head in 0..HEADS {
                weights[comptime!(head * UNITS) + unit] = (scores[head] - highest[head]).exp();
            }
            sync_cube();
            for entry in 0..UNITS {
                if listed[entry] >= 0 {
                    let row = usize::cast_from(listed[entry]) * width;
                    #[unroll]
                    for head in 0..HEADS {
                        sums[head] += weights[comptime!(head * UNITS) + entry];
                    }
                    #[unroll]
                    for column in 0..columns {
                        // Channels past the last are computed too, and not written.
                        let channel = min(unit + comptime!(column * UNITS), comptime!(value_width - 1));
                        let value = f32::cast_from(rows[row + channel]);
                        #[unroll]
                        for head in 0..HEADS {
                            values[comptime!(head * columns + column)] +=
                                weights[comptime!(head * UNITS) + entry] * value;
                        }
                    }
                }
            }
            first += UNITS;
        }

        write(acc, max_score, row_sum, &own, &highest, &sums, &values, neg_inf, value_width);
    }
}

/// Raises the maxima to the scores in shared memory, and shrinks what was summed up relative to them.
#[cube]
fn raise(
    scores: &Shared<[f32]>,
    highest: &mut Array<f32>,
    sums: &mut Array<f32>,
    values: &mut Array<f32>,
    #[comptime] columns: usize,
) {
    #[unroll]
    for head in 0..HEADS {
        let mut top = highest[head];
        for entry in 0..UNITS {
            top = max(top, scores[comptime!(head * UNITS) + entry]);
        }
        let shrink = (highest[head] - top).exp();
        highest[head] = top;
        sums[head] *= shrink;
        #[unroll]
        for column in 0..columns {
            values[comptime!(head * columns + column)] *= shrink;
        }
    }
}

/// Writes what a unit has of the heads of a cube.
#[cube]
fn write(
    acc: &mut [f32],
    max_score: &mut [f32],
    row_sum: &mut [f32],
    own: &Heads,
    highest: &Array<f32>,
    sums: &Array<f32>,
    values: &Array<f32>,
    neg_inf: f32,
    #[comptime] value_width: usize,
) {
    let columns = comptime!(columns(value_width));
    let unit = UNIT_POS as usize;
    #[unroll]
    for head in 0..HEADS {
        if head < own.count {
            let row = own.first + head;
            #[unroll]
            for column in 0..columns {
                let channel = unit + comptime!(column * UNITS);
                if channel < value_width {
                    acc[row * value_width + channel] = values[comptime!(head * columns + column)];
                }
            }
            if unit == 0 {
                // The weight of the largest score is 1.
                let empty = sums[head] == 0.0;
                max_score[row] = cubecl::prelude::select(empty, neg_inf, highest[head]);
                row_sum[row] = sums[head];
            }
        }
    }
}

/// The scores of a row with the heads of a cube; [`LOWEST`] of none.
#[cube]
fn scores<E: Float>(q: &[E], rows: &[E], heads: &Heads, slot: i32, width: usize, scale: f32) -> Array<f32> {
    let mut scores = filled(HEADS, LOWEST);
    if slot >= 0 {
        let row = usize::cast_from(slot) * width;
        let mut products = filled(HEADS, 0.0);
        for channel in 0..width {
            let key = f32::cast_from(rows[row + channel]);
            #[unroll]
            for head in 0..HEADS {
                products[head] += f32::cast_from(q[heads.row(head) * width + channel]) * key;
            }
        }
        #[unroll]
        for head in 0..HEADS {
            scores[head] = products[head] * scale;
        }
    }
    scores
}

#[cube]
fn filled(#[comptime] len: usize, #[comptime] value: f32) -> Array<f32> {
    let mut numbers = Array::<f32>::new(len);
    #[unroll]
    for i in 0..len {
        numbers[i] = f32::new(value);
    }
    numbers
}

/// Values of 512 channels.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, FLOATS, form};
    let cube = CubeDim::new_1d(UNITS as u32);
    let forms = FLOATS.map(|kind| {
        let (bits, elem) = (AddressType::U32, ElemType::Float(kind));
        let form = form!(sparse_parts_kernel, cube, [bits, _, _, _, _, _, _, _, 1, 1, 1, 1, 1, 1.0, 0.0, 512, elem]);
        Entry::of(kind, "sparse_parts", form)
    });
    forms.into()
}
