//! Weights in blocks of codes: tiles of codes in shared memory, decoded into the registers from which `wgmma` takes A.
//!
//! A unit has the elements of A that the instruction wants of it: of rows `t / 4` and `t / 4 + 8` of its warp's 16 two neighbouring
//! channels of every eight. What is multiplied are the bits of the dequantised weight, or FP8 codes as they are, where sums take the scale.

use cubecl::prelude::*;
use half::{bf16, f16};

use super::schedule::Place;
use super::{CHANNELS, Form, GROUP};
use crate::linear::packed::{
    BlockLayout, FP4_COLUMNS, FP8_COLUMNS, e2m1_pair, e2m1_pair_of_byte, e4m3_halves_of_pair, e4m3_halves_of_word,
    e4m3_number_bf16, e4m3_pair, e8m0, e8m0_pair_bf16,
};
use crate::linear::{WeightArg, WeightFormat};
use crate::ptx::wgmma::Elem;
use crate::ptx::{math, matrix};

/// Registers of A for a block: two neighbouring channels each.
pub(super) const PAIRS: usize = 16;

/// Where the scales of weights are. Launches make `ScalesArgs`.
#[derive(CubeType, CubeLaunch)]
#[allow(dead_code, reason = "kernels alone have values of it")]
pub(super) enum Scales {
    /// Dense weights have none.
    Dense,
    /// FP8's and FP4's, as `BlockLayout` says.
    Blocks(BlockScales),
}

#[derive(CubeType, CubeLaunch)]
pub(super) struct BlockScales {
    /// f32 of FP8, four exponents of FP4.
    words: &'static [u32],
    rows_log2: u32,
    across: u32,
    matrix: u32,
}

impl ScalesArgs {
    /// The numbers or codes of a weight, and its scales.
    pub(super) fn of(weight: WeightArg) -> (BufferArg, Self) {
        match weight {
            WeightArg::Dense(elements) => (elements, Self::Dense),
            WeightArg::Fp8(packed) | WeightArg::Fp4(packed) => {
                let BlockLayout { rows_log2, across, matrix } = packed.layout;
                let scales = BlockScalesLaunch::new(packed.scales, rows_log2, across as u32, matrix as u32);
                (packed.codes, Self::Blocks(scales))
            }
        }
    }
}

/// Nothing to launch.
#[cfg(feature = "offline")]
pub(super) fn offline(format: WeightFormat) -> ScalesArgs {
    match format {
        WeightFormat::Dense => ScalesArgs::Dense,
        WeightFormat::Fp8 | WeightFormat::Fp4 => {
            ScalesArgs::Blocks(BlockScalesLaunch::new(crate::offline::buffer(), 0, 1, 1))
        }
    }
}

/// The codes that a unit decodes of a tile: where the scales of its two rows are, and the rows themselves in a stage.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Codes {
    /// The first scale of each row.
    first: usize,
    second: usize,
    /// Scales of a row.
    across: usize,
    /// Bytes to the unit's first code in a warpgroup's rows.
    at: u32,
    /// What 16 bytes of a row are permuted by.
    swizzle: u32,
}

