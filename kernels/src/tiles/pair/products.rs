//! The warp of the products in the first cube, of which one thread issues them for both: the scores of a block before the output of
//! the block before it.

use cubecl::prelude::*;

use super::cube::{Cube, RING};
use super::ring::CHUNK_BYTES;
use super::{OUTPUT_AT, OUTPUT_COLUMNS, ROWS_OF_TERMS, SCORES_AT, SCORES_COLUMNS, output, scores};
use crate::ptx::tcgen05::{self, descriptor};
use crate::ptx::{mbarrier, warp};
use crate::tiles::form::{Form, TILE_BYTES};

/// How far it is.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Products {
    /// Blocks, queries and chunks of all tiles so far.
    turn: u32,
    queries: u32,
    chunk: u32,
    #[cube(comptime)]
    form: Form,
}

#[cube]
impl Products {
    pub fn new(#[comptime] form: Form) -> Products {
        Products { turn: 0u32, queries: 0u32, chunk: 0u32, form }
    }

    /// Issues the products of a tile with so many halves of blocks. One thread.
    pub fn multiply(&mut self, cube: &Cube, halves: u32) {
        let blocks = halves.div_ceil(2u32);
        if blocks > 0 {
            mbarrier::wait_cluster(cube.barriers.query_come, self.queries % 2);
            self.queries += 1;
        }
        let mut block = 0u32;
        while block < blocks + comptime!(1u32).runtime() {
            if block < blocks {
                self.multiply_keys(cube, (self.turn + block) % 2);
                if block + 1 == blocks {
                    tcgen05::commit_pair(cube.barriers.query_empty);
                }
            }
            if block > 0 {
                let halves = min(halves - (block - 1) * 2, comptime!(2u32).runtime());
                self.multiply_values(cube, block, halves);
            }
            block = warp::next(block);
        }
        self.turn += blocks;
    }

    /// The scores of a block, the first or the second of the two that there is room for; chunk by chunk, as they come.
    fn multiply_keys(&mut self, cube: &Cube, place: u32) {
        #[unroll]
        for part in 0..comptime!(self.form.tiles.div_ceil(2)) {
            let stage = self.chunk % RING;
            mbarrier::wait_cluster(cube.barriers.come + stage * 8, self.chunk / RING % 2);
            tcgen05::mma_ss(
                cube.tensor + SCORES_AT + place * SCORES_COLUMNS,
                descriptor(cube.query_at + comptime!(part as u32 * CHUNK_BYTES), ROWS_OF_TERMS),
                descriptor(cube.chunks_at + stage * CHUNK_BYTES, ROWS_OF_TERMS),
                comptime!((part > 0) as u32),
                comptime!(scores(self.form, (self.form.tiles - 2 * part).min(2))),
            );
            tcgen05::commit_pair(cube.barriers.empty + stage * 8);
            self.chunk = warp::next(self.chunk);
        }
        tcgen05::commit_pair(cube.barriers.scored + place * 8);
    }

    /// The output of the block before block `block` of a tile, which has one half or two, once its weights are there.
    fn multiply_values(&mut self, cube: &Cube, block: u32, halves: u32) {
        mbarrier::wait_cluster(cube.barriers.weighed, (self.turn + block - 1) % 2);
        tcgen05::fence_after();
        #[unroll]
        for side in 0..2u32 {
            let mut half = 0u32;
            while half < halves {
                let stage = self.chunk % RING;
                mbarrier::wait_cluster(cube.barriers.come + stage * 8, self.chunk / RING % 2);
                tcgen05::mma_ss(
                    cube.tensor + comptime!(OUTPUT_AT + side * OUTPUT_COLUMNS),
                    descriptor(cube.weights_at + half * TILE_BYTES, ROWS_OF_TERMS),
                    descriptor(cube.chunks_at + stage * CHUNK_BYTES, comptime!(output(self.form).b)),
                    u32::cast_from(block > 1 || half > 0),
                    comptime!(output(self.form)),
                );
                tcgen05::commit_pair(cube.barriers.empty + stage * 8);
                self.chunk = warp::next(self.chunk);
                half = warp::next(half);
            }
        }
        tcgen05::commit_pair(cube.barriers.summed);
    }
}
