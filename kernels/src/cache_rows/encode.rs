//! Numbers to E4M3 codes and back, on any device. Source: OCP 8-bit floating point specification 1.0, table 1.

use cubecl::prelude::*;

/// The bits of the largest number of the format, 448 = 1.75 * 2^8.
const LARGEST: u32 = 448f32.to_bits();
/// Below this the format knows multiples of 2^-9 only.
const SMALLEST_NORMAL: f32 = 0.015625;

/// The exponent, with its bias, of the smallest power of two by which numbers up to that with these bits are brought into the range of
/// the format; `least` at least. Without a division: not every device rounds it right.
#[cube]
pub(super) fn scale_exponent(bits: u32, #[comptime] least: u32) -> u32 {
    let above = select((bits & 0x007f_ffff) > comptime!(LARGEST & 0x007f_ffff), 1u32.runtime(), 0u32.runtime());
    // Of infinity too, its inverse is a normal number.
    min(max((bits >> 23) + above, comptime!(least + 8)) - 8, 253u32.runtime())
}

/// The code nearest to a number, of two the even one; of larger numbers, and of no number, that of the largest.
#[cube]
pub(super) fn encode(value: f32) -> u32 {
    let bits = u32::reinterpret(value);
    let sign = (bits >> 24) & 0x80;
    let magnitude = bits & 0x7fff_ffff;
    // Three bits of the fraction are left; the exponent's bias goes from 127 to 7.
    let rounded = (magnitude + 0x7_ffff + ((magnitude >> 20) & 1)) >> 20;
    let normal = rounded - comptime!(120u32 << 3);
    // Multiples of 2^-9, rounded by a sum whose last place is that.
    let sum = f32::reinterpret(magnitude) + f32::new(comptime!((1u32 << 14) as f32));
    let small = u32::reinterpret(sum) & 0xf;
    let code = select(f32::reinterpret(magnitude) < f32::new(SMALLEST_NORMAL), small, normal);
    sign | select(magnitude >= LARGEST, 0x7eu32.runtime(), code)
}
