//! What becomes of the accumulators: scaled, and written as a result or as that of a split.

use cubecl::prelude::*;

use super::VALUE_WIDTH;
use crate::ptx::math;

/// Multiplies both rows of a unit's part of the output.
#[cube]
pub(super) fn scale_rows(acc: Vector<f32, Const<128>>, factor_a: f32, factor_b: f32) -> Vector<f32, Const<128>> {
    let mut scaled = Sequence::<f32>::new();
    #[unroll]
    for i in 0..32usize {
        scaled.push(acc.extract(comptime!(4 * i)) * factor_a);
        scaled.push(acc.extract(comptime!(4 * i + 1)) * factor_a);
        scaled.push(acc.extract(comptime!(4 * i + 2)) * factor_b);
        scaled.push(acc.extract(comptime!(4 * i + 3)) * factor_b);
    }
    math::vector::<f32, Const<128>>(&scaled)
}

/// Whether a sequence is a single item, whose result needs no merge.
#[cube]
pub(super) fn is_whole(split_ptr: &[i32], sequence: u32) -> bool {
    split_ptr[sequence as usize + 1] - split_ptr[sequence as usize] == 1
}

/// Writes the lse of both rows of a unit; `row` is the first of them, and the sequence's or item's rows start at `start`.
#[cube]
pub(super) fn write_lses(lse: &mut [f32], start: u32, row: u32, rows: u32, lse_a: f32, lse_b: f32) {
    if row < rows {
        lse[(start + row) as usize] = lse_a;
    }
    if row + 8 < rows {
        lse[(start + row + 8) as usize] = lse_b;
    }
}

/// Writes both rows of a unit's part of the output, from a column on. Columns are counted in pairs.
#[cube]
pub(super) fn write_rows<T: Float, P: Size>(
    acc: Vector<f32, Const<128>>,
    out: &mut [Vector<T, P>],
    start: u32,
    row: u32,
    rows: u32,
    column: u32,
) {
    let at = (start + row) as usize * comptime!(VALUE_WIDTH / 2) + column as usize;
    if row < rows {
        write_row::<T, P>(acc, out, at, 0usize);
    }
    if row + 8 < rows {
        write_row::<T, P>(acc, out, at + comptime!(8 * VALUE_WIDTH / 2), 2usize);
    }
}

/// Writes one of the two rows.
#[cube]
fn write_row<T: Float, P: Size>(
    acc: Vector<f32, Const<128>>,
    out: &mut [Vector<T, P>],
    at: usize,
    #[comptime] first: usize,
) {
    #[unroll]
    for i in 0..32usize {
        let mut pair = Vector::<f32, P>::empty();
        pair.insert(0usize, acc.extract(comptime!(4 * i + first)));
        pair.insert(1usize, acc.extract(comptime!(4 * i + first + 1)));
        out[at + 4 * i] = Vector::cast_from(pair);
    }
}
