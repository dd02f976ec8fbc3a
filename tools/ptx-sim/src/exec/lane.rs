//! Operations on up to three values of a lane.
use super::compare::{compare_ints, ordered};
use super::{convert, double, float, half, integer};
use crate::ir::{Class, FloatUnary, LaneOp, Round, RoundedKind, Set, Ty};

/// f32 arithmetic with a rounding mode, by way of `fma`.
fn rounded(kind: RoundedKind, round: Round, ftz: bool, [a, b, c]: [u64; 3]) -> u64 {
    let one = u64::from(1f32.to_bits());
    match kind {
        RoundedKind::Fma => float::fma(round, ftz, a, b, c),
        RoundedKind::Add => float::fma(round, ftz, a, one, b),
        RoundedKind::Sub => float::fma(round, ftz, a, one, b ^ 0x8000_0000),
        // A zero of the product's sign changes nothing, not even the sign of a zero.
        RoundedKind::Mul => float::fma(round, ftz, a, b, u64::from(((a ^ b) & 0x8000_0000) as u32)),
    }
}

fn set(op: &Set, a: u64, b: u64) -> u64 {
    let one = |a: u64, b: u64| match op.from {
        Ty::Int(int) => compare_ints(op.cmp, int, a, b),
        ty => {
            let number = |bits: u64| {
                let x = convert::value(ty, bits);
                let tiny = match ty {
                    Ty::F32 => f64::from(f32::MIN_POSITIVE),
                    _ => 2f64.powi(-14),
                };
                if op.ftz && x.abs() < tiny { 0.0 } else { x }
            };
            ordered(op.cmp, number(a), number(b))
        }
    };
    let bits = |a: u64, b: u64| if one(a, b) { op.yes } else { 0 };
    if op.packed { bits(a & 0xffff, b & 0xffff) | bits(a >> 16 & 0xffff, b >> 16 & 0xffff) << 16 } else { bits(a, b) }
}

/// Not inlined: the loops over lanes would be compiled once for each operation.
#[inline(never)]
pub(super) fn run(op: &LaneOp, a: u64, b: u64, c: u64) -> u64 {
    match *op {
        LaneOp::Half(ref op) => half::run(op, a, b, c),
        LaneOp::Double(kind, round) => double::run(kind, round, a, b, c),
        LaneOp::Int(op) => integer::run(op, a, b, c),
        LaneOp::Rounded { kind, round, ftz, saturate } => {
            let value = rounded(kind, round, ftz, [a, b, c]);
            if saturate { float::unary(FloatUnary::Saturate, ftz, value) } else { value }
        }
        LaneOp::ExtremeNan { max, ftz } => {
            let nan = |bits: u64| f32::from_bits(bits as u32).is_nan();
            let kind = if max { crate::ir::FloatBinary::Max } else { crate::ir::FloatBinary::Min };
            if nan(a) || nan(b) { 0x7fff_ffff } else { float::binary(kind, ftz, a, b) }
        }
        LaneOp::Set(ref op) => set(op, a, b),
        LaneOp::Pair { to, round, relu } => convert::pair(to, round, relu, a, b),
        LaneOp::Tf32 { away } => convert::tf32(away, a),
        LaneOp::Fp8Pair { format, relu } => convert::fp8_pair(format, relu, Ty::F32, a, b),
        LaneOp::Fp8FromPair { format, relu, from } => {
            convert::fp8_pair(format, relu, from, a >> 16 & 0xffff, a & 0xffff)
        }
        LaneOp::Fp8ToF16 { format, relu } => convert::fp8_to_f16(format, relu, a),
    }
}

/// Whether a float is of a class (PTX ISA, `testp`).
pub(super) fn is_of(class: Class, ty: Ty, bits: u64) -> bool {
    let (category, finite) = match ty {
        Ty::F64 => (f64::from_bits(bits).classify(), f64::from_bits(bits).is_finite()),
        _ => (f32::from_bits(bits as u32).classify(), f32::from_bits(bits as u32).is_finite()),
    };
    use std::num::FpCategory;
    match class {
        Class::Finite => finite,
        Class::Infinite => category == FpCategory::Infinite,
        Class::Number => category != FpCategory::Nan,
        Class::NotANumber => category == FpCategory::Nan,
        Class::Normal => category == FpCategory::Normal,
        Class::Subnormal => category == FpCategory::Subnormal,
    }
}
