//! f16, bf16 and f64 arithmetic, `set`, carries and less common integer instructions (PTX ISA 9.7.1 to 9.7.6).
use super::Decoder;
use super::alu::{bits, compare, int, round, ty};
use crate::error::Fault;
use crate::ir::{
    Carry, CarryKind, Clamp, Class, DoubleKind, HalfKind, HalfOp, Int, IntOp, LaneOp, Op, Round, RoundedKind, SINK,
    Set, Ty,
};

/// A half type and whether it is a pair.
fn half_type(name: &str) -> Option<(Ty, bool)> {
    Some(match name {
        "f16" => (Ty::F16, false),
        "f16x2" => (Ty::F16, true),
        "bf16" => (Ty::Bf16, false),
        "bf16x2" => (Ty::Bf16, true),
        _ => return None,
    })
}

/// An operation on halves and the number of its sources.
fn half(parts: &[&str]) -> Option<(HalfOp, usize)> {
    let (name, rest) = parts.split_first()?;
    let (last, mut rest) = rest.split_last()?;
    let (ty, packed) = half_type(last)?;
    let (kind, sources) = match *name {
        "add" => (HalfKind::Add, 2),
        "sub" => (HalfKind::Sub, 2),
        "mul" => (HalfKind::Mul, 2),
        "fma" => (HalfKind::Fma, 3),
        "min" => (HalfKind::Min, 2),
        "max" => (HalfKind::Max, 2),
        "neg" => (HalfKind::Neg, 1),
        "abs" => (HalfKind::Abs, 1),
        "ex2" => (HalfKind::Exp2, 1),
        "tanh" => (HalfKind::Tanh, 1),
        _ => return None,
    };
    let approximate = matches!(kind, HalfKind::Exp2 | HalfKind::Tanh);
    if let [first @ ("approx" | "rn"), more @ ..] = rest {
        if (*first == "approx") != approximate || *first == "rn" && sources == 1 {
            return None;
        }
        rest = more;
    } else if approximate || kind == HalfKind::Fma {
        return None;
    }
    let (mut ftz, mut clamp, mut nan) = (false, Clamp::None, false);
    for modifier in rest {
        match *modifier {
            "ftz" => ftz = true,
            "sat" => clamp = Clamp::Unit,
            "relu" if kind == HalfKind::Fma => clamp = Clamp::Positive,
            "NaN" if matches!(kind, HalfKind::Min | HalfKind::Max) => nan = true,
            _ => return None,
        }
    }
    Some((HalfOp { kind, ty, packed, ftz, clamp, nan }, sources))
}

/// An operation on f64 and the number of its sources.
fn double(parts: &[&str]) -> Option<(DoubleKind, Round, usize)> {
    let (name, rest) = parts.split_first()?;
    let (&"f64", rest) = rest.split_last()? else { return None };
    let mode = match rest {
        [] => None,
        ["approx", "ftz"] => {
            return match *name {
                "rcp" => Some((DoubleKind::RecipUpper, Round::Nearest, 1)),
                "rsqrt" => Some((DoubleKind::RsqrtUpper, Round::Nearest, 1)),
                _ => None,
            };
        }
        ["approx"] if *name == "rsqrt" => return Some((DoubleKind::Rsqrt, Round::Nearest, 1)),
        [mode] => Some(round(mode)?),
        _ => return None,
    };
    // The last says whether the rounding mode fits; of those that must have one only the nearest is known.
    let (kind, sources, rounds) = match *name {
        "add" => (DoubleKind::Add, 2, true),
        "sub" => (DoubleKind::Sub, 2, true),
        "mul" => (DoubleKind::Mul, 2, true),
        "fma" => (DoubleKind::Fma, 3, mode == Some(Round::Nearest)),
        "div" => (DoubleKind::Div, 2, mode == Some(Round::Nearest)),
        "sqrt" => (DoubleKind::Sqrt, 1, mode == Some(Round::Nearest)),
        "rcp" => (DoubleKind::Recip, 1, mode == Some(Round::Nearest)),
        "min" => (DoubleKind::Min, 2, mode.is_none()),
        "max" => (DoubleKind::Max, 2, mode.is_none()),
        "neg" => (DoubleKind::Neg, 1, mode.is_none()),
        "abs" => (DoubleKind::Abs, 1, mode.is_none()),
        "copysign" => (DoubleKind::CopySign, 2, mode.is_none()),
        _ => return None,
    };
    rounds.then_some((kind, mode.unwrap_or(Round::Nearest), sources))
}

