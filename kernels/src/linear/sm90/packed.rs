//! Weights in blocks of codes: tiles of codes in shared memory, decoded into the registers from which `wgmma` takes A.
//!
//! A unit has the elements of A that the instruction wants of it: of rows `t / 4` and `t / 4 + 8` of its warp's 16 two neighbouring
//! channels of every eight; of arranged rows (`arranged.rs`) channels whose codes are in one word. What is multiplied are the bits of the
//! dequantised weight, or FP8 codes as they are, where sums take the scale.

use cubecl::prelude::*;
use half::{bf16, f16};

use super::schedule::Place;
use super::{CHANNELS, Form, GROUP};
use crate::linear::packed::{
    BlockLayout, FP4_COLUMNS, FP8_COLUMNS, e2m1_pair, e2m1_pair_of_byte, e2m1_pair_of_word, e4m3_halves_of_pair,
    e4m3_halves_of_word, e4m3_number_bf16, e4m3_pair, e8m0, e8m0_pair_bf16, e8m0_pair_bf16_of_word,
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
    /// Bytes to the unit's first row in a warpgroup's.
    at: u32,
    /// Which pair of every eight channels it has, or which eight of 32.
    quarter: u32,
    /// What 16 bytes of a row are permuted by.
    swizzle: u32,
}

#[cube]
impl Codes {
    /// Those of a tile. `outputs` are rows of a matrix; of a gated output, of each half.
    pub fn new(scales: &Scales, place: &Place, group: u32, outputs: u32, #[comptime] form: Form) -> Codes {
        let (warp, lane) = (UNIT_POS % GROUP / 32, UNIT_POS % 32);
        let mut codes = Codes { first: 0usize, second: 0usize, across: 1usize, at: 0u32, quarter: 0u32, swizzle: 0u32 };
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
                codes.at = row * comptime!(form.weight_row_bytes());
                codes.quarter = lane % 4;
                let units = comptime!(form.weight_row_bytes() / 16);
                codes.swizzle = row / comptime!(8 / units) % units;
            }
        }
        codes
    }

    /// The scales of the unit's two rows in a block of channels, or both of a stage: f32 of FP8; codes of FP4, for each half of the block, or four
    /// of each row in a word.
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
                } else if comptime!(form.stage_blocks() > 1) {
                    let column = block as usize * comptime!(CHANNELS / FP4_COLUMNS);
                    // A row may end within the stage.
                    let count = u32::cast_from(self.across - column);
                    words.insert(0usize, four(blocks, self.first + column, count));
                    words.insert(1usize, four(blocks, self.second + column, count));
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
        for half in 0..2usize {
            let first = self.load(rows_at, block, half, 0usize, form);
            let second = self.load(rows_at, block, half, 1usize, form);
            if comptime!(Decoded::of(form) == Decoded::Codes && form.is_arranged()) {
                words.push(first[0]);
                words.push(first[1]);
                words.push(second[0]);
                words.push(second[1]);
            } else if comptime!(Decoded::of(form) == Decoded::Codes) {
                #[unroll]
                for i in 0..4usize {
                    words.push(first[i]);
                    words.push(second[i]);
                }
            } else if comptime!(form.scales_sums() && form.cubes() == 2) {
                #[unroll]
                for i in 0..4usize {
                    // Fewer instructions, but more of them behind the products; two cubes hide that. The word takes a product and a sum,
                    // which have pipes of their own.
                    let (first, second) = e4m3_halves_of_word(second[i] * 0x1_0000 + first[i], Elem::Bf16);
                    words.push(first);
                    words.push(second);
                }
            } else {
                #[unroll]
                for i in 0..4usize {
                    decode_pair(&mut words, &first, factors, block, half, 0usize, i, form);
                    decode_pair(&mut words, &second, factors, block, half, 1usize, i, form);
                }
            }
        }
        math::vector::<u32, D>(&words)
    }

    /// The codes of half a block of one of the unit's two rows: pairs of neighbours, each in a word, or if they are arranged eight in one word of
    /// FP4 or two of FP8.
    fn load(
        &self,
        rows_at: u32,
        #[comptime] block: usize,
        #[comptime] half: usize,
        #[comptime] row: usize,
        #[comptime] form: Form,
    ) -> Sequence<u32> {
        let mut words = Sequence::<u32>::new();
        // Bytes of eight codes, to the second row, and to the half.
        let eight = comptime!(form.weight_columns() / 8);
        let below = comptime!(row as u32 * 8 * form.weight_row_bytes());
        let first = comptime!((block * 2 + half) as u32 * 4 * eight);
        if comptime!(form.is_arranged()) {
            let from = first + self.quarter * eight;
            let at = rows_at + self.at + (((from / 16) ^ self.swizzle) * 16) + from % 16;
            if comptime!(form.format == WeightFormat::Fp8) {
                let pair = matrix::load_8(at, below);
                words.push(pair.extract(0usize));
                words.push(pair.extract(1usize));
            } else {
                words.push(matrix::load_4(at, below));
            }
        } else {
            #[unroll]
            for i in 0..4usize {
                let from = comptime!(first + i as u32 * eight);
                let at = rows_at + self.at + self.quarter * (eight / 4) + ((from / 16) ^ self.swizzle) * 16;
                words.push(matrix::load_low(at, comptime!(from % 16 + below), comptime!(eight / 4)));
            }
        }
        words
    }
}

