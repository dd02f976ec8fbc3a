//! f64 arithmetic (PTX ISA 9.7.3). Rounding to nearest is the CPU's own.
use crate::ir::{DoubleKind, Round};

/// `near` moved to the side of a rounding mode; `error` is what the exact result has beyond it.
fn directed(near: f64, error: f64, round: Round) -> f64 {
    if error == 0.0 || !near.is_finite() {
        return near;
    }
    match round {
        Round::Nearest => near,
        Round::Down if error < 0.0 => near.next_down(),
        Round::Up if error > 0.0 => near.next_up(),
        Round::Zero if near > 0.0 && error < 0.0 => near.next_down(),
        Round::Zero if near < 0.0 && error > 0.0 => near.next_up(),
        _ => near,
    }
}

fn sum(x: f64, y: f64, round: Round) -> f64 {
    let near = x + y;
    // An exact zero of unlike signs is -0 only when rounding down.
    if near == 0.0 && x.is_sign_negative() != y.is_sign_negative() {
        return if round == Round::Down { -0.0 } else { 0.0 };
    }
    let part = near - x;
    directed(near, (x - (near - part)) + (y - part), round)
}

/// min and max: of a number and a NaN the number; -0 is less than +0.
fn extreme(x: f64, y: f64, max: bool) -> f64 {
    if x.is_nan() || y.is_nan() {
        return if x.is_nan() { y } else { x };
    }
    let first = if x == y { x.is_sign_negative() != max } else { (x > y) == max };
    if first { x } else { y }
}

/// The upper word of a result: what `rcp.approx.ftz.f64` and `rsqrt.approx.ftz.f64` give (PTX ISA, `rcp` and `rsqrt`).
fn upper(x: f64) -> f64 {
    f64::from_bits(x.to_bits() & !0xffff_ffff)
}

fn flushed(x: f64) -> f64 {
    if x.is_subnormal() { 0f64.copysign(x) } else { x }
}

pub(super) fn run(kind: DoubleKind, round: Round, a: u64, b: u64, c: u64) -> u64 {
    let [x, y, z] = [a, b, c].map(f64::from_bits);
    let value = match kind {
        DoubleKind::Neg => return a ^ 1 << 63,
        DoubleKind::Abs => return a & !(1 << 63),
        // The first operand gives the sign (PTX ISA, `copysign`), unlike in C.
        DoubleKind::CopySign => return b & !(1 << 63) | a & 1 << 63,
        DoubleKind::Add => sum(x, y, round),
        DoubleKind::Sub => sum(x, -y, round),
        DoubleKind::Mul => {
            let near = x * y;
            directed(near, x.mul_add(y, -near), round)
        }
        DoubleKind::Fma => x.mul_add(y, z),
        DoubleKind::Div => x / y,
        DoubleKind::Sqrt => x.sqrt(),
        DoubleKind::Recip => 1.0 / x,
        DoubleKind::Min => extreme(x, y, false),
        DoubleKind::Max => extreme(x, y, true),
        DoubleKind::RecipUpper => upper(flushed(1.0 / flushed(x))),
        DoubleKind::RsqrtUpper => upper(1.0 / flushed(x).sqrt()),
        DoubleKind::Rsqrt => 1.0 / x.sqrt(),
    };
    value.to_bits()
}
