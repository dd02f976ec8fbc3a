//! Arithmetic, logic, comparison and moves (PTX ISA 9.7.1 to 9.7.8).
use super::Decoder;
use crate::error::Fault;
use crate::ir::{
    Compare, FloatBinary, FloatUnary, Int, IntBinary, IntUnary, Logic, Op, PredSource, Round, Ternary, Ty,
};
use crate::parse::Operand;

/// An integer type; untyped bits are unsigned.
pub(super) fn int(name: &str) -> Option<Int> {
    Some(match name {
        "u16" | "b16" => Int::U16,
        "s16" => Int::S16,
        "u32" | "b32" => Int::U32,
        "s32" => Int::S32,
        "u64" | "b64" => Int::U64,
        "s64" => Int::S64,
        _ => return None,
    })
}

/// Any type that memory, `cvt` and `setp` know.
pub(super) fn ty(name: &str) -> Option<Ty> {
    Some(match name {
        "u8" | "b8" => Ty::U8,
        "s8" => Ty::S8,
        "f16" => Ty::F16,
        "bf16" => Ty::Bf16,
        "f32" => Ty::F32,
        "f64" => Ty::F64,
        other => Ty::Int(int(other)?),
    })
}

fn int_binary(parts: &[&str]) -> Option<(IntBinary, Int)> {
    let (name, rest) = parts.split_first()?;
    let (op, ty) = match (*name, rest) {
        ("add", [t]) => (IntBinary::Add, t),
        ("sub", [t]) => (IntBinary::Sub, t),
        ("mul", ["lo", t]) => (IntBinary::MulLo, t),
        ("mul", ["hi", t]) => (IntBinary::MulHi, t),
        ("mul", ["wide", t]) => (IntBinary::MulWide, t),
        ("div", [t]) => (IntBinary::Div, t),
        ("rem", [t]) => (IntBinary::Rem, t),
        ("min", [t]) => (IntBinary::Min, t),
        ("max", [t]) => (IntBinary::Max, t),
        ("and", [t]) => (IntBinary::And, t),
        ("or", [t]) => (IntBinary::Or, t),
        ("xor", [t]) => (IntBinary::Xor, t),
        ("shl", [t]) => (IntBinary::Shl, t),
        ("shr", [t]) => (IntBinary::Shr, t),
        _ => return None,
    };
    Some((op, int(ty)?))
}

fn int_unary(parts: &[&str]) -> Option<(IntUnary, Int)> {
    let op = match *parts.first()? {
        "not" => IntUnary::Not,
        "neg" => IntUnary::Neg,
        "abs" => IntUnary::Abs,
        "popc" => IntUnary::Popc,
        "clz" => IntUnary::Clz,
        "brev" => IntUnary::Brev,
        _ => return None,
    };
    let [_, ty] = parts else { return None };
    Some((op, int(ty)?))
}

/// An f32 opcode without its `.rn`, `.ftz` and `.f32`; whether it flushes.
fn float_name<'a>(parts: &[&'a str]) -> Option<(&'a str, bool)> {
    let (name, rest) = parts.split_first()?;
    let (last, rest) = rest.split_last()?;
    let approximate = rest.contains(&"approx") || rest.contains(&"full");
    let known = rest.iter().all(|m| matches!(*m, "rn" | "ftz" | "approx" | "full"));
    // What only exists as an approximation must say so; the others must not.
    let needs = matches!(*name, "ex2" | "lg2" | "rsqrt" | "sin" | "cos" | "tanh");
    let may = needs || matches!(*name, "rcp" | "sqrt" | "div");
    let fits = *last == "f32" && known && (approximate || !needs) && (may || !approximate);
    fits.then(|| (*name, rest.contains(&"ftz")))
}

fn float_binary(parts: &[&str]) -> Option<(FloatBinary, bool)> {
    let (name, ftz) = float_name(parts)?;
    let op = match name {
        "add" => FloatBinary::Add,
        "sub" => FloatBinary::Sub,
        "mul" => FloatBinary::Mul,
        "div" => FloatBinary::Div,
        "min" => FloatBinary::Min,
        "max" => FloatBinary::Max,
        "copysign" => FloatBinary::CopySign,
        _ => return None,
    };
    Some((op, ftz))
}

fn float_unary(parts: &[&str]) -> Option<(FloatUnary, bool)> {
    let (name, ftz) = float_name(parts)?;
    let op = match name {
        "neg" => FloatUnary::Neg,
        "abs" => FloatUnary::Abs,
        "ex2" => FloatUnary::Exp2,
        "lg2" => FloatUnary::Log2,
        "rcp" => FloatUnary::Recip,
        "sqrt" => FloatUnary::Sqrt,
        "rsqrt" => FloatUnary::Rsqrt,
        "sin" => FloatUnary::Sin,
        "cos" => FloatUnary::Cos,
        "tanh" => FloatUnary::Tanh,
        _ => return None,
    };
    Some((op, ftz))
}

