//! The fifth generation of tensor cores (PTX ISA, TensorCore 5th Generation Family Instructions).
mod alloc;
mod copy;
pub(super) mod cores;
mod descriptor;
mod fragment;
mod history;
mod layout;
mod mma;
mod operand;
mod pipeline;
mod tmem;
mod transfer;

use super::env::Env;
use super::registers::{LaneResult, lanes};
use super::warp::{Flow, Warp, whole_warp};
use crate::error::Fault;
use crate::ir::tcgen05::Tcgen05;
use cores::peer;

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

/// Whether this CTA may issue for its pair. The ISA has a single thread of the pair do it, while the peer has not exited (Issue
/// Granularity); which CTA's thread it leaves open, and all known programs take the even one, which CUTLASS calls the leader.
fn leads(warp: &Warp, env: &Env) -> Result<(), &'static str> {
    if peer(warp.rank) >= env.tensor.ctas.len() {
        return Err("it needs a cluster with a pair of CTAs");
    }
    if warp.rank % 2 == 1 {
        return Err("the CTA with the odd rank issues it, expected the even one, which leads the pair");
    }
    if env.shared.has_ended(peer(warp.rank)) {
        return Err("the other CTA of the pair has exited");
    }
    Ok(())
}

/// Operations that a single thread issues (PTX ISA, Issue Granularity).
fn single(warp: &Warp, env: &mut Env, lane: usize, op: &Tcgen05) -> Result<(), Fault> {
    if op.group() == Some(2) {
        leads(warp, env).map_err(|problem| Fault::CtaGroup { problem })?;
    }
    match *op {
        Tcgen05::Mma(ref op) => mma::issue(warp, env, lane, op),
        Tcgen05::Commit { mbarrier, mask, .. } => pipeline::commit(warp, env, lane, mbarrier, mask),
        Tcgen05::Copy { shape, address, descriptor, .. } => copy::issue(warp, env, lane, shape, (address, descriptor)),
        Tcgen05::Shift { group, address } => copy::shift(warp, env, lane, group, address),
        _ => Ok(()),
    }
}
