//! Products of `wgmma` that are under way, of a warpgroup and of each of its warps.
use super::order::Agent;
use super::registers::LaneResult;
use crate::error::Fault;
use crate::ir::{AsyncProduct, Shape, Slot, SourceA};
use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock};

/// Warps of a warpgroup.
pub(super) const WARPS: usize = 4;

/// What an instruction of the warpgroup read from shared memory, by rows: all 64 rows of A, unless they are registers.
#[derive(Debug)]
pub(super) struct Operands<T> {
    pub a: Option<Vec<T>>,
    pub b: Vec<T>,
}

/// Factors of a product.
#[derive(Debug)]
pub(super) enum Values {
    Float(Operands<f32>),
    Int(Operands<i64>),
}

/// A product of the warpgroup, once all of its warps have issued it.
#[derive(Debug)]
pub(super) struct Issue {
    /// The instruction, and what its four warps must agree on: descriptors and whether it adds to D.
    pub op: AsyncProduct,
    pub line: u32,
    pub descriptors: (Option<u64>, u64),
    pub accumulates: bool,
    /// As what it reads B, and as what it reads each warp's rows of A in shared memory.
    pub agent: Agent,
    pub rows: OnceLock<[Agent; WARPS]>,
    /// The CTA that it belongs to.
    pub rank: usize,
    /// Rows of A in shared memory and columns of B that nothing wrote.
    pub unwritten: OnceLock<[BTreeSet<usize>; 2]>,
    pub values: OnceLock<Values>,
    /// Warps that have waited for it.
    pub retired: AtomicUsize,
}

/// A product that not all warps have issued.
pub(super) struct Open {
    pub issue: Arc<Issue>,
    /// Warps that have, and the agents that read their rows of A.
    pub warps: usize,
    pub rows: [Option<Agent>; WARPS],
}

/// The products of a warpgroup that not all of its warps have issued.
#[derive(Default)]
pub(crate) struct Warpgroup {
    pub open: VecDeque<Open>,
    /// Products that all warps have issued.
    pub complete: u64,
}

impl Warpgroup {
    /// Whether all warps have issued this many products.
    pub fn passed(&self, issued: u64) -> bool {
        self.complete >= issued
    }
}

/// A register of a warp.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Register {
    /// A `wgmma.fence` came after the last access.
    pub fenced: bool,
    /// The last access was as D of a product of this shape.
    pub sum: Option<Shape>,
    /// Products under way that have it, and the line of the last of them.
    pub flights: u32,
    pub line: u32,
}

/// A warp's part in its warpgroup's products.
#[derive(Default)]
pub(crate) struct Products {
    pub registers: Vec<Register>,
    pub issued: u64,
    pub open: Vec<Arc<Issue>>,
    pub groups: VecDeque<Vec<Arc<Issue>>>,
}

/// A fault of all lanes.
pub(super) fn error(problem: impl Into<String>) -> (Fault, u32) {
    (Fault::Wgmma { problem: problem.into() }, u32::MAX)
}
impl Products {
    /// An instruction other than `wgmma` accesses registers that a `wgmma` has, too.
    pub fn touch(&mut self, slots: &[Slot], mask: u32) -> LaneResult<()> {
        for slot in slots {
            let Some(register) = self.registers.get_mut(*slot as usize) else { return Ok(()) };
            if register.flights > 0 {
                let problem = format!("a register of line {} is accessed before a wait_group", register.line);
                return Err((Fault::Wgmma { problem }, mask));
            }
            (register.fenced, register.sum) = (false, None);
        }
        Ok(())
    }

    pub fn take_off(&mut self, op: &AsyncProduct, line: u32) -> LaneResult<()> {
        for slot in op.a_registers() {
            let register = &mut self.registers[*slot as usize];
            if !register.fenced {
                return Err(error("no wgmma.fence since the last access to a register of A"));
            }
            register.take_off(line);
        }
        for slot in &op.d {
            let register = &mut self.registers[*slot as usize];
            let chained = register.sum == Some(op.shape);
            if register.flights > 0 && !chained {
                return Err(error(format!("D has a register of line {}, which is under way", register.line)));
            }
            if !register.fenced && !chained {
                return Err(error("no wgmma.fence since the last access to a register of D"));
            }
            (register.fenced, register.sum) = (false, Some(op.shape));
            register.take_off(line);
        }
        Ok(())
    }

    pub fn fence(&mut self) {
        self.registers.iter_mut().for_each(|register| register.fenced = true);
    }
}

impl Register {
    fn take_off(&mut self, line: u32) {
        self.flights += 1;
        self.line = line;
    }
}

impl AsyncProduct {
    pub(super) fn a_registers(&self) -> &[Slot] {
        match &self.a {
            SourceA::Registers(slots) => slots,
            SourceA::Shared(..) => &[],
        }
    }
}
