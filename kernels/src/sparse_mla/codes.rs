//! FP8 rows in memory: where each begins, and the numbers that its codes stand for.

use cubecl::prelude::*;

use super::ScopeArgs;
use super::form::{Form, Stored};
use super::launch::scratch;
use crate::cache_rows::RowFormat;
use crate::common::launch::{dummy, share};
use crate::linear::packed::e4m3_pairs_bf16;
use crate::ptx::wgmma::Elem;
use crate::ptx::{math, matrix};

/// Words of a row of V3 and V4.
const ROW_V3: usize = 164;
const ROW_V4: usize = 144;
/// Where the scales begin in a row of V3, and the words of a row's scales behind the page in V4.
const SCALES_V3: usize = 128;
const SCALES_V4: usize = 2;
/// Where the rotary channels begin.
const ROPE_V3: usize = 132;
const ROPE_V4: usize = 112;

/// The FP8 rows of a list.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Codes<'a> {
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

/// The words of a scope's FP8 rows; of dense ones something that nobody reads.
pub(super) fn words(client: &Client, scope: &ScopeArgs) -> BufferArg {
    match (scope.rows.format(), scope.row_count) {
        (RowFormat::Dense, _) => dummy(client),
        // The first row is read where there is none.
        (RowFormat::Fp8(layout), 0) => scratch(client, layout.page_words()),
        (RowFormat::Fp8(_), _) => share(scope.rows.buffer()),
    }
}

/// Words of an FP8 row, and where its rotary channels begin in it.
pub(super) fn row_words(stored: Stored) -> [usize; 2] {
    if stored == Stored::V4 { [ROW_V4, ROPE_V4] } else { [ROW_V3, ROPE_V3] }
}

#[cube]
impl<'a> Codes<'a> {
    pub fn new(words: &'a [u32], pages: RowPages) -> Codes<'a> {
        Codes::<'a> { words, pages }
    }
}

#[cube]
impl Codes<'_> {
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

    /// The number of a row, or -1, where rows and the scales behind their pages are counted alike: those fill whole rows.
    pub fn row_of(&self, slot: i32, #[comptime] form: Form) -> i32 {
        if comptime!(form.paged_scales()) {
            let page = (slot as u32 >> self.pages.shift) * (self.pages.words / comptime!(ROW_V4 as u32));
            select(slot >= 0, (page + (slot as u32 & self.last_of_page())) as i32, i32::new(-1))
        } else {
            slot
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

/// A scale as two numbers in bf16: of a word that is one, or has one for each of four tiles.
#[cube]
pub(super) fn scale_pair(word: u32, tile: u32, #[comptime] form: Form) -> u32 {
    if comptime!(form.paged_scales()) {
        let code = (word >> (8 * tile)) & 0xff;
        // 255 is no number.
        let number = select(code == 255, 0x7fc0u32.runtime(), code << 7);
        number | number << 16
    } else {
        let scale = f32::reinterpret(word);
        math::pack(scale, scale, Elem::Bf16)
    }
}

/// Writes the numbers of 16 codes to two units of a row with swizzle, whose numbers differ in the lowest bit.
#[cube]
pub(super) fn store_vector(codes: Vector<u32, Const<4>>, scale: u32, to: u32, #[comptime] offset: u32) {
    matrix::store_16(to, offset, dequantised(codes.extract(0usize), codes.extract(1usize), scale));
    matrix::store_16(to ^ 16u32, offset, dequantised(codes.extract(2usize), codes.extract(3usize), scale));
}

/// The numbers of eight codes, in bf16.
#[cube]
fn dequantised(first: u32, second: u32, scale: u32) -> Vector<u32, Const<4>> {
    let scale = Vector::<half::bf16, Const<2>>::reinterpret(scale);
    let mut pairs = Sequence::<u32>::new();
    #[unroll]
    for word in 0..2u32 {
        let (low, high) = e4m3_pairs_bf16(if comptime!(word == 0) { first } else { second });
        pairs.push(u32::reinterpret(low * scale));
        pairs.push(u32::reinterpret(high * scale));
    }
    math::vector::<u32, Const<4>>(&pairs)
}
