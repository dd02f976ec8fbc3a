//! Operations of single lanes, over all lanes of a mask.
use super::compare::ordered;
use super::registers::{LANES, Registers};
use super::{convert, float, integer, lane};
use crate::error::Fault;
use crate::ir::{Carry, Compare, FloatBinary, FloatUnary, Int, IntBinary, IntUnary, Logic, Op, Round, Ternary, Ty};

/// Runs an integer expression at the width and signedness of a type; `$x` and `$y` have that type.
macro_rules! typed {
    ($ty:expr, $regs:expr, $mask:expr, $dst:expr, $a:expr, $b:expr, |$x:ident, $y:ident| $body:expr) => {
        match $ty {
            Int::U16 => $regs.map2($mask, $dst, $a, $b, |x, y| {
                let ($x, $y) = (x as u16, y as u16);
                ($body) as u64
            }),
            Int::S16 => $regs.map2($mask, $dst, $a, $b, |x, y| {
                let ($x, $y) = (x as i16, y as i16);
                ($body) as u16 as u64
            }),
            Int::U32 => $regs.map2($mask, $dst, $a, $b, |x, y| {
                let ($x, $y) = (x as u32, y as u32);
                ($body) as u64
            }),
            Int::S32 => $regs.map2($mask, $dst, $a, $b, |x, y| {
                let ($x, $y) = (x as i32, y as i32);
                ($body) as u32 as u64
            }),
            Int::U64 => $regs.map2($mask, $dst, $a, $b, |x, y| {
                let ($x, $y) = (x as u64, y as u64);
                ($body) as u64
            }),
            Int::S64 => $regs.map2($mask, $dst, $a, $b, |x, y| {
                let ($x, $y) = (x as i64, y as i64);
                ($body) as u64
            }),
        }
    };
}

/// A shift: amounts from the width on shift everything out (PTX ISA, `shl` and `shr`).
macro_rules! shifted {
    ($regs:expr, $mask:expr, $dst:expr, $a:expr, $b:expr, $t:ty, $u:ty, $op:ident, $all:expr) => {
        $regs.map2($mask, $dst, $a, $b, |x, y| {
            let x = x as $t;
            let gone: fn($t) -> $t = $all;
            x.$op(y as u32).unwrap_or_else(|| gone(x)) as $u as u64
        })
    };
}

fn int_binary(regs: &mut Registers, mask: u32, op: IntBinary, ty: Int, dst: u32, a: u32, b: u32) {
    match op {
        IntBinary::Add => typed!(ty, regs, mask, dst, a, b, |x, y| x.wrapping_add(y)),
        IntBinary::Sub => typed!(ty, regs, mask, dst, a, b, |x, y| x.wrapping_sub(y)),
        IntBinary::MulLo => typed!(ty, regs, mask, dst, a, b, |x, y| x.wrapping_mul(y)),
        IntBinary::Min => typed!(ty, regs, mask, dst, a, b, |x, y| x.min(y)),
        IntBinary::Max => typed!(ty, regs, mask, dst, a, b, |x, y| x.max(y)),
        // A division by zero gives all ones, as hardware does.
        IntBinary::Div => typed!(ty, regs, mask, dst, a, b, |x, y| if y == 0 { !0 } else { x.wrapping_div(y) }),
        IntBinary::Rem => typed!(ty, regs, mask, dst, a, b, |x, y| if y == 0 { !0 } else { x.wrapping_rem(y) }),
        IntBinary::And => regs.map2(mask, dst, a, b, |x, y| x & y),
        IntBinary::Or => regs.map2(mask, dst, a, b, |x, y| x | y),
        IntBinary::Xor => regs.map2(mask, dst, a, b, |x, y| x ^ y),
        IntBinary::MulHi => match ty {
            Int::U16 => regs.map2(mask, dst, a, b, |x, y| (x * y) >> 16),
            Int::S16 => regs.map2(mask, dst, a, b, |x, y| ((x as i16 as i32 * y as i16 as i32) >> 16) as u16 as u64),
            Int::U32 => regs.map2(mask, dst, a, b, |x, y| (x * y) >> 32),
            Int::S32 => regs.map2(mask, dst, a, b, |x, y| ((x as i32 as i64 * y as i32 as i64) >> 32) as u32 as u64),
            Int::U64 => regs.map2(mask, dst, a, b, |x, y| ((u128::from(x) * u128::from(y)) >> 64) as u64),
            Int::S64 => regs.map2(mask, dst, a, b, |x, y| ((x as i64 as i128 * y as i64 as i128) >> 64) as u64),
        },
        IntBinary::MulWide => regs.map2(mask, dst, a, b, |x, y| wide(ty, x, y)),
        IntBinary::Shl => match ty {
            Int::U16 | Int::S16 => shifted!(regs, mask, dst, a, b, u16, u16, checked_shl, |_| 0),
            Int::U32 | Int::S32 => shifted!(regs, mask, dst, a, b, u32, u32, checked_shl, |_| 0),
            Int::U64 | Int::S64 => shifted!(regs, mask, dst, a, b, u64, u64, checked_shl, |_| 0),
        },
        IntBinary::Shr => match ty {
            Int::U16 => shifted!(regs, mask, dst, a, b, u16, u16, checked_shr, |_| 0),
            Int::U32 => shifted!(regs, mask, dst, a, b, u32, u32, checked_shr, |_| 0),
            Int::U64 => shifted!(regs, mask, dst, a, b, u64, u64, checked_shr, |_| 0),
            Int::S16 => shifted!(regs, mask, dst, a, b, i16, u16, checked_shr, |x| x >> 15),
            Int::S32 => shifted!(regs, mask, dst, a, b, i32, u32, checked_shr, |x| x >> 31),
            Int::S64 => shifted!(regs, mask, dst, a, b, i64, u64, checked_shr, |x| x >> 63),
        },
    }
}

