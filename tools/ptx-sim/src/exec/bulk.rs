//! Bulk copies, which go on by themselves (PTX ISA, `cp.async.bulk` and `cp.async.bulk.tensor`).
//!
//! A copy owns the shared memory that it writes, and what it reads must stay, from its issue until somebody has waited
//! for it. Shared memory is read at the issue, global memory when the copy is done: nothing may change the one, and the
//! other is not checked.
use super::address::{aligned, resolve};
use super::bulk_groups::Store;
use super::env::Env;
use super::order::{Agent, Proxy};
use super::registers::{LaneResult, lanes};
use super::shared::{address_in, rank_and_offset};
use super::tiles::{self, Row};
use super::warp::Warp;
use crate::error::Fault;
use crate::ir::{Addr, BulkOp, Slot, Space, Target, TensorBox};
use crate::memory::SHARED_WINDOW;
use crate::tensor::{TENSOR_MAP_BYTES, TensorMap};

/// A copy into the shared memory of one CTA.
struct Landing {
    dst: u64,
    barrier: u64,
}

fn refuse<T>(problem: impl Into<String>) -> Result<T, Fault> {
    Err(Fault::Bulk { problem: problem.into() })
}

fn address(warp: &Warp, addr: Addr, lane: usize) -> u64 {
    let address = warp.regs.row(addr.base)[lane].wrapping_add(addr.offset);
    if address >> 44 == SHARED_WINDOW >> 44 { address - SHARED_WINDOW } else { address }
}

pub(super) fn run(warp: &mut Warp, env: &mut Env, mask: u32, op: &BulkOp) -> LaneResult<()> {
    lanes(mask).try_for_each(|lane| one(warp, env, lane, op).map_err(|fault| (fault, 1 << lane)))
}

fn one(warp: &mut Warp, env: &mut Env, lane: usize, op: &BulkOp) -> Result<(), Fault> {
    match op {
        BulkOp::LoadTensor(tensor, target) => load_tensor(warp, env, lane, tensor, target),
        BulkOp::Load { src, bytes, target } => {
            let (from, bytes) = (address(warp, *src, lane), size(warp, *bytes, lane)?);
            aligned("bulk copy", from, 16)?;
            for landing in landings(warp, env, lane, target)? {
                aligned("bulk copy", landing.dst, 16)?;
                let rows = vec![Row::whole(landing.dst, from, bytes)];
                load(warp, env, landing, rows, bytes)?;
            }
            Ok(())
        }
        BulkOp::Push { src, bytes, target } => push(warp, env, lane, (*src, *bytes), target),
        BulkOp::StoreTensor { tensor, src, adds } => {
            let map = tensor_map(warp, env, lane, tensor)?;
            let coords = coordinates(warp, lane, tensor);
            if coords.iter().any(|c| *c < 0) {
                return refuse(format!("a tensor store at a negative coordinate, {coords:?}"));
            }
            let from = address(warp, *src, lane);
            aligned("tensor store", from, 128)?;
            let add = adds.then_some(map.elem);
            store(warp, env, lane, tiles::rows(&map, &coords, false, from), add)
        }
        BulkOp::Store { dst, src, bytes } => {
            let (to, from) = (address(warp, *dst, lane), address(warp, *src, lane));
            let bytes = size(warp, *bytes, lane)?;
            aligned("bulk copy", to, 16)?;
            aligned("bulk copy", from, 16)?;
            store(warp, env, lane, vec![Row::whole(from, to, bytes)], None)
        }
        BulkOp::Commit => {
            let lane = warp.bulk.of(lane);
            let group = std::mem::take(&mut lane.open);
            lane.groups.push_back(group);
            Ok(())
        }
        BulkOp::Wait { pending, reads } => wait(warp, env, lane, *pending, *reads),
    }
}

fn size(warp: &Warp, bytes: Slot, lane: usize) -> Result<u64, Fault> {
    let bytes = warp.regs.row(bytes)[lane];
    if bytes > 0 && bytes.is_multiple_of(16) { Ok(bytes) } else { refuse(format!("{bytes} bytes, expected sixteens")) }
}

fn coordinates(warp: &Warp, lane: usize, tensor: &TensorBox) -> Vec<i64> {
    tensor.coords.iter().map(|c| i64::from(warp.regs.row(*c)[lane] as i32)).collect()
}

