//! Blocks of codes with a scale each, decoded in registers: FP8 E4M3 and FP4 E2M1.
//!
//! A code becomes an f32 by moving its exponent and fraction to where f32 has them, with the difference of the biases added to
//! the exponent: no table is read. Codes below the smallest normal number have no hidden bit; they take the exponent one above,
//! and what that adds is subtracted again. All of it is exact. The product with the scale is f32, rounded to the dtype of the
//! weight: the bits that a dequantised weight has.
//!
//! NVIDIA's GPUs decode two codes in one instruction each: as a pair of f16, whose exponent is wider than that of either format, and
//! which has no need of a hidden bit, since it knows numbers without one and does not flush them. That is half of the work, and
//! makes kernels wait for the memory.
//!
//! Sources: OCP 8-bit floating point specification 1.0, table 1; OCP microscaling specification 1.0, sections 5.3 and 5.4.

use cubecl::ir::FloatKind;
use cubecl::prelude::*;
use half::{bf16, f16};

#[cfg(feature = "cuda")]
use crate::common::launch::share;
use crate::linear::weight::WeightRow;
#[cfg(feature = "cuda")]
use crate::ptx::math;

/// Columns of a block of FP8.
pub const FP8_COLUMNS: usize = 128;
/// Columns of a block of FP4.
pub const FP4_COLUMNS: usize = 32;

/// Matrices `[outputs, inputs]`, one or a stack, as codes and scales.
pub struct PackedArg {
    /// u32: the codes of all rows one after the other, the first of a word in its low bits.
    pub codes: BufferArg,
    /// One for each block, as the format has them.
    pub scales: BufferArg,
    /// Where they are.
    pub layout: BlockLayout,
}

impl PackedArg {
    /// The same once more.
    #[cfg(feature = "cuda")]
    pub(super) fn share(&self) -> Self {
        Self { codes: share(&self.codes), scales: share(&self.scales), layout: self.layout }
    }
}

/// Where the scales of blocks are: rows of blocks one after the other, matrix after matrix.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct BlockLayout {
    /// The logarithm of the rows of a block, to base 2. A matrix begins with a block.
    pub rows_log2: u32,
    /// Blocks of a row.
    pub across: usize,
    /// Blocks of a matrix.
    pub matrix: usize,
}

/// E4M3 codes in a kernel.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Fp8Rows {
    codes: &'static [u32],
    scales: &'static [f32],
    rows_log2: u32,
    across: usize,
    matrix: usize,
    /// Whether codes are decoded in pairs.
    #[cube(comptime)]
    pairs: bool,
}

/// E2M1 codes in a kernel; a block is part of one row.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Fp4Rows {
    codes: &'static [u32],
    scales: &'static [u32],
    across: usize,
    matrix: usize,
    /// Whether codes are decoded in pairs.
    #[cube(comptime)]
    pairs: bool,
}

/// Columns that the words of a load stand for, where codes are fetched before they are decoded.
pub(super) const FETCHED: usize = 8;

#[cube]
impl Fp8Rows {
    /// A vector of a row, which lies in one block, decoded.
    pub(crate) fn load<E: Float, V: Size>(&self, row: &WeightRow, column: usize) -> Vector<E, V> {
        let lanes = V::value().comptime();
        if comptime!(lanes == FETCHED) {
            self.decode::<E, V>(self.words(row, column), self.scale::<V>(row, column))
        } else {
            let scale = self.scale::<V>(row, column);
            let vector = row.first + column;
            let mut values = Vector::<E, V>::new(E::from_int(0));
            if comptime!(lanes >= 4) {
                #[unroll]
                for word in 0..comptime!(lanes / 4) {
                    let codes = self.codes[vector * comptime!(lanes / 4) + word];
                    decode_e4m3::<E, V>(&mut values, codes, scale, comptime!(4 * word), self.pairs);
                }
            } else {
                let first = vector * lanes;
                let codes = self.codes[first / 4] >> (u32::cast_from(first % 4) * 8);
                #[unroll]
                for i in 0..lanes {
                    let value = e4m3(codes >> comptime!(8 * i as u32)) * scale;
                    values.insert(i, E::cast_from(value));
                }
            }
            values
        }
    }