/// The full product of two values of up to 32 bits.
fn wide(ty: Int, x: u64, y: u64) -> u64 {
    match ty {
        Int::U16 => x * y,
        Int::S16 => (x as i16 as i32 * y as i16 as i32) as u32 as u64,
        Int::S32 => (x as i32 as i64 * y as i32 as i64) as u64,
        _ => (x & 0xffff_ffff) * (y & 0xffff_ffff),
    }
}

fn int_unary(regs: &mut Registers, mask: u32, op: IntUnary, ty: Int, dst: u32, a: u32) {
    let zero = crate::ir::SINK;
    match op {
        IntUnary::Not => typed!(ty, regs, mask, dst, a, zero, |x, _y| !x),
        IntUnary::Neg => typed!(ty, regs, mask, dst, a, zero, |x, _y| x.wrapping_neg()),
        IntUnary::Abs => match ty {
            Int::S16 => regs.map(mask, dst, a, |x| (x as i16).unsigned_abs().into()),
            Int::S64 => regs.map(mask, dst, a, |x| (x as i64).unsigned_abs()),
            _ => regs.map(mask, dst, a, |x| (x as i32).unsigned_abs().into()),
        },
        IntUnary::Popc => typed!(ty, regs, mask, dst, a, zero, |x, _y| x.count_ones()),
        IntUnary::Clz => typed!(ty, regs, mask, dst, a, zero, |x, _y| x.leading_zeros()),
        IntUnary::Brev => typed!(ty, regs, mask, dst, a, zero, |x, _y| x.reverse_bits()),
    }
}

/// Bit field extract (PTX ISA, `bfe`). Beyond the value come zeros, or the sign.
fn bfe(value: u64, bits: u32, signed: bool, pos: u64, len: u64) -> u64 {
    let (pos, len) = ((pos & 0xff) as u32, (len & 0xff) as u32);
    let extended = if signed { i128::from(value) << (128 - bits) >> (128 - bits) } else { i128::from(value) };
    let field = (extended >> pos.min(127)) & ((1i128 << len.min(64)) - 1);
    if !signed || len == 0 {
        return field as u64;
    }
    let sign = extended >> (pos + len - 1).min(bits - 1) & 1;
    let filled = if sign == 1 && len < bits { field | -1i128 << len } else { field };
    filled as u64 & u64::MAX >> (64 - bits)
}

fn bfi(bits: u32, a: u64, b: u64, pos: u64, len: u64) -> u64 {
    let (pos, len) = ((pos & 0xff) as u32, (len & 0xff) as u32);
    if pos >= bits || len == 0 {
        return b;
    }
    let ones = if len >= 64 { u64::MAX } else { (1 << len) - 1 };
    let mask = ones << pos & (u64::MAX >> (64 - bits));
    b & !mask | a << pos & mask
}

/// Permute in its default mode: the top bit of a selector spreads the byte's sign (PTX ISA, `prmt`).
fn prmt(a: u64, b: u64, selector: u64) -> u64 {
    let bytes = b << 32 | a;
    (0..4).fold(0, |word, i| {
        let nibble = selector >> (4 * i) & 15;
        let byte = bytes >> (8 * (nibble & 7)) & 0xff;
        let byte = if nibble & 8 == 0 { byte } else { (byte >> 7) * 0xff };
        word | byte << (8 * i)
    })
}

fn lop3(table: u8, a: u64, b: u64, c: u64) -> u64 {
    let term = |i: u64| {
        let side = |x: u64, bit: u64| if i >> bit & 1 == 1 { x } else { !x };
        if table >> i & 1 == 1 { side(a, 2) & side(b, 1) & side(c, 0) } else { 0 }
    };
    (0..8).fold(0, |bits, i| bits | term(i)) & 0xffff_ffff
}

