//! `tcgen05` instructions (PTX ISA, TensorCore 5th Generation Family Instructions), those of `.kind::f16` among the
//! multiplications.
use super::Decoder;
use crate::error::Fault;
use crate::ir::tcgen05::{CopyShape, Fragment, MatrixA, Mma, Shape, Tcgen05};
use crate::ir::{Inst, Op, Space};
use crate::parse::Operand;

fn cta_group(name: &str) -> Option<u8> {
    match name {
        "cta_group::1" => Some(1),
        "cta_group::2" => Some(2),
        _ => None,
    }
}

/// `.collector_usage`: buffer A, or one of four B buffers of `.ws`.
fn is_collector(name: &str, weight_stationary: bool) -> bool {
    let Some(("collector", rest)) = name.split_once("::") else { return false };
    let Some((buffer, op)) = rest.split_once("::") else { return false };
    let buffers: &[&str] = if weight_stationary { &["b0", "b1", "b2", "b3"] } else { &["a"] };
    buffers.contains(&buffer) && matches!(op, "fill" | "use" | "lastuse" | "discard")
}

/// The fragment of a shape, a repeat and maybe `.pack::16b`, and how many registers a thread has of it.
fn fragment(parts: &[&str], pack: &str) -> Option<(Fragment, usize)> {
    let (shape, repeat, packed) = match parts {
        [shape, repeat] => (shape, repeat, false),
        [shape, repeat, modifier] if *modifier == pack => (shape, repeat, true),
        _ => return None,
    };
    let (shape, registers) = match *shape {
        "16x64b" => (Shape::L16B64, 1),
        "16x128b" => (Shape::L16B128, 2),
        "16x256b" => (Shape::L16B256, 4),
        "32x32b" => (Shape::L32B32, 1),
        "16x32bx2" => (Shape::L16B32x2, 1),
        _ => return None,
    };
    let repeat: usize = repeat.strip_prefix('x')?.parse().ok()?;
    let count = repeat * registers;
    // PTX ISA, tcgen05.ld: repeats are powers of two, and a thread has 128 registers at most.
    (repeat.is_power_of_two() && count <= 128).then_some((Fragment { shape, split: 0, packed }, count))
}

fn copy_shape(parts: &[&str]) -> Option<CopyShape> {
    Some(match parts {
        ["128x256b"] => CopyShape::L128B256,
        ["4x256b"] => CopyShape::L4B256,
        ["128x128b"] => CopyShape::L128B128,
        ["64x128b", "warpx2::02_13"] => CopyShape::L64B128Pairs02,
        ["64x128b", "warpx2::01_23"] => CopyShape::L64B128Pairs01,
        ["32x128b", "warpx4"] => CopyShape::L32B128,
        _ => return None,
    })
}

/// All `tcgen05` instructions of a kernel have one value of `.cta_group` (PTX ISA, tcgen05.mma and others). The first
/// instruction that has another.
pub(super) fn mixed_groups(code: &[Inst]) -> Option<&Inst> {
    let group = |inst: &Inst| match &inst.op {
        Op::Tcgen05(op) => op.group(),
        _ => None,
    };
    let first = code.iter().find_map(group)?;
    code.iter().find(|inst| group(inst).is_some_and(|g| g != first))
}

impl Decoder<'_, '_> {
    pub(super) fn tcgen05(&mut self, parts: &[&str]) -> Result<Option<Op>, Fault> {
        let ["tcgen05", rest @ ..] = parts else { return Ok(None) };
        Ok(self.tcgen05_op(rest)?.map(|op| Op::Tcgen05(Box::new(op))))
    }

    fn tcgen05_op(&mut self, parts: &[&str]) -> Result<Option<Tcgen05>, Fault> {
        Ok(Some(match parts {
            ["wait::ld", "sync", "aligned"] => Tcgen05::WaitLoads,
            ["wait::st", "sync", "aligned"] => Tcgen05::WaitStores,
            ["fence::before_thread_sync"] => Tcgen05::FenceBefore,
            ["fence::after_thread_sync"] => Tcgen05::FenceAfter,
            ["ld", "sync", "aligned", rest @ .., "b32"] => return self.tensor_load(rest),
            ["st", "sync", "aligned", rest @ .., "b32"] => return self.tensor_store(rest),
            ["mma", "ws", group, rest @ ..] => return self.tensor_mma(group, rest, true),
            ["mma", group, rest @ ..] => return self.tensor_mma(group, rest, false),
            [name, group, rest @ ..] => {
                let Some(group) = cta_group(group) else { return Ok(None) };
                return self.tensor_group(name, group, rest);
            }
            _ => return Ok(None),
        }))
    }