    /// The codes of 8 columns, by one load where the device decodes in pairs.
    pub(crate) fn words(&self, row: &WeightRow, column: usize) -> Vector<u32, Const<2>> {
        let vector = row.first + column;
        if comptime!(self.pairs) {
            self.codes.as_vectorized().with_vector_size::<Const<2>>()[vector]
        } else {
            let mut words = Vector::<u32, Const<2>>::new(self.codes[vector * 2]);
            words.insert(1usize, self.codes[vector * 2 + 1]);
            words
        }
    }

    /// The codes of 16 columns.
    #[cfg(feature = "cuda")]
    pub(crate) fn words_of_16(&self, row: &WeightRow, column: usize) -> Vector<u32, Const<4>> {
        self.codes.as_vectorized().with_vector_size::<Const<4>>()[(row.first + column) / 2]
    }

    /// Their scale.
    pub(crate) fn scale<V: Size>(&self, row: &WeightRow, column: usize) -> f32 {
        let block = (row.column + column) * V::value().comptime() / FP8_COLUMNS;
        let row_of_blocks = row.row >> self.rows_log2 as usize;
        self.scales[row.matrix * self.matrix + row_of_blocks * self.across + block]
    }

    /// What these codes stand for.
    pub(crate) fn decode<E: Float, V: Size>(&self, words: Vector<u32, Const<2>>, scale: f32) -> Vector<E, V> {
        let mut values = Vector::<E, V>::new(E::from_int(0));
        #[unroll]
        for word in 0..2usize {
            decode_e4m3::<E, V>(&mut values, words.extract(word), scale, comptime!(4 * word), self.pairs);
        }
        values
    }
}

/// The numbers of a word of E4M3 codes, from place `first` of a vector on.
#[cube]
pub(crate) fn decode_e4m3<E: Float, V: Size>(
    values: &mut Vector<E, V>,
    codes: u32,
    scale: f32,
    #[comptime] first: usize,
    #[comptime] pairs: bool,
) {
    if comptime!(pairs) {
        #[unroll]
        for i in 0..2usize {
            let pair = e4m3_pair(codes << comptime!(8 - 8 * i as u32));
            let (low, high) = (f32::cast_from(pair.extract(0usize)), f32::cast_from(pair.extract(1usize)));
            values.insert(comptime!(first + i), E::cast_from(low * scale));
            values.insert(comptime!(first + i + 2), E::cast_from(high * scale));
        }
    } else {
        #[unroll]
        for i in 0..4usize {
            let value = e4m3(codes >> comptime!(8 * i as u32)) * scale;
            values.insert(comptime!(first + i), E::cast_from(value));
        }
    }
}

#[cube]
impl Fp4Rows {
    /// A vector of a row, which lies in one block, decoded.
    pub(crate) fn load<E: Float, V: Size>(&self, row: &WeightRow, column: usize) -> Vector<E, V> {
        let lanes = V::value().comptime();
        if comptime!(lanes == FETCHED) {
            self.decode::<E, V>(self.word(row, column), self.scale_code::<V>(row, column))
        } else {
            let scale = e8m0(self.scale_code::<V>(row, column));
            let first = (row.first + column) * lanes;
            let codes = self.codes[first / 8] >> (u32::cast_from(first % 8) * 4);
            let mut values = Vector::<E, V>::new(E::from_int(0));
            #[unroll]
            for i in 0..lanes {
                let value = e2m1(codes >> comptime!(4 * i as u32)) * scale;
                values.insert(i, E::cast_from(value));
            }
            values
        }
    }

    /// The codes of 8 columns.
    pub(crate) fn word(&self, row: &WeightRow, column: usize) -> u32 {
        self.codes[row.first + column]
    }

    /// The codes of 16 columns.
    #[cfg(feature = "cuda")]
    pub(crate) fn words_of_16(&self, row: &WeightRow, column: usize) -> Vector<u32, Const<2>> {
        self.codes.as_vectorized().with_vector_size::<Const<2>>()[(row.first + column) / 2]
    }

    /// The codes of 32 columns.
    #[cfg(feature = "cuda")]
    pub(crate) fn words_of_32(&self, row: &WeightRow, column: usize) -> Vector<u32, Const<4>> {
        self.codes.as_vectorized().with_vector_size::<Const<4>>()[(row.first + column) / 4]
    }

    /// The codes of the scales of four blocks, of which one has this column, in rows of a multiple of 128 columns.
    #[cfg(feature = "cuda")]
    pub(crate) fn scale_codes<V: Size>(&self, row: &WeightRow, column: usize) -> u32 {
        let block = (row.column + column) * V::value().comptime() / FP4_COLUMNS;
        self.scales[(row.matrix * self.matrix + row.row * self.across + block) / 4]
    }