/// f32 with a rounding mode, `.sat`, or both; `.NaN`.
fn rounded(parts: &[&str]) -> Option<(LaneOp, usize)> {
    let (name, rest) = parts.split_first()?;
    let (&"f32", rest) = rest.split_last()? else { return None };
    if let ("min" | "max", ["NaN"] | ["ftz", "NaN"]) = (*name, rest) {
        return Some((LaneOp::ExtremeNan { max: *name == "max", ftz: rest.len() == 2 }, 2));
    }
    let (kind, sources) = match *name {
        "add" => (RoundedKind::Add, 2),
        "sub" => (RoundedKind::Sub, 2),
        "mul" => (RoundedKind::Mul, 2),
        "fma" => (RoundedKind::Fma, 3),
        _ => return None,
    };
    let (mut mode, mut ftz, mut saturate) = (Round::Nearest, false, false);
    for modifier in rest {
        match *modifier {
            "ftz" => ftz = true,
            "sat" => saturate = true,
            other => mode = round(other)?,
        }
    }
    Some((LaneOp::Rounded { kind, round: mode, ftz, saturate }, sources))
}

/// An integer operation, its number of sources and their width.
fn integer(parts: &[&str]) -> Option<(IntOp, usize, u32)> {
    let sign = |name: &str| match name {
        "s32" => Some(true),
        "u32" => Some(false),
        _ => None,
    };
    Some(match parts {
        ["sad", "u32"] => (IntOp::SadU, 3, 32),
        ["sad", "s32"] => (IntOp::SadS, 3, 32),
        ["dp4a", a, b] => (IntOp::Dp4a((sign(a)?, sign(b)?)), 3, 32),
        ["dp2a", half @ ("lo" | "hi"), a, b] => {
            (IntOp::Dp2a { signs: (sign(a)?, sign(b)?), high: *half == "hi" }, 3, 32)
        }
        ["mul24", half @ ("lo" | "hi"), t] => (IntOp::Mul24 { signed: sign(t)?, high: *half == "hi" }, 2, 32),
        ["mad24", "lo", t] => (IntOp::Mad24 { signed: sign(t)? }, 3, 32),
        ["mad", "hi", t] => (if sign(t)? { IntOp::MadHiS } else { IntOp::MadHiU }, 3, 32),
        ["bfind", rest @ .., t] if matches!(rest, [] | ["shiftamt"]) => {
            let ty = int(t)?;
            let signed = matches!(ty, Int::S32 | Int::S64);
            (IntOp::Bfind { bits: bits(ty), signed, shift: !rest.is_empty() }, 1, bits(ty))
        }
        ["add", "sat", "s32"] => (IntOp::AddSat, 2, 32),
        ["sub", "sat", "s32"] => (IntOp::SubSat, 2, 32),
        ["add", "u16x2" | "s16x2"] => (IntOp::AddHalves, 2, 32),
        ["min", t @ ("u16x2" | "s16x2")] => (IntOp::MinHalves { signed: *t == "s16x2" }, 2, 32),
        ["max", t @ ("u16x2" | "s16x2")] => (IntOp::MaxHalves { signed: *t == "s16x2" }, 2, 32),
        ["slct", _, "s32"] => (IntOp::SlctS, 3, 64),
        ["slct", _, "f32"] => (IntOp::SlctF, 3, 64),
        _ => return None,
    })
}