fn ternary(op: Ternary, a: u64, b: u64, c: u64) -> u64 {
    let amount = |wrap: bool| if wrap { c & 31 } else { (c & 0xffff_ffff).min(32) };
    match op {
        Ternary::MadLo(Int::U16 | Int::S16) => u64::from((a as u16).wrapping_mul(b as u16).wrapping_add(c as u16)),
        Ternary::MadLo(Int::U32 | Int::S32) => u64::from((a as u32).wrapping_mul(b as u32).wrapping_add(c as u32)),
        Ternary::MadLo(_) => a.wrapping_mul(b).wrapping_add(c),
        Ternary::MadWide(ty @ (Int::U16 | Int::S16)) => u64::from((wide(ty, a, b) as u32).wrapping_add(c as u32)),
        Ternary::MadWide(ty) => wide(ty, a, b).wrapping_add(c),
        Ternary::BfeU32 => bfe(a, 32, false, b, c),
        Ternary::BfeU64 => bfe(a, 64, false, b, c),
        Ternary::BfeS32 => bfe(a, 32, true, b, c),
        Ternary::BfeS64 => bfe(a, 64, true, b, c),
        Ternary::Prmt => prmt(a, b, c),
        // a is the low word, b the high one (PTX ISA, `shf`).
        Ternary::ShfLeft { wrap } => ((b << 32 | a) << amount(wrap)) >> 32,
        Ternary::ShfRight { wrap } => (b << 32 | a) >> amount(wrap) & 0xffff_ffff,
        Ternary::Lop3(table) => lop3(table, a, b, c),
    }
}

/// The lanes where a comparison holds.
fn compare(regs: &Registers, cmp: Compare, ty: Ty, ftz: bool, a: u32, b: u32) -> u32 {
    let (x, y) = (regs.row(a), regs.row(b));
    let lanes = |f: &dyn Fn(u64, u64) -> bool| (0..LANES).fold(0, |m, l| m | u32::from(f(x[l], y[l])) << l);
    let float = |bits: u64| {
        let x = f32::from_bits(bits as u32);
        if ftz && x.is_subnormal() { 0.0 } else { x }
    };
    match ty {
        Ty::Int(Int::S16) => lanes(&|x, y| ordered(cmp, x as i16, y as i16)),
        Ty::Int(Int::S32) => lanes(&|x, y| ordered(cmp, x as i32, y as i32)),
        Ty::Int(Int::S64) => lanes(&|x, y| ordered(cmp, x as i64, y as i64)),
        Ty::Int(_) => lanes(&|x, y| ordered(cmp, x, y)),
        Ty::F64 => lanes(&|x, y| ordered(cmp, f64::from_bits(x), f64::from_bits(y))),
        Ty::F16 | Ty::Bf16 => lanes(&|x, y| {
            let half = |bits: u64| {
                let x = float::widen(ty, bits);
                if ftz && x.abs() < 6.103_515_6e-5 { 0.0 } else { x }
            };
            ordered(cmp, half(x), half(y))
        }),
        _ => lanes(&|x, y| ordered(cmp, float(x), float(y))),
    }
}

fn logic(op: Logic, a: u32, b: u32) -> u32 {
    match op {
        Logic::And => a & b,
        Logic::Or => a | b,
        Logic::Xor => a ^ b,
    }
}

fn carry(regs: &mut Registers, mask: u32, op: &Carry, dst: u32, [a, b, c]: [u32; 3]) {
    let (x, y, z) = (*regs.row(a), *regs.row(b), *regs.row(c));
    for l in (0..LANES).filter(|l| mask >> l & 1 == 1) {
        let (value, carry) = integer::carry(op, x[l], y[l], z[l], regs.carry >> l & 1 == 1);
        regs.row_mut(dst)[l] = value;
        if op.sets {
            regs.carry = regs.carry & !(1 << l) | u32::from(carry) << l;
        }
    }
}