#[cube]
impl Codes {
    /// Those of a tile. `outputs` are rows of a matrix; of a gated output, of each half.
    pub fn new(scales: &Scales, place: &Place, group: u32, outputs: u32, #[comptime] form: Form) -> Codes {
        let (warp, lane) = (UNIT_POS % GROUP / 32, UNIT_POS % 32);
        let mut codes = Codes { first: 0usize, second: 0usize, across: 1usize, at: 0u32, swizzle: 0u32 };
        #[comptime]
        match scales {
            Scales::Dense => {}
            Scales::Blocks(blocks) => {
                let (of_tile, row) = (group * 4 + warp, lane / 4);
                // Past the last row, that one again: its codes are zeros.
                let mut first = min(place.output + of_tile * 16 + row, outputs - 1);
                let mut second = min(place.output + of_tile * 16 + row + 8, outputs - 1);
                if comptime!(form.linear.gated) {
                    first = min(place.output + of_tile * 8 + row, outputs - 1);
                    second = outputs + first;
                }
                let matrix = place.expert as usize * blocks.matrix as usize;
                codes.across = blocks.across as usize;
                codes.first = matrix + (first >> blocks.rows_log2) as usize * codes.across;
                codes.second = matrix + (second >> blocks.rows_log2) as usize * codes.across;
                let row = warp * 16 + row;
                if comptime!(form.scales_sums()) {
                    codes.at = row * 128 + lane % 4 * 2;
                    codes.swizzle = row % 8;
                } else if comptime!(form.format == WeightFormat::Fp8) {
                    codes.at = row * 64 + lane % 4 * 2;
                    codes.swizzle = row / 2 % 4;
                } else {
                    codes.at = row * 32 + lane % 4;
                    codes.swizzle = row / 4 % 2;
                }
            }
        }
        codes
    }

    /// The scales of the unit's two rows in a block of channels: f32 of FP8; codes of FP4, for each half of the block.
    pub fn factors(&self, scales: &Scales, block: u32, #[comptime] form: Form) -> Vector<u32, Const<4>> {
        let mut words = Vector::<u32, Const<4>>::new(0u32);
        #[comptime]
        match scales {
            Scales::Dense => {}
            Scales::Blocks(blocks) => {
                if comptime!(form.format == WeightFormat::Fp8) {
                    let column = block as usize / comptime!(FP8_COLUMNS / CHANNELS);
                    words.insert(0usize, blocks.words[self.first + column]);
                    words.insert(1usize, blocks.words[self.second + column]);
                } else {
                    #[unroll]
                    for half in 0..comptime!(CHANNELS / FP4_COLUMNS) {
                        let column = block as usize * comptime!(CHANNELS / FP4_COLUMNS) + half;
                        // A row may end within the block.
                        let column = min(column, self.across - 1);
                        words.insert(comptime!(2 * half), exponent(blocks, self.first + column));
                        words.insert(comptime!(2 * half + 1), exponent(blocks, self.second + column));
                    }
                }
            }
        }
        words
    }

    /// Decodes the codes of the warpgroup's rows of a block of channels of a stage, up to what [`finished`] does.
    pub fn decode<D: Size>(
        &self,
        rows_at: u32,
        factors: Vector<u32, Const<4>>,
        #[comptime] block: usize,
        #[comptime] form: Form,
    ) -> Vector<u32, D> {
        let mut words = Sequence::<u32>::new();
        #[unroll]
        for step in 0..4usize {
            // 16 channels are 16 bytes of FP8, and 8 of FP4.
            let bytes = comptime!(form.weight_columns() / 4);
            let unit = comptime!((block as u32 * 4 + step as u32) * bytes / 16) ^ self.swizzle;
            let at = rows_at + self.at + unit * 16;
            #[unroll]
            for eight in 0..2usize {
                let offset = comptime!(step as u32 * bytes % 16 + eight as u32 * bytes / 2);
                let below = comptime!(offset + 8 * form.weight_row_bytes());
                let first = matrix::load_low(at, offset, comptime!(bytes / 8));
                let second = matrix::load_low(at, below, comptime!(bytes / 8));
                if comptime!(Decoded::of(form) == Decoded::Codes) {
                    words.push(first);
                    words.push(second);
                } else if comptime!(form.cubes() == 2) {
                    // Fewer instructions, but more of them behind the products; two cubes hide that. The word takes a product and a sum,
                    // which have pipes of their own.
                    let (first, second) = e4m3_halves_of_word(second * 0x1_0000 + first, Elem::Bf16);
                    words.push(first);
                    words.push(second);
                } else {
                    decode_pair(&mut words, first, factors, comptime!(step / 2), 0usize, form);
                    decode_pair(&mut words, second, factors, comptime!(step / 2), 1usize, form);
                }
            }
        }
        math::vector::<u32, D>(&words)
    }
}

