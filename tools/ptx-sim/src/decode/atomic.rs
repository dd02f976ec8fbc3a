//! `atom` and `red` (PTX ISA 9.7.13.5 and 9.7.13.7).
use super::Decoder;
use super::alu::int;
use super::memory::access;
use crate::error::Fault;
use crate::ir::{Atom, AtomOp, AtomTy, Int, Op, SINK};

pub(super) fn atom(name: &str) -> Option<Atom> {
    Some(match name {
        "add" => Atom::Add,
        "min" => Atom::Min,
        "max" => Atom::Max,
        "and" => Atom::And,
        "or" => Atom::Or,
        "xor" => Atom::Xor,
        "exch" => Atom::Exch,
        "cas" => Atom::Cas,
        "inc" => Atom::Inc,
        "dec" => Atom::Dec,
        _ => return None,
    })
}

/// The type, where the operation has it.
fn ty(op: Atom, name: &str) -> Option<AtomTy> {
    let float = match name {
        "f32" => Some(AtomTy::F32),
        "f64" => Some(AtomTy::F64),
        "f16" | "f16x2" => Some(AtomTy::Half { bf16: false, packed: name == "f16x2" }),
        "bf16" | "bf16x2" => Some(AtomTy::Half { bf16: true, packed: name == "bf16x2" }),
        _ => None,
    };
    if let Some(float) = float {
        return (op == Atom::Add).then_some(float);
    }
    let int = int(name)?;
    let fits = match int {
        Int::U16 | Int::S16 => op == Atom::Cas,
        Int::U32 => true,
        _ => !matches!(op, Atom::Inc | Atom::Dec),
    };
    fits.then_some(AtomTy::Int(int))
}

impl Decoder<'_, '_> {
    pub(super) fn atomic(&mut self, parts: &[&str]) -> Result<Option<Op>, Fault> {
        let [name @ ("atom" | "red"), rest @ .., t] = parts else { return Ok(None) };
        let Some(at) = rest.iter().position(|part| atom(part).is_some()) else { return Ok(None) };
        let (Some((space, _, 1)), Some(op)) = (access(&rest[..at]), atom(rest[at])) else { return Ok(None) };
        let mut vector = 1;
        for modifier in &rest[at + 1..] {
            match *modifier {
                "noftz" => {}
                "v2" => vector = 2,
                "v4" => vector = 4,
                "v8" => vector = 8,
                _ => return Ok(None),
            }
        }
        let Some(ty) = ty(op, t).filter(|_| vector == 1 || op == Atom::Add) else { return Ok(None) };
        let dsts = if *name == "red" { [].into() } else { self.dests()? };
        let (addr, a) = (self.address()?, self.sources(64)?);
        self.check_parts(&a, vector)?;
        if *name == "atom" {
            self.check_parts(&dsts, vector)?;
        }
        let b = if op == Atom::Cas { self.source(64)? } else { SINK };
        Ok(Some(Op::Atom(Box::new(AtomOp { op, ty, space, dsts, addr, a, b }))))
    }
}
