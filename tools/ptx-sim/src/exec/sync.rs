//! Operations of a whole warp or CTA: branches, barriers, shuffles, votes (PTX ISA 9.7.12, 9.7.13).
use super::barriers::Arrival;
use super::bulk;
use super::collect;
use super::env::Env;
use super::registers::{LANES, LaneResult};
use super::sync_mbarrier;
use super::warp::{Flow, Wait, Warp, aligned};
use crate::error::Fault;
use crate::ir::{Op, PredSource, ShuffleMode, Slot, VoteMode};

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
            let now = env.timer();
            warp.regs.map(mask, dst, dst, |_| now);
        }
        Op::ActiveMask { dst } => warp.regs.map(mask, dst, dst, |_| u64::from(mask)),
        Op::Matrix(ref op) if op.is_async() => return super::wgmma::run(warp, env, group, mask, op),
        Op::Matrix(ref op) => return super::matrix::run(warp, env, group, mask, op),
        Op::BarSync { id, count, waits } => return barrier(warp, env, group, mask, (id, count, waits)),
        Op::ClusterArrive { releases, aligned } => {
            if let Some(flow) = at_cluster_barrier(warp, group, aligned)? {
                return Ok(flow);
            }
            cluster_arrive(warp, env, mask, releases)?;
        }
        Op::ClusterWait { aligned } => {
            if let Some(flow) = at_cluster_barrier(warp, group, aligned)? {
                return Ok(flow);
            }
            return cluster_wait(warp, env, mask);
        }
        Op::Tcgen05(ref op) => return super::tcgen05::run(warp, env, group, mask, op),
        Op::Registers { count, more } => return registers(warp, env, (group, mask), count, more),
        Op::Elect { dst, elected, mask: members } => {
            if let Some(flow) = gather(warp, group, mask, members)? {
                return Ok(flow);
            }
            // Which lane it is hardware does not say, but it is always the same of these members.
            let leader = env.leader(mask);
            warp.regs.map(mask, dst, dst, |_| leader as u64);
            warp.regs.set_pred(mask, elected, 1 << leader);
        }
        Op::Bulk(ref op) => bulk::run(warp, env, mask, op)?,
        Op::ProxyFence => env.shared.order.proxy_fence(warp.agent),
        Op::MbarrierInitFence => env.mbarriers.announce(warp.agent),
        Op::WarpSync { mask: members } => {
            if let Some(flow) = gather(warp, group, mask, members)? {
                return Ok(flow);
            }
            env.shared.order.meet(warp.agent, mask);
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
        Op::Redux { op, signed, dst, a, mask: members } => {
            if let Some(flow) = gather(warp, group, mask, members)? {
                return Ok(flow);
            }
            collect::redux(warp, mask, (op, signed), dst, a);
        }
        Op::Match { all, dst, pred, a, mask: members } => {
            if let Some(flow) = gather(warp, group, mask, members)? {
                return Ok(flow);
            }
            collect::matching(warp, mask, all, (dst, pred), a);
        }
        Op::Trap => return Err((Fault::Trap, mask)),
        _ => return sync_mbarrier::run(warp, env, mask, op),
    }
    Ok(Flow::Next)
}

/// `bar.sync` and `bar.arrive`: the warp's lanes execute them together, each warp counts 32. They are `.aligned`, but no
/// [`aligned`] instructions: since Volta each thread counts for itself, and the warp passes when all of its lanes have come (CUDA
/// Programming Guide, `__syncthreads()`).
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
    let arrival = Arrival { by: warp.agent, count, waits };
    let arrived = env.ctas[warp.rank].barriers.arrive(&mut env.shared.order, id, &arrival);
    let generation = arrived.map_err(|fault| (fault, mask))?;
    Ok(if waits { Flow::Sleep(Wait::Barrier { id, generation }) } else { Flow::Next })
}

/// `setmaxnreg`: the warps of a CTA share what it was launched with; an increase waits for what others give back.
fn registers(warp: &mut Warp, env: &mut Env, (group, mask): (u32, u32), count: u32, more: bool) -> LaneResult<Flow> {
    if let Some(flow) = aligned(warp, group)? {
        return Ok(flow);
    }
    let bad = |problem: String| Err((Fault::Registers { count, problem }, mask));
    if !(24..=256).contains(&count) || !count.is_multiple_of(8) {
        return bad("expected a multiple of 8 from 24 to 256".to_string());
    }
    // Without `.maxnreg` it is for ptxas to say what a thread is launched with.
    let Some(now) = warp.registers else { return Ok(Flow::Next) };
    let free = &mut env.ctas[warp.rank].free_registers;
    if more {
        let Some(missing) = count.checked_sub(now) else { return bad(format!("an increase from {now}")) };
        if *free < missing {
            return Ok(Flow::Retry(Wait::Registers { count: missing }));
        }
        *free -= missing;
    } else {
        let Some(surplus) = now.checked_sub(count) else { return bad(format!("a decrease from {now}")) };
        *free += surplus;
    }
    warp.registers = Some(count);
    Ok(Flow::Next)
}

/// Lanes that come without the others do so by themselves, unless the instruction is `.aligned`.
fn at_cluster_barrier(warp: &Warp, group: u32, is_aligned: bool) -> LaneResult<Option<Flow>> {
    if is_aligned && warp.stays_apart { aligned(warp, group) } else { Ok(None) }
}

/// `barrier.cluster.arrive`: each thread does it once before each of its waits.
fn cluster_arrive(warp: &mut Warp, env: &mut Env, mask: u32, releases: bool) -> LaneResult<()> {
    let again = warp.cluster_arrived & mask;
    if again != 0 {
        return Err((Fault::ClusterBarrier { problem: "arrives twice without a wait between" }, again));
    }
    warp.cluster_arrived |= mask;
    warp.cluster_generation = env.cluster.generation;
    let threads = u64::from(mask.count_ones());
    env.cluster.arrive(&mut env.shared.order, warp.agent, threads, releases);
    Ok(())
}

fn cluster_wait(warp: &mut Warp, env: &mut Env, mask: u32) -> LaneResult<Flow> {
    let missing = mask & !warp.cluster_arrived;
    if missing != 0 {
        return Err((Fault::ClusterBarrier { problem: "waits without having arrived" }, missing));
    }
    let generation = warp.cluster_generation;
    if env.cluster.generation <= generation {
        return Ok(Flow::Retry(Wait::Cluster { generation }));
    }
    warp.cluster_arrived &= !mask;
    env.cluster.wait(&mut env.shared.order, warp.agent);
    Ok(Flow::Next)
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

/// Whether a predicate holds in any of the lanes.
pub(super) fn guarded(warp: &Warp, group: u32, guard: Option<PredSource>) -> u32 {
    guard.map_or(group, |g| group & warp.regs.pred(g))
}
