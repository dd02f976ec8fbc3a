//! The rows of a list where there are FP8 rows: where each begins, and the copies of what is not codes.

use cubecl::prelude::*;

use super::gather::VECTOR;
use crate::cache_rows::RowFormat;
use crate::ptx::copy::copy_or_zero;
use crate::sparse_mla::form::{Form, Stored};
use crate::tiles::form::{TILE_BYTES, TILE_WIDTH};

/// Words of a row of V3 and V4.
const ROW_V3: usize = 164;
const ROW_V4: usize = 144;
/// Where the scales begin in a row of V3, and the words of a row's scales behind the page in V4.
const SCALES_V3: usize = 128;
const SCALES_V4: usize = 2;
/// Where the rotary channels begin.
const ROPE_V3: usize = 132;
const ROPE_V4: usize = 112;
/// Where the rows of a list are.
#[derive(CubeType)]
pub(super) struct List<'a, E: Float, V: Size> {
    /// Of dense rows, and of FP8 rows.
    dense: &'a [Vector<E, V>],
    pub words: &'a [u32],
    pages: RowPages,
}

/// The pages that have their scales behind them.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct RowPages {
    /// The logarithm of the rows of a page.
    pub shift: u32,
    /// Words of a page.
    pub words: u32,
}

impl RowPagesLaunch {
    /// Those of a format; of others nobody looks at them.
    pub fn of(format: RowFormat) -> Self {
        match format {
            RowFormat::Fp8(layout) => Self::new(layout.page_rows().max(1).ilog2(), layout.page_words() as u32),
            RowFormat::Dense => Self::new(0, 0),
        }
    }
}

#[cube]
impl<'a, E: Float, V: Size> List<'a, E, V> {
    pub fn new(dense: &'a [Vector<E, V>], words: &'a [u32], pages: RowPages) -> List<'a, E, V> {
        List::<'a, E, V> { dense, words, pages }
    }

    /// Starts to copy vector `vector` of each tile of a row that is not codes to its places in the tiles of a stage.
    pub fn copy_row(&self, slot: i32, vector: u32, to: u32, #[comptime] stored: Stored, #[comptime] form: Form) {
        let bytes = select(slot >= 0, 16u32, 0u32);
        if comptime!(stored == Stored::Dense) {
            const VECTORS: usize = TILE_WIDTH / VECTOR;
            let at = usize::cast_from(max(slot, 0i32)) * comptime!(form.tile.tiles * VECTORS) + vector as usize;
            #[unroll]
            for tile in 0..form.tile.tiles as u32 {
                let from = at + comptime!(tile as usize * VECTORS);
                copy_or_zero(&self.dense[from..from + 1], 0u32, to, comptime!(tile * TILE_BYTES), bytes);
            }
        } else {
            let rope = comptime!(if form.paged_scales() { ROPE_V4 } else { ROPE_V3 });
            let at = self.first_of(slot, form) + rope + vector as usize * 4;
            copy_or_zero(&self.words[at..at + 4], 0u32, to, comptime!(form.code_tiles() * TILE_BYTES), bytes);
        }
    }

    /// The first word of a row.
    pub fn first_of(&self, slot: i32, #[comptime] form: Form) -> usize {
        let slot = max(slot, 0i32);
        if comptime!(form.paged_scales()) {
            self.page_of(slot) + (slot as u32 & self.last_of_page()) as usize * ROW_V4
        } else {
            usize::cast_from(slot) * ROW_V3
        }
    }

    /// The word of a row's scales that a vector in this tile needs, or its byte; that of the vector four tiles on is
    /// [`scale_step`] bytes behind.
    pub fn scale_of(&self, slot: i32, tile: u32, #[comptime] form: Form) -> usize {
        let slot = max(slot, 0i32);
        if comptime!(form.paged_scales()) {
            let row = slot as u32 & self.last_of_page();
            self.page_of(slot) + (self.last_of_page() + 1) as usize * ROW_V4 + row as usize * SCALES_V4
        } else {
            self.first_of(slot, form) + SCALES_V3 + (tile / 2) as usize
        }
    }

    /// The first word of a slot's page.
    fn page_of(&self, slot: i32) -> usize {
        usize::cast_from(slot as u32 >> self.pages.shift) * self.pages.words as usize
    }

    /// The number of the last row of a page, which has all bits.
    fn last_of_page(&self) -> u32 {
        (1u32 << self.pages.shift) - 1
    }
}

/// Bytes from the scale of a vector of codes to that of the one four tiles on.
pub(super) fn scale_step(form: Form) -> u32 {
    if form.paged_scales() { 4 } else { 8 }
}
