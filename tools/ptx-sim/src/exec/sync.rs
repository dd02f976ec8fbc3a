//! Operations of a whole warp or CTA: branches, barriers, shuffles, votes, mbarriers (PTX ISA 9.7.12, 9.7.13).
use super::cta::Env;
use super::mem::LaneResult;
use super::warp::{LANES, Wait, Warp};
use crate::error::Fault;
use crate::ir::{Addr, Op, PredSource, ShuffleMode, Slot, VoteMode};

/// What an instruction does to the group that ran it.
pub(super) enum Flow {
    Next,
    /// These lanes go elsewhere.
    Jump(u32, u32),
    /// These lanes are done.
    Exit(u32),
    /// Runs again when the wait is over.
    Retry(Wait),
    /// Goes on behind the instruction when the wait is over.
    Sleep(Wait),
}

fn first_lane(mask: u32) -> usize {
    (mask.trailing_zeros() as usize).min(LANES - 1)
}

/// Waits until the member mask's living lanes stand here, too. Every executing lane must be a member.
fn gather(warp: &Warp, group: u32, mask: u32, members: Slot) -> LaneResult<Option<Flow>> {
    let members = warp.regs.row(members)[first_lane(mask)] as u32;
    if mask & !members != 0 {
        return Err((Fault::NotMember { executing: mask, members }, mask & !members));
    }
    let missing = members & warp.live() & !group;
    Ok((missing != 0).then_some(Flow::Retry(Wait::Lanes(members))))
}

/// Runs an operation that is none of one lane. `group` are the lanes that stand here, `mask` those that execute.
pub(super) fn run(warp: &mut Warp, env: &mut Env, group: u32, mask: u32, op: &Op) -> LaneResult<Flow> {
    match *op {
        Op::Branch { target } => return Ok(Flow::Jump(target, mask)),
        Op::Exit => return Ok(Flow::Exit(mask)),
        Op::Timer { dst } => {
            let now = env.executed;
            warp.regs.map(mask, dst, dst, |_| now);
        }
        Op::ActiveMask { dst } => warp.regs.map(mask, dst, dst, |_| u64::from(mask)),
        Op::Matrix(ref op) if op.is_async() => return super::wgmma::run(warp, env, group, mask, op),
        Op::Matrix(ref op) => return super::matrix::run(warp, env, group, mask, op),
        Op::BarSync { id, count, waits } => return barrier(warp, env, group, mask, (id, count, waits)),
        Op::WarpSync { mask: members } => {
            if let Some(flow) = gather(warp, group, mask, members)? {
                return Ok(flow);
            }
        }
        Op::Shuffle { mode, dst, in_range, a, b, c, mask: members } => {
            if let Some(flow) = gather(warp, group, mask, members)? {
                return Ok(flow);
            }
            shuffle(warp, mask, mode, (dst, in_range), (a, b, c))?;
        }
        Op::Vote { mode, dst, a, mask: members } => {
            if let Some(flow) = gather(warp, group, mask, members)? {
                return Ok(flow);
            }
            let yes = warp.regs.pred(a) & mask;
            let holds = match mode {
                VoteMode::Any => yes != 0,
                VoteMode::All => yes == mask,
                VoteMode::Uni => yes == mask || yes == 0,
            };
            warp.regs.set_pred(mask, dst, if holds { u32::MAX } else { 0 });
        }
        Op::Ballot { dst, a, mask: members } => {
            if let Some(flow) = gather(warp, group, mask, members)? {
                return Ok(flow);
            }
            let yes = u64::from(warp.regs.pred(a) & mask);
            warp.regs.map(mask, dst, dst, |_| yes);
        }
        _ => return mbarrier(warp, env, mask, op),
    }
    Ok(Flow::Next)
}

/// `bar.sync` and `bar.arrive` are `.aligned`: the warp's lanes execute them together, each warp counts 32.
fn barrier(
    warp: &mut Warp,
    env: &mut Env,
    group: u32,
    mask: u32,
    (id, count, waits): (Slot, Option<Slot>, bool),
) -> LaneResult<Flow> {
    if warp.live() & !group != 0 {
        return Ok(Flow::Retry(Wait::Lanes(warp.live())));
    }
    let lane = first_lane(mask);
    let id = warp.regs.row(id)[lane];
    let count = count.map(|c| warp.regs.row(c)[lane]);
    let generation = env.barriers.arrive(id, count).map_err(|fault| (fault, mask))?;
    Ok(if waits { Flow::Sleep(Wait::Barrier { id, generation }) } else { Flow::Next })
}

