//! Rows of x as f16, each times a power of two that brings its largest number just below 2^15.
//!
//! That is exact for bf16 down to 2^-31 of the largest number; what is smaller is off by less than 2^-40 of it.

use cubecl::prelude::*;

use super::WeightFormat;
use crate::ptx::math;
use crate::ptx::wgmma::Elem;

/// Numbers of a vector.
const VECTOR: usize = 8;
/// Exponent of the largest number of a row, biased: 14.
const TOP: u32 = 127 + 14;
/// The largest biased exponent of the factor, so that its inverse is a normal number.
const LARGEST: u32 = 253;

/// The bits of the larger of a number and those of a vector of bf16, without signs. Up to a step of bf16 too large: of a pair, the one behind
/// the other is part of it. NaN counts for none, and so may infinity: times any power of two they stay what they are.
#[cube]
pub(super) fn larger<E: Float, V: Size>(bits: u32, value: Vector<E, V>) -> u32 {
    let words = Vector::<u32, Const<4>>::reinterpret(value);
    let mut largest = f32::reinterpret(bits);
    #[unroll]
    for word in 0..4usize {
        let pair = words.extract(word);
        largest = max(largest, max(f32::reinterpret(pair).abs(), f32::reinterpret(pair << 16).abs()));
    }
    u32::reinterpret(largest)
}

/// The power of two for a row whose largest number has these bits, and its inverse.
#[cube]
pub(super) fn power(largest: u32) -> (f32, f32) {
    let biased = min(comptime!(TOP + 127) - (largest >> 23), LARGEST);
    (f32::reinterpret(biased << 23), f32::reinterpret((254 - biased) << 23))
}

/// Where the numbers of a vector are in a row, in the order in which codes are decoded: FP4's by conversion, or each with the one four
/// further.
pub(super) fn order(format: WeightFormat, by_conversion: bool) -> [usize; VECTOR] {
    match format {
        WeightFormat::Fp4 if by_conversion => [0, 2, 4, 6, 1, 3, 5, 7],
        WeightFormat::Fp4 => [0, 4, 1, 5, 2, 6, 3, 7],
        WeightFormat::Fp8 | WeightFormat::Dense => [0, 1, 2, 3, 4, 5, 6, 7],
    }
}

/// A vector times a factor as f16, in this order.
#[cube]
pub(super) fn halves<E: Float, V: Size>(
    value: Vector<E, V>,
    factor: f32,
    #[comptime] order: [usize; VECTOR],
) -> Vector<u32, Const<4>> {
    let mut words = Vector::<u32, Const<4>>::new(0u32);
    #[unroll]
    for pair in 0..4usize {
        let low = f32::cast_from(value.extract(comptime!(order[2 * pair])));
        let high = f32::cast_from(value.extract(comptime!(order[2 * pair + 1])));
        words.insert(pair, math::pack(low * factor, high * factor, Elem::F16));
    }
    words
}