/// Reads the tensor map at a generic address.
fn tensor_map(warp: &Warp, env: &Env, lane: usize, tensor: &TensorBox) -> Result<TensorMap, Fault> {
    let at = warp.regs.row(tensor.map.base)[lane].wrapping_add(tensor.map.offset);
    aligned("tensor map", at, 64)?;
    let mut bytes = [0; TENSOR_MAP_BYTES];
    match resolve(Space::Generic, at) {
        (Space::Global, at) => bytes.copy_from_slice(&env.global.copy_from(at, TENSOR_MAP_BYTES as u64)?),
        (Space::Param, at) => {
            let start = at as usize;
            let Some(found) = env.params.get(start..start.saturating_add(TENSOR_MAP_BYTES)) else {
                return refuse("the tensor map is not in the parameters");
            };
            bytes.copy_from_slice(found);
        }
        _ => return refuse("the tensor map is in shared memory"),
    }
    let Some(map) = TensorMap::decode(&bytes) else { return refuse(format!("no tensor map at {at:#x}")) };
    let rank = if tensor.gather { 2 } else { tensor.coords.len() };
    if map.dims.len() != rank {
        return refuse(format!("a tensor of rank {}, the instruction has {rank}", map.dims.len()));
    }
    if tensor.gather && map.boxes[1] != 1 {
        return refuse(format!("gather4 with a box of {} rows, expected 1", map.boxes[1]));
    }
    Ok(map)
}

/// Where the copies of an instruction land. The mbarrier is one of the CTA that gets the bytes, or with `.cta_group::2`
/// of that pair.
fn landings(warp: &Warp, env: &Env, lane: usize, target: &Target) -> Result<Vec<Landing>, Fault> {
    let (dst, barrier) = (address(warp, target.dst, lane), address(warp, target.barrier, lane));
    let Some(mask) = target.multicast else {
        let (to, at) = (rank_and_offset(dst).0, rank_and_offset(barrier).0);
        if to != at && !(target.pair && to / 2 == at / 2) {
            return refuse(format!("the bytes go to CTA {to} of the cluster, the mbarrier is in CTA {at}"));
        }
        return Ok(vec![Landing { dst, barrier }]);
    };
    let mask = warp.regs.row(mask)[lane] & 0xffff;
    if mask == 0 || mask >> env.ctas.len() != 0 {
        return refuse(format!("a multicast to {mask:#b} in a cluster of {} CTAs", env.ctas.len()));
    }
    let (dst, (at, barrier)) = (rank_and_offset(dst).1, rank_and_offset(barrier));
    let of = |rank: usize| if target.pair { rank & !1 | at & 1 } else { rank };
    let landing = |rank| Landing { dst: address_in(rank, dst), barrier: address_in(of(rank), barrier) };
    Ok((0..env.ctas.len()).filter(|rank| mask >> rank & 1 == 1).map(landing).collect())
}

fn load_tensor(warp: &mut Warp, env: &mut Env, lane: usize, tensor: &TensorBox, target: &Target) -> Result<(), Fault> {
    let map = tensor_map(warp, env, lane, tensor)?;
    let coords = coordinates(warp, lane, tensor);
    for landing in landings(warp, env, lane, target)? {
        aligned("tensor copy", landing.dst, 128)?;
        let rows = tiles::rows(&map, &coords, tensor.gather, landing.dst);
        let bytes = rows.len() as u64 * map.row_bytes();
        load(warp, env, landing, rows, bytes)?;
    }
    Ok(())
}

/// Rows from global memory, then their bytes to an mbarrier. What lies outside of a tensor counts, too.
fn load(warp: &Warp, env: &mut Env, landing: Landing, rows: Vec<Row>, bytes: u64) -> Result<(), Fault> {
    let agent = env.shared.order.begin_async(warp.agent, Proxy::Async, "a bulk copy");
    env.mbarriers.get(&env.shared.order, agent, landing.barrier)?;
    claim(env, agent, &rows, true)?;
    let to = rank_and_offset(landing.dst).0;
    env.uses(1 << to, agent);
    if let Some(time) = &mut env.time {
        time.bulk_load(to, bytes);
    }
    env.later(
        1 << to,
        None,
        Box::new(move |env| {
            for row in &rows {
                let bytes = row.read(&env.global)?;
                row.chunks().zip(bytes.chunks(16)).try_for_each(|(at, chunk)| env.shared.poke(at, chunk))?;
            }
            arrive(env, agent, (to, landing.barrier), bytes)
        }),
    );
    Ok(())
}

