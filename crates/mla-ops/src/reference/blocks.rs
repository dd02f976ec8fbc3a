//! Products with weights in blocks of codes, on the CPU: a block is decoded where it is multiplied, into registers and the first
//! cache. Nothing that is as large as the weight is made.
//!
//! A code becomes an f32 by moving its exponent and fraction to where f32 has them; no table is read, so that loops over a block
//! are vector code, compiled for what the processor has.

use burn::backend::{Flex, tensor::IntTensor};
use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::rows::{row_by_row, values};
use crate::Determinism;
use crate::ops::matmul::product;
use crate::weight::{BlockFormat, Blocks, Packing};

/// Rows of x up to which products are computed where blocks are decoded, and rows that share what is decoded.
const FEW: usize = 8;
/// Sums that are computed side by side, of channels that far apart.
const LANES: usize = 32;
/// Numbers that are decoded at a time for a product of many rows: 4 MB of f32.
const SCRATCH: usize = 1 << 20;
/// Multiply-adds that are worth a thread.
const WORK: usize = 1 << 18;
/// Columns of a block at most.
const WIDEST: usize = 128;

/// x `[N, in]` of the dtype that the weight stands for, weight `[out, in]`: `[N, out]`.
///
/// A few rows are summed in f32, in an order that depends on nothing; if rows have to be independent, any number of them is. More
/// are products of matrices with some rows of the weight, decoded in turn.
pub(crate) fn matmul(x: Tensor<2>, weight: &Blocks, determinism: Determinism) -> Tensor<2> {
    let ([rows, inputs], [outputs, _]) = (x.dims(), weight.packing.dims());
    let dtype = weight.packing.dtype;
    if rows * inputs * outputs == 0 {
        return Tensor::zeros([rows, outputs], (&x.device(), dtype));
    }
    if rows > FEW && !determinism.is_batch_invariant() {
        return in_parts(x, weight, determinism);
    }
    let device = x.device();
    let (codes, x) = (words(&weight.codes), row_by_row(x));
    let scales = words(&weight.scales);
    let codes = Codes::new(weight, values_of(&codes), values_of(&scales));
    // Rows end with a whole block, of zeros.
    let padded = inputs.next_multiple_of(codes.width());
    let mut channels = vec![0.0; rows * padded];
    for (to, from) in channels.chunks_mut(padded).zip(values(&x).chunks(inputs)) {
        to[..inputs].copy_from_slice(from);
        if weight.packing.format == BlockFormat::Fp4 {
            to.as_chunks_mut().0.iter_mut().for_each(halves);
        }
    }
    let mut sums = vec![0.0; outputs * rows];
    let piece = outputs.div_ceil((outputs * inputs * rows / WORK).max(1));
    sums.par_chunks_mut(piece * rows).enumerate().for_each(|(number, sums)| {
        codes.multiply(&channels, padded, number * piece, sums, rows);
    });
    let out: Vec<f32> = (0..rows).flat_map(|row| sums[row..].iter().step_by(rows).copied()).collect();
    Tensor::<2>::from_data(TensorData::new(out, [rows, outputs]), (&device, DType::F32)).cast(FloatDType::from(dtype))
}

/// The channels of a block of FP4 in the order in which it is decoded: those of the low halves of its bytes, then the others.
fn halves(channels: &mut [f32; 32]) {
    let before = *channels;
    for i in 0..16 {
        channels[i] = before[2 * i];
        channels[16 + i] = before[2 * i + 1];
    }
}

/// The products with some rows of the weight at a time, side by side.
fn in_parts(x: Tensor<2>, weight: &Blocks, determinism: Determinism) -> Tensor<2> {
    let [outputs, inputs] = weight.packing.dims();
    let step = (SCRATCH / inputs).max(1);
    let parts = (0..outputs).step_by(step).map(|first| {
        let part = decoded(weight, first, step.min(outputs - first));
        product(x.clone(), part.transpose(), determinism)
    });
    let mut parts: Vec<Tensor<2>> = parts.collect();
    if parts.len() > 1 { Tensor::cat(parts, 1) } else { parts.remove(0) }
}

/// All elements `[count, out, in]`.
pub(crate) fn dense(weight: &Blocks) -> Tensor<3> {
    let [count, rows, columns] = weight.packing.dims();
    decoded(weight, 0, count * rows).reshape([count, rows, columns])
}

