//! Bulk copies (PTX ISA, `cp.async.bulk` and `cp.async.bulk.tensor`).
use super::Decoder;
use crate::error::Fault;
use crate::ir::{Addr, BulkOp, Op, Slot, Target, TensorBox};
use crate::parse::Operand;

/// What may follow the mechanism of completion.
#[derive(Default)]
struct Extras {
    multicast: bool,
    pair: bool,
    hint: bool,
}

fn extras(names: &[&str]) -> Option<Extras> {
    let mut found = Extras::default();
    for name in names {
        match *name {
            "multicast::cluster" => found.multicast = true,
            "cta_group::1" => {}
            "cta_group::2" => found.pair = true,
            "L2::cache_hint" => found.hint = true,
            _ => return None,
        }
    }
    Some(found)
}

impl Decoder<'_, '_> {
    /// What follows `cp.async.bulk` or `cp.reduce.async.bulk`.
    pub(super) fn bulk(&mut self, parts: &[&str], reduces: bool) -> Result<Option<Op>, Fault> {
        let op = match parts {
            ["commit_group"] => BulkOp::Commit,
            ["wait_group"] => BulkOp::Wait { pending: self.immediate()? as usize, reads: false },
            ["wait_group", "read"] => BulkOp::Wait { pending: self.immediate()? as usize, reads: true },
            ["tensor", dims, rest @ ..] => return self.tensor(dims, rest, reduces),
            ["shared::cluster" | "shared::cta", "global", "mbarrier::complete_tx::bytes", rest @ ..] if !reduces => {
                let Some(extras) = extras(rest) else { return Ok(None) };
                let (dst, src, bytes) = (self.address()?, self.address()?, self.source(32)?);
                BulkOp::Load { src, bytes, target: self.bulk_target(dst, &extras)? }
            }
            ["shared::cluster", "shared::cta", "mbarrier::complete_tx::bytes"] if !reduces => {
                let (dst, src, bytes) = (self.address()?, self.address()?, self.source(32)?);
                BulkOp::Push { src, bytes, target: self.bulk_target(dst, &Extras::default())? }
            }
            ["global", "shared::cta", "bulk_group", rest @ ..] if !reduces => {
                let Some(extras) = extras(rest) else { return Ok(None) };
                let (dst, src, bytes) = (self.address()?, self.address()?, self.source(32)?);
                self.hint(&extras)?;
                BulkOp::Store { dst, src, bytes }
            }
            ["prefetch", "L2", "global", rest @ ..] => {
                let Some(extras) = extras(rest) else { return Ok(None) };
                self.address()?;
                self.source(32)?;
                self.hint(&extras)?;
                return Ok(Some(Op::Nop));
            }
            _ => return Ok(None),
        };
        Ok(Some(Op::Bulk(Box::new(op))))
    }

    fn tensor(&mut self, dims: &str, parts: &[&str], reduces: bool) -> Result<Option<Op>, Fault> {
        let Some(rank) = ["1d", "2d", "3d", "4d", "5d"].iter().position(|d| d == &dims) else { return Ok(None) };
        // Without a mode the copy is tiled.
        let (spaces, rest) = match parts {
            [to, from, rest @ ..] => ((*to, *from), rest),
            _ => return Ok(None),
        };
        let (mode, rest) = match rest {
            [mode @ ("tile" | "tile::gather4"), rest @ ..] => (*mode, rest),
            _ => ("tile", rest),
        };
        let gather = mode == "tile::gather4";
        let coords = if gather { 5 } else { rank + 1 };
        let op = match (spaces, rest) {
            (("shared::cluster" | "shared::cta", "global"), ["mbarrier::complete_tx::bytes", rest @ ..])
                if !reduces =>
            {
                let Some(extras) = extras(rest) else { return Ok(None) };
                let dst = self.address()?;
                let tensor = self.tensor_box(coords, gather)?;
                BulkOp::LoadTensor(tensor, self.bulk_target(dst, &extras)?)
            }
            (("global", "shared::cta"), rest) if !gather => {
                // `cp.reduce` has its operation before the mode.
                let rest = match (reduces, rest) {
                    (false, rest) => rest,
                    (true, ["add", "tile", rest @ ..] | ["add", rest @ ..]) => rest,
                    _ => return Ok(None),
                };
                let ["bulk_group", rest @ ..] = rest else { return Ok(None) };
                let Some(extras) = extras(rest) else { return Ok(None) };
                let (tensor, src) = (self.tensor_box(coords, false)?, self.address()?);
                self.hint(&extras)?;
                BulkOp::StoreTensor { tensor, src, adds: reduces }
            }
            _ => return Ok(None),
        };
        Ok(Some(Op::Bulk(Box::new(op))))
    }

    /// `[map, {c0, c1}]`.
    fn tensor_box(&mut self, rank: usize, gather: bool) -> Result<TensorBox, Fault> {
        let instr = self.instr;
        self.operand()?;
        match &instr.operands[self.at - 1] {
            Operand::Address { base, offset, coords } if coords.len() == rank => {
                let map = Addr { base: self.slot_of(base)?, offset: *offset as u64 };
                let cut = |coord: &Operand| match coord {
                    Operand::Int(value) => Operand::Int(value & 0xffff_ffff),
                    other => other.clone(),
                };
                let coords = coords.iter().map(|c| self.slot_of(&cut(c))).collect::<Result<Box<[Slot]>, _>>()?;
                Ok(TensorBox { map, coords, gather })
            }
            other => Err(self.bad(&format!("{other:?}"))),
        }
    }

    fn bulk_target(&mut self, dst: Addr, extras: &Extras) -> Result<Target, Fault> {
        let barrier = self.address()?;
        let multicast = if extras.multicast { Some(self.source(16)?) } else { None };
        self.hint(extras)?;
        Ok(Target { dst, barrier, multicast, pair: extras.pair })
    }

    /// A cache policy, which changes nothing here.
    fn hint(&mut self, extras: &Extras) -> Result<(), Fault> {
        if extras.hint {
            self.source(64)?;
        }
        Ok(())
    }
}
