//! Weights in blocks of codes: tiles of codes in shared memory, decoded into the registers from which `wgmma` takes A.
//!
//! A unit has the elements of A that the instruction wants of it: of rows `t / 4` and `t / 4 + 8` of its warp's 16 two neighbouring
//! channels of every eight. What is multiplied are the bits of the dequantised weight.

use cubecl::prelude::*;
use half::{bf16, f16};

use super::schedule::Place;
use super::{CHANNELS, Form, GROUP};
use crate::linear::packed::{
    BlockLayout, E4M3_FACTOR, FP4_COLUMNS, FP8_COLUMNS, e2m1_pair, e2m1_pair_bf16, e4m3_halves, e8m0, twice_in_bf16,
};
use crate::linear::{WeightArg, WeightFormat};
use crate::ptx::{math, matrix};

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

/// Scales of a unit's two rows in a block of channels: f32 of FP8; of FP4 pairs in bf16, or f32 for f16, for each half of the block.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Factors {
    words: Vector<u32, Const<4>>,
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
                if comptime!(form.format == WeightFormat::Fp8) {
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

    /// The scales of a block of channels.
    pub fn factors(&self, scales: &Scales, block: u32, #[comptime] form: Form) -> Factors {
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
        Factors { words }
    }

    /// A for the products with a block of channels, from the codes of the warpgroup's rows.
    pub fn decode(&self, rows_at: u32, factors: &Factors, #[comptime] form: Form) -> Vector<u32, Const<16>> {
        let mut pairs = Sequence::<u32>::new();
        #[unroll]
        for step in 0..4usize {
            // 16 channels are 16 bytes of FP8, and 8 of FP4.
            let bytes = comptime!(form.weight_row_bytes() / 4);
            let unit = comptime!(step as u32 * bytes / 16) ^ self.swizzle;
            let at = rows_at + self.at + unit * 16;
            #[unroll]
            for eight in 0..2usize {
                #[unroll]
                for row in 0..2usize {
                    let within = comptime!(step as u32 * bytes % 16 + eight as u32 * bytes / 2);
                    let offset = comptime!(within + row as u32 * 8 * form.weight_row_bytes());
                    let codes = matrix::load_low(at, offset, comptime!(bytes / 8));
                    pairs.push(pair(codes, factors, comptime!(step / 2), row, form));
                }
            }
        }
        math::vector::<u32, Const<16>>(&pairs)
    }
}

/// The code of an exponent, in the low 8 bits.
#[cube]
fn exponent(blocks: &BlockScales, place: usize) -> u32 {
    blocks.words[place / 4] >> (u32::cast_from(place % 4) * 8)
}

/// The numbers of two neighbouring codes of a row, the first in the low half.
#[cube]
fn pair(codes: u32, factors: &Factors, #[comptime] half: usize, #[comptime] row: usize, #[comptime] form: Form) -> u32 {
    if comptime!(form.format == WeightFormat::Fp8) {
        let scale = f32::reinterpret(factors.words.extract(row));
        let halves = e4m3_halves(math::permute(codes, 0x1404u32));
        let numbers = Vector::<f16, Const<2>>::reinterpret(halves);
        scaled(numbers * Vector::<f16, Const<2>>::new(f16::from_int(E4M3_FACTOR)), scale, form)
    } else {
        let scale = e8m0(factors.words.extract(comptime!(2 * half + row)));
        // The codes of a byte, each in a half of the word.
        let apart = codes | (codes << 12);
        if comptime!(form.bf16) {
            let numbers: Vector<bf16, Const<2>> = e2m1_pair_bf16(apart) * twice_in_bf16(scale);
            u32::reinterpret(numbers)
        } else {
            scaled(e2m1_pair(apart), scale, form)
        }
    }
}

/// Products with the scale, rounded.
#[cube]
fn scaled(numbers: Vector<f16, Const<2>>, scale: f32, #[comptime] form: Form) -> u32 {
    let (low, high) = (f32::cast_from(numbers.extract(0usize)), f32::cast_from(numbers.extract(1usize)));
    math::pack(low * scale, high * scale, comptime!(form.elem()))
}
