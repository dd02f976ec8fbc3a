//! The fifth generation of tensor cores (PTX ISA, TensorCore 5th Generation Family Instructions).
mod alloc;
mod copy;
mod descriptor;
mod fragment;
mod history;
mod layout;
mod mma;
mod pipeline;
mod tmem;
mod transfer;

use super::cta::Env;
use super::matrix::whole_warp;
use super::mem::{LaneResult, lanes};
use super::order::{Agent, Clock};
use super::sync::Flow;
use super::warp::{LANES, Warp};
use crate::error::Fault;
use crate::ir::Slot;
use crate::ir::tcgen05::Tcgen05;
use history::{By, History, Operations, Thread};
use std::collections::HashMap;
use std::ops::Range;
use tmem::{Place, TensorMemory};

/// The other CTA of a pair: their ranks differ in the last bit (PTX ISA, CTA Pair).
fn peer(rank: usize) -> usize {
    rank ^ 1
}

/// The tensor memory of a CTA.
struct CtaMemory {
    memory: TensorMemory,
    history: History,
    part: alloc::Part,
}

/// What a warp knows about accesses to tensor memory.
#[derive(Default)]
struct View {
    /// What its next accesses are ordered after.
    known: Clock,
    /// Its own accesses that it has waited for.
    own: Clock,
    /// Its loads and stores since it last waited for them.
    loads: Option<Agent>,
    stores: Option<Agent>,
    /// Operations since the last `fence::before_thread_sync`.
    unpublished: Vec<u32>,
}

/// The tensor cores of a cluster.
pub(super) struct TensorCores {
    ctas: Vec<CtaMemory>,
    /// By the number of the warp in the cluster.
    warps: Vec<View>,
    pipelines: HashMap<Thread, pipeline::Pipeline>,
    operations: Operations,
}

impl TensorCores {
    pub fn new(ctas: usize, warps: usize) -> Self {
        let cta = |_| CtaMemory { memory: TensorMemory::new(), history: History::new(), part: alloc::Part::None };
        Self {
            ctas: (0..ctas).map(cta).collect(),
            warps: (0..warps).map(|_| View::default()).collect(),
            pipelines: HashMap::new(),
            operations: Operations::default(),
        }
    }

    /// Checks and notes an access of a warp's operation to columns, the first and their number, of a CTA.
    fn access(
        &mut self,
        rank: usize,
        (warp, number, writes): (Agent, u32, bool),
        lanes: Range<u32>,
        (column, width): (u32, u32),
    ) -> Result<(), Fault> {
        let cta = &mut self.ctas[rank];
        for lane in lanes.clone() {
            cta.memory.reach(Place { lane, column }, width)?;
        }
        let by = By { operations: &self.operations, known: &self.warps[warp.index()].known, number };
        let columns = column..column + width;
        if writes { cta.history.write(&by, lanes, columns) } else { cta.history.read(&by, lanes, columns) }
    }
}

/// An operand that all lanes must agree on, for instance an address.
fn uniform(warp: &Warp, slot: Slot, offset: u64, mask: u32) -> LaneResult<u32> {
    let row = warp.regs.row(slot);
    let first = row[(mask.trailing_zeros() as usize).min(LANES - 1)];
    match lanes(mask).find(|l| row[*l] != first) {
        None => Ok(first.wrapping_add(offset) as u32),
        Some(l) => {
            let problem = format!("the lanes of the warp give different operands, {first:#x} and {:#x}", row[l]);
            Err((Place::new(first as u32).fault(problem), 1 << l))
        }
    }
}

/// Runs a `tcgen05` operation.
pub(super) fn run(warp: &mut Warp, env: &mut Env, group: u32, mask: u32, op: &Tcgen05) -> LaneResult<Flow> {
    let at = (group, mask);
    match op {
        Tcgen05::Alloc { group, space, dst, columns } => {
            return alloc::alloc(warp, env, at, *group, (*space, *dst, *columns));
        }
        Tcgen05::Dealloc { group, address, columns } => {
            return alloc::dealloc(warp, env, at, *group, (*address, *columns));
        }
        Tcgen05::Load { fragment, dsts, address } => {
            return transfer::load(warp, env, at, (*fragment, dsts, *address));
        }
        Tcgen05::Store { fragment, srcs, address } => {
            return transfer::store(warp, env, at, (*fragment, srcs, *address));
        }
        Tcgen05::Relinquish { .. } | Tcgen05::WaitLoads | Tcgen05::WaitStores => {
            if let Some(flow) = whole_warp(warp, group, mask)? {
                return Ok(flow);
            }
            match op {
                Tcgen05::WaitLoads => pipeline::wait_loads(warp, env),
                Tcgen05::WaitStores => pipeline::wait_stores(warp, env),
                _ => env.tensor.ctas[warp.rank].memory.relinquish(),
            }
        }
        Tcgen05::FenceBefore => pipeline::fence_before(warp, env),
        Tcgen05::FenceAfter => pipeline::fence_after(warp, env),
        Tcgen05::Mma(_) | Tcgen05::Commit { .. } | Tcgen05::Copy { .. } | Tcgen05::Shift { .. } => {
            for lane in lanes(mask) {
                single(warp, env, lane, op).map_err(|fault| (fault, 1 << lane))?;
            }
        }
    }
    Ok(Flow::Next)
}

/// Operations that a single thread issues (PTX ISA, Issue Granularity).
fn single(warp: &Warp, env: &mut Env, lane: usize, op: &Tcgen05) -> Result<(), Fault> {
    if op.group() == Some(2) && peer(warp.rank) >= env.tensor.ctas.len() {
        let problem = ".cta_group::2 needs a cluster with a pair of CTAs".to_string();
        return Err(Fault::TensorAllocation { columns: 0, problem });
    }
    match *op {
        Tcgen05::Mma(ref op) => mma::issue(warp, env, lane, op),
        Tcgen05::Commit { mbarrier, mask, .. } => pipeline::commit(warp, env, lane, mbarrier, mask),
        Tcgen05::Copy { shape, address, descriptor, .. } => copy::issue(warp, env, lane, shape, (address, descriptor)),
        Tcgen05::Shift { group, address } => copy::shift(warp, env, lane, group, address),
        _ => Ok(()),
    }
}