    /// The code of their scale, in the low 8 bits.
    pub(crate) fn scale_code<V: Size>(&self, row: &WeightRow, column: usize) -> u32 {
        let block = (row.column + column) * V::value().comptime() / FP4_COLUMNS;
        let place = row.matrix * self.matrix + row.row * self.across + block;
        self.scales[place / 4] >> (u32::cast_from(place % 4) * 8)
    }

    /// What these codes stand for.
    pub(crate) fn decode<E: Float, V: Size>(&self, codes: u32, scale_code: u32) -> Vector<E, V> {
        let scale = e8m0(scale_code);
        let in_bf16 = is_bf16::<E>();
        let mut values = Vector::<E, V>::new(E::from_int(0));
        if comptime!(self.pairs && in_bf16) {
            let scale = e8m0_pair_bf16(scale_code);
            #[unroll]
            for i in 0..4usize {
                let pair = e2m1_pair_bf16(codes >> comptime!(4 * i as u32)) * scale;
                values.insert(i, E::cast_from(pair.extract(0usize)));
                values.insert(comptime!(i + 4), E::cast_from(pair.extract(1usize)));
            }
        } else if comptime!(self.pairs) {
            #[unroll]
            for i in 0..4usize {
                let pair = e2m1_pair(codes >> comptime!(4 * i as u32));
                let (low, high) = (f32::cast_from(pair.extract(0usize)), f32::cast_from(pair.extract(1usize)));
                values.insert(i, E::cast_from(low * scale));
                values.insert(comptime!(i + 4), E::cast_from(high * scale));
            }
        } else {
            #[unroll]
            for i in 0..8usize {
                let value = e2m1(codes >> comptime!(4 * i as u32)) * scale;
                values.insert(i, E::cast_from(value));
            }
        }
        values
    }
}

/// Whether numbers are bf16.
#[cube]
#[allow(clippy::extra_unused_type_parameters, reason = "its expansion looks at the type")]
pub(crate) fn is_bf16<E: Float>() -> comptime_type!(bool) {
    intrinsic!(|scope| E::elem_type(scope) == ElemType::Float(FloatKind::BF16))
}

/// The number of the E4M3 code in the low 8 bits.
#[cube]
pub(crate) fn e4m3(code: u32) -> f32 {
    let magnitude = code & 0x7f;
    let is_small = magnitude < 8;
    let bits = (magnitude << 20) + select(is_small, comptime!(121u32 << 23), comptime!(120u32 << 23));
    let value = f32::reinterpret(bits) - select(is_small, 0.015625f32, 0.0f32);
    f32::reinterpret(u32::reinterpret(value) | ((code & 0x80) << 24))
}

/// The number of the E2M1 code in the low 4 bits.
#[cube]
fn e2m1(code: u32) -> f32 {
    let magnitude = code & 0x7;
    let is_small = magnitude < 2;
    let bits = (magnitude << 22) + select(is_small, comptime!(127u32 << 23), comptime!(126u32 << 23));
    let value = f32::reinterpret(bits) - select(is_small, 1.0f32, 0.0f32);
    f32::reinterpret(u32::reinterpret(value) | ((code & 0x8) << 28))
}

/// The power of two of the E8M0 code in the low 8 bits; the smallest has no hidden bit.
#[cube]
pub(super) fn e8m0(code: u32) -> f32 {
    let exponent = code & 0xff;
    f32::reinterpret(select(exponent == 0, comptime!(1u32 << 22), exponent << 23))
}

/// The numbers of the E4M3 codes in the upper 8 bits of each half of a word.
#[cube]
pub(super) fn e4m3_pair(codes: u32) -> Vector<f16, Const<2>> {
    let pair = Vector::<f16, Const<2>>::reinterpret(e4m3_halves(codes));
    pair * Vector::<f16, Const<2>>::new(f16::from_int(E4M3_FACTOR))
}

/// The numbers of the E2M1 codes in the lowest 4 bits of each half of a word.
#[cube]
pub(super) fn e2m1_pair(codes: u32) -> Vector<f16, Const<2>> {
    let pair = Vector::<f16, Const<2>>::reinterpret(e2m1_halves(codes));
    pair * Vector::<f16, Const<2>>::new(f16::from_int(E2M1_FACTOR))
}

