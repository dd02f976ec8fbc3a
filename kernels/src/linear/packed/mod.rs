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

mod numbers;

use cubecl::prelude::*;

pub(crate) use self::numbers::*;
#[cfg(feature = "cuda")]
use crate::common::launch::share;
use crate::linear::weight_row::WeightRow;

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
        self.sixteen((row.first + column) / 2)
    }

    /// Those of number `number`, counted from the first of all columns.
    #[cfg(feature = "cuda")]
    pub(crate) fn sixteen(&self, number: usize) -> Vector<u32, Const<4>> {
        self.codes.as_vectorized().with_vector_size::<Const<4>>()[number]
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
        self.thirty_two((row.first + column) / 4)
    }

    /// Those of number `number`, counted from the first of all columns.
    #[cfg(feature = "cuda")]
    pub(crate) fn thirty_two(&self, number: usize) -> Vector<u32, Const<4>> {
        self.codes.as_vectorized().with_vector_size::<Const<4>>()[number]
    }

    /// The codes of the scales of four blocks, which begin with this column, a multiple of 128, as is the length of the rows.
    #[cfg(feature = "cuda")]
    pub(crate) fn scale_codes<V: Size>(&self, row: &WeightRow, column: usize) -> u32 {
        let first = (row.matrix * self.matrix + row.row * self.across) / 4;
        let lanes = V::value().comptime();
        self.scales[first + column / comptime!(4 * FP4_COLUMNS / lanes)]
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

/// Whether a device decodes in pairs: where the compiler keeps numbers of f16 below its normal ones.
pub(crate) fn decodes_pairs(client: &Client) -> bool {
    client.properties().identity.fingerprint.starts_with("ptx_")
}
