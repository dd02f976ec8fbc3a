//! The second and the third warpgroup: half of the output each. The first warp of the second loads the keys.

use cubecl::prelude::*;

use super::cube::Cube;
use super::{VALUES, WEIGHTS};
use crate::ptx::wgmma::descriptor;
use crate::ptx::{mbarrier, warp, wgmma};
use crate::tiles::form::{Form, STAGES, TILE_BYTES, VALUE_WIDTH};
use crate::tiles::loader::{Item, Loader, Plan};
use crate::tiles::output::{Results, Target, scale_rows};

/// Channels of a warpgroup, two rows of which are a unit's: 128 numbers.
const CHANNELS: u32 = VALUE_WIDTH as u32 / 2;

/// How far a warpgroup is.
#[derive(CubeType)]
pub(super) struct Output {
    /// Which half of the channels.
    half: u32,
    /// Whether this warp loads keys.
    producer: bool,
    loader: Loader,
    /// Blocks and factors of all items so far.
    turn: u32,
    round: u32,
    #[cube(comptime)]
    form: Form,
}

#[cube]
impl Output {
    pub fn new(cube: &Cube, half: u32, loader: Loader, #[comptime] form: Form) -> Output {
        Output { half, producer: half == 0 && cube.warp == 0, loader, turn: 0u32, round: 0u32, form }
    }

    /// The output of all items.
    pub fn run<E: Float, P: Size>(
        &mut self,
        cube: &Cube,
        plan: &Plan,
        factors: &Shared<[f32]>,
        results: &mut Results<E, P>,
    ) {
        if self.producer {
            self.load_first(cube, plan);
        }
        let mut index = cube.first;
        while index < cube.end {
            let mut item = Item::none();
            item.read(plan, index, &cube.tile);
            let target = Target::of(plan, &item, index);
            let mut acc = Vector::<f32, Const<128>>::zeroed();
            let mut block = 0u32;
            while block < item.blocks {
                acc = self.add_block(acc, cube, plan, factors);
                block = warp::next(block);
            }
            mbarrier::wait(cube.barriers.weighed, self.round % 2);
            let factor_a = factors[cube.own_row as usize];
            let factor_b = factors[cube.own_row as usize + 8];
            acc = scale_rows::<Const<128>>(acc, factor_a, factor_b);
            mbarrier::arrive(cube.barriers.used);
            self.round += 1;
            results.write_rows::<Const<128>>(
                acc,
                &target,
                cube.tile_row + cube.own_row,
                self.half * CHANNELS,
                cube.lane,
            );
            index = warp::next(index);
        }
    }

    /// Fills all stages.
    fn load_first(&mut self, cube: &Cube, plan: &Plan) {
        self.loader.open(plan, &cube.tile, cube.lane, self.form);
        #[unroll]
        for _ in 0..STAGES {
            if self.loader.has_block() {
                self.loader.load_half(plan, 0usize, cube.lane, self.form);
                self.loader.load_half(plan, 1usize, cube.lane, self.form);
                self.loader.advance(plan, &cube.tile, cube.lane, self.form);
            }
        }
    }

    /// Adds the output of a block. The keys of the block after the next take its place, half by half.
    fn add_block(
        &mut self,
        sum: Vector<f32, Const<128>>,
        cube: &Cube,
        plan: &Plan,
        factors: &Shared<[f32]>,
    ) -> Vector<f32, Const<128>> {
        let mut acc = sum;
        let loads = self.producer && self.loader.has_block();
        mbarrier::wait(cube.barriers.weighed, self.round % 2);
        let factor_a = factors[cube.own_row as usize];
        let factor_b = factors[cube.own_row as usize + 8];
        if warp::any(factor_a != 1.0f32 || factor_b != 1.0f32) {
            acc = scale_rows::<Const<128>>(acc, factor_a, factor_b);
        }
        let stage = self.turn % STAGES;
        let empty = cube.barriers.empty + stage * 16;
        let values = cube.keys_at + stage * comptime!(self.form.stage_bytes()) + self.half * comptime!(4 * TILE_BYTES);
        let issued = wgmma::mma_ss::<Const<128>>(
            acc,
            descriptor(cube.weights_at, WEIGHTS),
            descriptor(values, VALUES),
            comptime!(self.form.output()),
        );
        // The first half of the keys is done with while the second is still at work.
        wgmma::wait_for_reads(1u32);
        mbarrier::arrive_if(empty, cube.lane == 0);
        if loads {
            self.loader.load_half(plan, 0usize, cube.lane, self.form);
        }
        acc = wgmma::wait::<Const<128>>(issued, 0u32);
        mbarrier::arrive_if(empty + 8, cube.lane == 0);
        mbarrier::arrive(cube.barriers.used);
        if loads {
            self.loader.load_half(plan, 1usize, cube.lane, self.form);
            self.loader.advance(plan, &cube.tile, cube.lane, self.form);
        }
        self.turn += 1;
        self.round += 1;
        acc
    }
}
