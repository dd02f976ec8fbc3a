//! The four warps of the softmax: weights from scores, the output scaled where a maximum has grown, and written at the end.

use cubecl::prelude::*;

use super::super::range::Range;
use super::{ENTRY_BLOCKS, Entries};
use crate::ptx::{math, mbarrier, warp};
use crate::sparse_mla::ends::RowEnd;
use crate::sparse_mla::work::{Lists, Work};
use crate::tiles::form::ROWS;
use crate::tiles::output::Results;
use crate::tiles::pair::{Cube, RowState, Rows, Seen, weigh_seen_row};

/// The rows of a unit.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Softmax {
    rows: Rows,
    /// Of the scores, as powers of two.
    scale: f32,
    /// The bits of -inf.
    empty_lse: u32,
}

#[cube]
impl Softmax {
    pub fn new(cube: &Cube, scale: f32, empty_lse: u32) -> Softmax {
        Softmax { rows: Rows::new(cube, 0u32), scale, empty_lse }
    }

    /// Weights, output and lse of all work.
    #[allow(clippy::too_many_arguments)]
    pub fn run<E: Float, P: Size>(
        &mut self,
        cube: &Cube,
        range: &Range,
        lists: &Lists,
        sink: &[f32],
        entries: &Entries,
        weights: &mut Shared<[Vector<u32, Const<4>>]>,
        told: &mut Shared<[f32]>,
        results: &mut Results<E, P>,
    ) {
        let mut index = range.first;
        while index < range.end {
            let mut work = Work::none();
            work.read(lists, index);
            let blocks = work.blocks().div_ceil(2u32);
            let state = self.weigh_all(cube, range, blocks, entries, weights, told);
            let sum = self.rows.sum(&state, told);
            let first_row = work.head_tile * comptime!(ROWS as u32);
            let row = first_row + self.rows.row;
            let end = RowEnd::of(sum, state.highest, &work, row, range.heads, sink, self.empty_lse, range.form);
            if self.rows.half == 0 && row < range.heads {
                end.write::<E, P>(&work, row, results, range.form);
            }
            self.rows.wait_for_output(cube);
            // Tensor memory is read by whole warps.
            sync_plane();
            let warp_row = first_row + self.rows.warp_row;
            self.rows.write::<E, P>(cube, blocks, end.factor, &work.target(), warp_row, results);
            index = range.next(index);
        }
    }

    /// The weights of the blocks of a tile, one after the other.
    fn weigh_all(
        &mut self,
        cube: &Cube,
        range: &Range,
        blocks: u32,
        entries: &Entries,
        weights: &mut Shared<[Vector<u32, Const<4>>]>,
        told: &mut Shared<[f32]>,
    ) -> RowState {
        let mut state = RowState::new();
        let mut block = 0u32;
        while block < blocks {
            let at = self.rows.turn % ENTRY_BLOCKS;
            mbarrier::wait(entries.published + at * 8, self.rows.turn / ENTRY_BLOCKS % 2);
            let of_block = entries.seen[at as usize];
            let scores = self.rows.scores(cube);
            let mut own = Sequence::<u32>::new();
            #[unroll]
            for i in 0..4usize {
                own.push(warp::uniform(of_block.extract(i) >> (self.rows.half * 16)));
            }
            let weighed = weigh_seen_row(
                scores,
                &mut state,
                told,
                self.rows.times,
                math::vector::<u32, Const<4>>(&own),
                self.scale,
                comptime!(if range.form.fp8() { Seen::OfWarps } else { Seen::OfLanes }),
                comptime!(range.form.slack()),
                comptime!(range.form.tile),
            );
            self.rows.give_weights(cube, &weighed, weights, block > 0);
            self.rows.turn += 1;
            block = warp::next(block);
        }
        state
    }
}