/// Runs an operation that concerns one lane at a time; `false` if it is of another kind.
pub(super) fn run(regs: &mut Registers, mask: u32, op: &Op) -> Result<bool, Fault> {
    match *op {
        Op::Mov { dst, a } => regs.map(mask, dst, a, |x| x),
        Op::IntBinary { op, ty, dst, a, b } => int_binary(regs, mask, op, ty, dst, a, b),
        Op::IntUnary { op, ty, dst, a } => int_unary(regs, mask, op, ty, dst, a),
        // The three that make up most of a kernel get loops of their own.
        Op::FloatBinary { op: FloatBinary::Add, ftz: false, dst, a, b } => {
            regs.map2(mask, dst, a, b, |x, y| float::binary(FloatBinary::Add, false, x, y));
        }
        Op::FloatBinary { op: FloatBinary::Mul, ftz: false, dst, a, b } => {
            regs.map2(mask, dst, a, b, |x, y| float::binary(FloatBinary::Mul, false, x, y));
        }
        Op::Fma { round: Round::Nearest, ftz: false, dst, a, b, c } => {
            regs.map3(mask, dst, a, b, c, |x, y, z| float::fma(Round::Nearest, false, x, y, z));
        }
        Op::FloatBinary { op, ftz, dst, a, b } => regs.map2(mask, dst, a, b, |x, y| float::binary(op, ftz, x, y)),
        Op::FloatUnary { op: FloatUnary::Neg, ftz: false, dst, a } => regs.map(mask, dst, a, |x| x ^ 0x8000_0000),
        Op::FloatUnary { op, ftz, dst, a } => regs.map(mask, dst, a, |x| float::unary(op, ftz, x)),
        Op::Fma { round, ftz, dst, a, b, c } => {
            regs.map3(mask, dst, a, b, c, |x, y, z| float::fma(round, ftz, x, y, z))
        }
        Op::Ternary { op: Ternary::MadLo(Int::U32 | Int::S32), dst, a, b, c } => {
            regs.map3(mask, dst, a, b, c, |x, y, z| ternary(Ternary::MadLo(Int::U32), x, y, z));
        }
        Op::Ternary { op, dst, a, b, c } => regs.map3(mask, dst, a, b, c, |x, y, z| ternary(op, x, y, z)),
        Op::Bfi { wide, dst, a, b, pos, len } => {
            let (p, n) = (*regs.row(pos), *regs.row(len));
            let bits = if wide { 64 } else { 32 };
            regs.map_lanes(mask, dst, a, b, |l, x, y| bfi(bits, x, y, p[l], n[l]));
        }
        Op::Cvt { how, dst, a } => match convert::cut(&how) {
            Some(bits) => regs.map(mask, dst, a, |x| x & bits),
            None => regs.map(mask, dst, a, |x| convert::run(&how, x)),
        },
        Op::Lane { ref op, dst, a, b, c } => regs.map3(mask, dst, a, b, c, |x, y, z| lane::run(op, x, y, z)),
        Op::Carry { ref op, dst, a, b, c } => carry(regs, mask, op, dst, [a, b, c]),
        Op::Testp { class, ty, dst, a } => {
            let row = regs.row(a);
            let holds = (0..LANES).fold(0, |m, l| m | u32::from(lane::is_of(class, ty, row[l])) << l);
            regs.set_pred(mask, dst, holds);
        }
        Op::CvtPair { to, dst, high, low } => regs.map2(mask, dst, high, low, |x, y| {
            let narrow = |bits: u64| float::narrow(to, f32::from_bits(bits as u32));
            narrow(x) << 16 | narrow(y)
        }),
        Op::Pack { bits, dst, ref parts } => {
            let rows: Vec<_> = parts.iter().map(|p| *regs.row(*p)).collect();
            let pack = |l: usize| rows.iter().rev().fold(0, |word, row| word << bits | row[l]);
            regs.map_lanes(mask, dst, dst, dst, |l, _, _| pack(l));
        }
        Op::Unpack { bits, ref dsts, a } => {
            let row = *regs.row(a);
            for (i, dst) in dsts.iter().enumerate() {
                let shift = bits * i as u32;
                regs.map_lanes(mask, *dst, a, a, |l, _, _| row[l] >> shift & ((1 << bits) - 1));
            }
        }
        Op::Selp { dst, a, b, pred } => {
            let chosen = regs.pred(pred);
            regs.map_lanes(mask, dst, a, b, |l, x, y| if chosen >> l & 1 == 1 { x } else { y });
        }
        Op::Setp { cmp, ty, ftz, dst, other, a, b, combine } => {
            let holds = compare(regs, cmp, ty, ftz, a, b);
            // The predicate counts for both results: `p = c op q` and `r = !c op q` (PTX ISA, `setp`).
            let with = |lanes: u32, regs: &Registers| combine.map_or(lanes, |(op, p)| logic(op, lanes, regs.pred(p)));
            let (yes, no) = (with(holds, regs), with(!holds, regs));
            regs.set_pred(mask, dst, yes);
            if let Some(other) = other {
                regs.set_pred(mask, other, no);
            }
        }
        Op::PredMov { dst, a } => regs.set_pred(mask, dst, regs.pred(a)),
        Op::PredConst { dst, value } => regs.set_pred(mask, dst, if value { u32::MAX } else { 0 }),
        Op::PredLogic { op, dst, a, b } => regs.set_pred(mask, dst, logic(op, regs.pred(a), regs.pred(b))),
        Op::Nop => {}
        _ => return Ok(false),
    }
    Ok(true)
}
