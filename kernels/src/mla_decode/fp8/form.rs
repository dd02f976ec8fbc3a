//! The sizes of the kernel, and where things lie in shared memory.

use crate::cache_rows::{Fp8Layout, Fp8Scales, RowFormat};
use crate::mla_decode::problem::DecodeSizes;
use crate::tiles::form::{KEYS, VALUE_WIDTH};

/// Query rows of a tile: those of a matrix instruction.
pub(super) const TILE_ROWS: usize = 16;
/// Heads that the kernel takes: those of the most tiles that a cube has. The number of query tokens does not matter, so that a token's bits
/// are the same among others.
const MOST_HEADS: usize = 2 * TILE_ROWS;

/// Blocks of keys in shared memory.
pub(super) const STAGES: u32 = 4;

/// Codes of a row, those that share a scale, and the rotary channels behind them.
pub(super) const CODES: usize = VALUE_WIDTH;
pub(super) const SCALED: usize = 128;
pub(super) const SCALES: usize = CODES / SCALED;
pub(super) const ROPE: usize = 64;
/// Bytes of a row, and where in it scales and rotary channels begin.
pub(super) const SCALES_AT: u32 = CODES as u32;
pub(super) const ROPE_AT: u32 = SCALES_AT + 4 * SCALES as u32;
pub(super) const ROW_BYTES: u32 = ROPE_AT + 2 * ROPE as u32;
pub(super) const STAGE_BYTES: u32 = KEYS as u32 * ROW_BYTES;

/// Numbers from a row of scores to the next, and of weights: the padding spares bank conflicts.
pub(super) const SCORE_STRIDE: usize = KEYS + 4;
pub(super) const WEIGHT_STRIDE: usize = KEYS + 8;

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::mla_decode) struct Form {
    /// Tiles of query rows.
    pub(super) tiles: usize,
    /// Whether keys may be hidden.
    pub(super) causal: bool,
}

impl Form {
    /// That of these sizes, where the kernel takes them.
    pub(in crate::mla_decode) fn of(sizes: &DecodeSizes) -> Option<Form> {
        let layout = Fp8Layout { codes: CODES, rope: ROPE, scales: Fp8Scales::F32InRow };
        let fits = sizes.rows == RowFormat::Fp8(layout)
            && sizes.key_width == layout.width()
            && sizes.value_width == VALUE_WIDTH
            && super::is_bf16(sizes.elem)
            && sizes.heads <= MOST_HEADS;
        let tiles = if sizes.query_rows() > TILE_ROWS { 2 } else { 1 };
        fits.then_some(Form { tiles, causal: sizes.causal })
    }

    /// Those of any number of query tokens.
    pub(super) fn all(self) -> [Form; 2] {
        [1, 2].map(|tiles| Form { tiles, ..self })
    }

    /// Query rows of a cube.
    pub(in crate::mla_decode) const fn rows(self) -> usize {
        self.tiles * TILE_ROWS
    }

    /// Warps: four for each scheduler, for instructions wait for each other, or two where registers are not enough.
    pub(super) const fn warps(self) -> usize {
        if self.tiles == 1 { 16 } else { 8 }
    }

    pub(super) const fn units(self) -> u32 {
        32 * self.warps() as u32
    }

    /// Rows whose weights a warp computes.
    pub(super) const fn own_rows(self) -> usize {
        self.rows() / self.warps()
    }

    /// Keys of a block that a warp computes the scores of, with the codes of one scale.
    pub(super) const fn own_keys(self) -> usize {
        KEYS * SCALES / self.warps()
    }

    /// Channels of the output that a warp has.
    pub(super) const fn channels(self) -> usize {
        VALUE_WIDTH / self.warps()
    }

    /// Those of a key that a thread loads: neighbours, one of each product.
    pub(super) const fn own_channels(self) -> usize {
        self.channels() / 8
    }
}
