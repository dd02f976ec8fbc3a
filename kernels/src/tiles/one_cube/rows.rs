//! What a warp of the softmax has of tensor memory: 16 rows of scores, weights and output.

use cubecl::prelude::*;

use super::cube::Cube;
use super::{OUTPUT_AT, RIGHT, SCORES_AT, SCORES_COLUMNS, WEIGHTS_AT};
use crate::ptx::tcgen05::{self, LANE, Shape};
use crate::ptx::{mbarrier, warp};
use crate::tiles::form::VALUE_WIDTH;
use crate::tiles::output::{Results, Target, scale_rows};
use crate::tiles::softmax::Weighted;

/// Columns of a quarter of the output.
const QUARTER_COLUMNS: u32 = VALUE_WIDTH as u32 / 4;

/// The rows of a unit, and how far it is.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Rows {
    /// The first of the two rows that it has a part of, in scores and output alike.
    pub own: u32,
    /// Blocks of all tiles so far.
    pub turn: u32,
    /// Its warp's rows of tensor memory.
    at: u32,
}

#[cube]
impl Rows {
    pub fn new(cube: &Cube) -> Rows {
        let own = cube.warp * 16 + cube.lane / 4;
        Rows { own, turn: 0u32, at: cube.tensor + cube.warp * comptime!(32 * LANE) }
    }

    /// Waits for the scores of the block, which lie as `wgmma` has its accumulators.
    pub fn scores(&self, cube: &Cube) -> Vector<f32, Const<32>> {
        mbarrier::wait(cube.barriers.scored + self.turn % 2 * 8, self.turn / 2 % 2);
        tcgen05::fence_after();
        let scores_at = self.at + SCORES_AT + self.turn % 2 * SCORES_COLUMNS;
        tcgen05::load::<Const<32>>(scores_at, comptime!(Shape::Pairs))
    }

    /// Stores the weights of a block, the first of a tile or a later one. The output of the block before is scaled first: its weights
    /// have been read then, too.
    pub fn store_weights(&self, cube: &Cube, weighted: &Weighted, is_later: bool) {
        if is_later {
            self.correct(cube, weighted);
        }
        #[unroll]
        for side in 0..2u32 {
            let to = self.at + comptime!(side * RIGHT + WEIGHTS_AT);
            tcgen05::store::<u32, Const<16>>(to, weighted.weights, comptime!(Shape::Singles));
        }
        tcgen05::wait_for_stores();
    }

    /// Says that the weights of the block are there, and goes on to the next block.
    pub fn give_weights(&mut self, cube: &Cube) {
        tcgen05::fence_before();
        mbarrier::arrive(cube.barriers.weighed);
        self.turn += 1;
    }

    /// Waits for the output of the block before, and scales it.
    fn correct(&self, cube: &Cube, weighted: &Weighted) {
        self.wait_for_output(cube);
        if warp::any(weighted.factor_a != 1.0f32 || weighted.factor_b != 1.0f32) {
            scale_output(self.at + OUTPUT_AT, weighted.factor_a, weighted.factor_b);
        }
    }

    /// Waits for the output of the block before. Without one this waits for nothing: the phase of the last block is over.
    fn wait_for_output(&self, cube: &Cube) {
        mbarrier::wait(cube.barriers.summed, (self.turn - 1) % 2);
        tcgen05::fence_after();
    }

    /// Writes the output of a tile of so many blocks, multiplied with these factors; `row` is the unit's first among those of the result.
    #[allow(clippy::too_many_arguments)]
    pub fn write<E: Float, P: Size>(
        &self,
        cube: &Cube,
        blocks: u32,
        factor_a: f32,
        factor_b: f32,
        target: &Target,
        row: u32,
        results: &mut Results<E, P>,
    ) {
        self.wait_for_output(cube);
        // Tensor memory is read by whole warps.
        sync_plane();
        // In quarters: a unit has 64 numbers of one, which leaves registers for the rest.
        let mut quarter = 0u32;
        while quarter < 4u32 {
            let mut acc = Vector::<f32, Const<64>>::zeroed();
            if blocks > 0 {
                let at = self.at + quarter / 2 * RIGHT + quarter % 2 * QUARTER_COLUMNS + OUTPUT_AT;
                acc = tcgen05::load::<Const<64>>(at, comptime!(Shape::Pairs));
            }
            acc = scale_rows::<Const<64>>(acc, factor_a, factor_b);
            results.write_rows::<Const<64>>(acc, target, row, quarter * QUARTER_COLUMNS, cube.lane);
            // The same of what is read next.
            sync_plane();
            quarter = warp::next(quarter);
        }
    }
}

/// Multiplies a warp's rows of the output, in both halves; `output` is the address of the first. The next products are issued
/// after the stores have been waited for.
#[cube]
fn scale_output(output: u32, factor_a: f32, factor_b: f32) {
    let mut part = 0u32;
    while part < 8u32 {
        let at = output + part % 2 * RIGHT + part / 2 * 64;
        let acc = tcgen05::load::<Const<32>>(at, comptime!(Shape::Pairs));
        tcgen05::store::<f32, Const<32>>(at, scale_rows::<Const<32>>(acc, factor_a, factor_b), comptime!(Shape::Pairs));
        part = warp::next(part);
    }
}
