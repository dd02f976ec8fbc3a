//! Products of small matrices, and what the bits of their elements mean.
//!
//! A product of two factors of at most 16 significant bits, or of tf32, is exact in f32. A sum starts at C and takes
//! the terms in the order of k, each addition rounded to nearest in f32; f16 results are rounded once more, at the end.
//! Tensor cores add in another order, with fewer guard bits: PTX ISA leaves order and rounding open.
use crate::ir::Elem;
use half::f16;
use std::ops::{Add, Mul};

/// A number that matrices are computed in: f32, or i64 for integers.
pub(super) trait Number: Copy + Default + Add<Output = Self> + Mul<Output = Self> {
    fn decode(elem: Elem, bits: u32) -> Self;
    /// `saturate` clamps integers to 32 bits.
    fn encode(self, elem: Elem, saturate: bool) -> u32;
    fn negated(self) -> Self;
    /// What stands for a number that nothing wrote, where there is such a thing.
    fn undefined() -> Self;
}

impl Number for f32 {
    fn undefined() -> Self {
        f32::NAN
    }

    #[inline(always)]
    fn decode(elem: Elem, bits: u32) -> Self {
        match elem {
            Elem::F16 => f16::from_bits(bits as u16).to_f32(),
            Elem::Bf16 => f32::from_bits(bits << 16),
            // The lowest 13 bits are not looked at.
            Elem::Tf32 => f32::from_bits(bits & !0x1fff),
            Elem::E4m3 => e4m3(bits as u8),
            Elem::E5m2 => f16::from_bits((bits as u16 & 0xff) << 8).to_f32(),
            Elem::F32 | Elem::S8 | Elem::U8 | Elem::S32 => f32::from_bits(bits),
        }
    }

    fn encode(self, elem: Elem, _: bool) -> u32 {
        match elem {
            Elem::F16 if self.is_nan() => 0x7fff,
            Elem::F16 => u32::from(f16::from_f32(self).to_bits()),
            _ if self.is_nan() => 0x7fff_ffff,
            _ => self.to_bits(),
        }
    }

    fn negated(self) -> Self {
        -self
    }
}

impl Number for i64 {
    fn undefined() -> Self {
        0
    }

    fn decode(elem: Elem, bits: u32) -> Self {
        match elem {
            Elem::S8 => i64::from(bits as i8),
            Elem::U8 => i64::from(bits as u8),
            _ => i64::from(bits as i32),
        }
    }

    fn encode(self, _: Elem, saturate: bool) -> u32 {
        let value = if saturate { self.clamp(i32::MIN.into(), i32::MAX.into()) } else { self };
        value as u32
    }

    fn negated(self) -> Self {
        -self
    }
}

/// An FP8 number with four exponent bits: no infinities, one NaN of each sign (PTX ISA 5.2.3).
pub(super) fn e4m3(bits: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
    let magnitude = match (exponent, bits & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 0.001_953_125,
        _ => (8.0 + mantissa) * ((exponent - 10) as f32).exp2(),
    };
    if bits >> 7 == 1 { -magnitude } else { magnitude }
}

/// `C += A B`; all by rows, B with `n` columns.
pub(super) fn multiply<T: Number>(k: usize, n: usize, a: &[T], b: &[T], c: &mut [T]) {
    for (a_row, c_row) in a.chunks_exact(k).zip(c.chunks_exact_mut(n)) {
        for (x, b_row) in a_row.iter().zip(b.chunks_exact(n)) {
            for (sum, y) in c_row.iter_mut().zip(b_row) {
                *sum = *sum + *x * *y;
            }
        }
    }
}
