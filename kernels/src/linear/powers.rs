//! Rows of x as f16, each times a power of two that brings its largest number just below 2^15.
//!
//! That is exact for bf16 down to 2^-31 of the largest number; what is smaller is off by less than 2^-40 of it.

use cubecl::prelude::*;

/// Exponent of the largest number of a row, biased: 14.
const TOP: u32 = 127 + 14;
/// The largest biased exponent of the factor, so that its inverse is a normal number.
const LARGEST: u32 = 253;

/// The larger of some bits of bf16 without a sign, and those of a vector.
#[cube]
pub(super) fn larger<E: Float, V: Size>(bits: u32, value: Vector<E, V>) -> u32 {
    let words = Vector::<u32, Const<4>>::reinterpret(value);
    let mut largest = bits;
    #[unroll]
    for word in 0..4usize {
        let pair = words.extract(word);
        largest = max(largest, max(pair & 0x7fff, (pair >> 16) & 0x7fff));
    }
    largest
}

/// The power of two for a row whose largest number has these bits, and its inverse.
#[cube]
pub(super) fn power(largest: u32) -> (f32, f32) {
    let biased = min(comptime!(TOP + 127) - (largest >> 7), LARGEST);
    (f32::reinterpret(biased << 23), f32::reinterpret((254 - biased) << 23))
}
