//! `cvt` and `set` (PTX ISA 9.7.9.21 and 9.7.6.1).
use super::float::{int_to_f32, narrow, round_f32, widen};
use super::half::odd;
use super::product::e4m3;
use crate::ir::{Clamp, Conversion, Fp8, Int, Round, Ty};
use half::f16;

fn is_float(ty: Ty) -> bool {
    matches!(ty, Ty::F16 | Ty::Bf16 | Ty::F32 | Ty::F64)
}

/// Any float as f64: exact.
pub(super) fn value(ty: Ty, bits: u64) -> f64 {
    if ty == Ty::F64 { f64::from_bits(bits) } else { f64::from(widen(ty, bits)) }
}

/// A register's bits as an integer.
fn integer(ty: Ty, bits: u64) -> i128 {
    match ty {
        Ty::U8 => i128::from(bits as u8),
        Ty::S8 => i128::from(bits as i8),
        Ty::Int(Int::U16) => i128::from(bits as u16),
        Ty::Int(Int::S16) => i128::from(bits as i16),
        Ty::Int(Int::U32) => i128::from(bits as u32),
        Ty::Int(Int::S32) => i128::from(bits as i32),
        Ty::Int(Int::S64) => i128::from(bits as i64),
        _ => i128::from(bits),
    }
}

/// Width in bits, and whether there is a sign.
fn class(ty: Ty) -> (u32, bool) {
    match ty {
        Ty::U8 => (8, false),
        Ty::S8 => (8, true),
        Ty::Int(Int::U16) => (16, false),
        Ty::Int(Int::S16) => (16, true),
        Ty::Int(Int::U32) => (32, false),
        Ty::Int(Int::S32) => (32, true),
        Ty::Int(Int::S64) => (64, true),
        _ => (64, false),
    }
}

fn clamp(ty: Ty, value: i128) -> i128 {
    let (bits, signed) = class(ty);
    if signed { value.clamp(-1 << (bits - 1), (1 << (bits - 1)) - 1) } else { value.clamp(0, (1 << bits) - 1) }
}

/// Cuts to the width of a type. A signed byte fills its 16-bit register with its sign.
fn truncate(ty: Ty, value: i128) -> u64 {
    match ty {
        Ty::S8 => u64::from(value as i8 as i16 as u16),
        _ => value as u64 & u64::MAX >> (64 - class(ty).0),
    }
}

fn whole(x: f64, round: Round) -> f64 {
    match round {
        Round::Nearest => x.round_ties_even(),
        Round::Zero => x.trunc(),
        Round::Down => x.floor(),
        Round::Up => x.ceil(),
    }
}

/// Float to integer: out of range gives the nearest limit. NaN gives 0, or the highest bit alone where one of the two
/// types has 64 bits.
fn to_int(x: f64, from: Ty, to: Ty, round: Round) -> u64 {
    if x.is_nan() {
        let (bits, _) = class(to);
        return if bits == 64 || from == Ty::F64 { 1 << (bits - 1) } else { 0 };
    }
    truncate(to, clamp(to, whole(x, round) as i128))
}

/// `sum` as a float, where `rounded` is it in f32, exact or odd.
fn to_half(ty: Ty, rounded: f32, round: Round) -> u64 {
    let near = narrow(ty, rounded);
    let got = widen(ty, near);
    if round == Round::Nearest || got == rounded || rounded.is_nan() || rounded.is_infinite() {
        return near;
    }
    let negative = rounded.is_sign_negative();
    let (too_large, too_small) = (got.abs() > rounded.abs(), got.abs() < rounded.abs());
    match round {
        Round::Zero if too_large => near - 1,
        Round::Down if !negative && too_large || negative && too_small => {
            if negative {
                near + 1
            } else {
                near - 1
            }
        }
        Round::Up if !negative && too_small || negative && too_large => {
            if negative {
                near - 1
            } else {
                near + 1
            }
        }
        _ => near,
    }
}

/// A float as another.
pub(super) fn to_float(ty: Ty, x: f64, round: Round) -> u64 {
    match ty {
        Ty::F64 => x.to_bits(),
        Ty::F32 if x.is_nan() => 0x7fff_ffff,
        Ty::F32 => u64::from(round_f32(x, 0.0, round).to_bits()),
        _ => to_half(ty, odd(x, 0.0), round),
    }
}

fn int_to_float(ty: Ty, value: i128, round: Round) -> u64 {
    match ty {
        Ty::F32 => u64::from(int_to_f32(value, round, false).to_bits()),
        Ty::F64 => {
            let near = value as f64;
            // What f64 leaves out of 64 bits.
            let rest = value - near as i128;
            let moved = match round {
                Round::Down if rest < 0 => near.next_down(),
                Round::Up if rest > 0 => near.next_up(),
                Round::Zero if rest < 0 && near > 0.0 => near.next_down(),
                Round::Zero if rest > 0 && near < 0.0 => near.next_up(),
                _ => near,
            };
            moved.to_bits()
        }
        _ => to_half(ty, int_to_f32(value, Round::Nearest, true), round),
    }
}

