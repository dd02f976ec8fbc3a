//! The stages of a warp: pieces of its rows of the weights, loaded while it multiplies those before.

use cubecl::prelude::*;

use super::form::{COPIES, COPY_BYTES, Form, PIECE_BYTES, WEIGHT_ROWS};
use crate::experts_mlp::sort::TILE;
use crate::linear::WeightFormat;
use crate::ptx::{mbarrier, tma, warp};

/// Where a warp's stages and their barriers are, the one that is multiplied next, and what is loaded into it afterwards.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Ring {
    codes_at: u32,
    scales_at: u32,
    barriers: u32,
    stage: u32,
    /// How often the ring has been passed, modulo 2.
    phase: u32,
    /// The item whose piece is loaded next, see [`Items`].
    item: u32,
    piece: u32,
    expert: i32,
    output: i32,
}

/// The maps of codes and scales.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Maps {
    pub codes: u64,
    pub scales: u64,
}

/// What there is to multiply: item `t * groups + g` has group `g` of the outputs for tile `t`.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Items {
    /// Those of this cube.
    pub first: u32,
    pub end: u32,
    /// Groups of outputs of a tile.
    pub groups: u32,
}

#[cube]
impl Items {
    /// Neighbouring ones for each cube, so that it has few tiles.
    pub fn of_cube(tiles: u32, groups: u32) -> Items {
        let all = tiles * groups;
        let (each, more) = (all / CUBE_COUNT_X, all % CUBE_COUNT_X);
        let first = CUBE_POS_X * each + min(CUBE_POS_X, more);
        Items { first, end: first + each + u32::cast_from(CUBE_POS_X < more), groups }
    }
}

#[cube]
impl Ring {
    /// Initialises the barriers, and starts to fill all stages. All units of warp number `own`.
    #[allow(clippy::too_many_arguments)]
    pub fn start(
        codes_at: u32,
        scales_at: u32,
        barriers: u32,
        maps: &Maps,
        tiles: &[i32],
        items: &Items,
        own: u32,
        #[comptime] form: Form,
    ) -> Ring {
        let barriers = barriers + own * comptime!(8 * form.stages() as u32);
        if warp::elect() {
            #[unroll]
            for i in 0..comptime!(form.stages() as u32) {
                mbarrier::init(barriers + i * 8, 1u32);
            }
            mbarrier::fence_init();
        }
        sync_plane();
        let mut ring = Ring {
            codes_at: codes_at + own * comptime!((form.stages() * PIECE_BYTES) as u32),
            scales_at: scales_at + own * comptime!((form.stages() * form.scale_bytes()) as u32),
            barriers,
            stage: 0u32,
            phase: 0u32,
            item: items.first + own,
            piece: 0u32,
            expert: 0i32,
            output: 0i32,
        };
        ring.find(tiles, items, form);
        #[unroll]
        for _ in 0..comptime!(form.stages()) {
            ring.load(maps, tiles, items, form);
            ring.advance(form);
        }
        ring.phase = 0u32;
        ring
    }

    /// Looks where the rows of an item are.
    fn find(&mut self, tiles: &[i32], items: &Items, #[comptime] form: Form) {
        if self.item < items.end {
            self.expert = tiles[(self.item / items.groups) as usize * TILE];
            self.output = (self.item % items.groups * comptime!(form.outputs() as u32)) as i32;
        }
    }

    /// Starts to load the next piece into this stage, if there is one. All units of a warp, which has read what is there.
    pub fn load(&mut self, maps: &Maps, tiles: &[i32], items: &Items, #[comptime] form: Form) {
        if self.item < items.end {
            if warp::elect() {
                let bar = self.barriers + self.stage * 8;
                mbarrier::arrive_expect(bar, comptime!((PIECE_BYTES + form.scale_bytes()) as u32));
                let to = self.codes();
                #[unroll]
                for i in 0..comptime!(COPIES as u32) {
                    let column =
                        self.piece * comptime!((COPIES * COPY_BYTES) as u32) + comptime!(i * COPY_BYTES as u32);
                    let to = to + comptime!(i * (COPY_BYTES * WEIGHT_ROWS) as u32);
                    self.copy(to, maps.codes, bar, column as i32, form);
                }
                if comptime!(form.format == WeightFormat::Fp4) {
                    let column = self.piece * comptime!(form.scale_row_bytes() as u32);
                    self.copy(self.scales(form), maps.scales, bar, column as i32, form);
                }
            }
            self.piece += 1;
            if self.piece == comptime!(form.pieces() as u32) {
                self.piece = 0u32;
                self.item += comptime!(form.warps() as u32);
                self.find(tiles, items, form);
            }
        }
    }

    /// Copies bytes of the rows from `column` on.
    fn copy(&self, to: u32, map: u64, bar: u32, column: i32, #[comptime] form: Form) {
        if comptime!(form.linear.gated) {
            let eight = self.output / comptime!(form.outputs() as i32);
            tma::load_5d(to, map, bar, column, 0i32, 0i32, eight, self.expert);
        } else {
            tma::load_3d(to, map, bar, column, self.output, self.expert);
        }
    }

    /// Waits until this stage has come.
    pub fn wait(&self) {
        mbarrier::wait(self.barriers + self.stage * 8, self.phase);
    }

    /// Its codes.
    pub fn codes(&self) -> u32 {
        self.codes_at + self.stage * comptime!(PIECE_BYTES as u32)
    }

    /// Its scales.
    pub fn scales(&self, #[comptime] form: Form) -> u32 {
        self.scales_at + self.stage * comptime!(form.scale_bytes() as u32)
    }

    /// Goes on to the next stage.
    pub fn advance(&mut self, #[comptime] form: Form) {
        let wraps = self.stage == comptime!(form.stages() as u32 - 1);
        self.stage = select(wraps, 0u32, self.stage + 1);
        self.phase ^= u32::cast_from(wraps);
    }
}
