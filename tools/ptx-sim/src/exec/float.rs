//! f32 arithmetic bit for bit, and rounding (PTX ISA 9.7.3).
//!
//! Rounding to nearest is the CPU's own. `ex2`, `lg2`, `rsqrt`, `sin`, `cos` and `tanh` of `.approx` are computed in f64 and rounded,
//! while hardware is less exact. `rcp`, `sqrt` and `div` are exact in both forms.
use crate::ir::{FloatBinary, FloatUnary, Round, Ty};
use half::{bf16, f16};

/// The NaN that arithmetic returns.
const NAN: u32 = 0x7fff_ffff;

/// Bits of a result: NaNs have one form.
fn out(x: f32) -> u64 {
    u64::from(if x.is_nan() { NAN } else { x.to_bits() })
}

/// A value of a register; subnormals become zeros of their sign where `ftz` asks for it.
fn input(bits: u64, ftz: bool) -> f32 {
    flush(f32::from_bits(bits as u32), ftz)
}

fn flush(x: f32, ftz: bool) -> f32 {
    if ftz && x.is_subnormal() { 0f32.copysign(x) } else { x }
}

/// min and max: of a number and a NaN the number; -0 is less than +0 (PTX ISA, `min` and `max` of floats).
pub(super) fn extreme(a: f32, b: f32, max: bool) -> f32 {
    if a.is_nan() || b.is_nan() {
        return if a.is_nan() { b } else { a };
    }
    let first = if a == b { a.is_sign_negative() != max } else { (a > b) == max };
    if first { a } else { b }
}

pub(super) fn binary(op: FloatBinary, ftz: bool, a: u64, b: u64) -> u64 {
    let (x, y) = (input(a, ftz), input(b, ftz));
    let value = match op {
        FloatBinary::Add => x + y,
        FloatBinary::Sub => x - y,
        FloatBinary::Mul => x * y,
        FloatBinary::Div => x / y,
        FloatBinary::Min => extreme(x, y, false),
        FloatBinary::Max => extreme(x, y, true),
        FloatBinary::CopySign => return b & 0x7fff_ffff | a & 0x8000_0000,
    };
    out(flush(value, ftz))
}

pub(super) fn unary(op: FloatUnary, ftz: bool, a: u64) -> u64 {
    let x = input(a, ftz);
    let value = match op {
        // Signs change without a look at the value.
        FloatUnary::Neg => return u64::from((-x).to_bits()),
        FloatUnary::Abs => return u64::from(x.abs().to_bits()),
        FloatUnary::Saturate if x.is_nan() => 0.0,
        FloatUnary::Saturate => x.clamp(0.0, 1.0) + 0.0,
        FloatUnary::Exp2 => f64::from(x).exp2() as f32,
        FloatUnary::Log2 => f64::from(x).log2() as f32,
        FloatUnary::Recip => 1.0 / x,
        FloatUnary::Sqrt => x.sqrt(),
        FloatUnary::Sin => f64::from(x).sin() as f32,
        FloatUnary::Cos => f64::from(x).cos() as f32,
        FloatUnary::Tanh => f64::from(x).tanh() as f32,
        FloatUnary::Rsqrt => (1.0 / f64::from(x).sqrt()) as f32,
    };
    out(flush(value, ftz))
}

pub(super) fn fma(round: Round, ftz: bool, a: u64, b: u64, c: u64) -> u64 {
    let (x, y, z) = (input(a, ftz), input(b, ftz), input(c, ftz));
    let value = match round {
        Round::Nearest => x.mul_add(y, z),
        mode => directed(x, y, z, mode),
    };
    out(flush(value, ftz))
}

/// `x * y + z` rounded towards a side. The product is exact in f64, the sum is an f64 and what that leaves out.
fn directed(x: f32, y: f32, z: f32, mode: Round) -> f32 {
    let (p, q) = (f64::from(x) * f64::from(y), f64::from(z));
    let sum = p + q;
    let part = sum - p;
    let rest = (p - (sum - part)) + (q - part);
    // An exact zero of unlike signs is -0 only when rounding down.
    if sum == 0.0 && rest == 0.0 && p.is_sign_negative() != q.is_sign_negative() {
        return if mode == Round::Down { -0.0 } else { 0.0 };
    }
    round_f32(sum, rest, mode)
}

/// `sum + rest` as an f32, where `sum` is the f64 nearest to that.
pub(super) fn round_f32(sum: f64, rest: f64, mode: Round) -> f32 {
    let near = sum as f32;
    if !sum.is_finite() {
        return near;
    }
    let wide = f64::from(near);
    let above = wide > sum || wide == sum && rest < 0.0;
    let below = wide < sum || wide == sum && rest > 0.0;
    match mode {
        Round::Nearest => near,
        Round::Down if above => near.next_down(),
        Round::Up if below => near.next_up(),
        Round::Zero if above && sum > 0.0 => near.next_down(),
        Round::Zero if below && sum < 0.0 => near.next_up(),
        _ => near,
    }
}

/// An integer as f32. `odd`: inexact results get an odd last bit, so that only a second rounding counts.
pub(super) fn int_to_f32(value: i128, mode: Round, odd: bool) -> f32 {
    let magnitude = value.unsigned_abs();
    let length = 128 - magnitude.leading_zeros();
    let shift = length.saturating_sub(24);
    let kept = magnitude >> shift;
    let lost = magnitude & ((1 << shift) - 1);
    let half = if shift == 0 { 0 } else { 1u128 << (shift - 1) };
    let up = match mode {
        _ if lost == 0 => false,
        _ if odd => kept & 1 == 0,
        Round::Nearest => lost > half || lost == half && kept & 1 == 1,
        Round::Zero => false,
        Round::Down => value < 0,
        Round::Up => value > 0,
    };
    let rounded = ((kept + u128::from(up)) << shift) as f32;
    if value < 0 { -rounded } else { rounded }
}

pub(super) fn widen(ty: Ty, bits: u64) -> f32 {
    match ty {
        Ty::F16 => f16::from_bits(bits as u16).to_f32(),
        Ty::Bf16 => bf16::from_bits(bits as u16).to_f32(),
        _ => f32::from_bits(bits as u32),
    }
}

/// f32 to a narrower float, to nearest. NaNs have one form.
pub(super) fn narrow(ty: Ty, x: f32) -> u64 {
    match ty {
        Ty::F16 | Ty::Bf16 if x.is_nan() => 0x7fff,
        Ty::F16 => u64::from(f16::from_f32(x).to_bits()),
        Ty::Bf16 => u64::from(bf16::from_f32(x).to_bits()),
        _ => u64::from(x.to_bits()),
    }
}
