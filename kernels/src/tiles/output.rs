//! What becomes of the accumulators: scaled, and written as a result or as that of a split.

use cubecl::prelude::*;

use super::form::VALUE_WIDTH;
use super::loader::{Item, Plan};
use crate::ptx::{math, warp};

/// Columns that a unit writes at once.
pub(crate) const COLUMNS: usize = 4;

/// Multiplies both rows of a unit's part of the output.
#[cube]
pub(crate) fn scale_rows<N: Size>(acc: Vector<f32, N>, factor_a: f32, factor_b: f32) -> Vector<f32, N> {
    let count = N::value().comptime();
    let mut scaled = Sequence::<f32>::new();
    #[unroll]
    for i in 0..comptime!(count / 4) {
        scaled.push(acc.extract(comptime!(4 * i)) * factor_a);
        scaled.push(acc.extract(comptime!(4 * i + 1)) * factor_a);
        scaled.push(acc.extract(comptime!(4 * i + 2)) * factor_b);
        scaled.push(acc.extract(comptime!(4 * i + 3)) * factor_b);
    }
    math::vector::<f32, N>(&scaled)
}

/// Where the rows of an item go.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Target {
    /// Whether the sequence is this item alone, whose result needs no merge.
    pub whole: bool,
    pub sequence: u32,
    pub index: u32,
}

#[cube]
impl Target {
    /// A whole result of a sequence, or what is number `index` of all splits.
    pub fn new(whole: bool, sequence: u32, index: u32) -> Target {
        Target { whole, sequence, index }
    }

    pub fn of(plan: &Plan, item: &Item, index: u32) -> Target {
        Target { whole: plan.is_whole(item.sequence), sequence: item.sequence, index }
    }
}

/// The results of whole sequences, and those of splits.
#[derive(CubeType)]
pub(crate) struct Results<'a, E: Float, P: Size> {
    pub out: &'a mut [Vector<E, P>],
    pub lse: &'a mut [f32],
    pub partial_out: &'a mut [Vector<f32, P>],
    pub partial_lse: &'a mut [f32],
    /// Of a sequence.
    pub rows: u32,
}

#[cube]
impl<'a, E: Float, P: Size> Results<'a, E, P> {
    pub fn new(
        out: &'a mut [Vector<E, P>],
        lse: &'a mut [f32],
        partial_out: &'a mut [Vector<f32, P>],
        partial_lse: &'a mut [f32],
        rows: u32,
    ) -> Results<'a, E, P> {
        Results::<'a, E, P> { out, lse, partial_out, partial_lse, rows }
    }

    /// Writes the lse of one row.
    pub fn write_lse(&mut self, target: &Target, row: u32, lse: f32) {
        if target.whole {
            self.lse[(target.sequence * self.rows + row) as usize] = lse;
        } else {
            self.partial_lse[(target.index * self.rows + row) as usize] = lse;
        }
    }

    /// Writes the lse of both rows of a unit, of which `row` is the first.
    pub fn write_lses(&mut self, target: &Target, row: u32, lse_a: f32, lse_b: f32) {
        if target.whole {
            write_lses(self.lse, target.sequence * self.rows, row, self.rows, lse_a, lse_b);
        } else {
            write_lses(self.partial_lse, target.index * self.rows, row, self.rows, lse_a, lse_b);
        }
    }

    /// Writes some columns of one row, from `column` on, a multiple of as many.
    pub fn write_columns(&mut self, columns: Vector<f32, P>, target: &Target, row: u32, column: u32) {
        let column_at = column as usize / COLUMNS;
        if target.whole {
            let row = (target.sequence * self.rows + row) as usize;
            self.out[row * comptime!(VALUE_WIDTH / COLUMNS) + column_at] = Vector::cast_from(columns);
        } else {
            let row = (target.index * self.rows + row) as usize;
            self.partial_out[row * comptime!(VALUE_WIDTH / COLUMNS) + column_at] = columns;
        }
    }

    /// Writes both rows of a unit's part of the output from `column` on; called by a whole warp. `row` is the first of them.
    pub fn write_rows<N: Size>(&mut self, acc: Vector<f32, N>, target: &Target, row: u32, column: u32, lane: u32) {
        if target.whole {
            let start = target.sequence * self.rows;
            write_rows::<E, P, N>(acc, self.out, start, row, self.rows, column, lane);
        } else {
            let start = target.index * self.rows;
            write_rows::<f32, P, N>(acc, self.partial_out, start, row, self.rows, column, lane);
        }
    }
}

/// Writes the lse of both rows of a unit; `row` is the first of them, and the sequence's or item's rows start at `start`.
#[cube]
fn write_lses(lse: &mut [f32], start: u32, row: u32, rows: u32, lse_a: f32, lse_b: f32) {
    if row < rows {
        lse[(start + row) as usize] = lse_a;
    }
    if row + 8 < rows {
        lse[(start + row + 8) as usize] = lse_b;
    }
}

/// Writes both rows of a unit's part of some columns of the output, as many as two rows of a quad have; called by a whole
/// warp. `row` is the first of the rows, and the sequence's or item's rows start at `start`.
#[cube]
fn write_rows<T: Float, P: Size, N: Size>(
    acc: Vector<f32, N>,
    out: &mut [Vector<T, P>],
    start: u32,
    row: u32,
    rows: u32,
    first_column: u32,
    lane: u32,
) {
    let column_at = first_column as usize / COLUMNS;
    let at = (start + row) as usize * comptime!(VALUE_WIDTH / COLUMNS) + column_at;
    write_row::<T, P, N>(acc, out, at, row < rows, lane, 0usize);
    write_row::<T, P, N>(acc, out, at + comptime!(8 * VALUE_WIDTH / COLUMNS), row + 8 < rows, lane, 2usize);
}

/// Writes one of the two rows, if there is such a row. Of each 8 columns a unit has two, its neighbour the next two: of two
/// times 8, each gives the other what makes four in a row.
#[cube]
fn write_row<T: Float, P: Size, N: Size>(
    acc: Vector<f32, N>,
    out: &mut [Vector<T, P>],
    at: usize,
    is_row: bool,
    lane: u32,
    #[comptime] first: usize,
) {
    let count = N::value().comptime();
    let second = lane % 2 == 1;
    let own_at = at + (lane % 2 * 2 + lane % 4 / 2) as usize;
    if warp::any(is_row) {
        #[unroll]
        for i in 0..comptime!(count / 8) {
            let a = comptime!(8 * i + first);
            let b = comptime!(8 * i + 4 + first);
            let (a0, a1) = (acc.extract(a), acc.extract(comptime!(a + 1)));
            let (b0, b1) = (acc.extract(b), acc.extract(comptime!(b + 1)));
            let other0 = warp::shuffle_xor::<f32>(select(second, a0, b0), 1u32);
            let other1 = warp::shuffle_xor::<f32>(select(second, a1, b1), 1u32);
            let mut columns = Vector::<f32, P>::empty();
            columns.insert(0usize, select(second, other0, a0));
            columns.insert(1usize, select(second, other1, a1));
            columns.insert(2usize, select(second, b0, other0));
            columns.insert(3usize, select(second, b1, other1));
            if is_row {
                out[own_at + 4 * i] = Vector::cast_from(columns);
            }
        }
    }
}
