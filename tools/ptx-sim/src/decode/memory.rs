//! Loads, stores, atomics and asynchronous copies (PTX ISA 9.7.9, 9.7.13).
use super::Decoder;
use super::alu::ty;
use crate::error::Fault;
use crate::ir::{Addr, Op, SINK, Slot, Space};
use crate::memory::Strength;

/// What an access's modifiers say: the space, how strong it is, the elements of a vector. Scopes below that of the system and how
/// the access is cached change nothing here.
pub(super) fn access(names: &[&str]) -> Option<(Space, Strength, usize)> {
    let (mut space, mut strength, mut vector) = (Space::Generic, Strength::Weak, 1);
    for name in names {
        match *name {
            "global" => space = Space::Global,
            "shared" | "shared::cta" => space = Space::Shared,
            "shared::cluster" => space = Space::Cluster,
            "param" | "param::entry" => space = Space::Param,
            "local" => space = Space::Local,
            // Constants lie where global variables do.
            "const" => space = Space::Global,
            "v2" => vector = 2,
            "v4" => vector = 4,
            "v8" => vector = 8,
            // A volatile access is a relaxed one of the scope of the system.
            "volatile" => strength = Strength::System,
            "relaxed" | "acquire" | "release" | "acq_rel" => {
                strength = if names.contains(&"sys") { Strength::System } else { Strength::Device }
            }
            "nc" | "ca" | "cg" | "cs" | "lu" | "cv" | "wb" | "wt" | "weak" | "cta" | "cluster" | "gpu" | "sys" => {}
            hint if hint.starts_with("L1::") || hint.starts_with("L2::") => {}
            _ => return None,
        }
    }
    Some((space, strength, vector))
}

impl Decoder<'_, '_> {
    pub(super) fn memory(&mut self, parts: &[&str]) -> Result<Option<Op>, Fault> {
        match parts {
            ["ld" | "ldu", rest @ .., t] => {
                let (Some((space, strength, vector)), Some(ty)) = (access(rest), ty(t)) else { return Ok(None) };
                let (dsts, addr) = (self.dests()?, self.address()?);
                self.check_parts(&dsts, vector)?;
                let bits = dsts.iter().map(|dst| self.names.width(*dst)).max().unwrap_or(64);
                let used = self.instr.used_bytes.unwrap_or(u32::MAX);
                Ok(Some(Op::Load { space, strength, ty, bits, used, dsts, addr }))
            }
            ["st", rest @ .., t] => {
                let (Some((space, strength, vector)), Some(ty)) = (access(rest), ty(t)) else { return Ok(None) };
                let (addr, srcs) = (self.address()?, self.sources(64)?);
                self.check_parts(&srcs, vector)?;
                Ok(Some(Op::Store { space, strength, ty, srcs, addr }))
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
