//! The rows of a list where there are FP8 rows: the copies of what is not codes.

use cubecl::prelude::*;

use super::gather::VECTOR;
use crate::ptx::copy::copy_or_zero;
use crate::sparse_mla::codes::{Codes, row_words};
use crate::sparse_mla::form::{Form, Stored};
use crate::tiles::form::{TILE_BYTES, TILE_WIDTH};

/// Where the rows of a list are: dense, or FP8 rows.
#[derive(CubeType)]
pub(super) struct List<'a, E: Float, V: Size> {
    dense: &'a [Vector<E, V>],
    pub codes: Codes<'a>,
}

#[cube]
impl<'a, E: Float, V: Size> List<'a, E, V> {
    pub fn new(dense: &'a [Vector<E, V>], codes: Codes<'a>) -> List<'a, E, V> {
        List::<'a, E, V> { dense, codes }
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
            let rope = comptime!(row_words(stored)[1]);
            let at = self.codes.first_of(slot, form) + rope + vector as usize * 4;
            copy_or_zero(&self.codes.words[at..at + 4], 0u32, to, comptime!(form.code_tiles() * TILE_BYTES), bytes);
        }
    }
}