/// Rows from number `first` on, counted through all matrices, in the dtype that the weight stands for.
fn decoded(weight: &Blocks, first: usize, rows: usize) -> Tensor<2> {
    let ([.., columns], dtype) = (weight.packing.dims::<3>(), weight.packing.dtype);
    let (codes, scales) = (words(&weight.codes), words(&weight.scales));
    let codes = Codes::new(weight, values_of(&codes), values_of(&scales));
    let mut out = vec![0.0; rows * columns];
    let piece = WORK.div_ceil(columns).max(1);
    out.par_chunks_mut(piece * columns).enumerate().for_each(|(number, out)| {
        codes.decode(first + number * piece, out);
    });
    let options = (&weight.codes.device(), DType::F32);
    Tensor::<2>::from_data(TensorData::new(out, [rows, columns]), options).cast(FloatDType::from(dtype))
}

/// The words of a weight, in memory.
fn words(tensor: &Tensor<1, Int>) -> IntTensor<Flex> {
    let words = tensor.clone().try_into_primitive::<Flex>().expect("a tensor of the CPU");
    if words.is_contiguous() { words } else { words.to_contiguous() }
}

fn values_of(words: &IntTensor<Flex>) -> &[i32] {
    words.as_slice().expect("i32, without gaps")
}

/// Codes and scales of a weight in memory.
#[derive(Clone, Copy)]
struct Codes<'a> {
    weight: &'a Blocks,
    /// In the order of the codes; the low half of a byte first.
    codes: &'a [u8],
    scales: &'a [i32],
}

impl<'a> Codes<'a> {
    fn new(weight: &'a Blocks, codes: &'a [i32], scales: &'a [i32]) -> Self {
        Self { weight, codes: bytemuck::cast_slice(codes), scales }
    }

    /// Columns of a block.
    fn width(&self) -> usize {
        self.weight.packing.format.block_columns()
    }

    /// Row number `number`, counted through all matrices.
    fn row(&self, number: usize) -> Row<'a> {
        let packing = &self.weight.packing;
        let [_, rows, columns] = packing.dims;
        let (matrix, row) = (packing.first + number / rows, number % rows);
        let bytes = columns / packing.format.codes_per_byte();
        let first = (matrix * rows + row) * bytes;
        Row {
            packing,
            codes: &self.codes[first..first + bytes],
            scales: self.scales,
            first_scale: matrix * packing.per_matrix() + row / packing.block_rows * packing.across(),
        }
    }

    /// Writes the sums of some rows of the weight, from number `first` on, with all rows of `x`, which are `padded` long: those of a row
    /// of the weight are neighbours.
    fn multiply(&self, x: &[f32], padded: usize, first: usize, sums: &mut [f32], rows: usize) {
        for (number, sums) in sums.chunks_mut(rows).enumerate() {
            let row = self.row(first + number);
            for (x, sums) in x.chunks(FEW * padded).zip(sums.chunks_mut(FEW)) {
                Arch::new().dispatch(Products { row, x, padded, sums });
            }
        }
    }

    /// Writes whole rows, from number `first` on.
    fn decode(&self, first: usize, out: &mut [f32]) {
        for (number, out) in out.chunks_mut(self.weight.packing.dims[2]).enumerate() {
            Arch::new().dispatch(Decoded { row: self.row(first + number), out });
        }
    }
}

/// A row of a weight.
#[derive(Clone, Copy)]
struct Row<'a> {
    packing: &'a Packing,
    codes: &'a [u8],
    scales: &'a [i32],
    /// The number of its first scale.
    first_scale: usize,
}

/// The sums of a row of the weight with at most [`FEW`] of x, which are `padded` long.
struct Products<'a, 'x> {
    row: Row<'a>,
    x: &'x [f32],
    padded: usize,
    sums: &'x mut [f32],
}

/// The numbers of a row.
struct Decoded<'a, 'o> {
    row: Row<'a>,
    out: &'o mut [f32],
}

// The functions of these, and all that they call, are compiled for each kind of processor.
impl WithSimd for Products<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { row, x, padded, sums } = self;
        let width = row.packing.format.block_columns();
        let mut lanes = [[0.0f32; LANES]; FEW];
        let mut block = [0.0; WIDEST];
        for number in 0..padded / width {
            row.block(number, &mut block, false);
            for (x, lanes) in x.chunks(padded).zip(&mut lanes) {
                let x = &x[number * width..][..width];
                let mut sums = *lanes;
                for (x, w) in x.as_chunks::<LANES>().0.iter().zip(block.as_chunks::<LANES>().0) {
                    for lane in 0..LANES {
                        sums[lane] += x[lane] * w[lane];
                    }
                }
                *lanes = sums;
            }
        }
        for (sum, lanes) in sums.iter_mut().zip(&lanes) {
            *sum = lanes.iter().sum();
        }
    }
}

