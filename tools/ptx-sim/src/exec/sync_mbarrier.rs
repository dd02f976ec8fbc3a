//! Operations on mbarriers (PTX ISA, "mbarrier" and `cp.async.mbarrier.arrive`).
use super::address::shared_address;
use super::copies::{self, Issued};
use super::env::{Env, Random, Work};
use super::order::{Agent, Clock};
use super::registers::{LANES, LaneResult, lanes};
use super::shared::rank_and_offset;
use super::warp::{Flow, Wait, Warp};
use crate::error::Fault;
use crate::ir::{Addr, Op, Scope, Slot};

/// Queues of the arrivals of a warp's copies.
const COPIES: u64 = 1 << 33;

fn place(warp: &Warp, addr: Addr, lane: usize) -> u64 {
    shared_address(warp.regs.row(addr.base)[lane].wrapping_add(addr.offset))
}

/// Only a CTA's own mbarriers can be waited for, initialised and invalidated.
fn own(warp: &Warp, address: u64) -> Result<u64, Fault> {
    if rank_and_offset(address).0 == warp.rank {
        return Ok(address);
    }
    Err(Fault::Mbarrier { address, problem: "it belongs to another CTA of the cluster".to_string() })
}

/// Runs an operation on mbarriers.
pub(super) fn run(warp: &mut Warp, env: &mut Env, mask: u32, op: &Op) -> LaneResult<Flow> {
    match *op {
        Op::MbarrierWait { dst, addr, parity, blocks, acquires } => {
            return wait(warp, env, mask, (dst, addr, parity), (blocks, acquires));
        }
        Op::MbarrierArriveCopies { addr, counted } => {
            return arrive_copies(warp, env, mask, addr, counted).map(|()| Flow::Next);
        }
        _ => {}
    }
    // The lanes that arrive with one instruction release the same.
    let mut clock = Clock::default();
    if matches!(op, Op::MbarrierArrive { releases: Some(_), .. }) {
        env.shared.order.release(warp.agent, &mut clock);
    }
    for l in lanes(mask) {
        one(warp, env, l, op, &clock).map_err(|fault| (fault, 1 << l))?;
    }
    if let Op::MbarrierArrive { dst, addr, .. } = *op {
        one_phase(warp, mask, dst, addr)?;
    }
    Ok(Flow::Next)
}

/// Lanes that arrive together arrive for one phase. A count that is reached among them is wrong, even if nothing shows it:
/// the other lanes' arrivals add up over many phases until a phase is over too early.
fn one_phase(warp: &Warp, mask: u32, dst: Slot, addr: Addr) -> LaneResult<()> {
    let (first, phases) = (mask.trailing_zeros() as usize, warp.regs.row(dst));
    let address = place(warp, addr, first);
    match lanes(mask).find(|&l| place(warp, addr, l) == address && phases[l] != phases[first]) {
        Some(l) => {
            let problem = "the arrivals of one instruction fall into two phases".to_string();
            Err((Fault::Mbarrier { address, problem }, 1 << l))
        }
        None => Ok(()),
    }
}

fn one(warp: &mut Warp, env: &mut Env, l: usize, op: &Op, clock: &Clock) -> Result<(), Fault> {
    let by = warp.agent;
    match *op {
        Op::MbarrierInit { addr, count } => {
            let (at, count) = (own(warp, place(warp, addr, l))?, warp.regs.row(count)[l]);
            env.mbarriers.init(&mut env.shared, by, at, count)
        }
        Op::MbarrierInvalidate { addr } => {
            let at = own(warp, place(warp, addr, l))?;
            env.mbarriers.invalidate(&mut env.shared, by, at)
        }
        Op::MbarrierExpect { addr, bytes } => {
            let (at, bytes) = (place(warp, addr, l), warp.regs.row(bytes)[l]);
            env.shared.reach("mbarrier.expect_tx", at)?;
            env.mbarriers.get(&env.shared.order, by, at)?.expect(at, bytes)
        }
        Op::MbarrierComplete { addr, bytes } => {
            let (at, bytes) = (place(warp, addr, l), warp.regs.row(bytes)[l]);
            env.shared.reach("mbarrier.complete_tx", at)?;
            env.mbarriers.get(&env.shared.order, by, at)?.complete_bytes(at, bytes, clock)
        }
        Op::MbarrierArrive { dst, addr, count, expect, releases } => {
            let at = place(warp, addr, l);
            env.shared.reach("mbarrier.arrive", at)?;
            let (rank, far) = (rank_and_offset(at).0, rank_and_offset(at).0 != warp.rank);
            let come = if far { come(env, by, rank) } else { Clock::default() };
            let count = count.map_or(1, |c| warp.regs.row(c)[l]);
            let barrier = env.mbarriers.get(&env.shared.order, by, at)?;
            if let Some(bytes) = expect {
                barrier.expect(at, warp.regs.row(bytes)[l])?;
            }
            warp.regs.row_mut(dst)[l] = barrier.phase;
            if far {
                barrier.release_far(releases, clock);
            }
            barrier.arrive(at, count, if far { &come } else { clock })
        }
        _ => Err(Fault::UnknownInstruction(format!("{op:?}"))),
    }
}

