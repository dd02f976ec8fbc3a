//! Numbers of 8 and 4 bits with a scale for every block of them (`Quantization`): dequantised on the device, and
//! rounded to on the host.
//!
//! E4M3 is the variant without infinities that safetensors calls `F8_E4M3` (OCP 8-bit floating point specification 1.0,
//! table 1); E2M1 and the power-of-two scales E8M0 are those of the OCP microscaling specification 1.0, §5.3 and §5.4. Two
//! E2M1 numbers share a byte, the one with the lower index in its low half (`inference/convert.py` of DeepSeek-V4).

use std::borrow::Cow;
use std::ops::Range;

use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use rayon::prelude::*;
use safetensors::Dtype;

use super::numbers::window;

/// A format of numbers in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// A number per byte, at most 448.
    E4m3,
    /// Two numbers per byte, at most 6.
    E2m1,
}

impl Format {
    /// Numbers in a byte.
    pub(super) fn per_byte(self) -> usize {
        match self {
            Self::E4m3 => 1,
            Self::E2m1 => 2,
        }
    }

    /// The largest number.
    pub(super) fn max(self) -> f32 {
        match self {
            Self::E4m3 => 448.0,
            Self::E2m1 => 6.0,
        }
    }

    /// The number of every code; the upper half of the codes is negative.
    pub(super) fn values(self) -> Vec<f32> {
        let (codes, mantissa_bits, bias) = match self {
            Self::E4m3 => (256, 3, 7),
            Self::E2m1 => (16, 1, 1),
        };
        (0..codes)
            .map(|code| {
                let magnitude = code % (codes / 2);
                if self == Self::E4m3 && magnitude == 0x7f {
                    return f32::NAN;
                }
                let (exponent, mantissa) = (magnitude >> mantissa_bits, magnitude % (1 << mantissa_bits));
                let fraction = f64::from(mantissa) / f64::from(1 << mantissa_bits);
                let value = match exponent {
                    0 => fraction * 2f64.powi(1 - bias),
                    _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
                };
                (if code < codes / 2 { value } else { -value }) as f32
            })
            .collect()
    }

    /// The code of the number nearest to `value`, the one with an even code of two that are; numbers beyond the largest
    /// become that. `value` is finite.
    pub(super) fn nearest(self, value: f32) -> u8 {
        let (mantissa_bits, smallest_normal, largest, sign) = match self {
            Self::E4m3 => (3, 0.015_625, 0x7e, 0x80),
            Self::E2m1 => (1, 1.0, 0x7, 0x8),
        };
        let magnitude = value.abs();
        let code = if magnitude < smallest_normal {
            // Below, codes count steps of the smallest number.
            (magnitude * (1 << mantissa_bits) as f32 / smallest_normal).round_ties_even() as u32
        } else {
            // Above, a code is the upper part of an f32 with another exponent: rounded there, it carries into the exponent.
            let dropped = 23 - mantissa_bits;
            let bits = magnitude.to_bits();
            let rounded = (bits + (1 << (dropped - 1)) - 1 + (bits >> dropped & 1)) >> dropped;
            rounded + (1 << mantissa_bits) - (smallest_normal.to_bits() >> dropped)
        };
        code.min(largest) as u8 | if value.is_sign_negative() { sign } else { 0 }
    }
}

/// A weight `[rows, columns]` in a block format, and the scales of its blocks.
pub(super) struct BlockWeight<'a> {
    pub(super) format: Format,
    /// `[rows, columns / numbers in a byte]`.
    pub(super) bytes: Cow<'a, [u8]>,
    /// `[ceil(rows / block[0]), ceil(columns / block[1])]`.
    pub(super) scales: Vec<f32>,
    pub(super) block: [usize; 2],
    pub(super) columns: usize,
}

/// Numbers that are dequantised at once, about: the device holds them a few times in f32 and i32 meanwhile.
const AT_ONCE: usize = 1 << 22;

impl<'a> BlockWeight<'a> {
    /// These rows and columns of it, which begin with a block.
    pub(super) fn window(self, [rows, columns]: [Range<usize>; 2]) -> Self {
        let Self { format, bytes, scales, block: [high, wide], columns: all } = self;
        let per_byte = format.per_byte();
        let scales = window_of_scales(&scales, [high, wide], all, &[rows.clone(), columns.clone()]);
        let bytes = window(bytes, all / per_byte, rows, columns.start / per_byte..columns.end / per_byte);
        Self { format, bytes, scales, block: [high, wide], columns: columns.len() }
    }