impl WithSimd for Decoded<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { row, out } = self;
        let mut block = [0.0; WIDEST];
        for (number, out) in out.chunks_mut(row.packing.format.block_columns()).enumerate() {
            row.block(number, &mut block, true);
            out.copy_from_slice(&block[..out.len()]);
        }
    }
}

impl Row<'_> {
    /// Block number `number`, decoded and rounded; zeros behind the end of the row. In FP4 the [`halves`] are not `joined` yet.
    #[inline(always)]
    fn block(&self, number: usize, out: &mut [f32; WIDEST], joined: bool) {
        match self.packing.dtype {
            DType::F16 => self.block_rounded(number, out, joined, Rounding::F16),
            DType::BF16 => self.block_rounded(number, out, joined, Rounding::Bf16),
            _ => self.block_rounded(number, out, joined, Rounding::None),
        }
    }

    #[inline(always)]
    fn block_rounded(&self, number: usize, out: &mut [f32; WIDEST], joined: bool, rounding: Rounding) {
        let place = self.first_scale + number;
        match self.packing.format {
            BlockFormat::Fp8 => {
                let scale = f32::from_bits(self.scales[place] as u32);
                let codes: [u8; WIDEST] = own(&self.codes[number * WIDEST..]);
                for i in 0..WIDEST {
                    out[i] = rounding.of(e4m3(codes[i]) * scale);
                }
            }
            BlockFormat::Fp4 => {
                let scale = e8m0((self.scales[place / 4] >> (8 * (place % 4))) as u8);
                let codes: [u8; 16] = own(&self.codes[number * 16..]);
                for i in 0..16 {
                    out[i] = rounding.of(e2m1(codes[i] & 0xf) * scale);
                    out[16 + i] = rounding.of(e2m1(codes[i] >> 4) * scale);
                }
                if joined {
                    let (low, high) = (own_half(out, 0), own_half(out, 16));
                    for i in 0..16 {
                        out[2 * i] = low[i];
                        out[2 * i + 1] = high[i];
                    }
                }
            }
        }
    }
}

/// To which dtype products of code and scale are rounded.
#[derive(Clone, Copy)]
enum Rounding {
    None,
    F16,
    Bf16,
}

impl Rounding {
    #[inline(always)]
    fn of(self, value: f32) -> f32 {
        match self {
            Self::None => value,
            Self::F16 => to_f16(value),
            Self::Bf16 => to_bf16(value),
        }
    }
}

/// Sixteen numbers from this one on.
#[inline(always)]
fn own_half(block: &[f32; WIDEST], first: usize) -> [f32; 16] {
    std::array::from_fn(|i| block[first + i])
}

/// The codes of a block: the first ones here, or at the end of a row all of them, and zeros.
#[inline(always)]
fn own<const N: usize>(codes: &[u8]) -> [u8; N] {
    match codes.first_chunk() {
        Some(codes) => *codes,
        None => {
            let mut padded = [0; N];
            padded[..codes.len()].copy_from_slice(codes);
            padded
        }
    }
}

/// The number of an E4M3 code. Those below the smallest normal number have no hidden bit: it is added, and subtracted again.
#[inline(always)]
fn e4m3(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7f);
    number(magnitude << 20, magnitude < 8, 120, u32::from(code & 0x80) << 24)
}

/// The number of an E2M1 code, in the same way.
#[inline(always)]
fn e2m1(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7);
    number(magnitude << 22, magnitude < 2, 126, u32::from(code & 0x8) << 28)
}

/// The number with this exponent and fraction, once `bias` is added to the exponent. By masks, since compilers make a table of a
/// choice between constants.
#[inline(always)]
fn number(magnitude: u32, is_small: bool, bias: u32, sign: u32) -> f32 {
    let hidden = f32::from_bits(u32::from(is_small).wrapping_neg() & (bias + 1) << 23);
    let value = f32::from_bits(magnitude + ((bias + u32::from(is_small)) << 23)) - hidden;
    f32::from_bits(value.to_bits() | sign)
}

/// `2^(code - 127)`.
#[inline(always)]
fn e8m0(code: u8) -> f32 {
    f32::from_bits(if code == 0 { 1 << 22 } else { u32::from(code) << 23 })
}

/// The nearest bf16; of two, the even one.
#[inline(always)]
fn to_bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

/// The nearest f16; of two, the even one. Below its smallest normal number, f16 has the steps that f32 has around 0.75.
#[inline(always)]
fn to_f16(value: f32) -> f32 {
    let bits = value.to_bits();
    let normal = f32::from_bits((bits + 0xfff + (bits >> 13 & 1)) & 0xffff_e000);
    let magnitude = value.abs();
    let small = ((magnitude + 0.75) - 0.75).copysign(value);
    if magnitude < 6.103_515_6e-5 { small } else { normal }
}
