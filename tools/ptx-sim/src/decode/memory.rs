//! Loads, stores, atomics and asynchronous copies (PTX ISA 9.7.9, 9.7.13).
use super::Decoder;
use super::alu::{int, ty};
use crate::error::Fault;
use crate::ir::{Addr, Atom, AtomTy, Op, SINK, Slot, Space};

/// What an access's modifiers say: the space, whether it is a strong one, the elements of a vector. The scope and how
/// the access is cached change nothing here.
fn access<'a>(names: &'a [&'a str]) -> Option<(Space, bool, usize)> {
    let (mut space, mut strong, mut vector) = (Space::Generic, false, 1);
    for name in names {
        match *name {
            "global" => space = Space::Global,
            "shared" | "shared::cta" => space = Space::Shared,
            "shared::cluster" => space = Space::Cluster,
            "param" | "param::entry" => space = Space::Param,
            "v2" => vector = 2,
            "v4" => vector = 4,
            "v8" => vector = 8,
            "volatile" | "relaxed" | "acquire" | "release" | "acq_rel" => strong = true,
            "nc" | "ca" | "cg" | "cs" | "lu" | "cv" | "wb" | "wt" | "weak" | "cta" | "cluster" | "gpu" | "sys" => {}
            hint if hint.starts_with("L1::") || hint.starts_with("L2::") => {}
            _ => return None,
        }
    }
    Some((space, strong, vector))
}

fn atom(name: &str) -> Option<Atom> {
    Some(match name {
        "add" => Atom::Add,
        "min" => Atom::Min,
        "max" => Atom::Max,
        "and" => Atom::And,
        "or" => Atom::Or,
        "xor" => Atom::Xor,
        "exch" => Atom::Exch,
        "cas" => Atom::Cas,
        _ => return None,
    })
}

impl Decoder<'_, '_> {
    pub(super) fn memory(&mut self, parts: &[&str]) -> Result<Option<Op>, Fault> {
        match parts {
            ["ld" | "ldu", rest @ .., t] => {
                let (Some((space, strong, vector)), Some(ty)) = (access(rest), ty(t)) else { return Ok(None) };
                let (dsts, addr) = (self.dests()?, self.address()?);
                self.check_parts(&dsts, vector)?;
                Ok(Some(Op::Load { space, strong, ty, dsts, addr }))
            }
            ["st", rest @ .., t] => {
                let (Some((space, strong, vector)), Some(ty)) = (access(rest), ty(t)) else { return Ok(None) };
                let (addr, srcs) = (self.address()?, self.sources(64)?);
                self.check_parts(&srcs, vector)?;
                Ok(Some(Op::Store { space, strong, ty, srcs, addr }))
            }
            [name @ ("atom" | "red"), rest @ .., op, t] => {
                let (Some((space, _, 1)), Some(op)) = (access(rest), atom(op)) else { return Ok(None) };
                let ty = match *t {
                    "f32" if op == Atom::Add => AtomTy::F32,
                    "u32" | "s32" | "b32" | "u64" | "s64" | "b64" => match int(t) {
                        Some(int) => AtomTy::Int(int),
                        None => return Ok(None),
                    },
                    _ => return Ok(None),
                };
                let dst = if *name == "red" { SINK } else { self.dest()? };
                let (addr, a) = (self.address()?, self.source(64)?);
                let b = if op == Atom::Cas { self.source(64)? } else { SINK };
                Ok(Some(Op::Atom { op, ty, space, dst, addr, a, b }))
            }
            ["cp", "async", rest @ ..] => self.copy(rest),
            ["cp", "reduce", "async", "bulk", rest @ ..] => self.bulk(rest, true),
            // Hints for caches.
            ["createpolicy", "fractional", ..] => {
                let dst = self.dest()?;
                while self.remaining() > 0 {
                    self.source(32)?;
                }
                Ok(Some(Op::Mov { dst, a: SINK }))
            }
            ["discard", ..] => {
                self.address()?;
                self.immediate()?;
                Ok(Some(Op::Nop))
            }
            ["mapa", "u32" | "u64"] | ["mapa", "shared::cluster", "u32" | "u64"] => {
                let dst = self.dest()?;
                let addr = Addr { base: self.source(64)?, offset: 0 };
                Ok(Some(Op::MapAddress { dst, addr, rank: self.source(32)? }))
            }
            ["prefetch" | "prefetchu", "global" | "L1" | "L2" | "tensormap" | "param" | "const", ..] => {
                self.address()?;
                Ok(Some(Op::Nop))
            }
            _ => Ok(None),
        }
    }

    pub(super) fn check_parts(&self, parts: &[Slot], vector: usize) -> Result<(), Fault> {
        if parts.len() == vector {
            return Ok(());
        }
        Err(self.bad(&format!("vector of {}, expected {vector}", parts.len())))
    }

    /// `cp.async` without tensors (PTX ISA, `cp.async`).
    fn copy(&mut self, parts: &[&str]) -> Result<Option<Op>, Fault> {
        match parts {
            ["ca" | "cg", "shared" | "shared::cta", "global", hints @ ..]
                if hints.iter().all(|h| h.starts_with("L2::")) =>
            {
                let (dst, src, bytes) = (self.address()?, self.address()?, self.immediate()?);
                let size = if self.remaining() > 0 { Some(self.source(32)?) } else { None };
                Ok(Some(Op::CpAsync { bytes, dst, src, size }))
            }
            ["bulk", rest @ ..] => self.bulk(rest, false),
            ["commit_group"] => Ok(Some(Op::CpAsyncCommit)),
            ["wait_group"] => Ok(Some(Op::CpAsyncWait { pending: self.immediate()? as usize })),
            ["wait_all"] => Ok(Some(Op::CpAsyncWait { pending: 0 })),
            ["mbarrier", "arrive", rest @ .., "b64"] => {
                let counted = match rest {
                    ["shared" | "shared::cta"] => false,
                    ["noinc", "shared" | "shared::cta"] => true,
                    _ => return Ok(None),
                };
                Ok(Some(Op::MbarrierArriveCopies { addr: self.address()?, counted }))
            }
            _ => Ok(None),
        }
    }
}