    /// The rows in parts that are dequantised at once, whole blocks each but for the last one.
    pub(super) fn parts(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let rows = self.bytes.len() * self.format.per_byte() / self.columns;
        let step = (AT_ONCE / self.columns / self.block[0]).max(1).saturating_mul(self.block[0]);
        (0..rows).step_by(step).map(move |row| row..(row + step).min(rows))
    }

    /// Numbers times scales, in f32 and then rounded to `dtype`: `[rows.len(), columns]`. `rows` begin with a block.
    pub(super) fn decode(&self, rows: Range<usize>, device: &Device, dtype: FloatDType) -> Tensor<2> {
        let (count, columns) = (rows.len(), self.columns);
        let float = |values: Vec<f32>| {
            let len = values.len();
            Tensor::<1>::from_data(TensorData::new(values, [len]), (device, DType::F32))
        };
        let codes = codes_on(device, self.bytes(&rows), self.format);
        let values =
            float(self.format.values()).select(0, codes).narrow(0, 0, count * columns).reshape([count, columns]);
        let [rows_of_blocks, across] = [count.div_ceil(self.block[0]), columns.div_ceil(self.block[1])];
        let first = rows.start / self.block[0] * across;
        // Of a block that is larger than the part there is no more to multiply.
        let [high, wide] = [self.block[0].min(count), self.block[1].min(columns)];
        let scales = float(self.scales[first..first + rows_of_blocks * across].to_vec())
            .reshape([rows_of_blocks, 1, across, 1])
            .expand([rows_of_blocks, high, across, wide])
            .reshape([rows_of_blocks * high, across * wide])
            .narrow(0, 0, count)
            .narrow(1, 0, columns);
        (values * scales).cast(dtype)
    }

    /// The same on the host, in f32.
    pub(super) fn decode_on_host(&self, rows: Range<usize>) -> Vec<f32> {
        let (values, per_byte) = (self.format.values(), self.format.per_byte());
        let across = self.columns.div_ceil(self.block[1]);
        let mut out = Vec::with_capacity(rows.len() * self.columns);
        for row in rows {
            for column in 0..self.columns {
                let at = row * self.columns + column;
                let byte = self.bytes[at / per_byte];
                let code = if per_byte == 1 { byte } else { byte >> (4 * (at % 2)) & 0xf };
                out.push(
                    values[usize::from(code)] * self.scales[row / self.block[0] * across + column / self.block[1]],
                );
            }
        }
        out
    }

    fn bytes(&self, rows: &Range<usize>) -> &[u8] {
        let width = self.columns / self.format.per_byte();
        &self.bytes[rows.start * width..rows.end * width]
    }
}

/// The codes in `bytes`, i32, with up to a word more. Devices without 8-bit integers take them four bytes to a word.
fn codes_on(device: &Device, bytes: &[u8], format: Format) -> Tensor<1, Int> {
    let (whole, rest) = bytes.as_chunks::<4>();
    let mut words: Vec<i32> = whole.iter().map(|&word| i32::from_le_bytes(word)).collect();
    if !rest.is_empty() {
        let mut last = [0; 4];
        last[..rest.len()].copy_from_slice(rest);
        words.push(i32::from_le_bytes(last));
    }
    let bits = 8 / format.per_byte() as i32;
    let (count, per_word) = (words.len(), 32 / bits as usize);
    let int = |values: Vec<i32>| {
        let len = values.len();
        Tensor::<1, Int>::from_data(TensorData::new(values, [len]), (device, DType::I32))
    };
    let words = int(words).reshape([count, 1]).expand([count, per_word]);
    let shifts = int((0..per_word as i32).map(|place| place * bits).collect());
    let shifts = shifts.reshape([1, per_word]).expand([count, per_word]);
    words.bitwise_right_shift(shifts).bitwise_and_scalar((1 << bits) - 1).reshape([count * per_word])
}