fn shuffle(
    warp: &mut Warp,
    mask: u32,
    mode: ShuffleMode,
    (dst, in_range): (Slot, Option<u32>),
    (a, b, c): (Slot, Slot, Slot),
) -> LaneResult<()> {
    let (values, amounts, clamps) = (*warp.regs.row(a), *warp.regs.row(b), *warp.regs.row(c));
    let (mut result, mut valid) = (*warp.regs.row(dst), 0u32);
    for l in (0..LANES).filter(|l| mask >> l & 1 == 1) {
        let lane = l as i64;
        let (amount, clamp, segment) =
            ((amounts[l] & 31) as i64, (clamps[l] & 31) as i64, (clamps[l] >> 8 & 31) as i64);
        let least = lane & segment;
        let most = least | clamp & !segment;
        let (source, holds) = match mode {
            ShuffleMode::Up => (lane - amount, lane - amount >= most),
            ShuffleMode::Down => (lane + amount, lane + amount <= most),
            ShuffleMode::Bfly => (lane ^ amount, lane ^ amount <= most),
            ShuffleMode::Idx => (least | amount & !segment, least | amount & !segment <= most),
        };
        let source = if holds { source } else { lane };
        if mask >> source & 1 == 0 {
            return Err((Fault::InactiveLane { source_lane: source as u32 }, 1 << l));
        }
        valid |= u32::from(holds) << l;
        result[l] = values[source as usize];
    }
    *warp.regs.row_mut(dst) = result;
    if let Some(pred) = in_range {
        warp.regs.set_pred(mask, pred, valid);
    }
    Ok(())
}

fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    (0..LANES).filter(move |l| mask >> l & 1 == 1)
}

fn mbarrier(warp: &mut Warp, env: &mut Env, mask: u32, op: &Op) -> LaneResult<Flow> {
    let place = |warp: &Warp, addr: Addr, l: usize| {
        crate::memory::shared_address(warp.regs.row(addr.base)[l].wrapping_add(addr.offset))
    };
    for l in lanes(mask) {
        let fault = |fault| (fault, 1u32 << l);
        match *op {
            Op::MbarrierInit { addr, count } => {
                let count = warp.regs.row(count)[l];
                env.mbarriers.init(place(warp, addr, l), count).map_err(fault)?;
            }
            Op::MbarrierExpect { addr, bytes } => {
                let bytes = warp.regs.row(bytes)[l];
                env.mbarriers.get(place(warp, addr, l)).map_err(fault)?.expect(bytes);
            }
            Op::MbarrierArrive { dst, addr, count, expect } => {
                let at = place(warp, addr, l);
                let count = count.map_or(1, |c| warp.regs.row(c)[l]);
                let barrier = env.mbarriers.get(at).map_err(fault)?;
                barrier.expect(expect.map_or(0, |e| warp.regs.row(e)[l]));
                warp.regs.row_mut(dst)[l] = barrier.phase;
                barrier.arrive(at, count).map_err(fault)?;
            }
            Op::MbarrierArriveCopies { addr, counted } => {
                warp.copies.finish(l, &mut env.shared).map_err(fault)?;
                // Without `.noinc` the operation first counts itself in: nothing changes once the copies are done.
                if counted {
                    let at = place(warp, addr, l);
                    env.mbarriers.get(at).map_err(fault)?.arrive(at, 1).map_err(fault)?;
                }
            }
            Op::MbarrierWait { .. } => {}
            _ => return Err((Fault::UnknownInstruction(format!("{op:?}")), mask)),
        }
    }
    let Op::MbarrierWait { dst, addr, parity, blocks } = *op else { return Ok(Flow::Next) };
    let mut done = 0;
    for l in lanes(mask) {
        let parity = warp.regs.row(parity)[l] & 1;
        let barrier = env.mbarriers.get(place(warp, addr, l)).map_err(|fault| (fault, 1 << l))?;
        done |= u32::from(barrier.phase & 1 != parity) << l;
    }
    // A thread that waits sleeps here until its phase is over: nothing could come of asking again.
    if blocks && done == 0 && mask != 0 {
        let l = first_lane(mask);
        let wait = Wait::Mbarrier { address: place(warp, addr, l), parity: warp.regs.row(parity)[l] & 1 };
        return Ok(Flow::Retry(wait));
    }
    warp.regs.set_pred(mask, dst, done);
    Ok(Flow::Next)
}

/// Whether a predicate holds in any of the lanes.
pub(super) fn guarded(warp: &Warp, group: u32, guard: Option<PredSource>) -> u32 {
    guard.map_or(group, |g| group & warp.regs.pred(g))
}
