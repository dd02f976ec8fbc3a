//! `cvt` and `cvta` (PTX ISA 9.7.9).
use super::Decoder;
use super::alu::{bits, round, ty};
use crate::error::Fault;
use crate::exec::can_convert;
use crate::ir::{Int, IntBinary, Op, Round, Ty};

fn is_float(ty: Ty) -> bool {
    matches!(ty, Ty::F16 | Ty::Bf16 | Ty::F32)
}

/// Modifiers of `cvt` before its types: rounding, integer rounding, saturation.
fn modifiers(names: &[&str], to: Ty, from: Ty) -> Option<(Round, bool)> {
    let (mut mode, mut sat) = (None, false);
    for name in names {
        match *name {
            "sat" => sat = true,
            "rni" | "rzi" | "rmi" | "rpi" => mode = round(&name[..2]),
            other => mode = Some(round(other)?),
        }
    }
    // To an integer only an integer rounding is legal, and it must be there.
    let integer = names.iter().any(|n| n.len() == 3 && n.ends_with('i'));
    let to_integer = is_float(from) && !is_float(to);
    if integer != to_integer {
        return None;
    }
    Some((mode.unwrap_or(Round::Nearest), sat))
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
                let (Some(to), Some(from)) = (ty(to), ty(from)) else { return Ok(None) };
                let Some((round, sat)) = modifiers(rest, to, from) else { return Ok(None) };
                if !can_convert(to, from, round, sat) {
                    return Ok(None);
                }
                let width = match from {
                    Ty::Int(int) => bits(int),
                    Ty::F32 => 32,
                    Ty::F16 | Ty::Bf16 => 16,
                    Ty::U8 | Ty::S8 => 8,
                };
                Ok(Some(Op::Cvt { to, from, round, sat, dst: self.dest()?, a: self.source(width)? }))
            }
            // Global addresses are generic addresses already.
            ["cvta", "global", "u64"] | ["cvta", "to", "global", "u64"] => {
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
