//! Arithmetic in f16 and bf16, single or in pairs (PTX ISA 9.7.4, "Half Precision Floating Point Instructions").
//!
//! Each result is rounded once, from the exact one. NaNs have one form, 0x7fff.
use super::float::{extreme, narrow, round_f32, widen};
use crate::ir::{Clamp, HalfKind, HalfOp, Round, Ty};

/// `sum + rest` as an f32 whose last bit is odd if that is not exact: rounding it again to fewer bits is then as good as
/// rounding once.
pub(super) fn odd(sum: f64, rest: f64) -> f32 {
    if !sum.is_finite() {
        return sum as f32;
    }
    let cut = round_f32(sum, rest, Round::Zero);
    if f64::from(cut) == sum && rest == 0.0 { cut } else { f32::from_bits(cut.to_bits() | 1) }
}

/// `x * y + z`: the product is exact in f64, the sum is an f64 and what that leaves out.
fn fused(x: f32, y: f32, z: f32) -> f32 {
    let (p, q) = (f64::from(x) * f64::from(y), f64::from(z));
    let sum = p + q;
    let part = sum - p;
    odd(sum, (p - (sum - part)) + (q - part))
}

fn flush(bits: u64, ftz: bool) -> u64 {
    if ftz && bits & 0x7c00 == 0 { bits & 0x8000 } else { bits }
}

/// One value of 16 bits.
fn single(op: &HalfOp, [a, b, c]: [u64; 3]) -> u64 {
    let [a, b, c] = [a, b, c].map(|bits| flush(bits & 0xffff, op.ftz && op.ty == Ty::F16));
    let [x, y, z] = [a, b, c].map(|bits| widen(op.ty, bits));
    let exact = match op.kind {
        // Signs change without a look at the value.
        HalfKind::Neg => return a ^ 0x8000,
        HalfKind::Abs => return a & 0x7fff,
        HalfKind::Add => fused(x, 1.0, y),
        HalfKind::Sub => fused(x, 1.0, -y),
        // The sign of a product that is zero does not change with -0 added.
        HalfKind::Mul => fused(x, y, -0.0),
        HalfKind::Fma => fused(x, y, z),
        HalfKind::Min | HalfKind::Max if op.nan && (x.is_nan() || y.is_nan()) => f32::NAN,
        HalfKind::Min => extreme(x, y, false),
        HalfKind::Max => extreme(x, y, true),
        HalfKind::Exp2 => odd(f64::from(if op.ftz && x.is_subnormal() { 0.0 } else { x }).exp2(), 0.0),
        HalfKind::Tanh => odd(f64::from(x).tanh(), 0.0),
    };
    let clamped = match op.clamp {
        Clamp::None => exact,
        Clamp::Unit if exact.is_nan() => 0.0,
        Clamp::Unit => exact.clamp(0.0, 1.0) + 0.0,
        Clamp::Positive if exact.is_nan() => exact,
        Clamp::Positive => exact.max(0.0) + 0.0,
    };
    flush(narrow(op.ty, clamped), op.ftz && op.ty == Ty::F16)
}

pub(super) fn run(op: &HalfOp, a: u64, b: u64, c: u64) -> u64 {
    let low = single(op, [a, b, c]);
    if op.packed { low | single(op, [a >> 16, b >> 16, c >> 16]) << 16 } else { low }
}