/// The scales of these rows and columns, which begin with a block, of a weight of so many columns.
pub(super) fn window_of_scales(
    scales: &[f32],
    [high, wide]: [usize; 2],
    all: usize,
    [rows, columns]: &[Range<usize>; 2],
) -> Vec<f32> {
    let across = all.div_ceil(wide);
    let of_block = columns.start / wide..columns.end.div_ceil(wide);
    let rows_of_blocks = (rows.start / high..rows.end.div_ceil(high)).map(|row| row * across);
    rows_of_blocks.flat_map(|row| &scales[row + of_block.start..row + of_block.end]).copied().collect()
}

/// The first code that is no number, by its place.
pub(super) fn find_nan(bytes: &[u8], format: Format) -> Option<usize> {
    match format {
        Format::E4m3 => find_byte(bytes, |byte| byte & 0x7f == 0x7f),
        Format::E2m1 => None,
    }
}

/// The first of these scales that is not above 0 (E4M3: or 0) and at most `most`, by its place.
pub(super) fn find_scale_beyond(bytes: &[u8], dtype: Dtype, most: f32) -> Option<(usize, f32)> {
    match dtype {
        // All are above 0, and in order; the last one is no number.
        Dtype::F8_E8M0 => {
            let first = (0..0xff).find(|&code| e8m0(code) > most).unwrap_or(0xff);
            find_byte(bytes, |code| code >= first).map(|at| (at, e8m0(bytes[at])))
        }
        Dtype::F8_E4M3 => {
            let values = Format::E4m3.values();
            let is_wrong = |code: u8| !(0.0..=most).contains(&values[usize::from(code)]);
            find_byte(bytes, is_wrong).map(|at| (at, values[usize::from(bytes[at])]))
        }
        _ => {
            let is_wrong = |&(_, scale): &(usize, f32)| !(scale > 0.0 && scale <= most);
            read_scales(bytes, dtype).into_iter().enumerate().find(is_wrong)
        }
    }
}

/// Bytes that a thread looks at, with no branch for each: this runs over every byte of a checkpoint.
const LOOKED_AT: usize = 1 << 17;

/// The place of the first byte that is so.
fn find_byte(bytes: &[u8], is_wrong: impl Fn(u8) -> bool + Sync) -> Option<usize> {
    let suspect = |piece: &[u8]| piece.iter().fold(false, |found, &byte| found | is_wrong(byte));
    let piece = match bytes.len() > LOOKED_AT {
        true => bytes.par_chunks(LOOKED_AT).position_first(suspect)? * LOOKED_AT,
        false => 0,
    };
    bytes[piece..].iter().position(|&byte| is_wrong(byte)).map(|at| piece + at)
}

/// Scales as they are stored, in f32, E4M3 (NVFP4) or E8M0: powers of two, of which 255 is no number.
pub(super) fn read_scales(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    match dtype {
        Dtype::F8_E4M3 => {
            let values = Format::E4m3.values();
            bytes.iter().map(|&code| values[usize::from(code)]).collect()
        }
        Dtype::F8_E8M0 => bytes.iter().map(|&exponent| e8m0(exponent)).collect(),
        _ => bytes.as_chunks::<4>().0.iter().map(|&quad| f32::from_le_bytes(quad)).collect(),
    }
}

/// `2^(code - 127)`.
fn e8m0(code: u8) -> f32 {
    match code {
        0xff => f32::NAN,
        // Below the smallest number with a whole mantissa.
        0 => f32::from_bits(1 << 22),
        code => f32::from_bits(u32::from(code) << 23),
    }
}

/// The scale of a block whose largest magnitude is `largest`: that which makes it the format's largest number, or with
/// `power_of_two` the next power of two. A block of zeros has 1.
pub(super) fn scale_for(largest: f32, format: Format, power_of_two: bool) -> f32 {
    if largest == 0.0 {
        return 1.0;
    }
    let scale = (largest / format.max()).max(f32::MIN_POSITIVE);
    if !power_of_two {
        return scale;
    }
    let exponent = scale.to_bits() >> 23;
    let up = u32::from(scale.to_bits().trailing_zeros() < 23);
    f32::from_bits((exponent + up).min(254) << 23)
}

/// A power of two from [`scale_for`] as it is stored.
pub(super) fn e8m0_of(scale: f32) -> u8 {
    (scale.to_bits() >> 23) as u8
}

#[cfg(test)]
#[path = "codes_tests.rs"]
mod tests;
