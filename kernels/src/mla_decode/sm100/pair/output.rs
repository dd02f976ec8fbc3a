//! The output of an item from tensor memory: scaled, and written. The warps of the queries do it while those of the softmax go on.

use cubecl::prelude::*;

use super::places::Places;
use super::walk::Range;
use crate::ptx::tcgen05::{self, LANE, Shape};
use crate::ptx::{math, mbarrier, warp};
use crate::tiles::form::{ROWS, VALUE_WIDTH};
use crate::tiles::output::{COLUMNS, Results, Target, scale_rows};
use crate::tiles::pair::{Cube, OUTPUT_AT, OUTPUT_COLUMNS};

/// An item whose output is to be written.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Done {
    /// Number of the item among those of all cubes, and its sequence.
    pub index: u32,
    pub sequence: u32,
    /// Without blocks the output is zero.
    pub blocks: u32,
    /// Items with blocks before it, and blocks up to its last one.
    pub items: u32,
    pub count: u32,
}

/// Waits for an item's output and the factors of its rows, writes it, and tells the first cube. A whole warp of four.
#[allow(clippy::too_many_arguments)]
#[cube]
pub(super) fn write_output<E: Float, P: Size>(
    cube: &Cube,
    places: &Places,
    range: &Range,
    done: &Done,
    target: &Target,
    factors: &Shared<[f32]>,
    results: &mut Results<E, P>,
) {
    let quarter = cube.warp % 4;
    let mut factor = 0.0f32;
    if done.blocks > 0 {
        // The softmax has waited for the output of the block before when it says this: no phase is missed.
        mbarrier::wait(places.factored + done.items % 2 * 8, done.items / 2 % 2);
        mbarrier::wait_cluster(cube.barriers.summed, (done.count - 1) % 2);
        tcgen05::fence_after();
        factor = factors[(done.items % 2 * comptime!(ROWS as u32) + UNIT_POS % comptime!(ROWS as u32)) as usize];
    }
    let from = cube.tensor + quarter * comptime!(32 * LANE) + OUTPUT_AT;
    let warp_row = range.tile_row + quarter % 2 * 32;
    #[unroll]
    for group in 0..2u32 {
        let row = comptime!(group * 16) + cube.lane / 4;
        let factor_a = warp::shuffle::<f32>(factor, row);
        let factor_b = warp::shuffle::<f32>(factor, row + 8);
        #[unroll]
        for side in 0..2u32 {
            let mut acc = Vector::<f32, Const<64>>::zeroed();
            if done.blocks > 0 {
                let at = from + comptime!(group * 16 * LANE + side * OUTPUT_COLUMNS);
                acc = tcgen05::load::<Const<64>>(at, comptime!(Shape::Pairs));
            }
            acc = scale_rows::<Const<64>>(acc, factor_a, factor_b);
            let column = comptime!(side * VALUE_WIDTH as u32 / 2) + quarter / 2 * comptime!(VALUE_WIDTH as u32 / 4);
            if target.whole {
                let start = target.sequence * results.rows;
                write_rows::<E, P>(acc, results.out, start, warp_row + row, range.rows, column, cube.lane);
            } else {
                let start = target.index * results.rows;
                write_rows::<f32, P>(acc, results.partial_out, start, warp_row + row, range.rows, column, cube.lane);
            }
            // Tensor memory is read by whole warps.
            sync_plane();
        }
    }
    if done.blocks > 0 {
        tcgen05::fence_before();
        sync_plane();
        mbarrier::arrive_at_if(places.output_read, 0u32, cube.lane == 0);
    }
}

/// Both rows of a unit's part of 128 columns, of which `row` is the first.
#[cube]
fn write_rows<T: Float, P: Size>(
    acc: Vector<f32, Const<64>>,
    out: &mut [Vector<T, P>],
    start: u32,
    row: u32,
    rows: u32,
    column: u32,
    lane: u32,
) {
    let at = (start + row) as usize * comptime!(VALUE_WIDTH / COLUMNS) + column as usize / COLUMNS;
    write_row::<T, P>(acc, out, at, row < rows, lane, 0usize);
    write_row::<T, P>(acc, out, at + comptime!(8 * VALUE_WIDTH / COLUMNS), row + 8 < rows, lane, 2usize);
}

/// One of the two rows, if there is such a row. Of each 8 columns a unit has two, its neighbour the next two: of two times 8, each gives
/// the other what makes four in a row. All is exchanged before anything is written: a store would wait for its exchange, and hold
/// up the next one.
#[cube]
fn write_row<T: Float, P: Size>(
    acc: Vector<f32, Const<64>>,
    out: &mut [Vector<T, P>],
    at: usize,
    is_row: bool,
    lane: u32,
    #[comptime] first: usize,
) {
    let second = lane % 2 == 1;
    let own_at = at + (lane % 2 * 2 + lane % 4 / 2) as usize;
    let mut others = Sequence::<f32>::new();
    #[unroll]
    for i in 0..16usize {
        let a = comptime!(8 * (i / 2) + first + i % 2);
        others.push(warp::shuffle_xor::<f32>(select(second, acc.extract(a), acc.extract(comptime!(a + 4))), 1u32));
    }
    if is_row {
        #[unroll]
        for i in 0..8usize {
            let (a, b) = comptime!((8 * i + first, 8 * i + first + 4));
            let (other0, other1) = (others[comptime!(2 * i)], others[comptime!(2 * i + 1)]);
            let mut columns = Sequence::<f32>::new();
            columns.push(select(second, other0, acc.extract(a)));
            columns.push(select(second, other1, acc.extract(comptime!(a + 1))));
            columns.push(select(second, acc.extract(b), other0));
            columns.push(select(second, acc.extract(comptime!(b + 1)), other1));
            out[own_at + 4 * i] = Vector::cast_from(math::vector::<f32, P>(&columns));
        }
    }
    sync_plane();
}
