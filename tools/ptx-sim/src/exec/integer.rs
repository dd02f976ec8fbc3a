//! Less common integer instructions (PTX ISA 9.7.1 and 9.7.2).
use crate::ir::{Carry, CarryKind, IntOp};

fn signed(x: u64) -> i64 {
    i64::from(x as i32)
}

/// Four products of bytes, added to c (PTX ISA, `dp4a`).
fn dot(a: u64, b: u64, c: u64, (a_signed, b_signed): (bool, bool)) -> u64 {
    let byte = |x: u64, i: u32, signed: bool| {
        let byte = (x >> (8 * i)) as u8;
        if signed { i32::from(byte as i8) } else { i32::from(byte) }
    };
    let sum = (0..4).fold(c as i32, |sum, i| sum.wrapping_add(byte(a, i, a_signed) * byte(b, i, b_signed)));
    u64::from(sum as u32)
}

/// Two products of halves of a with bytes of b (PTX ISA, `dp2a`).
fn dot2(a: u64, b: u64, c: u64, (a_signed, b_signed): (bool, bool), high: bool) -> u64 {
    let half = |i: u32| {
        let half = (a >> (16 * i)) as u16;
        if a_signed { i32::from(half as i16) } else { i32::from(half) }
    };
    let byte = |i: u32| {
        let byte = (b >> (8 * i + if high { 16 } else { 0 })) as u8;
        if b_signed { i32::from(byte as i8) } else { i32::from(byte) }
    };
    u64::from((0..2).fold(c as i32, |sum, i| sum.wrapping_add(half(i).wrapping_mul(byte(i)))) as u32)
}

/// The 48-bit product of 24-bit numbers (PTX ISA, `mul24`).
fn mul24(a: u64, b: u64, is_signed: bool) -> i64 {
    let cut = |x: u64| {
        let low = (x & 0xff_ffff) as i64;
        if is_signed { low << 40 >> 40 } else { low }
    };
    cut(a) * cut(b)
}

/// Position of the highest bit that differs from the sign; all ones if there is none (PTX ISA, `bfind`).
fn bfind(a: u64, bits: u32, is_signed: bool, shift: bool) -> u64 {
    let value = if is_signed && a >> (bits - 1) & 1 == 1 { !a & u64::MAX >> (64 - bits) } else { a };
    if value == 0 {
        return 0xffff_ffff;
    }
    let position = 63 - value.leading_zeros();
    u64::from(if shift { bits - 1 - position } else { position })
}

/// Lanes of 16 bits.
fn halves(a: u64, b: u64, f: impl Fn(u16, u16) -> u16) -> u64 {
    u64::from(f(a as u16, b as u16)) | u64::from(f((a >> 16) as u16, (b >> 16) as u16)) << 16
}

pub(super) fn run(op: IntOp, a: u64, b: u64, c: u64) -> u64 {
    match op {
        IntOp::SadU => u64::from((a as u32).abs_diff(b as u32).wrapping_add(c as u32)),
        IntOp::SadS => u64::from((a as i32).abs_diff(b as i32).wrapping_add(c as u32)),
        IntOp::Dp4a(signs) => dot(a, b, c, signs),
        IntOp::Dp2a { signs, high } => dot2(a, b, c, signs, high),
        IntOp::Mul24 { signed, high } => {
            let product = mul24(a, b, signed);
            u64::from((if high { product >> 16 } else { product }) as u32)
        }
        IntOp::Mad24 { signed } => u64::from((mul24(a, b, signed) as u32).wrapping_add(c as u32)),
        IntOp::MadHiU => u64::from((((a * b) >> 32) as u32).wrapping_add(c as u32)),
        IntOp::MadHiS => u64::from((((signed(a) * signed(b)) >> 32) as u32).wrapping_add(c as u32)),
        IntOp::Bfind { bits, signed, shift } => bfind(a, bits, signed, shift),
        IntOp::AddSat => u64::from((a as i32).saturating_add(b as i32) as u32),
        IntOp::SubSat => u64::from((a as i32).saturating_sub(b as i32) as u32),
        IntOp::AddHalves => halves(a, b, u16::wrapping_add),
        IntOp::MinHalves { signed: false } => halves(a, b, u16::min),
        IntOp::MaxHalves { signed: false } => halves(a, b, u16::max),
        IntOp::MinHalves { .. } => halves(a, b, |x, y| (x as i16).min(y as i16) as u16),
        IntOp::MaxHalves { .. } => halves(a, b, |x, y| (x as i16).max(y as i16) as u16),
        // The third operand chooses by its sign (PTX ISA, `slct`).
        IntOp::SlctS => {
            if (c as i32) >= 0 {
                a
            } else {
                b
            }
        }
        IntOp::SlctF => {
            if f32::from_bits(c as u32) >= 0.0 {
                a
            } else {
                b
            }
        }
    }
}

/// An addition with the lane's carry: the result, and the carry that it leaves (PTX ISA 9.7.2).
pub(super) fn carry(op: &Carry, a: u64, b: u64, c: u64, carry: bool) -> (u64, bool) {
    let mask = u128::from(u64::MAX >> (64 - op.bits));
    let wide =
        |x: u64| if op.signed { i128::from(x as i64) << (128 - op.bits) >> (128 - op.bits) } else { i128::from(x) };
    let product = || (wide(a) * wide(b)) as u128;
    let (x, y) = match op.kind {
        CarryKind::Add | CarryKind::Sub => (u128::from(a), u128::from(b)),
        CarryKind::MadLow => (product() & mask, u128::from(c)),
        CarryKind::MadHigh => (product() >> op.bits & mask, u128::from(c)),
    };
    let flag = u128::from(op.uses && carry);
    // A borrow is the carry's meaning after a subtraction.
    let result = if op.kind == CarryKind::Sub { x.wrapping_sub(y).wrapping_sub(flag) } else { x + y + flag };
    ((result & mask) as u64, result & !mask != 0)
}
