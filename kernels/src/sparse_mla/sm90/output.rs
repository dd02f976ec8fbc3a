//! The second and the third warpgroup: half of the output each, and the loads of dense rows, each of its own channels.

use cubecl::prelude::*;

use super::cube::Cube;
use super::form::{PARTS, VALUES, WEIGHTS, output};
use super::gather::Gather;
use super::scores::Exchange;
use crate::ptx::wgmma::descriptor;
use crate::ptx::{barrier, mbarrier, warp, wgmma};
use crate::sparse_mla::work::{Lists, RING, Work};
use crate::tiles::form::{GROUP, ROWS, STAGES, TILE_BYTES, VALUE_WIDTH};
use crate::tiles::output::{Results, scale_rows};

/// Channels of a warpgroup, two rows of which are a unit's: 128 numbers.
const CHANNELS: u32 = VALUE_WIDTH as u32 / 2;

/// How far a warpgroup is.
#[derive(CubeType)]
pub(super) struct Output {
    /// Which half of the channels.
    half: u32,
    /// Blocks and factors so far.
    turn: u32,
    round: u32,
}

#[cube]
impl Output {
    pub fn new(half: u32) -> Output {
        Output { half, turn: 0u32, round: 0u32 }
    }

    /// The output of all work.
    pub fn run<E: Float, P: Size, V: Size>(
        &mut self,
        cube: &Cube,
        lists: &Lists,
        gather: &Gather<E, V>,
        exchange: &Exchange,
        results: &mut Results<E, P>,
    ) {
        if comptime!(!cube.form.fp8()) {
            #[unroll]
            for stage in 0..STAGES {
                #[unroll]
                for part in 0..PARTS {
                    let (list, slot) = (exchange.kinds[stage as usize], gather.slot(&exchange.slots, stage, part));
                    gather.load_part(cube, list, slot, stage, part);
                }
            }
        }
        let mut index = cube.first;
        while index < cube.end {
            let mut work = Work::none();
            work.read(lists, index);
            let mut acc = Vector::<f32, Const<128>>::zeroed();
            let mut block = work.first;
            while block < work.end {
                acc = self.add_block::<E, V>(acc, cube, gather, exchange);
                block = warp::next(block);
            }
            mbarrier::wait(cube.barriers.weighed, self.round % 2);
            let factor_a = exchange.factors[cube.own_row as usize];
            let factor_b = exchange.factors[cube.own_row as usize + 8];
            acc = scale_rows::<Const<128>>(acc, factor_a, factor_b);
            mbarrier::arrive(cube.barriers.used);
            self.round += 1;
            let row = work.head_tile * comptime!(ROWS as u32) + cube.own_row;
            results.write_rows::<Const<128>>(acc, &work.target(), row, self.half * CHANNELS, cube.lane);
            index = cube.next(index);
        }
    }

    /// Adds the output of a block. Dense rows of the block after the next take its place, part by part: this warpgroup's channels,
    /// as soon as all of its warps are done with them.
    fn add_block<E: Float, V: Size>(
        &mut self,
        sum: Vector<f32, Const<128>>,
        cube: &Cube,
        gather: &Gather<E, V>,
        exchange: &Exchange,
    ) -> Vector<f32, Const<128>> {
        let mut acc = sum;
        mbarrier::wait(cube.barriers.weighed, self.round % 2);
        let factor_a = exchange.factors[cube.own_row as usize];
        let factor_b = exchange.factors[cube.own_row as usize + 8];
        if warp::any(factor_a != 1.0f32 || factor_b != 1.0f32) {
            acc = scale_rows::<Const<128>>(acc, factor_a, factor_b);
        }
        let stage = self.turn % STAGES;
        let form = comptime!(cube.form);
        let values = cube.keys_at + stage * comptime!(form.tile.stage_bytes()) + self.half * comptime!(4 * TILE_BYTES);
        let issued = wgmma::mma_ss::<Const<128>>(
            acc,
            descriptor(cube.weights_at, WEIGHTS),
            descriptor(values, VALUES),
            comptime!(output(form)),
        );
        if comptime!(form.fp8()) {
            acc = wgmma::wait::<Const<128>>(issued, 0u32);
            mbarrier::arrive(cube.barriers.used);
            let empty = cube.barriers.empty + stage * 8;
            if comptime!(form.pair) {
                mbarrier::arrive_at_after_reads_if(empty, cube.lane % 2, cube.lane < 2);
            } else {
                mbarrier::arrive_if(empty, cube.lane == 0);
            }
        } else {
            let next = (self.turn + STAGES) % RING;
            let list = exchange.kinds[next as usize];
            // The first parts are done with while the last is still at work.
            #[unroll]
            for part in 0..comptime!(PARTS - 1) {
                let slot = gather.slot(&exchange.slots, next, part);
                wgmma::wait_for_reads(comptime!(PARTS - 1 - part));
                barrier::sync_at(self.half + 1, GROUP);
                gather.load_part(cube, list, slot, stage, part);
            }
            let slot = gather.slot(&exchange.slots, next, comptime!(PARTS - 1));
            acc = wgmma::wait::<Const<128>>(issued, 0u32);
            mbarrier::arrive(cube.barriers.used);
            barrier::sync_at(self.half + 1, GROUP);
            gather.load_part(cube, list, slot, stage, comptime!(PARTS - 1));
        }
        self.turn += 1;
        self.round += 1;
        acc
    }
}