    fn tensor_group(&mut self, name: &str, group: u8, rest: &[&str]) -> Result<Option<Tcgen05>, Fault> {
        Ok(Some(match (name, rest) {
            ("alloc", ["sync", "aligned", space @ .., "b32"]) => {
                let space = match space {
                    [] => Space::Generic,
                    ["shared::cta"] => Space::Shared,
                    _ => return Ok(None),
                };
                Tcgen05::Alloc { group, space, dst: self.address()?, columns: self.source(32)? }
            }
            ("dealloc", ["sync", "aligned", "b32"]) => {
                Tcgen05::Dealloc { group, address: self.source(32)?, columns: self.source(32)? }
            }
            ("relinquish_alloc_permit", ["sync", "aligned"]) => Tcgen05::Relinquish { group },
            ("commit", ["mbarrier::arrive::one", rest @ .., "b64"]) => {
                let multicast = match rest {
                    [] | ["shared::cluster"] => false,
                    ["multicast::cluster"] | ["shared::cluster", "multicast::cluster"] => true,
                    _ => return Ok(None),
                };
                let mbarrier = self.address()?;
                let mask = if multicast { Some(self.source(16)?) } else { None };
                Tcgen05::Commit { group, mbarrier, mask }
            }
            // What a pair of CTAs copies from whose shared memory, the ISA does not say.
            ("cp", shape) if group == 1 => {
                let Some(shape) = copy_shape(shape) else { return Ok(None) };
                Tcgen05::Copy { shape, address: self.address()?, descriptor: self.source(64)? }
            }
            ("shift", ["down"]) => Tcgen05::Shift { group, address: self.address()? },
            _ => return Ok(None),
        }))
    }

    fn tensor_load(&mut self, parts: &[&str]) -> Result<Option<Tcgen05>, Fault> {
        let Some((mut fragment, count)) = fragment(parts, "pack::16b") else { return Ok(None) };
        let (dsts, address) = (self.dests()?, self.address()?);
        self.check_registers(dsts.len(), count)?;
        if fragment.shape == Shape::L16B32x2 {
            fragment.split = self.immediate()? as u32;
        }
        Ok(Some(Tcgen05::Load { fragment, dsts, address }))
    }

    fn tensor_store(&mut self, parts: &[&str]) -> Result<Option<Tcgen05>, Fault> {
        let Some((mut fragment, count)) = fragment(parts, "unpack::16b") else { return Ok(None) };
        let address = self.address()?;
        if fragment.shape == Shape::L16B32x2 {
            fragment.split = self.immediate()? as u32;
        }
        let srcs = self.sources(32)?;
        self.check_registers(srcs.len(), count)?;
        Ok(Some(Tcgen05::Store { fragment, srcs, address }))
    }

    fn check_registers(&self, registers: usize, expected: usize) -> Result<(), Fault> {
        if registers == expected {
            return Ok(());
        }
        Err(self.bad(&format!("{registers} registers, expected {expected}")))
    }

    fn tensor_mma(&mut self, group: &str, rest: &[&str], weight_stationary: bool) -> Result<Option<Tcgen05>, Fault> {
        let known = match rest {
            ["kind::f16"] => true,
            ["kind::f16", usage] => is_collector(usage, weight_stationary),
            _ => false,
        };
        let Some(group) = cta_group(group).filter(|g| known && (*g == 1 || !weight_stationary)) else {
            return Ok(None);
        };
        let d = self.address()?;
        let a = match self.peek() {
            Some(Operand::Address { .. }) => MatrixA::Tensor(self.address()?),
            _ => MatrixA::Shared(self.source(64)?),
        };
        let (b, instruction) = (self.source(64)?, self.source(32)?);
        let disable_output_lane = match self.peek() {
            Some(Operand::Vector(_)) if !weight_stationary => {
                let lanes = self.sources(32)?;
                self.check_registers(lanes.len(), 4 * usize::from(group))?;
                Some(lanes)
            }
            _ => None,
        };
        let enable_input_d = self.pred()?;
        let (mut scale_input_d, mut zero_column_mask) = (0, None);
        if self.remaining() > 0 && weight_stationary {
            zero_column_mask = Some(self.source(64)?);
        } else if self.remaining() > 0 {
            scale_input_d = self.immediate()?.min(16) as u32;
        }
        // PTX ISA, tcgen05.mma: the valid range of scale-input-d is [0, 15].
        if scale_input_d > 15 {
            return Err(self.bad("scale-input-d, expected 0 to 15"));
        }
        Ok(Some(Tcgen05::Mma(Mma {
            group,
            weight_stationary,
            d,
            a,
            b,
            instruction,
            enable_input_d,
            scale_input_d,
            disable_output_lane,
            zero_column_mask,
        })))
    }
}