fn ternary(parts: &[&str]) -> Option<Ternary> {
    Some(match parts {
        ["mad", "lo", t] => Ternary::MadLo(int(t)?),
        ["mad", "wide", t @ ("u16" | "s16" | "u32" | "s32")] => Ternary::MadWide(int(t)?),
        ["bfe", "u32"] => Ternary::BfeU32,
        ["bfe", "s32"] => Ternary::BfeS32,
        ["bfe", "u64"] => Ternary::BfeU64,
        ["bfe", "s64"] => Ternary::BfeS64,
        ["prmt", "b32"] => Ternary::Prmt,
        ["shf", "l", mode @ ("wrap" | "clamp"), "b32"] => Ternary::ShfLeft { wrap: *mode == "wrap" },
        ["shf", "r", mode @ ("wrap" | "clamp"), "b32"] => Ternary::ShfRight { wrap: *mode == "wrap" },
        _ => return None,
    })
}

/// The rounding modifiers.
pub(super) fn round(name: &str) -> Option<Round> {
    Some(match name {
        "rn" => Round::Nearest,
        "rz" => Round::Zero,
        "rm" => Round::Down,
        "rp" => Round::Up,
        _ => return None,
    })
}

fn logic(name: &str) -> Option<Logic> {
    Some(match name {
        "and" => Logic::And,
        "or" => Logic::Or,
        "xor" => Logic::Xor,
        _ => return None,
    })
}

/// A comparison (PTX ISA 9.3); the unsigned names `lo` and so on mean the same on unsigned types.
pub(super) fn compare(name: &str) -> Option<Compare> {
    Some(match name {
        "eq" => Compare::Eq,
        "ne" => Compare::Ne,
        "lt" | "lo" => Compare::Lt,
        "le" | "ls" => Compare::Le,
        "gt" | "hi" => Compare::Gt,
        "ge" | "hs" => Compare::Ge,
        "equ" => Compare::Unordered(&Compare::Eq),
        "neu" => Compare::Unordered(&Compare::Ne),
        "ltu" => Compare::Unordered(&Compare::Lt),
        "leu" => Compare::Unordered(&Compare::Le),
        "gtu" => Compare::Unordered(&Compare::Gt),
        "geu" => Compare::Unordered(&Compare::Ge),
        "num" => Compare::Num,
        "nan" => Compare::Nan,
        _ => return None,
    })
}

/// Width of an integer type.
pub(super) fn bits(ty: Int) -> u32 {
    match ty {
        Int::U16 | Int::S16 => 16,
        Int::U32 | Int::S32 => 32,
        Int::U64 | Int::S64 => 64,
    }
}

impl Decoder<'_, '_> {
    pub(super) fn alu(&mut self, parts: &[&str]) -> Result<Option<Op>, Fault> {
        if let Some((op, ty)) = int_binary(parts) {
            let shift = matches!(op, IntBinary::Shl | IntBinary::Shr);
            let (dst, a) = (self.dest()?, self.source(bits(ty))?);
            let b = self.source(if shift { 32 } else { bits(ty) })?;
            return Ok(Some(Op::IntBinary { op, ty, dst, a, b }));
        }
        if let Some((op, ty)) = int_unary(parts) {
            return Ok(Some(Op::IntUnary { op, ty, dst: self.dest()?, a: self.source(bits(ty))? }));
        }
        if let Some((op, ftz)) = float_binary(parts) {
            let (dst, a, b) = (self.dest()?, self.source(32)?, self.source(32)?);
            // The first operand of copysign gives the sign (PTX ISA, `copysign`), unlike in C.
            return Ok(Some(Op::FloatBinary { op, ftz, dst, a, b }));
        }
        if let Some((op, ftz)) = float_unary(parts) {
            return Ok(Some(Op::FloatUnary { op, ftz, dst: self.dest()?, a: self.source(32)? }));
        }
        if let Some(op) = ternary(parts) {
            let dst = self.dest()?;
            let narrow = match op {
                Ternary::MadLo(ty) | Ternary::MadWide(ty) => bits(ty),
                Ternary::BfeU64 | Ternary::BfeS64 => 64,
                _ => 32,
            };
            let last = match op {
                Ternary::MadWide(ty) => 2 * bits(ty),
                Ternary::BfeU64 | Ternary::BfeS64 => 32,
                _ => narrow,
            };
            let a = self.source(narrow)?;
            let b = self.source(if matches!(op, Ternary::BfeU64 | Ternary::BfeS64) { 32 } else { narrow })?;
            return Ok(Some(Op::Ternary { op, dst, a, b, c: self.source(last)? }));
        }
        self.other(parts)
    }

