//! From accumulators to rows of the output: a warp transposes 64 channels of its 16 rows at a time through shared memory, and stores
//! 16 bytes a lane.

use cubecl::prelude::*;

use super::{Attended, GROUP_ROWS};
use crate::ptx::{math, matrix};
use crate::tiles::output::scale_rows;
use crate::tiles::prefill::form::{Form, PANEL};
use crate::tiles::softmax::{inverse, log_sum, quad_sum};

/// Elements of a store: 16 bytes.
pub(crate) const VECTOR: usize = 8;
/// Stores of a row of a panel.
const UNITS_OF_ROW: u32 = (PANEL / VECTOR) as u32;
/// Rows of a warp.
const WARP_ROWS: u32 = 16;

/// The query rows of a tile, of one head.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Rows {
    /// The first query token.
    pub query: u32,
    /// Query tokens.
    pub count: u32,
    pub head: u32,
}

/// Where a warp's part of a tile goes.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Output {
    /// Shared memory of the warp: 16 rows of a panel.
    pub staging_at: u32,
    /// The first of its rows in the tile.
    pub row: u32,
    pub heads: u32,
    /// The bits of -inf.
    pub empty_lse: u32,
}

#[cube]
impl Output {
    /// The warp with this number among those that compute, of tiles of so many warps.
    pub fn new(staging_at: u32, warp: u32, heads: u32, empty_lse: u32, #[comptime] tile_warps: u32) -> Output {
        let warp_bytes = comptime!(WARP_ROWS * PANEL as u32 * 2);
        Output { staging_at: staging_at + warp * warp_bytes, row: warp % tile_warps * WARP_ROWS, heads, empty_lse }
    }

    /// Divides by the sums, and writes output and lse. A warp.
    pub fn write<E: Float, V: Size, A: Size>(
        &self,
        attended: &Attended<A>,
        tile: &Rows,
        out: &mut [Vector<E, V>],
        lse: &mut [f32],
        scale: f32,
        #[comptime] form: Form,
    ) {
        let (lane, state) = (UNIT_POS % 32, &attended.state);
        let (sum_a, sum_b) = (quad_sum(state.sum_a), quad_sum(state.sum_b));
        let corner = lane % 4;
        if corner == 0 {
            let row = self.row + lane / 4;
            if row < tile.count {
                lse[self.row_of(tile, row)] = log_sum(sum_a, state.highest_a * scale, self.empty_lse);
            }
            if row + 8 < tile.count {
                lse[self.row_of(tile, row + 8)] = log_sum(sum_b, state.highest_b * scale, self.empty_lse);
            }
        }
        let (factor_a, factor_b) = (inverse(sum_a), inverse(sum_b));
        // Whole warps store matrices, and begin the next products. Some lanes may have had a row without a key.
        sync_plane();
        let rows = scale_rows::<A>(attended.out, factor_a, factor_b);
        // Rows past the end of a sequence are none of the tile's.
        if self.row < tile.count {
            #[unroll]
            for panel in 0..form.value_panels {
                self.stage::<A>(rows, panel, form);
                sync_plane();
                self.store::<E, V>(tile, out, panel, form);
                // What has been read may be written anew.
                sync_plane();
            }
        }
    }

    /// Writes a panel of the accumulators to shared memory.
    fn stage<A: Size>(&self, rows: Vector<f32, A>, #[comptime] panel: usize, #[comptime] form: Form) {
        let lane = UNIT_POS % 32;
        // Matrices are of rows 0 to 7 and 8 to 15, then the same of the next 8 channels.
        let (row, next) = (lane % 16, lane / 16);
        #[unroll]
        for i in 0..comptime!(PANEL / 16) {
            let to = self.staging_at + address(row, comptime!(2 * i as u32) + next);
            let mut words = Sequence::<u32>::new();
            #[unroll]
            for m in 0..4usize {
                let at = comptime!(panel * PANEL / 2 + 8 * i + 2 * m);
                words.push(math::pack(rows.extract(at), rows.extract(comptime!(at + 1)), comptime!(form.elem())));
            }
            matrix::store_x4(to, 0u32, false, math::vector::<u32, Const<4>>(&words));
        }
    }

    /// Writes a panel to the output, as far as there are such rows.
    fn store<E: Float, V: Size>(
        &self,
        tile: &Rows,
        out: &mut [Vector<E, V>],
        #[comptime] panel: usize,
        #[comptime] form: Form,
    ) {
        #[unroll]
        for i in 0..comptime!(WARP_ROWS * UNITS_OF_ROW / 32) {
            let place = UNIT_POS % 32 + comptime!(i * 32);
            let (row, unit) = (place / UNITS_OF_ROW, place % UNITS_OF_ROW);
            if self.row + row < tile.count {
                let words = matrix::load_16(self.staging_at + address(row, unit), 0u32);
                let at = self.row_of(tile, self.row + row) * comptime!(form.value_panels * PANEL / VECTOR);
                out[at + (comptime!(panel as u32) * UNITS_OF_ROW + unit) as usize] = Vector::<E, V>::reinterpret(words);
            }
        }
    }

    /// The row of out and lse for a row of the tile.
    fn row_of(&self, tile: &Rows, row: u32) -> usize {
        (tile.query + row) as usize * self.heads as usize + tile.head as usize
    }
}

/// Bytes to 16 bytes of a row, permuted so that eight rows, and a row's, are in different banks.
#[cube]
fn address(row: u32, unit: u32) -> u32 {
    row * comptime!(PANEL as u32 * 2) + (unit ^ (row % 8)) * 16
}

const _: () = assert!(GROUP_ROWS == 4 * WARP_ROWS as usize, "a warpgroup has the rows of its four warps");