fn claim(env: &mut Env, agent: Agent, rows: &[Row], writes: bool) -> Result<(), Fault> {
    for at in rows.iter().flat_map(Row::chunks) {
        if writes {
            env.shared.claim_write(agent, at, 16)?;
        } else {
            env.shared.claim_read(agent, at, 16)?;
        }
    }
    Ok(())
}

/// The copy is over: its bytes count.
fn arrive(env: &mut Env, agent: Agent, (to, barrier): (usize, u64), bytes: u64) -> Result<(), Fault> {
    let clock = env.shared.order.end_async(agent);
    if let Some(time) = &mut env.time {
        time.land(to, bytes);
    }
    env.mbarriers.get(&env.shared.order, agent, barrier)?.complete_bytes(barrier, bytes, &clock)
}

/// From the own shared memory to that of another CTA.
fn push(warp: &mut Warp, env: &mut Env, lane: usize, (src, bytes): (Addr, Slot), target: &Target) -> Result<(), Fault> {
    let (from, bytes) = (address(warp, src, lane), size(warp, bytes, lane)?);
    aligned("bulk copy", from, 16)?;
    for landing in landings(warp, env, lane, target)? {
        aligned("bulk copy", landing.dst, 16)?;
        let agent = env.shared.order.begin_async(warp.agent, Proxy::Async, "a bulk copy");
        env.mbarriers.get(&env.shared.order, agent, landing.barrier)?;
        env.shared.claim_read(agent, from, bytes)?;
        env.shared.claim_write(agent, landing.dst, bytes)?;
        if let Some(time) = &mut env.time {
            time.bulk_store(warp.rank, bytes);
        }
        let ctas = 1 << rank_and_offset(from).0 | 1 << rank_and_offset(landing.dst).0;
        env.uses(ctas, agent);
        env.later(
            ctas,
            None,
            Box::new(move |env| {
                let mut data = vec![0; bytes as usize];
                env.shared.peek(from, &mut data)?;
                env.shared.poke(landing.dst, &data)?;
                arrive(env, agent, (rank_and_offset(landing.dst).0, landing.barrier), bytes)
            }),
        );
    }
    Ok(())
}

/// Rows to global memory, as part of the lane's next group. `add`: adds elements of this type.
fn store(
    warp: &mut Warp,
    env: &mut Env,
    lane: usize,
    rows: Vec<Row>,
    add: Option<crate::tensor::TensorElem>,
) -> Result<(), Fault> {
    let agent = env.shared.order.begin_async(warp.agent, Proxy::Async, "a bulk store");
    claim(env, agent, &rows, false)?;
    let mut data = Vec::new();
    for at in rows.iter().flat_map(Row::chunks) {
        let mut chunk = [0; 16];
        env.shared.peek(at, &mut chunk)?;
        data.extend(chunk);
    }
    let total = data.len() as u64;
    let clock = env.shared.order.clock(agent).clone();
    env.uses(1 << warp.rank, agent);
    let work = move |env: &mut Env| {
        env.shared.order.end_async(agent);
        let mut rest = &data[..];
        for row in &rows {
            let (bytes, later) = rest.split_at(row.bytes as usize);
            rest = later;
            row.write(&env.global, bytes, add)?;
        }
        Ok(())
    };
    if let Some(time) = &mut env.time {
        time.bulk_store(warp.rank, total);
    }
    let flight = env.later(1 << warp.rank, None, Box::new(work));
    warp.bulk.of(lane).open.push((flight, clock));
    Ok(())
}

fn wait(warp: &mut Warp, env: &mut Env, lane: usize, pending: usize, reads: bool) -> Result<(), Fault> {
    let groups = &mut warp.bulk.of(lane).groups;
    let count = groups.len().saturating_sub(pending);
    for (flight, clock) in groups.iter().take(count).flatten() {
        env.shared.order.acquire(warp.agent, clock);
        if reads {
            env.flights.leave_shared(*flight);
        } else {
            env.finish_flight(*flight)?;
        }
    }
    // After `.read` groups may still have to be waited for.
    let over = |group: &Vec<Store>| group.iter().all(|(flight, _)| !env.flights.is_under_way(*flight));
    let over = groups.iter().take(count).take_while(|group| over(group)).count();
    groups.drain(..over);
    Ok(())
}
