//! What a warp of the softmax has of tensor memory: 32 rows of scores and output, half of the columns. Two units have the same row, each
//! half of the keys of a block and half of the channels.

use cubecl::prelude::*;

use super::cube::Cube;
use super::weights::{RowState, WeighedRow, partner, scale_output, store_weights};
use super::{OUTPUT_AT, OUTPUT_COLUMNS, SCORES_AT, SCORES_COLUMNS};
use crate::ptx::tcgen05::{self, LANE, Shape};
use crate::ptx::{fence, mbarrier, warp};
use crate::tiles::form::VALUE_WIDTH;
use crate::tiles::output::{Results, Target, scale_rows};

/// The rows of a unit, and how far it is.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Rows {
    /// Which half of the keys and channels it has.
    pub half: u32,
    /// The first row of its warp, and its own.
    pub warp_row: u32,
    pub row: u32,
    /// Its warp's rows of tensor memory.
    pub at: u32,
    /// Blocks of all tiles so far, and how often units of a row have told each other something.
    pub turn: u32,
    pub times: u32,
}

#[cube]
impl Rows {
    /// Counted from the first row of the cube's tile, which has this number.
    pub fn new(cube: &Cube, tile_row: u32) -> Rows {
        let half = cube.warp / 2;
        let warp_row = tile_row + cube.warp % 2 * 32;
        let at = cube.tensor + cube.warp * comptime!(32 * LANE);
        Rows { half, warp_row, row: warp_row + cube.lane, at, turn: 0u32, times: 0u32 }
    }

    /// Waits for the scores of the block.
    pub fn scores(&self, cube: &Cube) -> Vector<f32, Const<64>> {
        mbarrier::wait_cluster(cube.barriers.scored + self.turn % 2 * 8, self.turn / 2 % 2);
        tcgen05::fence_after();
        let scores_at = self.at + SCORES_AT + self.turn % 2 * SCORES_COLUMNS;
        tcgen05::load::<Const<64>>(scores_at, comptime!(Shape::Lanes))
    }

    /// Says what the weights of the block are, the first of a tile or a later one. The output of the block before is scaled first: its
    /// weights have been read then, too. The next block is another turn.
    pub fn give_weights(
        &mut self,
        cube: &Cube,
        weighed: &WeighedRow,
        weights: &mut Shared<[Vector<u32, Const<4>>]>,
        is_later: bool,
    ) {
        self.times += 1;
        if is_later {
            self.wait_for_output(cube);
            if warp::any(weighed.factor != 1.0f32) {
                scale_output(self.at + OUTPUT_AT, weighed.factor);
            }
        }
        store_weights(weighed, weights, self.half);
        fence::async_shared();
        tcgen05::wait_for_stores();
        tcgen05::fence_before();
        sync_plane();
        mbarrier::arrive_at_if(cube.barriers.weighed, 0u32, cube.lane == 0);
    }

    /// The sum of a row's weights, of both units.
    pub fn sum(&mut self, state: &RowState, told: &mut Shared<[f32]>) -> f32 {
        let sum = state.sum + partner(told, self.times, state.sum);
        self.times += 1;
        sum
    }

    /// Waits for the output of the block before. Without one this waits for nothing: the phase of the last block is over.
    pub fn wait_for_output(&self, cube: &Cube) {
        mbarrier::wait_cluster(cube.barriers.summed, (self.turn - 1) % 2);
        tcgen05::fence_after();
    }

    /// Writes the output of a tile of so many blocks, multiplied with the factors of its rows, 16 rows at a time, once it has been waited
    /// for; `warp_row` is the warp's first row among those of the result.
    #[allow(clippy::too_many_arguments)]
    pub fn write<E: Float, P: Size>(
        &self,
        cube: &Cube,
        blocks: u32,
        factor: f32,
        target: &Target,
        warp_row: u32,
        results: &mut Results<E, P>,
    ) {
        #[unroll]
        for group in 0..2u32 {
            let group_row = comptime!(group * 16) + cube.lane / 4;
            let factor_a = warp::shuffle::<f32>(factor, group_row);
            let factor_b = warp::shuffle::<f32>(factor, group_row + 8);
            #[unroll]
            for side in 0..2u32 {
                let mut acc = Vector::<f32, Const<64>>::zeroed();
                if blocks > 0 {
                    let at = self.at + comptime!(group * 16 * LANE + OUTPUT_AT + side * OUTPUT_COLUMNS);
                    acc = tcgen05::load::<Const<64>>(at, comptime!(Shape::Pairs));
                }
                acc = scale_rows::<Const<64>>(acc, factor_a, factor_b);
                let column = comptime!(side * VALUE_WIDTH as u32 / 2) + self.half * comptime!(VALUE_WIDTH as u32 / 4);
                results.write_rows::<Const<64>>(acc, target, warp_row + group_row, column, cube.lane);
                // Tensor memory is read by whole warps.
                sync_plane();
            }
        }
    }
}
