//! The four warps of the softmax: weights from scores, the output scaled where a maximum has grown, and written at the end.

use cubecl::prelude::*;

use super::super::range::Range;
use crate::ptx::{mbarrier, warp};
use crate::sparse_mla::ends::Ends;
use crate::sparse_mla::work::{Lists, Work};
use crate::tiles::form::STAGES;
use crate::tiles::one_cube::{Cube, Rows};
use crate::tiles::output::Results;
use crate::tiles::softmax::{SoftmaxState, weigh_seen};

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
        Softmax { rows: Rows::new(cube), scale, empty_lse }
    }

    /// Weights, output and lse of all work.
    #[allow(clippy::too_many_arguments)]
    pub fn run<E: Float, P: Size>(
        &mut self,
        cube: &Cube,
        range: &Range,
        lists: &Lists,
        sink: &[f32],
        seen: &Shared<[u32]>,
        results: &mut Results<E, P>,
    ) {
        let mut index = range.first;
        while index < range.end {
            let mut work = Work::none();
            work.read(lists, index);
            let state = self.weigh_all(cube, range, &work, seen);
            let ends = Ends::of(&state, &work, self.rows.own, range.heads, sink, self.empty_lse, range.form);
            let corner = cube.lane % 4;
            if corner == 0 {
                ends.write::<E, P>(&work, results, range.form);
            }
            let (blocks, target) = (work.blocks(), work.target());
            self.rows.write::<E, P>(cube, blocks, ends.a.factor, ends.b.factor, &target, ends.row, results);
            index = range.next(index);
        }
    }

    /// The weights of the blocks of a tile, one after the other.
    fn weigh_all(&mut self, cube: &Cube, range: &Range, work: &Work, seen: &Shared<[u32]>) -> SoftmaxState {
        let mut state = SoftmaxState::new();
        let mut block = work.first;
        while block < work.end {
            let stage = self.rows.turn % STAGES;
            // Who has loaded rows has said which there are.
            #[unroll]
            for half in 0..2u32 {
                let full = cube.barriers.full + stage * 16 + comptime!(half * 8);
                mbarrier::wait(full, self.rows.turn / STAGES % 2);
            }
            let low = warp::uniform(seen[(stage * 2) as usize]);
            let high = warp::uniform(seen[(stage * 2 + 1) as usize]);
            let scores = self.rows.scores(cube);
            let weighted = weigh_seen(
                scores,
                &mut state,
                low,
                high,
                self.scale,
                cube.lane,
                comptime!(range.form.slack()),
                comptime!(range.form.tile),
            );
            self.rows.store_weights(cube, &weighted, block > work.first);
            self.rows.give_weights(cube);
            block = warp::next(block);
        }
        state
    }
}