/// The same of E4M3 codes in the upper 8 bits of each half of a word, as bf16.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn e4m3_pair_bf16(codes: u32) -> Vector<bf16, Const<2>> {
    let halves = (codes & 0x8000_8000) | ((codes & 0x7f00_7f00) >> 4);
    Vector::<bf16, Const<2>>::reinterpret(halves)
        * Vector::<bf16, Const<2>>::reinterpret(comptime!(E4M3_FACTOR_BF16).runtime())
}

/// The numbers of the four E4M3 codes of a word, as bf16.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn e4m3_pairs_bf16(codes: u32) -> (Vector<bf16, Const<2>>, Vector<bf16, Const<2>>) {
    // Upper and lower bytes of all four: a code is a sign, four bits of exponent and three of mantissa, a bf16 a sign, eight bits and seven.
    let upper = (codes & 0x8080_8080) | ((codes >> 4) & 0x0707_0707);
    let lower = (codes << 4) & 0xf0f0_f0f0;
    let factor = Vector::<bf16, Const<2>>::reinterpret(comptime!(E4M3_FACTOR_BF16).runtime());
    let low = Vector::<bf16, Const<2>>::reinterpret(math::permute_two(lower, upper, 0x5140u32));
    let high = Vector::<bf16, Const<2>>::reinterpret(math::permute_two(lower, upper, 0x7362u32));
    (low * factor, high * factor)
}

/// The same as f16.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn e4m3_pairs_f16(codes: u32) -> (Vector<f16, Const<2>>, Vector<f16, Const<2>>) {
    // A f16 is a sign, five bits of exponent and ten of mantissa.
    let upper = (codes & 0x8080_8080) | ((codes >> 1) & 0x3f3f_3f3f);
    let lower = (codes << 7) & 0x8080_8080;
    let factor = Vector::<f16, Const<2>>::new(f16::from_int(E4M3_FACTOR));
    let low = Vector::<f16, Const<2>>::reinterpret(math::permute_two(lower, upper, 0x5140u32));
    let high = Vector::<f16, Const<2>>::reinterpret(math::permute_two(lower, upper, 0x7362u32));
    (low * factor, high * factor)
}

/// The same as bf16, whose exponent is wide enough for the product with a power of two to be exact.
#[cube]
pub(super) fn e2m1_pair_bf16(codes: u32) -> Vector<bf16, Const<2>> {
    let halves = ((codes & 0x0008_0008) << 12) | ((codes & 0x0007_0007) << 6);
    let pair = Vector::<bf16, Const<2>>::reinterpret(halves);
    pair * Vector::<bf16, Const<2>>::reinterpret(comptime!(E2M1_FACTOR_BF16).runtime())
}

/// The numbers of code `i` of a word of E2M1 and of code `i + 4`, as bf16.
#[cfg(feature = "cuda")]
#[cube]
pub(super) fn e2m1_pair_of_word(word: u32, #[comptime] i: usize) -> Vector<bf16, Const<2>> {
    Vector::<bf16, Const<2>>::reinterpret(e2m1_halves_of_word(word, i))
        * Vector::<bf16, Const<2>>::reinterpret(comptime!(E2M1_FACTOR_BF16).runtime())
}

/// The numbers of the two codes of a byte, as bf16.
#[cfg(feature = "cuda")]
#[cube]
pub(super) fn e2m1_pair_of_byte(byte: u32) -> Vector<bf16, Const<2>> {
    Vector::<bf16, Const<2>>::reinterpret(e2m1_halves_of_word((byte * 0x1001) & 0x000f_000f, 0usize))
        * Vector::<bf16, Const<2>>::reinterpret(comptime!(E2M1_FACTOR_BF16).runtime())
}

/// The halves of [`e2m1_pair_of_word`], whose exponents have the bias of the codes. Sign and exponent are moved by one product with two powers of two: products have
/// pipes of their own, and what limits kernels that decode are shifts and masks.
#[cfg(any(feature = "cuda", test))]
#[cube]
fn e2m1_halves_of_word(word: u32, #[comptime] i: usize) -> u32 {
    let mut codes = word;
    if comptime!(i >= 2) {
        codes = word >> 8;
    }
    let own = codes & comptime!(0x000f_000fu32 << (4 * (i as u32 % 2)));
    (own * comptime!(0x1040u32 >> (4 * (i as u32 % 2)))) & 0x81c0_81c0
}

/// The power of two of the E8M0 code in the low 8 bits, in both halves of a pair.
#[cube]
pub(super) fn e8m0_pair_bf16(code: u32) -> Vector<bf16, Const<2>> {
    Vector::<bf16, Const<2>>::reinterpret(e8m0_halves(code))
}