fn carry(parts: &[&str]) -> Option<Carry> {
    let (last, rest) = parts.split_last()?;
    let (rest, sets) = match rest {
        [rest @ .., "cc"] => (rest, true),
        rest => (rest, false),
    };
    let (kind, uses) = match rest {
        ["add"] => (CarryKind::Add, false),
        ["addc"] => (CarryKind::Add, true),
        ["sub"] => (CarryKind::Sub, false),
        ["subc"] => (CarryKind::Sub, true),
        ["mad", "lo"] => (CarryKind::MadLow, false),
        ["mad", "hi"] => (CarryKind::MadHigh, false),
        ["madc", "lo"] => (CarryKind::MadLow, true),
        ["madc", "hi"] => (CarryKind::MadHigh, true),
        _ => return None,
    };
    let ty = int(last)?;
    let signed = matches!(ty, Int::S32 | Int::S64);
    (bits(ty) >= 32 && (uses || sets)).then_some(Carry { kind, bits: bits(ty), signed, uses, sets })
}

/// `set.cmp{.ftz}.dtype.stype` (PTX ISA, `set`).
fn set(parts: &[&str]) -> Option<Set> {
    let (cmp, ftz, to, from) = match parts {
        ["set", cmp, to, from] => (cmp, false, to, from),
        ["set", cmp, "ftz", to, from] => (cmp, true, to, from),
        _ => return None,
    };
    let (from, packed) = half_type(from).or_else(|| ty(from).map(|t| (t, false)))?;
    // Of pairs an integer result has 16 ones for each half.
    let yes = match (*to, packed) {
        ("u32" | "s32", true) => 0xffff,
        ("u32" | "s32", false) => 0xffff_ffff,
        ("u16" | "s16", false) => 0xffff,
        ("f32", false) => 0x3f80_0000,
        ("f16", false) | ("f16x2", true) => 0x3c00,
        ("bf16", false) | ("bf16x2", true) => 0x3f80,
        _ => return None,
    };
    Some(Set { cmp: compare(cmp)?, from, packed, ftz, yes })
}

fn class(name: &str) -> Option<Class> {
    Some(match name {
        "finite" => Class::Finite,
        "infinite" => Class::Infinite,
        "number" => Class::Number,
        "notanumber" => Class::NotANumber,
        "normal" => Class::Normal,
        "subnormal" => Class::Subnormal,
        _ => return None,
    })
}

impl Decoder<'_, '_> {
    pub(super) fn lane(&mut self, parts: &[&str]) -> Result<Option<Op>, Fault> {
        if let Some((op, sources)) = half(parts) {
            return self.lane_op(LaneOp::Half(op), sources, if op.packed { 32 } else { 16 });
        }
        if let Some((kind, mode, sources)) = double(parts) {
            return self.lane_op(LaneOp::Double(kind, mode), sources, 64);
        }
        if let Some((op, sources, width)) = integer(parts) {
            return self.lane_op(LaneOp::Int(op), sources, width);
        }
        if let Some(op) = carry(parts) {
            let (dst, a, b) = (self.dest()?, self.source(op.bits)?, self.source(op.bits)?);
            let three = matches!(op.kind, CarryKind::MadLow | CarryKind::MadHigh);
            let c = if three { self.source(op.bits)? } else { SINK };
            return Ok(Some(Op::Carry { op, dst, a, b, c }));
        }
        if let Some((op, sources)) = rounded(parts) {
            return self.lane_op(op, sources, 32);
        }
        if let Some(op) = set(parts) {
            return self.lane_op(LaneOp::Set(op), 2, 64);
        }
        match parts {
            ["testp", name, t @ ("f32" | "f64")] => {
                let Some(class) = class(name) else { return Ok(None) };
                let (ty, width) = if *t == "f32" { (Ty::F32, 32) } else { (Ty::F64, 64) };
                Ok(Some(Op::Testp { class, ty, dst: self.pred()?.slot, a: self.source(width)? }))
            }
            _ => Ok(None),
        }
    }

    pub(super) fn lane_op(&mut self, op: LaneOp, sources: usize, width: u32) -> Result<Option<Op>, Fault> {
        let dst = self.dest()?;
        let mut slots = [SINK; 3];
        for slot in &mut slots[..sources] {
            *slot = self.source(width)?;
        }
        let [a, b, c] = slots;
        Ok(Some(Op::Lane { op, dst, a, b, c }))
    }
}