    fn other(&mut self, parts: &[&str]) -> Result<Option<Op>, Fault> {
        Ok(Some(match parts {
            ["fma", mode, rest @ .., "f32"] if matches!(rest, [] | ["ftz"]) => {
                let Some(round) = round(mode) else { return Ok(None) };
                let (dst, a) = (self.dest()?, self.source(32)?);
                Op::Fma { round, ftz: !rest.is_empty(), dst, a, b: self.source(32)?, c: self.source(32)? }
            }
            ["lop3", "b32"] => {
                let (dst, a, b, c) = (self.dest()?, self.source(32)?, self.source(32)?, self.source(32)?);
                Op::Ternary { op: Ternary::Lop3(self.immediate()? as u8), dst, a, b, c }
            }
            ["bfi", t @ ("b32" | "b64")] => {
                let wide = *t == "b64";
                let width = if wide { 64 } else { 32 };
                // bfi d, a, b, c, d: a goes into b (PTX ISA, `bfi`).
                let (dst, a, b) = (self.dest()?, self.source(width)?, self.source(width)?);
                Op::Bfi { wide, dst, a, b, pos: self.source(32)?, len: self.source(32)? }
            }
            ["selp", t] => {
                let Some(width) = width(t) else { return Ok(None) };
                let (dst, a, b) = (self.dest()?, self.source(width)?, self.source(width)?);
                Op::Selp { dst, a, b, pred: self.pred()? }
            }
            ["setp", cmp, rest @ .., t] => return self.setp(cmp, rest, t),
            [op, "pred"] if logic(op).is_some() => {
                let Some(op) = logic(op) else { return Ok(None) };
                Op::PredLogic { op, dst: self.pred()?.slot, a: self.pred()?, b: self.pred()? }
            }
            ["not", "pred"] => {
                let (dst, a) = (self.pred()?.slot, self.pred()?);
                Op::PredMov { dst, a: PredSource { negated: !a.negated, ..a } }
            }
            ["mov", "pred"] => {
                let dst = self.pred()?.slot;
                match self.peek() {
                    Some(Operand::Int(bits)) => {
                        let value = *bits != 0;
                        self.at += 1;
                        Op::PredConst { dst, value }
                    }
                    _ => Op::PredMov { dst, a: self.pred()? },
                }
            }
            ["mov", t] => {
                let Some(width) = width(t) else { return Ok(None) };
                return self.mov(width);
            }
            _ => return Ok(None),
        }))
    }

    fn setp(&mut self, cmp: &str, rest: &[&str], t: &str) -> Result<Option<Op>, Fault> {
        let (Some(cmp), Some(ty)) = (compare(cmp), ty(t)) else { return Ok(None) };
        let (combine, ftz) = match rest {
            [] => (None, false),
            ["ftz"] => (None, true),
            [l] => (logic(l), false),
            [l, "ftz"] => (logic(l), true),
            _ => return Ok(None),
        };
        let wanted = rest.iter().any(|m| *m != "ftz");
        if wanted != combine.is_some() || matches!(ty, Ty::U8 | Ty::S8) {
            return Ok(None);
        }
        let width = match ty {
            Ty::Int(int) => bits(int),
            Ty::F64 => 64,
            Ty::F16 | Ty::Bf16 => 16,
            _ => 32,
        };
        let (dst, other) = self.pred_pair()?;
        let (a, b) = (self.source(width)?, self.source(width)?);
        let combine = combine.map(|l| self.pred().map(|p| (l, p))).transpose()?;
        Ok(Some(Op::Setp { cmp, ty, ftz, dst, other, a, b, combine }))
    }

    /// `mov` between registers, and to and from vectors (PTX ISA, `mov`).
    fn mov(&mut self, width: u32) -> Result<Option<Op>, Fault> {
        let instr = self.instr;
        Ok(Some(match &instr.operands[..] {
            [Operand::Vector(parts), _] => {
                let dsts = self.dests()?;
                Op::Unpack { bits: width / parts.len() as u32, dsts, a: self.source(width)? }
            }
            [_, Operand::Vector(parts)] => {
                let (dst, bits) = (self.dest()?, width / parts.len() as u32);
                Op::Pack { bits, dst, parts: self.sources(bits)? }
            }
            [_, Operand::Name(name)] if matches!(name.as_str(), "%globaltimer" | "%clock64" | "%clock") => {
                let dst = self.dest()?;
                self.operand()?;
                Op::Timer { dst }
            }
            _ => Op::Mov { dst: self.dest()?, a: self.source(width)? },
        }))
    }
}

/// Width of a type that is only moved.
fn width(name: &str) -> Option<u32> {
    match name {
        "f32" => Some(32),
        "f64" => Some(64),
        "f16x2" | "bf16x2" => Some(32),
        "f16" | "bf16" => Some(16),
        other => int(other).map(bits),
    }
}