/// What a unit decodes of two codes, before [`finished`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Decoded {
    /// Two codes as they are, of which an instruction makes f16; their sums take the scale.
    Codes,
    /// Two bf16, whose exponents have the bias of E4M3; their sums take the scale, too.
    Halves,
    /// Two bf16 without the scale.
    Bf16,
    /// Two f32, to be rounded.
    F32,
}

impl Decoded {
    fn of(form: Form) -> Self {
        match form.format {
            _ if form.scales_sums() && form.elem() == Elem::F16 => Self::Codes,
            _ if form.scales_sums() => Self::Halves,
            WeightFormat::Fp4 if form.bf16 => Self::Bf16,
            _ => Self::F32,
        }
    }
}

/// Words that a unit decodes of a block.
pub(super) fn decoded_words(form: Form) -> usize {
    if Decoded::of(form) == Decoded::F32 { 2 * PAIRS } else { PAIRS }
}

/// A for the products with a block of channels. The compiler wants the registers of A written when no product is under way: so this is what
/// is left for then.
#[cube]
pub(super) fn finished<D: Size>(
    words: Vector<u32, D>,
    factors: Vector<u32, Const<4>>,
    #[comptime] form: Form,
) -> Vector<u32, Const<PAIRS>> {
    let mut pairs = Sequence::<u32>::new();
    #[unroll]
    for i in 0..PAIRS {
        if comptime!(Decoded::of(form) == Decoded::Codes) {
            pairs.push(math::e4m3_pair(words.extract(i), false));
        } else if comptime!(Decoded::of(form) == Decoded::Halves) {
            pairs.push(u32::reinterpret(e4m3_number_bf16(words.extract(i))));
        } else if comptime!(Decoded::of(form) == Decoded::Bf16) {
            let scale = e8m0_pair_bf16(factors.extract(comptime!(i / (PAIRS / 2) * 2 + i % 2)));
            let numbers: Vector<bf16, Const<2>> = Vector::<bf16, Const<2>>::reinterpret(words.extract(i)) * scale;
            pairs.push(u32::reinterpret(numbers));
        } else {
            let low = f32::reinterpret(words.extract(comptime!(2 * i)));
            let high = f32::reinterpret(words.extract(comptime!(2 * i + 1)));
            pairs.push(math::pack(low, high, comptime!(form.elem())));
        }
    }
    math::vector::<u32, Const<PAIRS>>(&pairs)
}

/// The code of an exponent, in the low 8 bits.
#[cube]
fn exponent(blocks: &BlockScales, place: usize) -> u32 {
    blocks.words[place / 4] >> (u32::cast_from(place % 4) * 8)
}

/// The numbers of two neighbouring codes of a row.
#[cube]
fn decode_pair(
    words: &mut Sequence<u32>,
    codes: u32,
    factors: Vector<u32, Const<4>>,
    #[comptime] half: usize,
    #[comptime] row: usize,
    #[comptime] form: Form,
) {
    if comptime!(Decoded::of(form) == Decoded::Halves) {
        words.push(e4m3_halves_of_pair(math::permute(codes, 0x1404u32), Elem::Bf16));
    } else if comptime!(Decoded::of(form) == Decoded::Bf16) {
        words.push(u32::reinterpret(e2m1_pair_of_byte(codes)));
    } else if comptime!(form.format == WeightFormat::Fp8) {
        push_scaled(words, e4m3_pair(math::permute(codes, 0x1404u32)), f32::reinterpret(factors.extract(row)));
    } else {
        // The codes of a byte, each in a half of the word.
        let numbers = e2m1_pair(codes | (codes << 12));
        push_scaled(words, numbers, e8m0(factors.extract(comptime!(2 * half + row))));
    }
}

/// Products with the scale.
#[cube]
fn push_scaled(words: &mut Sequence<u32>, numbers: Vector<f16, Const<2>>, scale: f32) {
    words.push(u32::reinterpret(f32::cast_from(numbers.extract(0usize)) * scale));
    words.push(u32::reinterpret(f32::cast_from(numbers.extract(1usize)) * scale));
}
