//! The warp of the products, of which one thread issues them: the scores of a block before the output of the block before it, or behind
//! it where their keys are late.

use cubecl::prelude::*;

use super::cube::Cube;
use super::{OUTPUT_AT, RIGHT, ROWS_OF_TERMS, SCORES_AT, SCORES_COLUMNS, VALUES, WEIGHTS_AT, output, scores};
use crate::ptx::tcgen05::{self, descriptor};
use crate::ptx::{mbarrier, warp};
use crate::tiles::form::{Form, STAGES, TILE_BYTES};

/// How far the thread of the products is: blocks and queries so far.
#[derive(CubeType)]
pub(crate) struct Products {
    turn: u32,
    queries: u32,
}

#[cube]
impl Products {
    pub fn new() -> Products {
        Products { turn: 0u32, queries: 0u32 }
    }

    /// Issues the products of a tile of so many blocks. One thread.
    pub fn multiply(&mut self, cube: &Cube, blocks: u32, #[comptime] form: Form) {
        if blocks > 0 {
            mbarrier::wait(cube.barriers.query_full, self.queries % 2);
            self.queries += 1;
        }
        let mut block = 0u32;
        while block < blocks + comptime!(1u32).runtime() {
            // Scores before the output of the block before, or behind it where the keys are late: their loads go on in the stage that the
            // output leaves.
            let is_late = block > 0 && block < blocks && !has_keys(cube, self.turn + block);
            if is_late {
                multiply_values(cube, self.turn + block - 1, u32::cast_from(block > 1), form);
            }
            if block < blocks {
                multiply_keys(cube, self.turn + block, form);
                if block + 1 == blocks {
                    tcgen05::commit(cube.barriers.query_empty);
                }
            }
            if block > 0 && !is_late {
                multiply_values(cube, self.turn + block - 1, u32::cast_from(block > 1), form);
            }
            block = warp::next(block);
        }
        self.turn += blocks;
    }
}

/// Whether the keys of a block have come.
#[cube]
fn has_keys(cube: &Cube, turn: u32) -> bool {
    let full = cube.barriers.full + turn % STAGES * 16;
    mbarrier::test_wait(full, turn / STAGES % 2) && mbarrier::test_wait(full + 8, turn / STAGES % 2)
}

/// The scores of a block, once its keys have come.
#[cube]
fn multiply_keys(cube: &Cube, turn: u32, #[comptime] form: Form) {
    let stage = turn % STAGES;
    mbarrier::wait(cube.barriers.full + stage * 16, turn / STAGES % 2);
    mbarrier::wait(cube.barriers.full + stage * 16 + 8, turn / STAGES % 2);
    tcgen05::mma_ss(
        cube.tensor + SCORES_AT + turn % 2 * SCORES_COLUMNS,
        descriptor(cube.query_at, ROWS_OF_TERMS),
        descriptor(cube.keys_at + stage * comptime!(form.stage_bytes()), ROWS_OF_TERMS),
        0u32,
        comptime!(scores(form)),
    );
    tcgen05::commit(cube.barriers.scored + turn % 2 * 8);
}

/// The output of a block, once its weights are there; `more` says whether it is added to that of others.
#[cube]
fn multiply_values(cube: &Cube, turn: u32, more: u32, #[comptime] form: Form) {
    let stage = turn % STAGES;
    let value = cube.keys_at + stage * comptime!(form.stage_bytes());
    mbarrier::wait(cube.barriers.weighed, turn % 2);
    tcgen05::fence_after();
    #[unroll]
    for half in 0..2u32 {
        #[unroll]
        for side in 0..2u32 {
            let tiles = value + comptime!(side * 4 * TILE_BYTES + half * 32 * 128);
            tcgen05::mma_ts(
                cube.tensor + comptime!(side * RIGHT + OUTPUT_AT),
                cube.tensor + comptime!(side * RIGHT + WEIGHTS_AT + half * 16),
                descriptor(tiles, VALUES),
                select(comptime!(half == 0), more, 1u32),
                comptime!(output(form)),
            );
        }
        tcgen05::commit(cube.barriers.empty + stage * 16 + comptime!(half * 8));
    }
    tcgen05::commit(cube.barriers.summed);
}
