//! From sums to rows of the output: by way of the shared memory of the warp's queries, and stores of 16 bytes.

use cubecl::prelude::*;

use super::attend::{Attended, Attention};
use super::form::{Form, LANES, M, N, PANEL, PANEL_BYTES, PANEL_VECTORS};
use super::load::Tile;
use super::products::scale_rows;
use crate::ptx::{math, matrix};
use crate::tiles::softmax::{inverse, log_sum, quad_sum};

/// Where the 16 rows of a warp go.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Output {
    pub head: u32,
    pub heads: u32,
    /// The bits of -inf.
    pub empty_lse: u32,
}

#[cube]
impl Output {
    /// Divides by the sums, and writes output and lse. All lanes of the warp, which has no more use for its queries.
    pub fn write<E: Float, V: Size, NC: Size>(
        &self,
        attention: &Attention,
        attended: &mut Attended<NC>,
        out: &mut [Vector<E, V>],
        lse: &mut [f32],
    ) {
        let lane = UNIT_POS % LANES as u32;
        let form = comptime!(attention.form);
        let (state, scale) = (&attended.state, attention.scores.scale);
        let (sum_a, sum_b) = (quad_sum(state.sum_a), quad_sum(state.sum_b));
        let corner = lane % 4;
        if corner == 0 {
            let (row, rows) = (attention.row + lane / 4, attention.tile.rows);
            if row < rows {
                lse[self.row_of(&attention.tile, row)] = log_sum(sum_a, state.highest_a * scale, self.empty_lse);
            }
            if row + 8 < rows {
                lse[self.row_of(&attention.tile, row + 8)] = log_sum(sum_b, state.highest_b * scale, self.empty_lse);
            }
        }
        scale_rows::<NC>(&mut attended.out, inverse(sum_a), inverse(sum_b), form);
        // All lanes have read the queries.
        sync_plane();
        stage::<NC>(attention.queries_at, &mut attended.out, form);
        sync_plane();
        self.store::<E, V>(attention, out);
    }

    /// Writes what was staged to the output, as far as there are such rows.
    fn store<E: Float, V: Size>(&self, attention: &Attention, out: &mut [Vector<E, V>]) {
        let form = comptime!(attention.form);
        let vectors = comptime!((form.value_panels * PANEL_VECTORS) as u32);
        #[unroll]
        for i in 0..comptime!(M as u32 * vectors / LANES as u32) {
            let place = UNIT_POS % LANES as u32 + comptime!(i * LANES as u32);
            let (row, vector) = (place / vectors, place % vectors);
            if attention.row + row < attention.tile.rows {
                let (panel, unit) =
                    (vector / comptime!(PANEL_VECTORS as u32), vector % comptime!(PANEL_VECTORS as u32));
                let at = row * comptime!(vectors * 16) + panel * PANEL_BYTES + (unit ^ (row % 8)) * 16;
                let words = matrix::load_16(attention.queries_at + at, 0u32);
                let to =
                    self.row_of(&attention.tile, attention.row + row) * comptime!(vectors as usize) + vector as usize;
                out[to] = Vector::<E, V>::reinterpret(words);
            }
        }
    }

    /// The row of out and lse for a row of the tile.
    fn row_of(&self, tile: &Tile, row: u32) -> usize {
        (tile.query + row) as usize * self.heads as usize + self.head as usize
    }
}

/// Writes the sums to shared memory, as numbers of the output. A row's vectors are permuted by its number: those of 8 rows lie in
/// different banks.
#[cube]
fn stage<NC: Size>(staging_at: u32, sums: &mut Sequence<Array<Vector<f32, NC>>>, #[comptime] form: Form) {
    let lane = UNIT_POS % LANES as u32;
    let (row, quad) = (lane / 4, lane % 4);
    let row_bytes = comptime!(form.value_panels as u32 * PANEL_BYTES);
    let first = staging_at + row * row_bytes + row * 16 + quad * 4;
    #[unroll]
    for i in 0..comptime!(form.value_panels * PANEL / N) {
        let flip = comptime!((i % PANEL_VECTORS * 16) as u32);
        #[unroll]
        for half in 0..2usize {
            let offset = comptime!((i / PANEL_VECTORS) as u32 * PANEL_BYTES + (half * 8) as u32 * row_bytes);
            let (low, high) = (sums[i][half].extract(0usize), sums[i][half].extract(1usize));
            matrix::store_4(first ^ flip, offset, math::pack(low, high, comptime!(form.elem())));
        }
    }
}
