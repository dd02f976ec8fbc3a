//! `cvt` and `cvta` (PTX ISA 9.7.9).
use super::Decoder;
use super::alu::{bits, round, ty};
use crate::error::Fault;
use crate::ir::{Clamp, Conversion, Fp8, Int, IntBinary, LaneOp, Op, Round, Ty};

fn is_float(ty: Ty) -> bool {
    matches!(ty, Ty::F16 | Ty::Bf16 | Ty::F32 | Ty::F64)
}

fn width(ty: Ty) -> u32 {
    match ty {
        Ty::Int(int) => bits(int),
        Ty::F64 => 64,
        Ty::F32 => 32,
        Ty::F16 | Ty::Bf16 => 16,
        Ty::U8 | Ty::S8 => 8,
    }
}

/// A conversion with the modifiers before its types: rounding, whole numbers, clamping.
fn conversion(names: &[&str], to: Ty, from: Ty) -> Option<Conversion> {
    let (mut mode, mut integral, mut clamp, mut ftz) = (None, false, Clamp::None, false);
    for name in names {
        match *name {
            "sat" => clamp = Clamp::Unit,
            "relu" if is_float(to) && is_float(from) => clamp = Clamp::Positive,
            "ftz" => ftz = true,
            "rni" | "rzi" | "rmi" | "rpi" => {
                mode = round(&name[..2]);
                integral = true;
            }
            other => mode = Some(round(other)?),
        }
    }
    let fits = match (is_float(from), is_float(to)) {
        // To an integer only an integer rounding is legal, and it must be there.
        (true, false) => integral,
        (false, false) => mode.is_none() && !ftz,
        (false, true) => mode.is_some() && !integral && clamp == Clamp::None,
        // What loses bits must say how; whole numbers stay in their type.
        (true, true) => {
            let narrower = width(to) < width(from) || width(to) == 16 && width(from) == 16 && to != from;
            if integral { to == from } else { mode.is_some() || !narrower }
        }
    };
    fits.then_some(Conversion { to, from, round: mode.unwrap_or(Round::Nearest), integral, clamp, ftz })
}

fn fp8(name: &str) -> Option<Fp8> {
    match name {
        "e4m3x2" => Some(Fp8::E4m3),
        "e5m2x2" => Some(Fp8::E5m2),
        _ => None,
    }
}

/// Conversions to and from packed or narrow formats, and the number and width of their sources.
fn packed(parts: &[&str]) -> Option<(LaneOp, usize, u32)> {
    let (mode, modifiers, to, from) = match parts {
        ["cvt", mode, rest @ .., to, from] => (*mode, rest, *to, *from),
        _ => return None,
    };
    let relu = modifiers.contains(&"relu");
    let satfinite = modifiers.contains(&"satfinite");
    if modifiers.iter().any(|m| !matches!(*m, "relu" | "satfinite")) {
        return None;
    }
    match (to, from) {
        ("f16x2" | "bf16x2", "f32") if !satfinite => {
            let to = if to == "f16x2" { Ty::F16 } else { Ty::Bf16 };
            let round = round(mode).filter(|r| matches!(r, Round::Nearest | Round::Zero))?;
            Some((LaneOp::Pair { to, round, relu }, 2, 32))
        }
        ("tf32", "f32") if modifiers.is_empty() && matches!(mode, "rna" | "rn") => {
            Some((LaneOp::Tf32 { away: mode == "rna" }, 1, 32))
        }
        ("f16x2", _) if mode == "rn" && !satfinite => Some((LaneOp::Fp8ToF16 { format: fp8(from)?, relu }, 1, 16)),
        (_, "f32") if mode == "rn" && satfinite => Some((LaneOp::Fp8Pair { format: fp8(to)?, relu }, 2, 32)),
        (_, "f16x2" | "bf16x2") if mode == "rn" && satfinite => {
            let from = if from == "f16x2" { Ty::F16 } else { Ty::Bf16 };
            Some((LaneOp::Fp8FromPair { format: fp8(to)?, relu, from }, 1, 32))
        }
        _ => None,
    }
}

impl Decoder<'_, '_> {
    pub(super) fn convert(&mut self, parts: &[&str]) -> Result<Option<Op>, Fault> {
        match parts {
            ["cvt", "rn", to @ ("f16x2" | "bf16x2"), "f32"] => {
                let to = if *to == "f16x2" { Ty::F16 } else { Ty::Bf16 };
                let (dst, high, low) = (self.dest()?, self.source(32)?, self.source(32)?);
                Ok(Some(Op::CvtPair { to, dst, high, low }))
            }
            ["cvt", rest @ .., to, from] => {
                if let Some((op, sources, width)) = packed(parts) {
                    return self.lane_op(op, sources, width);
                }
                let (Some(to), Some(from)) = (ty(to), ty(from)) else { return Ok(None) };
                let Some(how) = conversion(rest, to, from) else { return Ok(None) };
                Ok(Some(Op::Cvt { how, dst: self.dest()?, a: self.source(width(from))? }))
            }
            // Global addresses are generic addresses already, as are those of constants.
            ["cvta", "global" | "const", "u64"] | ["cvta", "to", "global" | "const", "u64"] => {
                Ok(Some(Op::Mov { dst: self.dest()?, a: self.source(64)? }))
            }
            ["cvta", "to", space, "u64"] => self.cvta(space, IntBinary::Sub),
            ["cvta", space, "u64"] => self.cvta(space, IntBinary::Add),
            _ => Ok(None),
        }
    }

    fn cvta(&mut self, space: &str, op: IntBinary) -> Result<Option<Op>, Fault> {
        let Some(b) = self.window(space) else { return Ok(None) };
        Ok(Some(Op::IntBinary { op, ty: Int::U64, dst: self.dest()?, a: self.source(64)?, b }))
    }
}