fn clamped(x: f64, clamp: Clamp) -> f64 {
    match clamp {
        Clamp::None => x,
        Clamp::Unit if x.is_nan() => 0.0,
        Clamp::Unit => x.clamp(0.0, 1.0) + 0.0,
        Clamp::Positive if x.is_nan() => x,
        Clamp::Positive => x.max(0.0) + 0.0,
    }
}

/// Not inlined: the loops over lanes would be compiled once for each combination.
#[inline(never)]
pub(super) fn run(c: &Conversion, bits: u64) -> u64 {
    let flushed = |x: f64, ty: Ty| {
        if c.ftz && ty == Ty::F32 && x.abs() < f64::from(f32::MIN_POSITIVE) { 0f64.copysign(x) } else { x }
    };
    match (is_float(c.from), is_float(c.to)) {
        (false, false) => {
            let value = integer(c.from, bits);
            truncate(c.to, if c.clamp == Clamp::None { value } else { clamp(c.to, value) })
        }
        (false, true) => int_to_float(c.to, integer(c.from, bits), c.round),
        (true, false) => to_int(flushed(value(c.from, bits), c.from), c.from, c.to, c.round),
        (true, true) => {
            let x = flushed(value(c.from, bits), c.from);
            let x = if c.integral { whole(x, c.round) } else { x };
            let x = clamped(x, c.clamp);
            let near = to_float(c.to, x, c.round);
            if c.ftz && c.to == Ty::F32 && f32::from_bits(near as u32).is_subnormal() {
                near & 0x8000_0000
            } else {
                near
            }
        }
    }
}

/// The bits that stay, where a conversion only cuts an unsigned integer.
pub(super) fn cut(c: &Conversion) -> Option<u64> {
    if is_float(c.from) || is_float(c.to) || c.clamp != Clamp::None || class(c.from).1 || class(c.to).1 {
        return None;
    }
    Some(u64::MAX >> (64 - class(c.from).0.min(class(c.to).0)))
}

/// Two f32 to a packed pair.
pub(super) fn pair(to: Ty, round: Round, relu: bool, high: u64, low: u64) -> u64 {
    let clamp = if relu { Clamp::Positive } else { Clamp::None };
    let one = |bits: u64| to_float(to, clamped(value(Ty::F32, bits), clamp), round);
    one(high) << 16 | one(low)
}

/// f32 to tf32, whose lowest 13 bits are zeros: to nearest, ties away from zero or to even.
pub(super) fn tf32(away: bool, bits: u64) -> u64 {
    let bits = bits as u32;
    if f32::from_bits(bits).is_nan() {
        return 0x7fff_ffff;
    }
    if f32::from_bits(bits).is_infinite() {
        return u64::from(bits);
    }
    let half = if away { 0x1000 } else { 0xfff + (bits >> 13 & 1) };
    u64::from(bits.wrapping_add(half) & !0x1fff)
}

fn fp8_value(format: Fp8, code: u8) -> f32 {
    match format {
        Fp8::E4m3 => e4m3(code),
        Fp8::E5m2 => f16::from_bits(u16::from(code) << 8).to_f32(),
    }
}

/// To the nearest FP8 number, ties to even; what is too large becomes the largest (`.satfinite`), NaN 0x7f.
fn to_fp8(format: Fp8, relu: bool, x: f64) -> u64 {
    if x.is_nan() {
        return 0x7f;
    }
    let largest = if format == Fp8::E4m3 { 0x7e } else { 0x7b };
    let x = if relu { x.max(0.0) } else { x };
    let magnitude = x.abs();
    // Codes of positive numbers are in order.
    let above = (0..largest).position(|code| f64::from(fp8_value(format, code)) >= magnitude);
    let code = above.map_or(u64::from(largest), |above| above as u64);
    let nearest = if code == 0 {
        0
    } else {
        let (up, down) = (f64::from(fp8_value(format, code as u8)), f64::from(fp8_value(format, code as u8 - 1)));
        let lower = magnitude - down < up - magnitude || magnitude - down == up - magnitude && code & 1 == 1;
        if lower { code - 1 } else { code }
    };
    nearest | u64::from(x.is_sign_negative()) << 7
}

/// Two floats to a pair of FP8 numbers.
pub(super) fn fp8_pair(format: Fp8, relu: bool, from: Ty, high: u64, low: u64) -> u64 {
    to_fp8(format, relu, value(from, high)) << 8 | to_fp8(format, relu, value(from, low))
}

/// A pair of FP8 numbers to one of f16: exact, but for NaNs.
pub(super) fn fp8_to_f16(format: Fp8, relu: bool, bits: u64) -> u64 {
    let clamp = if relu { Clamp::Positive } else { Clamp::None };
    let one = |code: u64| to_float(Ty::F16, clamped(f64::from(fp8_value(format, code as u8)), clamp), Round::Nearest);
    one(bits >> 8 & 0xff) << 16 | one(bits & 0xff)
}
