//! `tcgen05.alloc`, `.dealloc` and `.relinquish_alloc_permit` (PTX ISA, Tensor Memory Allocation and Management).
//!
//! With `.cta_group::2` a warp of each CTA of the pair takes part, and each waits for the other. The ISA lets
//! `.dealloc` wait or not; that it waits here shows programs that would hang.
use super::cores::{Part, Request, peer};
use super::operand::uniform;
use super::tmem::Place;
use crate::error::Fault;
use crate::exec::address;
use crate::exec::env::Env;
use crate::exec::mem::{self};
use crate::exec::registers::LaneResult;
use crate::exec::warp::{Flow, Wait, Warp, whole_warp};
use crate::ir::{Addr, Slot, Space};
use crate::memory::Strength;

/// `.alloc`: the address goes to shared memory, by the generic proxy.
pub(super) fn alloc(
    warp: &mut Warp,
    env: &mut Env,
    (group, mask): (u32, u32),
    cta_group: u8,
    (space, dst, columns): (Space, Addr, Slot),
) -> LaneResult<Flow> {
    if let Some(flow) = whole_warp(warp, group, mask)? {
        return Ok(flow);
    }
    let columns = uniform(warp, columns, 0, mask)?;
    env.tensor.ctas[warp.rank].memory.check(columns).map_err(|fault| (fault, mask))?;
    let first = if cta_group == 1 {
        let starts = env.tensor.fitting(warp.rank, 1, columns);
        if starts.is_empty() {
            return Ok(Flow::Retry(Wait::TensorMemory { columns: Some(columns) }));
        }
        let first = starts[env.random.below(starts.len() as u64) as usize];
        env.tensor.ctas[warp.rank].memory.allocate(first, columns);
        first
    } else {
        match together(warp, env, Request::Allocate { columns }).map_err(|fault| (fault, mask))? {
            Some(first) => first,
            None => return Ok(Flow::Retry(Wait::TensorMemory { columns: None })),
        }
    };
    let address = address::address(warp, dst, 0);
    let (space, address) = address::resolve(space, address);
    address::aligned("tcgen05.alloc", address, 4).map_err(|fault| (fault, mask))?;
    if !matches!(space, Space::Shared | Space::Cluster) {
        let nearest = "the address must be one of the CTA's shared memory".to_string();
        return Err((Fault::OutOfBounds { access: "tcgen05.alloc".to_string(), address, bytes: 4, nearest }, mask));
    }
    // The lane is 0: an allocation has all lanes of its columns.
    mem::store(warp, env, (Space::Shared, Strength::Weak), address, &first.to_le_bytes())
        .map_err(|fault| (fault, mask))?;
    Ok(Flow::Next)
}

/// `.dealloc`: all accesses to the columns must be ordered before.
pub(super) fn dealloc(
    warp: &mut Warp,
    env: &mut Env,
    (group, mask): (u32, u32),
    cta_group: u8,
    (address, columns): (Slot, Slot),
) -> LaneResult<Flow> {
    if let Some(flow) = whole_warp(warp, group, mask)? {
        return Ok(flow);
    }
    let (address, columns) = (uniform(warp, address, 0, mask)?, uniform(warp, columns, 0, mask)?);
    let fault = |fault| (fault, mask);
    if cta_group == 2 && together(warp, env, Request::Deallocate { address, columns }).map_err(fault)?.is_none() {
        return Ok(Flow::Retry(Wait::TensorMemory { columns: None }));
    }
    give_back(warp, env, address, columns).map_err(fault)?;
    Ok(Flow::Next)
}

fn give_back(warp: &Warp, env: &mut Env, address: u32, columns: u32) -> Result<(), Fault> {
    let mut known = env.shared.order.clock(warp.agent).clone();
    let tensor = &mut env.tensor;
    known.join(&tensor.warps[warp.agent.index()].own);
    let cta = &mut tensor.ctas[warp.rank];
    let first = cta.memory.deallocate(address, columns)?;
    cta.history.forget(&tensor.operations, &known, first..first + columns)
}

/// Does something together with the peer CTA: `None` until both have asked.
fn together(warp: &Warp, env: &mut Env, request: Request) -> Result<Option<u32>, Fault> {
    let (me, other) = (warp.rank, peer(warp.rank));
    if other >= env.tensor.ctas.len() {
        let problem = ".cta_group::2 needs a cluster with a pair of CTAs".to_string();
        return Err(Fault::TensorAllocation { columns: 0, problem });
    }
    let (mine, its) = (env.tensor.ctas[me].part, env.tensor.ctas[other].part);
    if let Part::Granted(first) = mine {
        env.tensor.ctas[me].part = Part::None;
        return Ok(Some(first));
    }
    env.tensor.ctas[me].part = Part::Asked(request);
    let Part::Asked(asked) = its else { return Ok(None) };
    let first = match (request, asked) {
        (Request::Allocate { columns }, Request::Allocate { columns: theirs }) if columns == theirs => {
            let starts = env.tensor.fitting(me, 2, columns);
            if starts.is_empty() {
                return Ok(None);
            }
            let first = starts[env.random.below(starts.len() as u64) as usize];
            for rank in [me, other] {
                env.tensor.ctas[rank].memory.allocate(first, columns);
            }
            first
        }
        (Request::Deallocate { address, .. }, theirs) if request == theirs => Place::new(address).column,
        _ => {
            let problem = format!("the CTAs of a pair disagree: {request:?} and {asked:?}");
            return Err(Fault::TensorAllocation { columns: 0, problem });
        }
    };
    env.tensor.ctas[me].part = Part::None;
    env.tensor.ctas[other].part = Part::Granted(first);
    Ok(Some(first))
}