/// An arrival at another CTA, which must not exit before one of its warps knows of it: the clock that says so.
fn come(env: &mut Env, by: Agent, rank: usize) -> Clock {
    let (arrival, clock) = env.shared.order.event(by, "an arrival");
    env.uses(1 << rank, arrival);
    clock
}

fn wait(
    warp: &mut Warp,
    env: &mut Env,
    mask: u32,
    (dst, addr, parity): (u32, Addr, Slot),
    (blocks, acquires): (bool, Option<Scope>),
) -> LaneResult<Flow> {
    let (mut done, mut clock) = (0, Clock::default());
    let (mut waits, mut known) = (None, None);
    for l in lanes(mask) {
        let fault = |fault| (fault, 1 << l);
        let address = own(warp, place(warp, addr, l)).map_err(fault)?;
        let parity = warp.regs.row(parity)[l] & 1;
        let barrier = env.mbarriers.get(&env.shared.order, warp.agent, address).map_err(fault)?;
        if barrier.passed(parity) {
            // Mostly all lanes ask for one barrier.
            if known != Some(address) {
                acquires.iter().for_each(|scope| barrier.acquire(*scope, &mut clock));
                known = Some(address);
            }
            done |= 1 << l;
        } else {
            waits = waits.or(Some(Wait::Mbarrier { address, parity, phase: barrier.phase }));
        }
    }
    if blocks && gives_up(warp, env, &clock) {
        warp.regs.set_pred(mask, dst, 0);
        return Ok(Flow::Next);
    }
    // A thread that waits sleeps here until its phase is over: nothing could come of asking again.
    if let (true, 0, Some(wait)) = (blocks, done, waits) {
        return Ok(Flow::Retry(wait));
    }
    if done != 0 && acquires.is_some() {
        env.shared.order.acquire(warp.agent, &clock);
    }
    warp.regs.set_pred(mask, dst, done);
    Ok(Flow::Next)
}

/// The time limit of a `try_wait` is the system's, and who has not learnt otherwise that a phase is over cannot tell when it came to
/// be: the wait may have been before. The lanes of one instruction get one answer.
fn gives_up(warp: &Warp, env: &mut Env, done: &Clock) -> bool {
    if !env.adversary.waits {
        return false;
    }
    let known = !done.is_empty() && env.shared.order.clock(warp.agent).covers(done);
    !known && env.random.below(4) == 0
}

/// The copies that the lanes have started come later, and the arrival after them. Without `.noinc` the operation first
/// counts itself in.
fn arrive_copies(warp: &mut Warp, env: &mut Env, mask: u32, addr: Addr, counted: bool) -> LaneResult<()> {
    // Each thread's copies are its own, and so is the arrival behind them.
    let some = if env.adversary.arrivals { apart(&mut env.random) } else { u32::MAX };
    for part in [mask & some, mask & !some].into_iter().filter(|part| *part != 0) {
        arrive_together(warp, env, part, addr, counted)?;
    }
    Ok(())
}

/// Lanes that are served before or after the others: any, or one of them.
fn apart(random: &mut Random) -> u32 {
    match random.below(3) {
        0 => 1 << random.below(LANES as u64),
        1 => !(1 << random.below(LANES as u64)),
        _ => random.below(1 << 32) as u32,
    }
}

/// The arrivals of lanes whose copies come at one time.
fn arrive_together(warp: &mut Warp, env: &mut Env, mask: u32, addr: Addr, counted: bool) -> LaneResult<()> {
    let (mut clock, mut all, mut barriers): (_, Vec<Issued>, Vec<u64>) = (Clock::default(), Vec::new(), Vec::new());
    for l in lanes(mask) {
        let at = place(warp, addr, l);
        let barrier = env.mbarriers.get(&env.shared.order, warp.agent, at).map_err(|fault| (fault, 1 << l))?;
        if !counted {
            barrier.add_pending();
        }
        barriers.push(at);
        let copies = warp.copies.all(l);
        warp.copies.settle(&copies, &mut env.shared.order, &mut clock);
        all.extend(copies);
    }
    let (by, clock) = (warp.agent, warp.copies.landed_with(&clock));
    let work: Work = Box::new(move |env| {
        copies::land(&all, &mut env.shared)?;
        for at in barriers {
            env.mbarriers.get(&env.shared.order, by, at)?.arrive(at, 1, &clock)?;
        }
        Ok(())
    });
    // An arrival comes when all copies before it are over.
    let flight = env.later(1 << warp.rank, Some(COPIES | warp.agent.index() as u64), work);
    warp.copies.arrive_later(flight);
    // The copies may be over already.
    if env.random.below(4) == 0 {
        env.finish_flight(flight).map_err(|fault| (fault, mask))?;
    }
    Ok(())
}
