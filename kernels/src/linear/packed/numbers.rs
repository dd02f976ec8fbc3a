//! The numbers that codes and scales stand for.

use cubecl::ir::FloatKind;
use cubecl::prelude::*;
use half::{bf16, f16};

#[cfg(feature = "cuda")]
use crate::ptx::math;
#[cfg(feature = "cuda")]
use crate::ptx::wgmma::Elem;

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
pub(crate) fn e2m1(code: u32) -> f32 {
    let magnitude = code & 0x7;
    let is_small = magnitude < 2;
    let bits = (magnitude << 22) + select(is_small, comptime!(127u32 << 23), comptime!(126u32 << 23));
    let value = f32::reinterpret(bits) - select(is_small, 1.0f32, 0.0f32);
    f32::reinterpret(u32::reinterpret(value) | ((code & 0x8) << 28))
}

/// The power of two of the E8M0 code in the low 8 bits; the smallest has no hidden bit.
#[cube]
pub(crate) fn e8m0(code: u32) -> f32 {
    let exponent = code & 0xff;
    f32::reinterpret(select(exponent == 0, comptime!(1u32 << 22), exponent << 23))
}

/// The same of code `i` of a word.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn e8m0_of_word(word: u32, #[comptime] i: usize) -> f32 {
    let exponent = if comptime!(i < 3) { word << comptime!(23 - 8 * i as u32) } else { word >> 1 };
    f32::reinterpret(max(exponent & 0x7f80_0000, comptime!(1u32 << 22)))
}

/// The numbers of the E4M3 codes in the upper 8 bits of each half of a word.
#[cube]
pub(crate) fn e4m3_pair(codes: u32) -> Vector<f16, Const<2>> {
    e4m3_number_f16(e4m3_halves(codes))
}

/// The numbers of the E2M1 codes in the lowest 4 bits of each half of a word.
#[cube]
pub(crate) fn e2m1_pair(codes: u32) -> Vector<f16, Const<2>> {
    let pair = Vector::<f16, Const<2>>::reinterpret(e2m1_halves(codes));
    pair * Vector::<f16, Const<2>>::new(f16::from_int(E2M1_FACTOR))
}

/// The same of E4M3 codes in the upper 8 bits of each half of a word, as bf16.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn e4m3_pair_bf16(codes: u32) -> Vector<bf16, Const<2>> {
    e4m3_number_bf16(e4m3_halves_of_pair(codes, Elem::Bf16))
}

/// The halves of these, whose exponents have the bias of the codes.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn e4m3_halves_of_pair(codes: u32, #[comptime] elem: Elem) -> u32 {
    if comptime!(elem == Elem::Bf16) {
        (codes & 0x8000_8000) | ((codes & 0x7f00_7f00) >> 4)
    } else {
        e4m3_halves(codes)
    }
}

/// The numbers of the four E4M3 codes of a word, as bf16.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn e4m3_pairs_bf16(codes: u32) -> (Vector<bf16, Const<2>>, Vector<bf16, Const<2>>) {
    let (low, high) = e4m3_halves_of_word(codes, Elem::Bf16);
    (e4m3_number_bf16(low), e4m3_number_bf16(high))
}

/// The same as f16.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn e4m3_pairs_f16(codes: u32) -> (Vector<f16, Const<2>>, Vector<f16, Const<2>>) {
    let (low, high) = e4m3_halves_of_word(codes, Elem::F16);
    (e4m3_number_f16(low), e4m3_number_f16(high))
}

/// [`e4m3_halves_of_pair`] of the lower two codes of a word and of the upper two.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn e4m3_halves_of_word(codes: u32, #[comptime] elem: Elem) -> (u32, u32) {
    // Upper and lower bytes of all four: a code is a sign, four bits of exponent and three of mantissa, a bf16 a sign, eight bits and seven,
    // a f16 a sign, five and ten.
    let sign = codes & 0x8080_8080;
    let (upper, lower) = if comptime!(elem == Elem::Bf16) {
        (sign | ((codes >> 4) & 0x0707_0707), (codes << 4) & 0xf0f0_f0f0)
    } else {
        (sign | ((codes >> 1) & 0x3f3f_3f3f), (codes << 7) & 0x8080_8080)
    };
    (math::permute_two(lower, upper, 0x5140u32), math::permute_two(lower, upper, 0x7362u32))
}

/// What halves are whose exponents have the bias of the codes.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn e4m3_number_bf16(halves: u32) -> Vector<bf16, Const<2>> {
    Vector::<bf16, Const<2>>::reinterpret(halves)
        * Vector::<bf16, Const<2>>::reinterpret(comptime!(E4M3_FACTOR_BF16).runtime())
}

/// The same of f16.
#[cube]
pub(crate) fn e4m3_number_f16(halves: u32) -> Vector<f16, Const<2>> {
    Vector::<f16, Const<2>>::reinterpret(halves) * Vector::<f16, Const<2>>::new(f16::from_int(E4M3_FACTOR))
}

/// The same as bf16, whose exponent is wide enough for the product with a power of two to be exact.
#[cube]
pub(crate) fn e2m1_pair_bf16(codes: u32) -> Vector<bf16, Const<2>> {
    let halves = ((codes & 0x0008_0008) << 12) | ((codes & 0x0007_0007) << 6);
    let pair = Vector::<bf16, Const<2>>::reinterpret(halves);
    pair * Vector::<bf16, Const<2>>::reinterpret(comptime!(E2M1_FACTOR_BF16).runtime())
}

/// The numbers of code `i` of a word of E2M1 and of code `i + 4`, as bf16.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn e2m1_pair_of_word(word: u32, #[comptime] i: usize) -> Vector<bf16, Const<2>> {
    Vector::<bf16, Const<2>>::reinterpret(e2m1_halves_of_word(word, i))
        * Vector::<bf16, Const<2>>::reinterpret(comptime!(E2M1_FACTOR_BF16).runtime())
}

/// The numbers of the two codes of a byte, as bf16.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn e2m1_pair_of_byte(byte: u32) -> Vector<bf16, Const<2>> {
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
pub(crate) fn e8m0_pair_bf16(code: u32) -> Vector<bf16, Const<2>> {
    Vector::<bf16, Const<2>>::reinterpret(e8m0_halves(code))
}

/// The same of code `i` of a word.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn e8m0_pair_bf16_of_word(word: u32, #[comptime] i: usize) -> Vector<bf16, Const<2>> {
    // The code in each half, and then where the exponent is.
    let halves = math::permute(word, comptime!(0x4040u32 + 0x0101 * i as u32)) * 0x80;
    Vector::<bf16, Const<2>>::reinterpret(max(halves, 0x0040_0040u32))
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
pub(crate) const E4M3_FACTOR: i64 = 1 << (15 - 7);
pub(crate) const E2M1_FACTOR: i64 = 1 << (15 - 1);

/// E4M3 codes as two f16 whose exponents have the bias of the codes.
#[cube]
pub(crate) fn e4m3_halves(codes: u32) -> u32 {
    (codes & 0x8000_8000) | ((codes & 0x7f00_7f00) >> 1)
}

/// The same of E2M1 codes.
#[cube]
pub(crate) fn e2m1_halves(codes: u32) -> u32 {
    ((codes & 0x0008_0008) << 12) | ((codes & 0x0007_0007) << 9)
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