/// Its bits. The smallest has no hidden bit.
#[cube]
fn e8m0_halves(code: u32) -> u32 {
    max((code & 0xff) * 0x0080_0080, 0x0040_0040u32)
}

/// 2^120 twice: the difference between the bias of bf16 and that of E4M3.
#[cfg(feature = "cuda")]
const E4M3_FACTOR_BF16: u32 = 0x7b80_7b80;
/// 2^126 twice: the difference between the bias of bf16 and that of E2M1.
const E2M1_FACTOR_BF16: u32 = 0x7e80_7e80;

/// What the codes are multiplied by: the difference between the bias of f16 and that of the format.
pub(super) const E4M3_FACTOR: i64 = 1 << (15 - 7);
pub(super) const E2M1_FACTOR: i64 = 1 << (15 - 1);

/// E4M3 codes as two f16 whose exponents have the bias of the codes.
#[cube]
pub(super) fn e4m3_halves(codes: u32) -> u32 {
    (codes & 0x8000_8000) | ((codes & 0x7f00_7f00) >> 1)
}

/// The same of E2M1 codes.
#[cube]
pub(super) fn e2m1_halves(codes: u32) -> u32 {
    ((codes & 0x0008_0008) << 12) | ((codes & 0x0007_0007) << 9)
}

/// Whether a device decodes in pairs: where the compiler keeps numbers of f16 below its normal ones.
pub(crate) fn decodes_pairs(client: &Client) -> bool {
    client.properties().identity.fingerprint.starts_with("ptx_")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(code: u32, [exponent_bits, fraction_bits]: [u32; 2], bias: i32) -> f32 {
        let (exponent, fraction) =
            (code >> fraction_bits & ((1 << exponent_bits) - 1), code & ((1 << fraction_bits) - 1));
        let fraction = fraction as f32 / (1 << fraction_bits) as f32;
        let magnitude = match exponent {
            0 => fraction * 2f32.powi(1 - bias),
            _ => (1.0 + fraction) * 2f32.powi(exponent as i32 - bias),
        };
        if code >> (exponent_bits + fraction_bits) == 1 { -magnitude } else { magnitude }
    }

    /// Multiplied as f16, pairs are the numbers of their codes, to the bit.
    #[test]
    fn pairs_are_exact() {
        let halves = |word: u32| [word as u16, (word >> 16) as u16].map(f16::from_bits);
        let times = |half: f16, factor: i64| (half * f16::from_f32(factor as f32)).to_f32().to_bits();
        for (low, high) in (0..256).flat_map(|low| [0x38, 0x81, 255 - low].map(|high| (low, high))) {
            let codes = [low, high];
            if codes.iter().all(|code| code & 0x7f != 0x7f) {
                let pair = halves(e4m3_halves(low << 8 | high << 24)).map(|half| times(half, E4M3_FACTOR));
                assert_eq!(pair, codes.map(|code| number(code, [4, 3], 7).to_bits()), "{codes:?}");
            }
            let codes = [low % 16, high % 16];
            let pair = halves(e2m1_halves(codes[0] | codes[1] << 16)).map(|half| times(half, E2M1_FACTOR));
            assert_eq!(pair, codes.map(|code| number(code, [2, 1], 1).to_bits()), "{codes:?}");
        }
    }

    /// Each code at each place of a word, with others about it, and each scale.
    #[test]
    fn pairs_of_a_word_and_scales_are_exact() {
        let halves = |word: u32| [word as u16, (word >> 16) as u16].map(|half| bf16::from_bits(half).to_f32());
        for (place, code, others) in (0..4usize).flat_map(|place| {
            (0..16u32).flat_map(move |code| [0, 0x5a5a_5a5a, u32::MAX].map(|others| (place, code, others)))
        }) {
            let codes = [code, 15 - code];
            let hole = 0x000f_000fu32 << (4 * place);
            let word = others & !hole | (codes[0] | codes[1] << 16) << (4 * place);
            let pair = halves(e2m1_halves_of_word(word, place)).map(|half| (half * 2f32.powi(126)).to_bits());
            assert_eq!(pair, codes.map(|code| number(code, [2, 1], 1).to_bits()), "{codes:?} at {place}");
        }
        for code in 0..255u32 {
            let power = 2f64.powi(code as i32 - 127) as f32;
            assert_eq!(halves(e8m0_halves(code | 0xab00)), [power; 2], "{code}");
        }
    }
}