/// Which channel of 32 the tokens have where element `high` of pair `pair` of unit `unit` of four is multiplied, so that the unit's codes are
/// neighbours. Of eight in a word of FP4 those are decoded together that are four apart.
#[cube]
pub(super) fn channel(
    #[comptime] unit: usize,
    pair: usize,
    #[comptime] high: usize,
    #[comptime] format: WeightFormat,
) -> usize {
    if comptime!(format == WeightFormat::Fp4) {
        pair + comptime!(8 * unit + 4 * high)
    } else {
        2 * pair + comptime!(8 * unit + high)
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
    match Decoded::of(form) {
        Decoded::F32 => 2 * PAIRS,
        Decoded::Codes if form.is_arranged() => PAIRS / 2,
        _ => PAIRS,
    }
}

/// A for the products with a block of channels. The compiler wants the registers of A written when no product is under way: so this is what
/// is left for then.
#[cube]
pub(super) fn finished<D: Size>(
    words: Vector<u32, D>,
    factors: Vector<u32, Const<4>>,
    #[comptime] block: usize,
    #[comptime] form: Form,
) -> Vector<u32, Const<PAIRS>> {
    let mut pairs = Sequence::<u32>::new();
    #[unroll]
    for i in 0..PAIRS {
        if comptime!(Decoded::of(form) == Decoded::Codes && form.is_arranged()) {
            // A half has two words of each row, with two pairs each.
            let pair = comptime!(i / 2 % 4);
            let word = words.extract(comptime!(i / 8 * 4 + i % 2 * 2 + pair / 2));
            pairs.push(math::e4m3_pair(word, comptime!(pair % 2 == 1)));
        } else if comptime!(Decoded::of(form) == Decoded::Codes) {
            pairs.push(math::e4m3_pair(words.extract(i), false));
        } else if comptime!(Decoded::of(form) == Decoded::Halves) {
            pairs.push(u32::reinterpret(e4m3_number_bf16(words.extract(i))));
        } else if comptime!(Decoded::of(form) == Decoded::Bf16) {
            let half = comptime!(i / (PAIRS / 2));
            let row = comptime!(i % 2);
            let scale = if comptime!(form.stage_blocks() > 1) {
                e8m0_pair_bf16_of_word(factors.extract(row), comptime!(2 * block + half))
            } else {
                e8m0_pair_bf16(factors.extract(comptime!(2 * half + row)))
            };
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

/// The codes of four exponents from this place on; zeros in place of those behind the first `count`.
#[cube]
fn four(blocks: &BlockScales, place: usize, count: u32) -> u32 {
    let word = place / 4;
    // The next word is needed where rows do not begin with one.
    let next = min(word + 1, blocks.words.len() - 1);
    let both = u64::cast_from(blocks.words[word]) | (u64::cast_from(blocks.words[next]) << 32u64);
    u32::cast_from(both >> (u64::cast_from(place % 4) * 8)) & (u32::MAX >> (32 - 8 * min(count, 4u32)))
}

/// The code of an exponent, in the low 8 bits.
#[cube]
fn exponent(blocks: &BlockScales, place: usize) -> u32 {
    blocks.words[place / 4] >> (u32::cast_from(place % 4) * 8)
}

/// The code of the exponent of half a block of one of the unit's rows, in the low 8 bits.
#[cube]
fn exponent_of(
    factors: Vector<u32, Const<4>>,
    #[comptime] block: usize,
    #[comptime] half: usize,
    #[comptime] row: usize,
    #[comptime] form: Form,
) -> u32 {
    if comptime!(form.stage_blocks() > 1) {
        factors.extract(row) >> comptime!(8 * (2 * block + half) as u32)
    } else {
        factors.extract(comptime!(2 * half + row))
    }
}

/// The numbers of pair `i` of half a block of one of the unit's rows.
#[cube]
fn decode_pair(
    words: &mut Sequence<u32>,
    codes: &Sequence<u32>,
    factors: Vector<u32, Const<4>>,
    #[comptime] block: usize,
    #[comptime] half: usize,
    #[comptime] row: usize,
    #[comptime] i: usize,
    #[comptime] form: Form,
) {
    let arranged = comptime!(form.is_arranged());
    if comptime!(form.format == WeightFormat::Fp8) {
        // The codes in the upper bytes of each half of the word.
        let own = if comptime!(arranged) {
            math::permute(codes[comptime!(i / 2)], comptime!(if i.is_multiple_of(2) { 0x1404u32 } else { 0x3424u32 }))
        } else {
            math::permute(codes[i], 0x1404u32)
        };
        if comptime!(Decoded::of(form) == Decoded::Halves) {
            words.push(e4m3_halves_of_pair(own, Elem::Bf16));
        } else {
            push_scaled(words, e4m3_pair(own), f32::reinterpret(factors.extract(row)));
        }
    } else if comptime!(Decoded::of(form) == Decoded::Bf16) {
        if comptime!(arranged) {
            words.push(u32::reinterpret(e2m1_pair_of_word(codes[0], i)));
        } else {
            words.push(u32::reinterpret(e2m1_pair_of_byte(codes[i])));
        }
    } else {
        // Each in the lowest bits of a half of the word: the codes of a byte, or two that are four apart.
        let own = if comptime!(arranged) { codes[0] >> comptime!(4 * i as u32) } else { codes[i] | (codes[i] << 12) };
        push_scaled(words, e2m1_pair(own), e8m0(exponent_of(factors, block, half, row, form)));
    }
}

/// Products with the scale.
#[cube]
fn push_scaled(words: &mut Sequence<u32>, numbers: Vector<f16, Const<2>>, scale: f32) {
    words.push(u32::reinterpret(f32::cast_from(numbers.extract(0usize)) * scale));
    words.push(u32::reinterpret(f32::cast_from(numbers.extract(1usize)) * scale));
}
